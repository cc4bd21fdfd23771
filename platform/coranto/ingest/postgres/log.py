"""The changes of a publication as reads, one for each transaction of the database. All calls block."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from coranto.errors import CorruptData, InvalidInput
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.pgoutput import (
    TableRelation,
    TransactionBegin,
    TransactionCommit,
    Truncate,
    format_lsn,
    is_change,
    parse,
    parse_lsn,
    table_of,
)
from coranto.ingest.postgres.replication import ReplicationConnection
from coranto.ingest.postgres.rows import Shape, Subject, TableRows
from coranto.ingest.source import Read

_SPLIT: Final = "log"


class LogPosition(NamedTuple):
    """A position in the log. Of the transaction that commits there, the first `done` changes are read, too."""

    lsn: int
    done: int = 0
    timeline: int = 0
    """The timeline of the log; 0 if it was not recorded."""

    @classmethod
    def parse(cls, text: Any) -> LogPosition:
        """Parse the position of the split. Raises CorruptData."""
        place, _, timeline = str(text).partition("@")
        lsn, _, count = place.partition("+")
        if not (count or "0").isdecimal() or not (timeline or "0").isdecimal():
            raise CorruptData(f"{text!r} is not a position in the log of PostgreSQL")
        return cls(parse_lsn(lsn), int(count or 0), int(timeline or 0))

    def __str__(self) -> str:
        count = f"+{self.done}" if self.done else ""
        timeline = f"@{self.timeline}" if self.timeline else ""
        return format_lsn(self.lsn) + count + timeline


class _Transaction:
    """A transaction that is being received. Changes are kept as the server sends them, which takes the least memory."""

    def __init__(self, begin: TransactionBegin, done: int) -> None:
        self.begin = begin
        self.done = done
        """The number of changes that were read before; -1 if all were."""
        self.seq = 0
        self.subjects: list[Subject] = []
        self.payloads: list[bytes] = []
        self.size = 0


class ChangeLog:
    """The log after a position. `position` is None until the first snapshot sets it."""

    def __init__(
        self,
        replication: ReplicationConnection,
        options: PostgresOptions,
        rows: TableRows,
        position: LogPosition | None,
        key_of: Callable[[TableRelation], tuple[str, ...]],
    ) -> None:
        self.position = position
        self._replication = replication
        self._options = options
        self._rows = rows
        self._key_of = key_of
        self._relations: dict[int, TableRelation] = {}
        self._shapes: dict[int, Shape] = {}
        self._open: _Transaction | None = None
        self._held: TransactionBegin | None = None  # The next transaction, unless it has to wait for a snapshot.

    @property
    def reached(self) -> int:
        """All changes before this position are read; 0 within a transaction."""
        return 0 if self._open is not None or self._held is not None else self._replication.reached

    def begin(self, lsn: int) -> Read:
        """Move the position to `lsn`, before which all changes are read. Returns a read without rows."""
        self.position = self._at(lsn)
        return Read(_SPLIT, (), str(self.position))

    def advance(self) -> Read | None:
        """Move the position up to the server's, and return a read without rows; None if the position is not lower."""
        if self.position is None or self.position.done or self.reached <= self.position.lsn:
            return None
        self._replication.is_asked = False
        return self.begin(self.reached)

    def is_at(self, lsn: int) -> bool:
        """Return True if all changes before a position are read."""
        held = self._held
        return self.reached >= lsn if held is None else held.commit_lsn >= lsn

    @property
    def is_asked(self) -> bool:
        """True if the server has asked for a report, as before it stops, since `advance` last returned a read."""
        return self._replication.is_asked

    def ask(self) -> None:
        """Ask the server for its position."""
        self._replication.report(ask=True)

    def keep_alive(self) -> None:
        """Report to the server without reading changes, since it closes silent connections."""
        self._replication.report()

    def read(self, max_bytes: int, seconds: float, until: int = 0) -> list[Read]:
        """Return the transactions that arrive within `seconds`, of about `max_bytes` bytes.

        A transaction that was committed at `until` or later is held back until a call without `until`. Raises
        InvalidInput for a transaction that is too large.
        """
        found: list[Read] = []
        size, deadline = 0, time.monotonic() + seconds
        while size < max_bytes:
            if self._held is not None:
                if until and self._held.commit_lsn >= until:
                    break
                self._begin(self._held)
                self._held = None
            payload = self._replication.receive(deadline)
            if payload is None:
                break
            size += len(payload)
            if is_change(payload):
                found += self._change(self._shape(table_of(payload)), payload)
                continue
            message = parse(payload)
            if isinstance(message, TransactionBegin):
                self._held = message
            elif isinstance(message, TransactionCommit):
                found += self._commit(message)
            elif isinstance(message, TableRelation):
                self._relations[message.oid] = message
                self._shapes.pop(message.oid, None)
            elif isinstance(message, Truncate):
                names = () if self._options.truncate == "skip" else message.oids
                found += self._change(tuple(self._relations[oid].name for oid in names), payload)
        return found

    def _begin(self, begin: TransactionBegin) -> None:
        assert self.position is not None
        done = 0
        if begin.commit_lsn < self.position.lsn:
            done = -1  # All of it.
        elif begin.commit_lsn == self.position.lsn:
            done = self.position.done
        self._open = _Transaction(begin, done)

    def _commit(self, message: TransactionCommit) -> list[Read]:
        transaction, self._open = self._open, None
        assert transaction is not None
        if transaction.done < 0:
            return []
        self.position = self._at(message.end_lsn)
        is_empty = not any(transaction.subjects) and not transaction.done
        return [] if is_empty else [self._taken(transaction)]

    def _change(self, subject: Subject, payload: bytes) -> list[Read]:
        transaction = self._open
        assert transaction is not None
        begin, options = transaction.begin, self._options
        transaction.seq += 1
        if transaction.done < 0 or transaction.seq <= transaction.done:
            return []
        transaction.subjects.append(subject)
        transaction.payloads.append(payload)
        transaction.size += len(payload)
        if transaction.size <= options.transaction_bytes:
            return []
        if not options.divides:
            raise InvalidInput(
                f"the transaction at {format_lsn(begin.commit_lsn)} (xid {begin.xid & 0xFFFFFFFF}) has more than "
                f"{options.transaction_bytes} bytes of changes: give more with `transaction`, which takes some "
                "fifteen times as much memory, or divide such transactions among several of the stream with `larger: "
                "divide`",
                field="transaction",
            )
        self.position = self._at(begin.commit_lsn, transaction.seq)
        return [self._taken(transaction)]

    def _taken(self, transaction: _Transaction) -> Read:
        """Return the changes that a transaction holds as a read that ends at the current position."""
        subjects, payloads = transaction.subjects, transaction.payloads
        first = transaction.seq - len(subjects) + 1
        transaction.subjects, transaction.payloads, transaction.size = [], [], 0
        transaction.done = transaction.seq
        rows = self._rows.changed(transaction.begin, first, subjects, payloads) if subjects else ()
        return Read(_SPLIT, rows, str(self.position))

    def _at(self, lsn: int, done: int = 0) -> LogPosition:
        return LogPosition(lsn, done, self._replication.timeline)

    def _shape(self, oid: int) -> Shape:
        shape = self._shapes.get(oid)
        if shape is None:
            relation = self._relations[oid]
            key = tuple(each.name for each in relation.columns if each.in_identity)
            if relation.identity == "f":  # All columns are the identity.
                key = self._key_of(relation)
            shape = self._shapes[oid] = self._rows.shape(relation, relation.columns, key)
        return shape
