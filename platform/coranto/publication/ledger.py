"""The ledger of publications: a journal that records which ones are decided.

It has one JSON object per line:

- a decision: `{"publication": writer_id, "producer": hex, "messages": n, "time": Unix seconds, "intents": {journal:
  base64}}`, and `"batch": [writer, n]` if it is about a batch (`batch_ledger.py`)
- that its acknowledgements are in their journals: `{"acknowledged": writer_id}`

A decision is appended on the condition that the ledger still ends where the process has read it to. So two processes
cannot both decide a publication. An append whose answer was lost may be repeated: if it was applied, the ledger ends
elsewhere.

A ledger needs all its records, so it has no retention. Its registers have `coranto.dev/held` from the first record on.
If all brokers lose the registers, they may have lost records too; then `LedgerDamaged` is raised.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import structlog

from coranto.client import SyncJournalClient
from coranto.client.record_journals import HELD, next_record, records_spec
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    LedgerDamaged,
    OffsetJump,
    RegisterMismatch,
    WrongAppendOffset,
)
from coranto.labels import NAME, PUBLICATIONS, label_selector, value_of
from coranto.names import validate_journal
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)

MAX_WRITER_ID = 1024
"""The largest number of characters of a writer id."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A publication that has happened: the producer whose messages count, their number, and when (Unix seconds)."""

    writer_id: str
    producer: str
    messages: int
    time: float
    intents: Mapping[str, bytes]
    batch: tuple[str, int] | None = None
    """The writer and the number of a batch; None for other publications."""

    def to_line(self) -> bytes:
        intents = {journal: base64.b64encode(intent).decode() for journal, intent in sorted(self.intents.items())}
        return _line(
            {
                "publication": self.writer_id,
                "producer": self.producer,
                "messages": self.messages,
                "time": self.time,
                "intents": intents,
                **({} if self.batch is None else {"batch": list(self.batch)}),
            }
        )


class Ledger:
    """The ledger in a journal, as this process has read it. For one thread."""

    def __init__(self, client: SyncJournalClient, journal: str) -> None:
        self.journal = journal
        self._client = client
        self._known_revision = 0
        self._offset = 0
        self._decisions: dict[str, Decision] = {}  # Of publications. Acknowledged ones have no intents any more.
        self._pending: dict[str, Decision] = {}  # Of publications and batches, until they are acknowledged.

    @classmethod
    def open(cls, client: SyncJournalClient, journal: str, *, like: str, accept_loss: bool = False) -> Ledger:
        """Return the ledger as it is now. A journal that does not exist is created, with the settings of `like`.

        Raises LedgerDamaged when records may be missing. With `accept_loss` it is used nevertheless: a publication
        whose record is gone is then published again.
        """
        ledger = cls.unread(client, journal, like=like, accept_loss=accept_loss)
        ledger.refresh(accept_loss=accept_loss)
        return ledger

    @classmethod
    def unread(cls, client: SyncJournalClient, journal: str, *, like: str, accept_loss: bool = False) -> Ledger:
        """Return the ledger like `open`, without reading its records."""
        ledger = cls(client, validate_journal(journal))
        if not ledger._exists():
            ledger._create(like)
        ledger._check(accept_loss)
        return ledger

    def decision_at(self, offset: int) -> Decision:
        """Read the decision whose record begins at `offset`. Raises LedgerDamaged if it is gone, and CorruptData."""
        line = b""
        try:
            head = self._client.head(self.journal)
            for chunk in self._client.read(self.journal, offset, end_offset=head, fail_on_jump=True):
                line += chunk.content
                if b"\n" in chunk.content:
                    break
        except OffsetJump as error:
            raise self._lost(error) from error
        if b"\n" not in line:
            raise LedgerDamaged(f"ledger {self.journal} has no record at offset {offset} any more")
        found = self._parse(line.partition(b"\n")[0], offset)
        if isinstance(found, str):
            raise self._no_record(offset)
        return found

    def find(self, writer_id: str) -> Decision | None:
        """Return the decision of a publication, or None if it was undecided when the ledger was last read.

        One that is acknowledged has no intents any more.
        """
        return self._decisions.get(writer_id)

    def unacknowledged(self) -> Iterator[Decision]:
        """Yield the decisions whose acknowledgements may not be in their journals yet, in the ledger's order."""
        yield from list(self._pending.values())

    def is_acknowledged(self, writer_id: str) -> bool:
        """Return True unless acknowledgements of this writer id may not be in their journals yet."""
        return writer_id not in self._pending

    def decide(self, decision: Decision) -> Decision:
        """Record a decision, unless the publication is decided already. Returns the decision that counts.

        Raises AppendOutcomeUnknown when the answers of brokers were lost for the client's patience: open the ledger
        later to learn which decision counts.
        """
        self._append_if(decision.to_line(), lambda: decision.writer_id not in self._decisions)
        return self._decisions[decision.writer_id]

    def acknowledge(self, writer_id: str) -> None:
        """Record that the acknowledgements of a decision are in their journals."""
        self._append_if(acknowledged_line(writer_id), lambda: writer_id in self._pending)

    def refresh(self, *, accept_loss: bool = False) -> None:
        """Read the records that were added since the ledger was last read. Raises CorruptData and LedgerDamaged.

        With `accept_loss`, content that is gone is passed by.
        """
        head = self._client.head(self.journal)
        if head < self._offset:
            raise LedgerDamaged(f"ledger {self.journal} was read up to offset {self._offset}, but now ends at {head}")
        while self._offset < head:
            try:
                self._read_to(head)
            except OffsetJump as error:
                if not accept_loss:
                    raise self._lost(error) from error
                _log.warning("publication.loss_accepted", ledger=self.journal, begin=error.expected, end=error.actual)
                self._offset = error.actual

    def _read_to(self, head: int) -> None:
        partial = b""
        for chunk in self._client.read(self.journal, self._offset, end_offset=head, fail_on_jump=True):
            *lines, partial = (partial + chunk.content).split(b"\n")
            for line in lines:
                self._take(line, self._offset)
                self._offset += len(line) + 1
        if self._offset != head:
            raise CorruptData(
                f"ledger {self.journal} at offset {self._offset}: content up to {head} is not a whole record"
            )

    def _take(self, line: bytes, offset: int) -> None:
        found = self._parse(line, offset)
        if isinstance(found, str):
            self._pending.pop(found, None)
            if (known := self._decisions.get(found)) is not None:
                self._decisions[found] = replace(known, intents={})
        elif found.batch is not None:
            self._pending[found.writer_id] = found
        elif found.writer_id not in self._decisions:
            self._decisions[found.writer_id] = self._pending[found.writer_id] = found

    def _parse(self, line: bytes, offset: int) -> Decision | str:
        """Return a decision, or the writer id of one that is acknowledged."""
        try:
            record = json.loads(line)
            if "acknowledged" in record:
                return str(record["acknowledged"])
            intents = {str(name): base64.b64decode(text, validate=True) for name, text in record["intents"].items()}
            writer, batch = record.get("batch", (None, 0))
            return Decision(
                str(record["publication"]),
                str(record["producer"]),
                int(record["messages"]),
                float(record["time"]),
                intents,
                None if writer is None else (str(writer), int(batch)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
            raise self._no_record(offset) from error

    def _lost(self, error: OffsetJump) -> LedgerDamaged:
        return LedgerDamaged(f"ledger {self.journal} has lost content: {error}")

    def _no_record(self, offset: int) -> CorruptData:
        return CorruptData(f"ledger {self.journal} at offset {offset}: no record of a publication")

    def _append_if(self, line: bytes, due: Callable[[], bool]) -> None:
        """Append a record as long as it is due, each time on the condition that nobody else has appended."""
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

    def _append(self, line: bytes) -> None:
        self._client.append(self.journal, line, **next_record(self._offset)._asdict())

    def _exists(self) -> bool:
        return bool(self._client.list(label_selector(include=[(NAME, self.journal)])).journals)

    def _create(self, like: str) -> None:
        found = self._client.list(label_selector(include=[(NAME, like)])).journals
        if not found:
            raise JournalNotFound(like)
        spec = records_spec(self.journal, found[0].spec, PUBLICATIONS)
        try:
            self._client.apply([pb.ApplyRequest.Change(upsert=spec)])
        except EtcdTransactionFailed as error:  # Another publisher was faster. Ask brokers that know that.
            self._known_revision = error.header.etcd.revision if error.header is not None else 0

    def _check(self, accept_loss: bool) -> None:
        """Raise LedgerDamaged if the brokers have content of the ledger, but not its registers."""
        at = self._client.append(self.journal, b"", min_etcd_revision=self._known_revision)
        if not at.end or value_of(at.registers, HELD_LABEL):
            return
        if accept_loss:
            untouched = label_selector(exclude=[(HELD_LABEL, "")])
            self._client.append(self.journal, acknowledged_line(""), check_registers=untouched, union_registers=HELD)
            return
        raise LedgerDamaged(
            f"journal {self.journal} has content but not the registers of a ledger: it is not one, or all its brokers "
            "were lost, and its last records perhaps with them"
        )


def checked_writer_id(writer_id: str) -> str:
    """Return the writer id. Raises InvalidInput if it is empty, too long or not printable."""
    if not writer_id or len(writer_id) > MAX_WRITER_ID or not writer_id.isprintable():
        raise InvalidInput(
            f"{writer_id[:100]!r} cannot be a writer id; give 1 to {MAX_WRITER_ID} printable characters",
            field="writer_id",
        )
    return writer_id


def acknowledged_line(writer_id: str) -> bytes:
    """Return the record that the acknowledgements of a decision are in their journals."""
    return _line({"acknowledged": writer_id})


def _line(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, separators=(",", ":"), sort_keys=True).encode() + b"\n"
