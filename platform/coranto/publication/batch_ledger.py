"""The decisions of writers that publish batch after batch, such as streaming queries.

A writer numbers its batches. After a failure it repeats the last batch, and never an earlier one. So only the last
decision of each writer matters, and no process has to read a ledger of a million batches. A register of the ledger
locates that decision:

    `coranto.dev/batch/<writer>`  =  `<batch>.<offset>`, followed by `.done` after its acknowledgement

Another register has a digest of the batch's content (`coranto.streams.model.batch_content`).

A decision and its registers are one append, on the condition that the writer's register is unchanged. So if several
processes decide the same batch, such as a zombie and its successor, one wins. The records have the format of
`records.py`, and one journal may be both kinds of ledger.

The process that decides a batch appends its acknowledgements. Before another process appends them, it *takes over*: it
adds `.taken` to the register, before `.done`. The deciding process thus learns that acknowledgements may be appended
again, at any later time. Its producers must then not write any more (`acknowledge`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import structlog

from coranto.client import SyncJournalClient
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    LedgerDamaged,
    RegisterMismatch,
    WrongAppendOffset,
)
from coranto.labels import label_selector, label_set, value_of
from coranto.publication.ledger import Ledger
from coranto.publication.records import Acknowledgement, Decision
from coranto.streams.model.batch_content import (
    BATCH_REGISTER,
    content_register,
    old_batch,
    require_same_content,
    validate_batch_writer,
)
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb

_VALUE: Final = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})(\.taken)?(\.done)?")
_TAKEN, _DONE = ".taken", ".done"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DecidedBatch:
    """The last decided batch of a writer."""

    batch: int
    is_acknowledged: bool
    """True if its acknowledgements are known to be in their journals."""
    is_taken: bool
    """True if a process other than the one that decided it may append them, too."""
    offset: int
    """The ledger offset of the record of its decision."""


class BatchLedger:
    """The decisions about one writer's batches. Not thread-safe."""

    def __init__(self, client: SyncJournalClient, ledger: Ledger, writer: str, *, accept_loss: bool = False) -> None:
        self.writer = validate_batch_writer(writer)
        self._client = client
        self._ledger = ledger
        self._accept_loss = accept_loss
        self._latest: tuple[int, Decision] | None = None  # The decision that was made or read last, and its offset.

    @classmethod
    def open(
        cls, client: SyncJournalClient, journal: str, writer: str, *, like: str, accept_loss: bool = False
    ) -> BatchLedger:
        """Return the ledger of a writer. A journal that does not exist is created, with the settings of `like`.

        Raises LedgerDamaged when records may be missing. With `accept_loss`, a batch whose decision is gone before it
        was acknowledged counts as undecided.
        """
        ledger = Ledger.unread(client, journal, like=like, accept_loss=accept_loss)
        return cls(client, ledger, writer, accept_loss=accept_loss)

    def last(self) -> DecidedBatch | None:
        """Return the last decided batch, or None if there is none. Raises CorruptData."""
        return self._read_state()[2]

    def decide(
        self, batch: int, decision: Decision, digest: str = "", planned_after: int | None = None
    ) -> Decision | None:
        """Record the decision about a batch, unless there is one. Returns the decision in effect.

        Returns None if the batch is decided and acknowledged, and the ledger's retention has removed the record.

        If a later batch is decided, raises BatchChanged if that was already the case when this batch was planned
        (`planned_after` is the writer's last batch at that time), because the writer's checkpoint is outdated.
        Otherwise raises Fenced.

        Raises BatchChanged if the batch is decided with content of another `digest`. A decision of an earlier version
        has no digest, and counts as the same. Raises LedgerDamaged if the record of a batch that is not acknowledged is
        gone, unless the loss is accepted. Raises AppendOutcomeUnknown when no response arrived within the client's
        retry timeout: open the ledger later to learn the decision in effect.
        """
        decision, is_unknown = replace(decision, batch=(self.writer, batch)), False
        while True:
            head, value, known, registers = self._read_state()
            if known is not None and known.batch > batch:
                raise old_batch(self.writer, batch, known.batch, planned_after)
            if known is not None and known.batch == batch:
                counts = self._read(known)
                if counts is not None or known.is_acknowledged:
                    if counts is None or counts.producer != decision.producer:
                        messages = None if counts is None else counts.messages
                        require_same_content(registers, self.writer, batch, digest, messages)
                    return counts
            try:
                content = content_register(self.writer, batch, digest)
                self._set(decision.to_line(), value, f"{batch}.{head}", head, content)
            except (WrongAppendOffset, RegisterMismatch):
                continue
            except AppendOutcomeUnknown:
                if is_unknown:
                    raise
                is_unknown = True
            else:
                self._latest = head, decision
                return decision

    def take_over(self, batch: int) -> Decision | None:
        """Take over the acknowledgements of a batch, and return its decision.

        Call this for each batch that another process, or an earlier call of this process, has decided. Returns None if
        the acknowledgements are in their journals, or the batch is not the last one, or its record is gone and the loss
        is accepted. Raises LedgerDamaged if the record is gone and the loss is not accepted.
        """
        while True:
            head, value, known, _ = self._read_state()
            if known is None or known.batch != batch or known.is_acknowledged:
                return None
            decision = self._read(known)
            if decision is None or known.is_taken:
                return decision
            try:
                self._set(Acknowledgement("").to_line(), value, value + _TAKEN, head)
            except (WrongAppendOffset, RegisterMismatch):
                continue
            return decision

    def acknowledge(self, batch: int) -> bool:
        """Record that the acknowledgements of a batch are in their journals.

        Returns True if no process has taken the batch over, so that only the caller has appended them.
        """
        while True:
            head, value, known, _ = self._read_state()
            if known is None or known.batch != batch or known.is_acknowledged:
                return False
            decision = self._read(known)
            if decision is None:
                return False
            try:
                self._set(Acknowledgement(decision.writer_id).to_line(), value, value + _DONE, head)
            except (WrongAppendOffset, RegisterMismatch):
                continue
            return not known.is_taken

    def _read_state(self) -> tuple[int, str, DecidedBatch | None, pb.LabelSet]:
        """Return the ledger's head, the writer's register (empty if unset), its parsed value, and all registers."""
        at = self._client.append(self._ledger.journal, b"")
        value = value_of(at.registers, self._label) or ""
        if not value:
            return at.end, value, None, at.registers
        found = _VALUE.fullmatch(value)
        if found is None:
            raise CorruptData(f"ledger {self._ledger.journal}: register {self._label} is {value!r}")
        known = DecidedBatch(int(found[1]), bool(found[4]), bool(found[3]), int(found[2]))
        return at.end, value, known, at.registers

    def _read(self, known: DecidedBatch) -> Decision | None:
        """Return the decision about a batch; None if its record is gone, and is not needed or the loss is accepted."""
        if self._latest is None or self._latest[0] != known.offset:
            try:
                self._latest = known.offset, self._ledger.decision_at(known.offset)
            except LedgerDamaged as error:
                if known.is_acknowledged:
                    return None
                if not self._accept_loss:
                    raise LedgerDamaged(
                        f"ledger {self._ledger.journal} has lost the decision about batch {known.batch} of "
                        f"{self.writer} (offset {known.offset}), whose messages are perhaps not all visible yet: its "
                        "retention is shorter than the writer's pause, or content was lost. If the loss is accepted "
                        "and the batch comes again, it is published again; otherwise hidden messages stay hidden"
                    ) from error
                _log.warning(
                    "publication.batch_lost", ledger=self._ledger.journal, writer=self.writer, batch=known.batch
                )
                return None
        return self._latest[1]

    def _set(
        self, line: bytes, before: str, after: str, head: int, others: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Append a record at the head and set the register and `others`, if the register is still `before`."""
        new = label_set({self._label: after, **others})
        if not head:  # An empty journal cannot be checked by an offset; its registers show that it is empty.
            empty = label_selector(exclude=[(HELD_LABEL, "")])
            both = label_set({self._label: after, HELD_LABEL: "true", **others})
            self._client.append(self._ledger.journal, line, check_registers=empty, union_registers=both)
            return
        mine = [(self._label, before)] if before else []
        as_it_was = label_selector(include=[(HELD_LABEL, ""), *mine], exclude=[] if before else [(self._label, "")])
        self._client.append(self._ledger.journal, line, offset=head, check_registers=as_it_was, union_registers=new)

    @property
    def _label(self) -> str:
        return BATCH_REGISTER + self.writer
