"""The errors of Coranto: one small tree.

::

    CorantoError
    ├── InvalidInput                    a name, spec, selector, URL, option or request that cannot be accepted
    ├── VersionTooOld                   the installed version of a package lacks a feature
    ├── CorruptData                     stored or received bytes that are inconsistent
    │   ├── CorruptFragment             content whose length or SHA-1 differs from its name
    │   ├── JournalRecreated            a position belongs to content that its journal no longer has
    │   ├── CorruptMessage              bytes of a journal that are not a message of its framing
    │   │   └── TornMessage             an incomplete message before another message
    │   └── CorruptSpool                a broker's own durable spool
    ├── Unavailable                     no broker answered, or the answering broker cannot serve now
    │   └── EtcdFull                    etcd's database has reached its quota
    ├── StatusError                     a broker answered with a status other than OK
    │   ├── JournalNotFound
    │   ├── NoPrimaryBroker
    │   ├── NotPrimaryBroker
    │   ├── InsufficientBrokers
    │   ├── NotJournalBroker
    │   ├── OffsetNotYetAvailable
    │   ├── WrongRoute
    │   ├── ProposalMismatch
    │   ├── EtcdTransactionFailed
    │   ├── NotAllowed
    │   ├── TornAppend                  an append to a journal of lines does not end with a newline
    │   ├── WrongAppendOffset
    │   ├── IndexHasGreaterOffset
    │   ├── RegisterMismatch
    │   ├── JournalSuspended
    │   ├── StoreUnhealthy
    │   └── UnknownStatus               a status number of a newer broker
    ├── RpcFailed                       a broker ended a call with a permanent gRPC error
    │   ├── Unauthenticated             the call has no token, or an invalid one
    │   └── PermissionDenied            the token is valid, but does not allow this call
    ├── MessageTypeNotFound             a registry has no such message type, or no such version of it
    ├── IncompatibleType                a new version of a message type breaks its declared compatibility
    ├── LimitExceeded                   a server refused a call because of a limit on its callers
    ├── AppendOutcomeUnknown            the connection broke after a commit may have been sent
    ├── ApplyOutcomeUnknown             the connection broke while specs were being applied
    ├── NotDurable                      an acknowledged append has not reached the durability that its client waits for
    ├── ContentGone                     journals no longer have all content of the requested moment
    ├── OffsetJump                      the content at a reader's offset is gone; the next content is at a higher offset
    ├── StoreError                      a fragment store refused or failed
    │   ├── StoreDenied                 the credentials don't allow it
    │   └── FragmentNotFound            the store has no such fragment
    ├── SpillFailed                     pending appends cannot be written to this machine's disk, or read from it
    ├── SqlStoreError                   a consumer's SQL store refused or failed; nothing was committed
    │   └── RejectedRow                 a row was refused because of its values
    ├── CommitOutcomeUnknown            the connection broke during a commit, and the outcome could not be read back
    ├── Fenced                          a later owner has raised the fence: stop, do not retry
    ├── BatchChanged                    this batch number is committed with other content
    ├── SourceChanged                   the source of an ingest was recreated, has changed, or lacks rows
    ├── PoisonRow                       a row of an ingest's source cannot become an event
    ├── ConsumerChanged                 a consumer's sources, outputs or store differ from its checkpoint
    ├── CoordinationError               etcd refused a call, or contradicts an earlier answer
    │   ├── WatchReset                  a watch cannot continue from its revision; read the prefix again
    │   ├── TxnOutcomeUnknown           the connection broke while a transaction may have been applied
    │   └── LeaseLost                   the process's lease is gone, and its member key and assignments with it
    ├── StreamError                     an operation on a stream
    │   ├── StreamNotFound
    │   ├── StreamExists
    │   ├── StreamChanged               another process changed the stream's segments during the call
    │   ├── StreamSealed                the stream accepts no more events
    │   ├── StreamTruncated             the events that a reader needs next are gone
    │   ├── ReaderOffline               a reader is not, or no longer, a member of its group
    │   ├── CheckpointRefused           a reader group cannot begin another checkpoint now
    │   └── WriteError                  a writer's event or transaction did not become durable, or may not have
    │       ├── MaxTransactionSizeExceeded
    │       ├── TransactionInProgress   the writer has an open transaction of that key
    │       ├── TransactionStateError   the transaction has ended, or is being committed
    │       ├── TransactionTimeout      it was open for too long, and was aborted
    │       ├── PreconditionFailed      an expected offset or a fence did not hold
    │       ├── EarlierWriteFailed      an earlier write to the same segment failed
    │       ├── WriterClosed
    │       ├── WriterFenced            another process writes under this writer id now
    │       ├── WriterExpired           the stream's record of the writer was dropped or lost
    │       ├── CommitUnknown           the outcome of the write can no longer be determined
    │       └── PositionUnknown         an earlier attempt made it durable at an unknown position
    └── ClusterError                    a cluster could not be started, found or stopped
        ├── DirectoryInUse              another process holds a data directory
        ├── WrongCluster                a data directory belongs to another cluster, or to this one before its restore
        └── MemberInUse                 another live process uses this process's name

Each error states the problem, the value concerned, and what to do next. `retriable` is true if the same call may
succeed later, and `permanent` if it fails until a person intervenes. `outcome` states whether a change was applied.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from coranto.journal_ids import held_through
from coranto.wire import protocol_pb2 as pb


class Outcome(enum.Enum):
    """The outcome of a change whose call failed."""

    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"


class CorantoError(Exception):
    """The base of every error that Coranto raises."""

    retriable: bool = False
    """The same call may succeed later."""
    permanent: bool = False
    """The same call fails until a person changes its input, rights or content. Orchestrators do not retry it."""
    outcome: Outcome = Outcome.NOT_APPLIED

    @property
    def public_text(self) -> str:
        """The text that a server may send to its caller. The server's log has the full error."""
        return str(self)


class InvalidInput(CorantoError, ValueError):
    """A value cannot be accepted. `field` is its path in the message or file, if known."""

    permanent = True

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field

    def within(self, parent: str) -> InvalidInput:
        """Return the same error, with its field as a path from the enclosing message's field `parent`."""
        return InvalidInput(self.message, field=f"{parent}.{self.field}" if self.field else parent)


class MissingExtra(CorantoError, ModuleNotFoundError):
    """A module cannot be imported because the extra that installs it is missing."""

    permanent = True

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"{module} is not installed; it comes with an extra: pip install 'coranto[{extra}]'", name=module
        )
        self.extra = extra


class VersionTooOld(CorantoError):
    """The installed version of a package lacks a feature. `instead` is the advice for users who keep it."""

    permanent = True

    def __init__(self, feature: str, package: str, found: str, needed: str, instead: str = "") -> None:
        super().__init__(
            f"{feature} needs {package} {needed} or later, and {package} {found} is installed: use a later version, "
            f"or {instead or f'do without {feature}'}"
        )
        self.feature = feature
        self.package = package
        self.found = found
        self.needed = needed


class CorruptData(CorantoError):
    """Stored or received bytes are inconsistent."""

    permanent = True


class CorruptFragment(CorruptData):
    """A fragment's content disagrees with its name, length or SHA-1."""


class CorruptMessage(CorruptData):
    """Journal content at `offset` is not a message of the journal's framing."""

    def __init__(self, journal: str, offset: int, problem: str) -> None:
        super().__init__(f"journal {journal} at offset {offset}: {problem}")
        self.journal = journal
        self.offset = offset


class TornMessage(CorruptMessage):
    """An incomplete message, because an append ended within it. The next message begins at offset `following`."""

    def __init__(self, journal: str, offset: int, following: int) -> None:
        super().__init__(
            journal,
            offset,
            f"a message is cut off here, because an append ended within it; the next one begins at offset {following}. "
            "Skip this part by a policy for misfits (consumers, Spark), by on_corrupt (readers), or by reading from "
            "there. Brokers refuse appends that end within a line if the journal's content-type says that it has lines",
        )
        self.following = following


class JournalRecreated(CorruptData):
    """A journal no longer has the content that an `offset` belongs to.

    It was deleted and recreated under the same name. Or brokers lost content that was not stored, and an operator reset
    the journal's head to the end of its store.

    `known` and `found` are the ids of the two journals. `head` is the end of the current one, as far as known. It has
    the earlier content up to the offset `same_through`, which is above 0 if its head was reset.
    """

    def __init__(self, journal: str, offset: int, known: str, found: str, head: int, advice: str = "") -> None:
        self.same_through = held_through(known, offset, found)
        passed = min(offset, head)
        if self.same_through:
            text = (
                f"journal {journal} has lost its content from offset {self.same_through} on, and continued there with "
                f"other content (its head was reset): offset {offset} belongs to the lost content, with the id "
                f"{known}, and this is {found}, which ends at {head}. "
            )
            if passed > self.same_through:
                text += f"Reading from there would skip its messages from {self.same_through} to {passed}. "
            text += advice or f"Begin at offset {self.same_through}: the content there was not read."
        else:
            lost = f"Reading from there would skip its messages before offset {passed}" if passed else "It is empty"
            text = (
                f"journal {journal} was deleted and created again: offset {offset} belongs to the journal with the id "
                f"{known}, and this is {found}, which ends at {head}. {lost}. "
            ) + (advice or "Begin at offset 0, unless you need unread content of the earlier journal.")
        super().__init__(text)
        self.journal = journal
        self.offset = offset
        self.known = known
        self.found = found
        self.head = head

    def with_advice(self, advice: str) -> JournalRecreated:
        """Return the same error with other advice."""
        return JournalRecreated(self.journal, self.offset, self.known, self.found, self.head, advice)


class LedgerDamaged(CorruptData):
    """A ledger of publications may have lost records, and their publications would be published again.

    Recover the journal (`coranto audit`), or accept the loss (`accept_loss`).
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            f"{message}. Run `coranto audit` on it and recover the lost records; or accept that publications without a "
            "record are published again (accept_loss; in Spark acceptLoss=true)."
        )


class CorruptSpool(CorruptData):
    """A durable spool cannot be recovered, or one of its files is damaged."""


class Unavailable(CorantoError):
    """There was no usable answer. Nothing was applied; a retry may succeed."""

    retriable = True


class EtcdFull(Unavailable):
    """etcd refused a change because its database has reached its quota. Nothing was changed."""


class LimitExceeded(CorantoError):
    """A server refused a call because its caller, or all callers together, exceed a limit. Nothing was changed."""

    retriable = True


class AppendOutcomeUnknown(CorantoError):
    """The append may or may not have committed.

    Read the journal to find out, or append again if readers discard duplicates (messages with UUIDs).
    """

    retriable = True
    outcome = Outcome.UNKNOWN


class ApplyOutcomeUnknown(CorantoError):
    """Either all or none of the spec changes were applied. List the journals to find out."""

    outcome = Outcome.UNKNOWN


class NotDurable(CorantoError):
    """An acknowledged append has not reached the durability that its client waits for. It stays in the journal."""

    retriable = True


class RpcFailed(CorantoError):
    """A broker ended a call with a permanent gRPC error. `code` is the name of that error."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Unauthenticated(RpcFailed):
    """A call had no token, or one that is expired, unsigned, signed by an unknown key, or otherwise invalid."""

    permanent = True

    def __init__(self, message: str) -> None:
        super().__init__(message, "UNAUTHENTICATED")


class PermissionDenied(RpcFailed):
    """A call's token is valid, but its capability or scope does not cover the call."""

    permanent = True

    def __init__(self, message: str) -> None:
        super().__init__(message, "PERMISSION_DENIED")


class MessageTypeNotFound(CorantoError):
    """A registry has no such message type, or no such version of it."""

    def __init__(self, registry: str, wanted: str, present: Sequence[str]) -> None:
        shown = ", ".join(present[:20]) + (f" and {len(present) - 20} more" if len(present) > 20 else "")
        super().__init__(
            f"registry {registry} has no message type {wanted}; it has {shown or 'none'}. Register it by "
            "`coranto types register`"
        )
        self.registry = registry
        self.wanted = wanted


class IncompatibleType(CorantoError):
    """A new version of a message type breaks its declared compatibility. `problems` has one text per field."""

    permanent = True

    def __init__(self, name: str, compatibility: str, problems: Sequence[str]) -> None:
        super().__init__(f"{name} is not {compatibility} compatible with its earlier versions: {'; '.join(problems)}")
        self.name = name
        self.compatibility = compatibility
        self.problems = tuple(problems)


class OffsetJump(CorantoError):
    """Content between `expected` and `actual` (journal offsets) is gone, for example by retention."""

    permanent = True

    def __init__(self, journal: str, expected: int, actual: int) -> None:
        super().__init__(
            f"journal {journal} has no content in [{expected}, {actual}): it was removed or never written. "
            f"Read from offset {actual} if that is acceptable."
        )
        self.journal = journal
        self.expected = expected
        self.actual = actual


class ContentGone(CorantoError):
    """Journals no longer have all content of the requested moment.

    `gone` has the missing offsets [begin, end) of each journal, `left` the first later offset with content.
    """

    permanent = True

    def __init__(self, gone: Mapping[str, tuple[int, int]], left: Mapping[str, int], more: str = "") -> None:
        spans = [f"{journal} [{begin}, {end})" for journal, (begin, end) in sorted(gone.items())]
        shown = ", ".join(spans[:10]) + (f" and {len(spans) - 10} more" if len(spans) > 10 else "")
        super().__init__(
            f"content of that moment is gone, by retention or deletion: {shown}{f' ({more})' if more else ''}. To read "
            "the rest, begin at the ends of these"
        )
        self.gone = dict(gone)
        self.left = dict(left)


class StoreError(CorantoError):
    """A fragment store refused or failed an operation."""

    retriable = True

    def __init__(self, message: str, *, kind: str = "") -> None:
        """`kind` is the failure without the store's answer; empty if `message` does not quote the answer."""
        super().__init__(message)
        self.kind = kind

    @property
    def public_text(self) -> str:
        return self.kind or str(self)


class StoreDenied(StoreError):
    """A fragment store's credentials are missing, wrong or not granted this operation."""


class FragmentNotFound(StoreError):
    """The store has no such fragment (any more): list the journal's fragments again."""

    retriable = False


class SpillFailed(CorantoError):
    """Pending appends could not be written to the disk of this machine, or read from it."""


class SqlStoreError(CorantoError):
    """A consumer's SQL store refused or failed. The transaction was not committed.

    `retriable` is True for a conflict of transactions, and for a store that is temporarily unavailable or read-only.
    """

    retriable = True

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(message)
        self.retriable = retriable


class RejectedRow(SqlStoreError):
    """A database refused a row because of its values. Nothing was committed, and a retry fails in the same way.

    `problem` has no values of rows. `journal` and `offset` are the position of its message, or "" and -1 if unknown.
    For a row of a Spark query without a message (`is_row`), they are the batch and the row's number.
    """

    permanent = True

    def __init__(self, problem: str, *, journal: str = "", offset: int = -1, is_row: bool = False) -> None:
        place = f"row {offset} of {journal}" if is_row else f"journal {journal} at offset {offset}"
        super().__init__(f"{place}: {problem}" if journal else problem, retriable=False)
        self.problem = problem
        self.journal = journal
        self.offset = offset

    def at(self, journal: str, offset: int, *, is_row: bool = False) -> RejectedRow:
        """Return the same error for the message at an offset of a journal, or for a row of a batch."""
        return RejectedRow(self.problem, journal=journal, offset=offset, is_row=is_row)


class CommitOutcomeUnknown(CorantoError):
    """A SQL commit may or may not have been applied, and the store has been unreachable since.

    Start the consumer again. It restores the last committed checkpoint, so nothing is lost or duplicated.
    """

    retriable = True
    outcome = Outcome.UNKNOWN


class Fenced(CorantoError):
    """A later owner raised the fence. This process must stop: its transaction did not commit and never will."""

    permanent = True

    def __init__(self, text: str, *, is_moved: bool = False) -> None:
        """`is_moved` is True if an operator has moved the consumer, and False if another process has taken over."""
        super().__init__(text)
        self.is_moved = is_moved


class BatchChanged(CorantoError):
    """A query repeats a committed batch number with other content, because its checkpoint is older than its target.

    No part of the batch is written.
    """

    permanent = True

    def __init__(self, text: str, *, batches: int = 1) -> None:
        """`batches` is the age of the checkpoint in batches."""
        super().__init__(text)
        self.batches = batches


class SourceChanged(CorantoError):
    """The source of an ingest does not continue its earlier rows: it was recreated, it changed, or rows are gone."""

    permanent = True


class PoisonRow(CorantoError):
    """A row of a source cannot become an event. All earlier reads of the source are committed."""

    permanent = True

    def __init__(self, source: str, split: str, place: str, problem: str) -> None:
        super().__init__(
            f"{source} {split}, {place}: the row {problem}. Correct it in the source, or keep such rows with "
            "`poison: dead letters`"
        )
        self.split = split
        self.place = place


class ConsumerChanged(CorantoError):
    """The sources, outputs or store of a consumer differ from its checkpoint. Nothing is committed.

    The error states the consequences of continuing, and the confirmation that permits it.
    """

    permanent = True


class CoordinationError(CorantoError):
    """etcd refused a call, or contradicts an earlier answer."""


class WatchReset(CoordinationError):
    """etcd has compacted the revision of a watch, or its revision has decreased. Read the prefix again."""

    retriable = True


class TxnOutcomeUnknown(CoordinationError):
    """The connection broke, and the transaction may or may not have been applied. Read its keys to find out."""

    retriable = True
    outcome = Outcome.UNKNOWN


class LeaseLost(CoordinationError):
    """The process's lease is gone. Other processes may hold its assignments, so it must stop serving them."""


class ClusterError(CorantoError):
    """An embedded cluster could not be started, found or stopped."""


class DirectoryInUse(ClusterError):
    """Another process holds `directory`. `pid` is its process id, if known."""

    def __init__(self, directory: Path, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{directory} is in use by {holder}: stop it, or use another directory")
        self.directory = directory
        self.pid = pid


class WrongCluster(ClusterError):
    """A data directory does not belong to the etcd of its process. Nothing was changed in either of them."""


class MemberInUse(ClusterError):
    """Another live process with the same zone and name keeps its lease alive."""


class StatusError(CorantoError):
    """A broker answered with a status other than OK. `header` is the response's header."""

    status: ClassVar[pb.Status.ValueType]
    advice: ClassVar[str] = ""

    def __init__(self, subject: str, header: pb.Header | None = None, detail: str = "") -> None:
        text = f"{subject}: {pb.Status.Name(self.status)}"
        if detail:
            text += f" ({detail})"
        super().__init__(f"{text}. {self.advice}" if self.advice else text)
        self.subject = subject
        self.header = header
        self.detail = detail


class JournalNotFound(StatusError):
    status = pb.JOURNAL_NOT_FOUND
    advice = "Check the name, or apply a spec for it (`coranto journals apply`)."


class NoPrimaryBroker(StatusError):
    status = pb.NO_JOURNAL_PRIMARY_BROKER
    retriable = True
    advice = "The journal is being assigned; try again shortly."


class NotPrimaryBroker(StatusError):
    status = pb.NOT_JOURNAL_PRIMARY_BROKER
    retriable = True
    advice = "Ask the primary broker of the response's route."


class InsufficientBrokers(StatusError):
    status = pb.INSUFFICIENT_JOURNAL_BROKERS
    retriable = True
    advice = "Fewer brokers hold the journal than its replication or its labels ask for; add brokers or try again."


class NotJournalBroker(StatusError):
    status = pb.NOT_JOURNAL_BROKER
    retriable = True
    advice = "Ask a broker of the response's route."


class OffsetNotYetAvailable(StatusError):
    status = pb.OFFSET_NOT_YET_AVAILABLE
    retriable = True
    advice = (
        "The offset is at or beyond the write head: read with block, or later. If it is below, its content is missing: "
        "brokers skip a gap when the content after it has been in the store for six hours."
    )


class WrongRoute(StatusError):
    status = pb.WRONG_ROUTE
    retriable = True


class ProposalMismatch(StatusError):
    status = pb.PROPOSAL_MISMATCH


class EtcdTransactionFailed(StatusError):
    status = pb.ETCD_TRANSACTION_FAILED
    advice = "A revision differs from the expected one: list the journals again, and apply to their current specs."


class NotAllowed(StatusError):
    status = pb.NOT_ALLOWED
    advice = "The journal's flags forbid it."


class TornAppend(StatusError):
    """An append to a journal of lines does not end with a newline. Nothing was applied."""

    status = pb.NOT_ALLOWED
    advice = "End the content with a newline."


class WrongAppendOffset(StatusError):
    status = pb.WRONG_APPEND_OFFSET
    advice = (
        "The journal's head is not at the offset that the append asked for, and nothing was applied: read the head."
    )


class IndexHasGreaterOffset(StatusError):
    status = pb.INDEX_HAS_GREATER_OFFSET
    advice = (
        "The fragment store holds content above the brokers' head: consistency was lost. "
        "Confirm that earlier brokers are gone for good, then run `coranto journals reset-head`."
    )


class RegisterMismatch(StatusError):
    """A check of registers failed. `registers` are the journal's actual registers."""

    status = pb.REGISTER_MISMATCH

    def __init__(
        self, subject: str, header: pb.Header | None = None, detail: str = "", registers: pb.LabelSet | None = None
    ) -> None:
        super().__init__(subject, header, detail)
        self.registers = registers if registers is not None else pb.LabelSet()


class JournalSuspended(StatusError):
    status = pb.SUSPENDED
    advice = "Append with resume to wake it."


class StoreUnhealthy(StatusError):
    status = pb.FRAGMENT_STORE_UNHEALTHY
    retriable = True


class UnknownStatus(StatusError):
    """A status number that this version does not know: the broker is newer."""

    status = pb.OK
    advice = "The broker speaks a newer protocol; update this client."

    def __init__(self, subject: str, header: pb.Header | None = None, detail: str = "") -> None:
        CorantoError.__init__(self, f"{subject}: {detail}. {self.advice}")
        self.subject, self.header, self.detail = subject, header, detail


_BY_STATUS: dict[int, type[StatusError]] = {
    cls.status: cls for cls in StatusError.__subclasses__() if cls.status != pb.OK and cls is not TornAppend
}


def status_error(
    status: pb.Status.ValueType, subject: str, header: pb.Header | None = None, detail: str = ""
) -> StatusError:
    """Return the error for a status other than OK. An unknown number (a newer broker's) becomes UnknownStatus."""
    found = _BY_STATUS.get(status)
    if found is not None:
        return found(subject, header, detail)
    return UnknownStatus(subject, header, f"status {status}; {detail}" if detail else f"status {status}")


# ------------------------------------------------------------------------------------------------------------- streams


class StreamError(CorantoError):
    """An operation on a stream failed."""


class StreamNotFound(StreamError):
    """No stream has this name."""


class StreamExists(StreamError):
    """A stream of this name, or content of an earlier one, already exists."""


class StreamChanged(StreamError):
    """Another process changed the stream's segments during the call. Nothing was applied. Describe it, then retry."""

    retriable = True


class StreamSealed(StreamError):
    """The stream is sealed: it accepts no more events and does not scale."""

    permanent = True


class StreamTruncated(StreamError):
    """The events that a reader needs next were truncated. Begin after them if you do not need them.

    `segment` still has its events from offset `available` on (None: unknown, or the segment is gone).
    """

    permanent = True

    def __init__(self, message: str, segment: int, available: int | None = None) -> None:
        super().__init__(message)
        self.segment = segment
        self.available = available


class ReaderOffline(StreamError):
    """A reader is not, or no longer, a member of its group.

    Other readers declared it dead or replaced it, or the group was reset. Its last changes were not recorded. Create
    another reader to continue.
    """


class CheckpointRefused(StreamError):
    """A checkpoint of this name exists, or the limit of open checkpoints is reached. Wait until one completes."""

    retriable = True


# --------------------------------------------------------------------------------------------------- writers of streams


class WriteError(StreamError):
    """An event or a transaction did not become durable, or its outcome is unknown: see `outcome`."""


class MaxTransactionSizeExceeded(WriteError):
    """An event or transaction of `actual` bytes, framing included, exceeds the `limit`. Nothing was accepted.

    An open transaction is unchanged: commit it without the event, or abort it.
    """

    def __init__(self, limit: int, actual: int) -> None:
        super().__init__(
            f"{actual} bytes, framing included, are more than the {limit} of one append: write less in one call, "
            "or raise the writer's max_transaction_bytes"
        )
        self.limit = limit
        self.actual = actual


class TransactionInProgress(WriteError):
    """The writer has an open transaction of this routing key. Commit or abort it before the next."""


class TransactionStateError(WriteError):
    """The transaction is not in a state that allows this call. Its earlier effects are unchanged."""


class TransactionTimeout(WriteError):
    """The transaction was open for longer than its timeout: it was aborted and its events dropped. Begin it again."""


class PreconditionFailed(WriteError):
    """A transaction's condition does not hold. `actual` is the actual value: an offset, or a fence's token.

    Nothing was written. The writer may continue.
    """

    def __init__(self, message: str, actual: int | str | None) -> None:
        super().__init__(message)
        self.actual = actual


class EarlierWriteFailed(WriteError):
    """An earlier write to the same segment failed (`__cause__`), so this one was not appended either.

    The earlier write may have been to a predecessor of the segment. If writes have sequences, everything above the
    failed sequence is refused until that sequence is given again.
    """

    retriable = True


class WriterClosed(WriteError):
    """The writer was closed before the event or transaction was appended."""


class WriterFenced(WriteError):
    """Another process took over this writer id. This writer must stop: it can append nothing more."""


class WriterExpired(WriteError):
    """The stream's record of this writer is gone: it was idle while many others wrote, or brokers were lost.

    `outcome` states whether the write may be durable. To continue, read the stream to find its last event if that
    matters, then create a writer with `fresh=True`, which assumes that its earlier
    writes are settled.
    """

    def __init__(self, message: str, outcome: Outcome = Outcome.NOT_APPLIED) -> None:
        super().__init__(message)
        self.outcome = outcome


class CommitUnknown(WriteError):
    """The write may or may not be durable. Read the stream to find out."""

    outcome = Outcome.UNKNOWN


class PositionUnknown(WriteError):
    """A transaction was not appended again, because an earlier attempt made it durable at an unknown position.

    Its content was truncated or cannot be read, or its sequence number never belonged to a transaction.
    """

    outcome = Outcome.UNKNOWN
