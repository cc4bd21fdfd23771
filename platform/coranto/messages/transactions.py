"""The transactions of a publisher, which may span journals.

`TransactionBuilder` implements the protocol. It stamps messages with UUIDs, keeps each journal's messages in order, and
creates the acknowledgements that commit or roll back a transaction. It does no I/O; the publishers (`publisher.py`) do.

A transaction goes through these phases:

::

    OPEN ──ack_intents()──> PREPARED ──commit()──> COMMITTING ──finish()──> OPEN
     │                         │
     └────rollback_intents()───┴──> ROLLING_BACK ──finish()──> OPEN

1.  Messages are added and appended as CONTINUE_TXN: every reader sees their bytes, but treats them as pending.
2.  When all messages are in their journals, `ack_intents` returns the acknowledgements (*intents*), one per journal.
3.  The caller persists the intents, typically in one store transaction with other changes that must commit with them.
    This commits the transaction.
4.  Only then are the intents appended. A process that finds persisted intents after a crash appends them again, which
    is harmless: its own messages have another producer.

Until the acknowledgement is written, an append with an unknown outcome may be retried with the same bytes. This is
harmless: readers discard messages whose clock they have seen.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from coranto.errors import InvalidInput
from coranto.messages.framing import Framing, JsonLines
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, format_uuid, successor

if TYPE_CHECKING:
    import pyarrow as pa

M = TypeVar("M")

_OPEN_FOR = "a transaction has messages for {}: commit or roll it back before publishing outside of it"


class Phase(enum.Enum):
    """The phase of a `TransactionBuilder`'s transaction; see the module's diagram."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"


class _Output:
    """The state of one journal: queued content, and the clock of its last acknowledgement."""

    __slots__ = (
        "in_doubt",
        "in_transaction",
        "is_ack_valid",
        "is_written",
        "last_ack",
        "may_be_appended",
        "queue",
        "size",
    )

    def __init__(self, last_ack: int) -> None:
        self.queue: deque[bytes] = deque()
        self.size = 0
        self.last_ack = last_ack
        self.in_transaction = False
        self.may_be_appended = False  # Messages of the open transaction may be in the journal.
        self.in_doubt = False  # One of its batches was put back: the append may still reach the journal.
        self.is_ack_valid = True  # `last_ack` belongs to the current producer.
        self.is_written = False  # A message of the current producer may be in the journal.


class TransactionBuilder(Generic[M]):
    """Builds the transactions of one writer, one after the other.

    All transactions have the same producer, unless an acknowledgement may be appended a second time. A repeated
    acknowledgement would make readers drop the messages of the next transaction, so `finish` then replaces the producer
    with its `successor`.
    """

    def __init__(self, producer: ProducerId, clock: ProducerClock, framing: Framing[M]) -> None:
        self.producer = producer
        self.phase = Phase.OPEN
        self.last_uuid = ""
        """The UUID of the last queued message, in its text form."""
        self._clock = clock
        self._framing = framing
        self._lanes: dict[str, _Output] = {}
        self._pending = 0
        self._acks: dict[str, tuple[int, bytes]] = {}
        self._may_repeat = False  # An append of the current acknowledgements had an unknown outcome.

    def add(self, journal: str, message: M) -> int:
        """Queue a message of the open transaction. Returns its size in bytes.

        Raises InvalidInput when the framing cannot hold the message, or when the transaction is not OPEN.
        """
        lane = self._queue(journal, message, Flags.CONTINUE_TXN)
        lane.in_transaction = True
        return len(lane.queue[-1])

    def add_outside(self, journal: str, message: M) -> int:
        """Queue a message that is committed as soon as it is appended. Returns its size in bytes.

        Raises InvalidInput as `add` does, and also when the open transaction has messages for the same journal, because
        readers would treat those as rolled back.
        """
        lane = self._lanes.get(journal)
        if lane is not None and lane.in_transaction:
            raise InvalidInput(_OPEN_FOR.format(journal))
        lane = self._queue(journal, message, Flags.OUTSIDE_TXN)
        lane.last_ack = self._clock.last
        return len(lane.queue[-1])

    def add_rows(self, journal: str, batch: pa.RecordBatch, flags: Flags, max_bytes: int) -> None:
        """Queue the rows of an Arrow record batch as messages, in the open transaction or outside of it (see `flags`).

        They are queued in pieces of at most `max_bytes`. The columns come from `columnar_json.table_of`. Raises
        InvalidInput as `add` and `add_outside` do, and for a framing other than JSON lines; then no row is queued.
        """
        from coranto.messages.columnar_json import line_pieces, stamped_rows

        self._require(Phase.OPEN)
        framing: object = self._framing
        if not isinstance(framing, JsonLines):
            raise InvalidInput(f"rows of tables are written as JSON lines, not by {type(framing).__name__}")
        lane = self._lanes.get(journal)
        if flags is Flags.OUTSIDE_TXN and lane is not None and lane.in_transaction:
            raise InvalidInput(_OPEN_FOR.format(journal))
        if not batch.num_rows:
            return
        first = self._clock.ticks(batch.num_rows)
        lines = stamped_rows(batch, framing, self.producer, first, flags)
        lane = self._lane(journal, first)
        for piece in line_pieces(lines, max_bytes):
            lane.queue.append(piece)
            lane.size += len(piece)
            self._pending += len(piece)
        self.last_uuid = format_uuid(self.producer, self._clock.last, flags)
        if flags is Flags.OUTSIDE_TXN:
            lane.last_ack = self._clock.last
        else:
            lane.in_transaction = True

    def pending_bytes(self, journal: str | None = None) -> int:
        """Return the number of queued bytes, for one journal or for all."""
        if journal is None:
            return self._pending
        lane = self._lanes.get(journal)
        return lane.size if lane is not None else 0

    def pending_journals(self) -> list[str]:
        """Return the journals that have queued bytes."""
        return [journal for journal, lane in self._lanes.items() if lane.size]

    def take(self, journal: str, max_bytes: int) -> bytes:
        """Take a batch of the next whole messages of a journal, at most `max_bytes` long; empty when none are queued.

        A larger message is a batch of its own. Append the batches of one journal in the order of `take`. When an append
        fails, put its batch back.
        """
        lane = self._lanes.get(journal)
        if lane is None or not lane.queue:
            return b""
        queue = lane.queue
        batch = [queue.popleft()]
        size = len(batch[0])
        while queue and size + len(queue[0]) <= max_bytes:
            batch.append(queue.popleft())
            size += len(batch[-1])
        lane.size -= size
        self._pending -= size
        lane.may_be_appended |= lane.in_transaction
        lane.is_written = True
        return b"".join(batch)

    def take_batches(self, max_bytes: int) -> list[tuple[str, bytes]]:
        """Take all queued messages as pairs (journal, batch) of at most `max_bytes`, in order for each journal."""
        batches = []
        for journal in self.pending_journals():
            while batch := self.take(journal, max_bytes):
                batches.append((journal, batch))
        return batches

    def put_back(self, journal: str, batch: bytes) -> None:
        """Queue the most recently taken batch of a journal again, because its append failed or is in doubt."""
        lane = self._lanes[journal]
        lane.in_doubt |= lane.in_transaction
        lane.queue.appendleft(batch)
        lane.size += len(batch)
        self._pending += len(batch)

    def ack_intents(self) -> dict[str, bytes]:
        """OPEN → PREPARED: return the acknowledgement for each journal that the transaction wrote to.

        Persist them, then call `commit`. Raises InvalidInput while messages are queued, because their acknowledgement
        must come after them.
        """
        self._require(Phase.OPEN)
        if self._pending:
            raise InvalidInput(
                f"{self._pending} bytes are not yet appended to {', '.join(self.pending_journals())}; append them first"
            )
        for journal, lane in self._lanes.items():
            if lane.in_transaction:
                clock = self._clock.tick()
                self._acks[journal] = clock, self._acknowledgement(clock)
        self.phase = Phase.PREPARED
        return self._intents()

    def commit(self) -> dict[str, bytes]:
        """PREPARED → COMMITTING: return the intents, to be appended after the caller has persisted them.

        After this the transaction cannot be rolled back. May be called again while COMMITTING, to append the intents
        again.
        """
        self._require(Phase.PREPARED, Phase.COMMITTING)
        self.phase = Phase.COMMITTING
        return self._intents()

    def rollback_intents(self) -> dict[str, bytes]:
        """OPEN or PREPARED → ROLLING_BACK: drop queued messages, and return intents that make readers drop the rest.

        The intent for a journal is an acknowledgement with the clock of that journal's last acknowledgement. Readers
        have committed everything up to that clock, and all clocks of the transaction are larger. So the acknowledgement
        commits nothing, and a reader drops all pending messages that an acknowledgement does not commit. If the last
        acknowledgement itself was lost, this one replaces it. In a journal without any acknowledgement the intent has
        the clock just below the producer's first message: a reader that has read that message treats this clock as the
        last acknowledged one.

        An append in doubt could still reach the journal after that acknowledgement, and its messages would be pending
        again. The intent for its journal therefore holds a second acknowledgement with a new clock. The second one
        commits nothing, and turns all earlier messages into duplicates.

        May be called again while ROLLING_BACK. The next transaction can begin only after `finish`, because its
        acknowledgement would commit messages that were not yet dropped.
        """
        self._require(Phase.OPEN, Phase.PREPARED, Phase.ROLLING_BACK)
        if self.phase is not Phase.ROLLING_BACK:
            self.phase = Phase.ROLLING_BACK
            self._acks = {}
            for journal, lane in self._lanes.items():
                if not lane.in_transaction:
                    continue  # Its queued messages are outside of the transaction.
                self._pending -= lane.size
                lane.queue.clear()
                lane.size = 0
                lane.is_ack_valid = lane.is_written  # Otherwise the producer's first message was dropped here.
                if lane.may_be_appended:
                    clock, content = lane.last_ack, self._acknowledgement(lane.last_ack)
                    if lane.in_doubt:
                        clock = self._clock.tick()
                        content += self._acknowledgement(clock)
                    self._acks[journal] = clock, content
        return self._intents()

    @contextmanager
    def acknowledging(self) -> Iterator[list[object]]:
        """Run a block that appends the intents and adds the results of the appends to the list, then call `finish`.

        If the block fails or is cancelled, an append may still be applied at any later time. A later block that appends
        the intents therefore replaces the producer. So does a result whose `may_repeat` is true.
        """
        results: list[object] = []
        repeats, self._may_repeat = self._may_repeat, True
        yield results
        self._may_repeat = False
        self.finish(may_repeat=repeats or any(getattr(each, "may_repeat", False) is True for each in results))

    def finish(self, *, may_repeat: bool = False) -> None:
        """COMMITTING or ROLLING_BACK → OPEN. Call this after the acknowledgements are in their journals.

        `may_repeat` means that an acknowledgement may appear in its journal again at any later time, because an append
        of it had an unknown outcome.
        """
        self._require(Phase.COMMITTING, Phase.ROLLING_BACK)
        for journal, (clock, _) in self._acks.items():
            self._lanes[journal].last_ack = clock
        for lane in self._lanes.values():
            lane.in_transaction = lane.may_be_appended = lane.in_doubt = False
            lane.is_ack_valid = lane.is_ack_valid and not may_repeat
            lane.is_written = lane.is_written and not may_repeat
        if may_repeat:
            self.producer = successor(self.producer)
        self._acks = {}
        self.phase = Phase.OPEN

    def _queue(self, journal: str, message: M, flags: Flags) -> _Output:
        self._require(Phase.OPEN)
        clock = self._clock.tick()
        uuid = format_uuid(self.producer, clock, flags)
        content = self._framing.marshal(message, uuid)
        self.last_uuid = uuid
        lane = self._lane(journal, clock)
        lane.queue.append(content)
        lane.size += len(content)
        self._pending += len(content)
        return lane

    def _lane(self, journal: str, clock: int) -> _Output:
        """Return the state of a journal. `clock` is the clock of the producer's next message there."""
        lane = self._lanes.get(journal)
        if lane is None:
            lane = self._lanes[journal] = _Output(clock - 1)
        elif not lane.is_ack_valid:
            lane.last_ack, lane.is_ack_valid = clock - 1, True
        return lane

    def _acknowledgement(self, clock: int) -> bytes:
        return self._framing.acknowledgement(format_uuid(self.producer, clock, Flags.ACK_TXN))

    def _intents(self) -> dict[str, bytes]:
        # Messages that cannot hold a UUID have no acknowledgement.
        return {journal: content for journal, (_, content) in self._acks.items() if content}

    def _require(self, *phases: Phase) -> None:
        if self.phase not in phases:
            allowed = " or ".join(phase.value for phase in phases)
            raise InvalidInput(f"the transaction is {self.phase.value}; this can be done only while {allowed}")
