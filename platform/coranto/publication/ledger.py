"""The ledger of publications: a journal that records their decisions (`records.py`).

A decision is appended on the condition that the ledger still ends where the process has read to. So two processes
cannot both decide a publication, and an append whose response was lost may be retried: if it was applied, the condition
fails.

**Summaries.** A process that reads much of a ledger when it opens it appends a summary of all records, on the same
condition. The append sets the register `coranto.dev/summary` to `<offset>.<digest>`, and the next process to open the
ledger reads from that offset on. If there is no summary with that digest, the ledger is read whole, which may raise
LedgerDamaged. An offset beyond the ledger's end raises it immediately, because then records are gone. A process that
has read all records before a summary compares it with them. A ledger with an accepted loss is never summarized, because
the summary would hide the loss.

**Marks.** A process that has seen undecided publications needs to read only later records (`Mark`, `Ledger.resume`).

A ledger needs all its records, so it has no retention. Its registers have `coranto.dev/held` from the first record on.
If all brokers lose the registers, they may have lost records too; then `LedgerDamaged` is raised.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from coranto.client import SyncJournalClient
from coranto.client.record_journals import HELD, RecordLines, next_record, records_spec
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    JournalRecreated,
    LedgerDamaged,
    NotAllowed,
    OffsetJump,
    PermissionDenied,
    RegisterMismatch,
    Unavailable,
    WrongAppendOffset,
)
from coranto.labels import NAME, PUBLICATIONS, label_selector, label_set, value_of
from coranto.names import validate_journal
from coranto.publication.records import Acknowledgement, Decision, Record, Summary, digest_of, parse_record
from coranto.streams.model.batch_content import last_batches
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)

MAX_WRITER_ID = 1024
"""The maximum length of a writer id in characters."""


_SUMMARY: Final = "coranto.dev/summary"
_SUMMARY_VALUE: Final = re.compile(r"([0-9]{1,19})\.([0-9a-f]{32})")
SUMMARIZED_BYTES: Final = 64 << 10
"""The minimum size of the records after the last summary, in bytes, to append another summary."""
_SUMMARY_SHARE: Final = 4
"""The minimum size of these records, as a multiple of the last summary's size."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A ledger offset, and publications that are undecided there.

    `revision` is the revision of etcd that created the ledger. The mark may be given to another process.
    """

    journal: str
    writer_ids: frozenset[str]
    offset: int
    revision: int


class Ledger:
    """The ledger in a journal, as this process has read it. Not thread-safe."""

    def __init__(self, client: SyncJournalClient, journal: str) -> None:
        self.journal = journal
        self._client = client
        self._known_revision = 0
        self._offset = 0
        self._journal_id = ""
        self.last_batches: Mapping[str, int] = {}
        """The last batch of each writer (`batch_ledger.py`), when the ledger was opened."""
        self._summary = ""  # The value of the register.
        self._summary_begin = self._summary_bytes = 0
        self._only: frozenset[str] | None = None  # The publications whose records are read; None for all.
        self._is_whole = True  # All records were read.
        self._has_lost = False
        self._decisions: dict[str, Decision] = {}  # Of publications. Acknowledged ones have no intents.
        self._pending: dict[str, Decision] = {}  # Of publications and batches, until they are acknowledged.

    @classmethod
    def open(cls, client: SyncJournalClient, journal: str, *, like: str, accept_loss: bool = False) -> Ledger:
        """Return the ledger as it is now. A journal that does not exist is created, with the settings of `like`.

        Raises LedgerDamaged when records may be missing. With `accept_loss` it is used nevertheless: a publication
        whose record is gone is then published again.
        """
        ledger = cls.unread(client, journal, like=like, accept_loss=accept_loss)
        ledger._take_last_summary()
        ledger.refresh(accept_loss=accept_loss)
        ledger._summarize_if_due()
        return ledger

    @classmethod
    def unread(cls, client: SyncJournalClient, journal: str, *, like: str, accept_loss: bool = False) -> Ledger:
        """Return the ledger like `open`, without reading its records."""
        ledger = cls(client, validate_journal(journal))
        if not ledger._revision():
            ledger._create(like)
        ledger._check(accept_loss)
        return ledger

    @classmethod
    def resume(cls, client: SyncJournalClient, mark: Mark, *, like: str, accept_loss: bool = False) -> Ledger:
        """Return the ledger for the publications of a mark. Only content after the mark is read.

        If the journal was recreated, or ends before the mark and the loss is accepted, it is read whole. Raises the
        errors of `open`.
        """
        ledger = cls(client, mark.journal)
        if ledger._revision() != mark.revision or (accept_loss and client.head(mark.journal) < mark.offset):
            return cls.open(client, mark.journal, like=like, accept_loss=accept_loss)
        ledger._check(accept_loss)
        ledger._offset, ledger._only, ledger._is_whole = mark.offset, mark.writer_ids, False
        ledger.refresh(accept_loss=accept_loss)
        return ledger

    def mark(self, *writer_ids: str) -> Mark:
        """Return the mark of publications that are undecided. Another process may continue from there (`resume`)."""
        if decided := [writer_id for writer_id in writer_ids if self.find(writer_id) is not None]:
            raise ValueError(f"{decided[0]} is decided")
        return Mark(self.journal, frozenset(writer_ids), self._offset, self._revision())

    def decision_at(self, offset: int) -> Decision:
        """Read the decision whose record begins at `offset`. Raises LedgerDamaged if it is gone, and CorruptData."""
        line = self._line_at(offset)
        found = self._parse(line, offset)
        if not isinstance(found, Decision):
            raise self._no_record(offset)
        return found

    def _line_at(self, offset: int) -> bytes:
        """Return the record that begins at an offset. Raises LedgerDamaged if it is gone."""
        lines = RecordLines()
        try:
            head = self._client.head(self.journal)
            if offset < head:
                for chunk in self._client.read(self.journal, offset, end_offset=head, fail_on_jump=True):
                    if found := lines.feed(chunk.content):
                        return found[0]
        except OffsetJump as error:
            raise self._lost(error) from error
        raise LedgerDamaged(f"ledger {self.journal} has no record at offset {offset} any more")

    def find(self, writer_id: str) -> Decision | None:
        """Return the decision of a publication, or None if it was undecided when the ledger was last read.

        An acknowledged decision has no intents.
        """
        if self._only is not None and writer_id not in self._only:
            raise ValueError(f"only the records of {', '.join(sorted(self._only))} were read from this ledger")
        return self._decisions.get(writer_id)

    def unacknowledged(self) -> Iterator[Decision]:
        """Yield the decisions whose acknowledgements may not be in their journals yet, in the ledger's order."""
        yield from list(self._pending.values())

    def is_acknowledged(self, writer_id: str) -> bool:
        """Return True if all acknowledgements of this writer id are known to be in their journals."""
        return writer_id not in self._pending

    def decide(self, decision: Decision) -> Decision:
        """Record a decision, unless the publication is decided already. Returns the decision in effect.

        Raises AppendOutcomeUnknown when no response arrived within the client's retry timeout: open the ledger later to
        learn the decision in effect.
        """
        self._append_if(decision.to_line(), lambda: self.find(decision.writer_id) is None)
        return self._decisions[decision.writer_id]

    def acknowledge(self, writer_id: str) -> None:
        """Record that the acknowledgements of a decision are in their journals."""
        self._append_if(Acknowledgement(writer_id).to_line(), lambda: writer_id in self._pending)

    def refresh(self, *, accept_loss: bool = False) -> None:
        """Read the records that were added since the ledger was last read. Raises CorruptData and LedgerDamaged.

        With `accept_loss`, content that is gone is skipped.
        """
        head = self._client.head(self.journal)
        if head < self._offset:
            raise LedgerDamaged(f"ledger {self.journal} was read up to offset {self._offset}, but now ends at {head}")
        while self._offset < head:
            try:
                self._read_to(head)
            except JournalRecreated as error:
                raise LedgerDamaged(f"ledger {self.journal} is not the one that was read before: {error}") from error
            except OffsetJump as error:
                if not accept_loss:
                    raise self._lost(error) from error
                _log.warning("publication.loss_accepted", ledger=self.journal, begin=error.expected, end=error.actual)
                self._offset, self._has_lost = error.actual, True

    def _read_to(self, head: int) -> None:
        lines = RecordLines()
        known = self._journal_id if self._offset else ""
        reading = self._client.read(self.journal, self._offset, end_offset=head, fail_on_jump=True, journal_id=known)
        for chunk in reading:
            self._journal_id = chunk.journal_id or self._journal_id
            for line in lines.feed(chunk.content):
                self._take(line, self._offset)
                self._offset += len(line) + 1
        if self._offset != head:
            raise CorruptData(
                f"ledger {self.journal} at offset {self._offset}: content up to {head} is not a whole record"
            )

    def _take(self, line: bytes, offset: int) -> None:
        match self._parse(line, offset):
            case Acknowledgement(writer_id):
                self._pending.pop(writer_id, None)
                if (known := self._decisions.get(writer_id)) is not None:
                    self._decisions[writer_id] = replace(known, intents={})
            case Summary() as summary:
                self._take_summary(summary, offset)
                self._summary_begin, self._summary_bytes = offset, len(line) + 1
            case Decision(batch=None) as decision:
                if decision.writer_id not in self._decisions:
                    self._decisions[decision.writer_id] = decision
                    if decision.intents:  # Otherwise there is nothing to acknowledge.
                        self._pending[decision.writer_id] = decision
            case Decision() as decision:
                self._pending[decision.writer_id] = decision

    def _take_summary(self, summary: Summary, offset: int) -> None:
        """Compare a summary with the records read before it. It replaces missing records."""
        if self._is_whole and not self._has_lost and summary != self._summarized():
            raise LedgerDamaged(
                f"ledger {self.journal} at offset {offset}: a summary differs from the records before it"
            )
        if self._only is not None:
            return
        pending = {decision.writer_id: decision for decision in summary.pending}
        for writer_id, (messages, time) in summary.decided.items():
            if writer_id not in self._decisions:
                self._decisions[writer_id] = pending.get(writer_id) or Decision(writer_id, "", messages, time, {})
        self._pending = pending

    def _summarized(self) -> Summary:
        decided = {writer_id: (each.messages, each.time) for writer_id, each in self._decisions.items()}
        return Summary(decided, tuple(self._pending.values()))

    def _take_last_summary(self) -> None:
        """Use the last summary instead of the records before it, if it can be read."""
        if not self._summary:
            return
        found = _SUMMARY_VALUE.fullmatch(self._summary)
        try:
            line = self._line_at(int(found[1])) if found else b""
            # Any other record would replace all records before it, and hide them.
            if found is None or digest_of(line) != found[2] or not isinstance(parse_record(line), Summary):
                raise ValueError(f"register {_SUMMARY} points to a missing summary ({self._summary})")
        except (LedgerDamaged, ValueError) as error:
            _log.warning("publication.summary_unreadable", ledger=self.journal, reason=str(error))
            return
        self._is_whole = False
        self._take(line, int(found[1]))
        self._offset = int(found[1]) + len(line) + 1

    def _summarize_if_due(self) -> None:
        """Append a summary if many records were read. A failure is harmless."""
        read = self._offset - self._summary_begin - self._summary_bytes
        if self._has_lost or read < max(SUMMARIZED_BYTES, _SUMMARY_SHARE * self._summary_bytes):
            return
        line = self._summarized().to_line()
        try:
            self._append(line, label_set({_SUMMARY: f"{self._offset}.{digest_of(line)}"}))
        except (WrongAppendOffset, RegisterMismatch):
            return  # Another process has appended. The next process that opens the ledger will summarize it.
        except (AppendOutcomeUnknown, NotAllowed, PermissionDenied, Unavailable) as error:
            _log.warning("publication.not_summarized", ledger=self.journal, reason=str(error))
            return
        self._summary_begin, self._summary_bytes = self._offset, len(line)
        self._offset += len(line)

    def _parse(self, line: bytes, offset: int) -> Record:
        try:
            return parse_record(line)
        except ValueError as error:
            raise self._no_record(offset) from error

    def _lost(self, error: OffsetJump) -> LedgerDamaged:
        return LedgerDamaged(f"ledger {self.journal} has lost content: {error}")

    def _no_record(self, offset: int) -> CorruptData:
        return CorruptData(f"ledger {self.journal} at offset {offset}: not a record of a publication")

    def _append_if(self, line: bytes, due: Callable[[], bool]) -> None:
        """Append a record while `due` returns True, on the condition that the ledger's end has not moved."""
        is_unknown = False
        while due():
            try:
                self._append(line)
            except (WrongAppendOffset, RegisterMismatch):
                self._check(accept_loss=False)
            except AppendOutcomeUnknown:
                if is_unknown:
                    raise
                is_unknown = True
            self.refresh()

    def _append(self, line: bytes, registers: pb.LabelSet | None = None) -> None:
        how = next_record(self._offset)._asdict()
        self._client.append(self.journal, line, **how if registers is None else {**how, "union_registers": registers})

    def _revision(self) -> int:
        """Return the revision of etcd that created the journal, or 0 if there is none."""
        found = self._client.list(label_selector(include=[(NAME, self.journal)])).journals
        return int(found[0].create_revision) if found else 0

    def _create(self, like: str) -> None:
        found = self._client.list(label_selector(include=[(NAME, like)])).journals
        if not found:
            raise JournalNotFound(like)
        spec = records_spec(self.journal, found[0].spec, PUBLICATIONS)
        try:
            self._client.apply([pb.ApplyRequest.Change(upsert=spec)])
        except EtcdTransactionFailed as error:  # Another publisher was faster. Use brokers that know its revision.
            self._known_revision = error.header.etcd.revision if error.header is not None else 0

    def _check(self, accept_loss: bool) -> None:
        """Raise LedgerDamaged if content and registers of the ledger do not match, unless the loss is accepted."""
        while True:
            at = self._client.append(self.journal, b"", min_etcd_revision=self._known_revision)
            self._summary = value_of(at.registers, _SUMMARY) or ""
            self.last_batches = last_batches(at.registers)
            is_held = bool(value_of(at.registers, HELD_LABEL))
            if not (damage := self._damage(at.end, is_held)):
                return
            if not accept_loss:
                raise LedgerDamaged(damage)
            _log.warning("publication.loss_accepted", ledger=self.journal, reason=damage)
            summary = {_SUMMARY: self._summary} if self._summary else {}
            as_they_are = label_selector(include=summary, exclude={} if is_held else {HELD_LABEL: ""})
            nothing = Acknowledgement("").to_line()
            with contextlib.suppress(RegisterMismatch):  # Another process was faster. Check again.
                self._client.append(
                    self.journal,
                    nothing,
                    check_registers=as_they_are,
                    subtract_registers=label_set(summary),
                    union_registers=HELD,
                )

    def _damage(self, end: int, is_held: bool) -> str:
        """Return the reason to assume that records of a ledger that ends at `end` are gone; empty if there is none.

        Each record is one append with the registers that refer to it, so both are kept or lost together.
        """
        if end and not is_held:
            return (
                f"journal {self.journal} has content but not the registers of a ledger: it is not one, or all its "
                "brokers were lost, and its last records perhaps with them"
            )
        if is_held and not end:
            return f"journal {self.journal} has the registers of a ledger but no content: all its records are gone"
        summary = _SUMMARY_VALUE.fullmatch(self._summary)
        if summary is not None and int(summary[1]) >= end:
            return (
                f"ledger {self.journal} ends at offset {end}, but register {_SUMMARY} points to a summary at "
                f"{summary[1]}: the last records are gone"
            )
        return ""


def checked_writer_id(writer_id: str) -> str:
    """Return the writer id. Raises InvalidInput if it is empty, too long or not printable."""
    if not writer_id or len(writer_id) > MAX_WRITER_ID or not writer_id.isprintable():
        raise InvalidInput(
            f"{writer_id[:100]!r} cannot be a writer id; give 1 to {MAX_WRITER_ID} printable characters",
            field="writer_id",
        )
    return writer_id
