"""Publishing messages, alone or in transactions that span journals.

`TransactionBuilder` holds the protocol: it stamps messages with UUIDs, keeps each journal's messages in order, and
knows which acknowledgements commit or roll back a transaction. It does no I/O. `SyncPublisher` and `Publisher` append
what it gives them, through a callable `append(journal, content)`.

A transaction goes through these phases:

::

    OPEN ──ack_intents()──> PREPARED ──commit()──> COMMITTING ──finish()──> OPEN
     │                         │
     └────rollback_intents()───┴──> ROLLING_BACK ──finish()──> OPEN

1.  Messages are added and appended as CONTINUE_TXN: every reader sees their bytes, and none takes them for committed.
2.  When all of them are in their journals, `ack_intents` makes the acknowledgement of each journal.
3.  The caller keeps the intents durably, typically in one store transaction with what else must commit. That is the
    moment at which the transaction commits.
4.  Only then are the intents appended. Whoever finds kept intents after a crash appends them again, which does no harm.

An append whose outcome is not known may be repeated with the same bytes until the acknowledgement is written, also on
purpose: readers discard messages whose clock they have seen.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from coranto.errors import InvalidInput
from coranto.messages.framing import Framing
from coranto.messages.uuids import Clock, Flags, ProducerId, format_uuid

M = TypeVar("M")

Destination: TypeAlias = str | Callable[[M], str]
"""The journal of a message: its name, or what names it by looking at the message (see `mapping.by_key`)."""

DEFAULT_BATCH_BYTES: Final = 1 << 20
DEFAULT_PENDING_BYTES: Final = 32 << 20


class Phase(enum.Enum):
    """Where a `TransactionBuilder` stands; see the module's picture."""

    OPEN = "open"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"


class _Lane:
    """One journal: what waits to be appended, and the clocks that its acknowledgements need."""

    __slots__ = ("in_doubt", "in_transaction", "last_ack", "may_be_appended", "queue", "size")

    def __init__(self, last_ack: int) -> None:
        self.queue: deque[bytes] = deque()
        self.size = 0
        self.last_ack = last_ack
        self.in_transaction = False
        self.may_be_appended = False  # Some of the open transaction's messages may be in the journal.
        self.in_doubt = False  # One of its batches was put back: the append may still reach the journal.


class TransactionBuilder(Generic[M]):
    """The transactions of one producer, one after the other."""

    def __init__(self, producer: ProducerId, clock: Clock, framing: Framing[M]) -> None:
        self.producer = producer
        self.phase = Phase.OPEN
        self.last_uuid = ""
        """The UUID of the message queued last, in its text form."""
        self._clock = clock
        self._framing = framing
        self._lanes: dict[str, _Lane] = {}
        self._pending = 0
        self._acks: dict[str, tuple[int, bytes]] = {}

    def add(self, journal: str, message: M) -> int:
        """Queue a message of the open transaction. Returns its size in bytes.

        Raises InvalidInput when the framing cannot hold the message, or when the transaction is not OPEN.
        """
        lane = self._queue(journal, message, Flags.CONTINUE_TXN)
        lane.in_transaction = True
        return len(lane.queue[-1])

    def outside(self, journal: str, message: M) -> int:
        """Queue a message that is committed as soon as it is appended. Returns its size in bytes.

        Raises InvalidInput as `add` does, and when the open transaction holds messages of the same journal: readers
        would take those for rolled back.
        """
        lane = self._lanes.get(journal)
        if lane is not None and lane.in_transaction:
            raise InvalidInput(
                f"a transaction has messages for {journal}: commit or roll it back before publishing outside of it"
            )
        lane = self._queue(journal, message, Flags.OUTSIDE_TXN)
        lane.last_ack = self._clock.last
        return len(lane.queue[-1])

    def pending_bytes(self, journal: str | None = None) -> int:
        """Bytes that wait to be taken, of one journal or of all."""
        if journal is None:
            return self._pending
        lane = self._lanes.get(journal)
        return lane.size if lane is not None else 0

    def pending_journals(self) -> list[str]:
        """Journals that have bytes waiting to be taken."""
        return [journal for journal, lane in self._lanes.items() if lane.size]

    def take(self, journal: str, max_bytes: int) -> bytes:
        """The next whole messages to append to a journal, together at most `max_bytes`; empty when there are none.

        A single larger message comes alone. Append batches of one journal in the order they were taken, and put one
        back whose append failed.
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
        return b"".join(batch)

    def take_batches(self, max_bytes: int) -> list[tuple[str, bytes]]:
        """All that waits, as batches of at most `max_bytes`; those of one journal in order."""
        batches = []
        for journal in self.pending_journals():
            while batch := self.take(journal, max_bytes):
                batches.append((journal, batch))
        return batches

    def put_back(self, journal: str, batch: bytes) -> None:
        """Return the batch most recently taken from a journal, because its append failed or is in doubt."""
        lane = self._lanes[journal]
        lane.in_doubt |= lane.in_transaction
        lane.queue.appendleft(batch)
        lane.size += len(batch)
        self._pending += len(batch)

    def ack_intents(self) -> dict[str, bytes]:
        """OPEN → PREPARED: the acknowledgement of each journal that the transaction wrote to.

        Keep them durably, then `commit`. Raises InvalidInput when messages wait to be taken: their acknowledgement
        must come after them.
        """
        self._require(Phase.OPEN)
        if self._pending:
            raise InvalidInput(f"{self._pending} bytes are not yet appended to {', '.join(self.pending_journals())}")
        for journal, lane in self._lanes.items():
            if lane.in_transaction:
                clock = self._clock.tick()
                self._acks[journal] = clock, self._acknowledgement(clock)
        self.phase = Phase.PREPARED
        return self._intents()

    def commit(self) -> dict[str, bytes]:
        """PREPARED → COMMITTING: the intents, to be appended now that they are durably kept.

        From here there is no way back. May be called again while COMMITTING, to append the intents again.
        """
        self._require(Phase.PREPARED, Phase.COMMITTING)
        self.phase = Phase.COMMITTING
        return self._intents()

    def rollback_intents(self) -> dict[str, bytes]:
        """OPEN or PREPARED → ROLLING_BACK: forget waiting messages; what to append so that readers drop the others.

        The intent of a journal is an acknowledgement with the clock of its last one. Readers have committed everything
        up to that clock, and all that the transaction wrote is larger; so the acknowledgement commits nothing of it,
        and a reader that meets an acknowledgement drops all it does not commit. Should the last acknowledgement itself
        have been lost, this one stands in for it. In a journal where nothing was ever acknowledged, the clock just
        below the producer's first message serves: a reader takes it for the last acknowledged one from that message on.

        An append in doubt could still reach the journal behind that acknowledgement and be pending again. Its journal's
        intent therefore holds a second, fresh acknowledgement: it commits nothing, and makes duplicates of all before.

        May be called again while ROLLING_BACK. The next transaction can begin after `finish` only, since its
        acknowledgement would commit messages that were not yet dropped.
        """
        self._require(Phase.OPEN, Phase.PREPARED, Phase.ROLLING_BACK)
        if self.phase is not Phase.ROLLING_BACK:
            self.phase = Phase.ROLLING_BACK
            self._acks = {}
            for journal, lane in self._lanes.items():
                if not lane.in_transaction:
                    continue  # What waits there is outside of the transaction.
                self._pending -= lane.size
                lane.queue.clear()
                lane.size = 0
                if lane.may_be_appended:
                    clock, content = lane.last_ack, self._acknowledgement(lane.last_ack)
                    if lane.in_doubt:
                        clock = self._clock.tick()
                        content += self._acknowledgement(clock)
                    self._acks[journal] = clock, content
        return self._intents()

    def finish(self) -> None:
        """COMMITTING or ROLLING_BACK → OPEN: the acknowledgements are in their journals."""
        self._require(Phase.COMMITTING, Phase.ROLLING_BACK)
        for journal, (clock, _) in self._acks.items():
            self._lanes[journal].last_ack = clock
        for lane in self._lanes.values():
            lane.in_transaction = lane.may_be_appended = lane.in_doubt = False
        self._acks = {}
        self.phase = Phase.OPEN

    def _queue(self, journal: str, message: M, flags: Flags) -> _Lane:
        self._require(Phase.OPEN)
        clock = self._clock.tick()
        uuid = format_uuid(self.producer, clock, flags)
        content = self._framing.marshal(message, uuid)
        self.last_uuid = uuid
        lane = self._lanes.get(journal)
        if lane is None:
            lane = self._lanes[journal] = _Lane(clock - 1)
        lane.queue.append(content)
        lane.size += len(content)
        self._pending += len(content)
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


class SyncPublisher(Generic[M]):
    """Publishes through a blocking `append(journal, content)`. Several threads may share it; one appends at a time.

    When an append raises, its batch is kept: the call that failed, or any later one, appends it again, or `rollback`
    drops it. Nothing is appended in the background, so call `flush` after the last `publish`.
    """

    def __init__(
        self,
        append: Callable[[str, bytes], object],
        *,
        producer: ProducerId,
        clock: Clock,
        framing: Framing[M],
        max_batch_bytes: int = DEFAULT_BATCH_BYTES,
    ) -> None:
        self._append = append
        self._builder = TransactionBuilder(producer, clock, framing)
        self._max_batch_bytes = max_batch_bytes
        self._lock = threading.RLock()

    @property
    def producer(self) -> ProducerId:
        return self._builder.producer

    def publish(self, journal: Destination[M], message: M) -> str:
        """Publish a message that is committed once appended: at the latest by the next `flush`. Returns its UUID.

        Its journal is chosen first. Raises InvalidInput when the message cannot be written.
        """
        with self._lock:
            name = journal if isinstance(journal, str) else journal(message)
            self._builder.outside(name, message)
            uuid = self._builder.last_uuid
            self._append_full(name)
            return uuid

    def add(self, journal: Destination[M], message: M) -> str:
        """Publish a message as part of the open transaction. As `publish` otherwise."""
        with self._lock:
            name = journal if isinstance(journal, str) else journal(message)
            self._builder.add(name, message)
            uuid = self._builder.last_uuid
            self._append_full(name)
            return uuid

    def flush(self) -> None:
        """Return once all messages are appended."""
        with self._lock:
            for journal in self._builder.pending_journals():
                while self._append_batch(journal):
                    pass

    def prepare(self) -> dict[str, bytes]:
        """Append all messages and return the transaction's ack intents, for the caller to keep durably."""
        with self._lock:
            self.flush()
            return self._builder.ack_intents()

    def acknowledge(self) -> None:
        """Append the prepared ack intents. Call it again when an append raised."""
        with self._lock:
            self._append_intents(self._builder.commit())

    def commit(self, on_intents: Callable[[Mapping[str, bytes]], object] | None = None) -> dict[str, bytes]:
        """Commit the transaction: `prepare`, have `on_intents` keep the intents durably, `acknowledge`.

        Without `on_intents` a crash between two acknowledgements leaves some journals committed and others not.
        When `on_intents` raises, nothing is acknowledged and the transaction stays prepared: `acknowledge` when the
        intents were kept all the same, else `rollback`. Returns the intents.
        """
        intents = self.prepare()
        if on_intents is not None:
            on_intents(intents)
        self.acknowledge()
        return intents

    def rollback(self) -> None:
        """Make readers drop what the open transaction published. Call it again when an append raised."""
        with self._lock:
            self._append_intents(self._builder.rollback_intents())

    def _append_full(self, journal: str) -> None:
        if self._builder.pending_bytes(journal) >= self._max_batch_bytes:
            self._append_batch(journal)

    def _append_batch(self, journal: str) -> bool:
        batch = self._builder.take(journal, self._max_batch_bytes)
        if not batch:
            return False
        try:
            self._append(journal, batch)
        except BaseException:
            self._builder.put_back(journal, batch)
            raise
        return True

    def _append_intents(self, intents: Mapping[str, bytes]) -> None:
        for journal, content in intents.items():
            self._append(journal, content)
        self._builder.finish()


class Publisher(Generic[M]):
    """Publishes through an awaitable `append(journal, content)`, to several journals at once and to each in order.

    Full batches are appended in the background. `add` and `publish` wait while more than `max_pending_bytes` are queued
    or being appended, and raise what a background append raised. The batch of a failed or cancelled append is kept, as
    with `SyncPublisher`.

    Use it as an asynchronous context manager: a clean exit flushes, and any exit ends background appends.
    """

    def __init__(
        self,
        append: Callable[[str, bytes], Awaitable[object]],
        *,
        producer: ProducerId,
        clock: Clock,
        framing: Framing[M],
        max_batch_bytes: int = DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        self._append = append
        self._builder = TransactionBuilder(producer, clock, framing)
        self._max_batch_bytes = max_batch_bytes
        self._max_pending_bytes = max_pending_bytes
        self._in_flight = 0
        self._flushing = False
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End background appends without waiting for their outcome. Messages not yet appended stay queued."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    @property
    def producer(self) -> ProducerId:
        return self._builder.producer

    async def publish(self, journal: Destination[M], message: M) -> str:
        """Publish a message that is committed once appended: at the latest by the next `flush`. Returns its UUID.

        Its journal is chosen first. Raises InvalidInput when the message cannot be written. Tasks may publish at once.
        """
        name = journal if isinstance(journal, str) else journal(message)
        self._builder.outside(name, message)
        uuid = self._builder.last_uuid
        await self._append_full(name)
        return uuid

    async def add(self, journal: Destination[M], message: M) -> str:
        """Publish a message as part of the open transaction. As `publish` otherwise."""
        name = journal if isinstance(journal, str) else journal(message)
        self._builder.add(name, message)
        uuid = self._builder.last_uuid
        await self._append_full(name)
        return uuid

    async def flush(self) -> None:
        """Return once all messages are appended."""
        self._flushing = True
        try:
            while self._tasks or self._builder.pending_bytes():
                self._collect()
                for journal in self._builder.pending_journals():
                    self._start(journal)
                if self._tasks:
                    await asyncio.wait(self._tasks.values())
        finally:
            self._flushing = False

    async def prepare(self) -> dict[str, bytes]:
        """Append all messages and return the transaction's ack intents, for the caller to keep durably."""
        await self.flush()
        return self._builder.ack_intents()

    async def acknowledge(self) -> None:
        """Append the prepared ack intents. Call it again when an append raised or the call was cancelled."""
        await self._append_intents(self._builder.commit())

    async def commit(
        self, on_intents: Callable[[Mapping[str, bytes]], Awaitable[object]] | None = None
    ) -> dict[str, bytes]:
        """Commit the transaction: `prepare`, have `on_intents` keep the intents durably, `acknowledge`.

        See `SyncPublisher.commit` for what failures leave behind.
        """
        intents = await self.prepare()
        if on_intents is not None:
            await on_intents(intents)
        await self.acknowledge()
        return intents

    async def rollback(self) -> None:
        """Make readers drop what the open transaction published. Call it again when it raised or was cancelled."""
        # A batch that is being appended must not land behind the acknowledgement that rolls it back.
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        await self._append_intents(self._builder.rollback_intents())

    async def _append_full(self, journal: str) -> None:
        if self._builder.pending_bytes(journal) >= self._max_batch_bytes:
            self._collect()
            self._start(journal)
        while self._is_over():
            self._collect()
            for waiting in self._builder.pending_journals():
                self._start(waiting)
            await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)

    def _is_over(self) -> bool:
        return self._builder.pending_bytes() + self._in_flight > self._max_pending_bytes

    def _start(self, journal: str) -> None:
        if journal not in self._tasks:
            self._tasks[journal] = asyncio.create_task(self._drain(journal))

    def _collect(self) -> None:
        """Forget ended tasks, and raise what the first failed one raised."""
        failure: BaseException | None = None
        for journal, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[journal]
                failure = failure or (None if task.cancelled() else task.exception())
        if failure is not None:
            raise failure

    async def _drain(self, journal: str) -> None:
        while True:
            size = self._builder.pending_bytes(journal)
            if size < self._max_batch_bytes and not (self._flushing or self._is_over()):
                return
            batch = self._builder.take(journal, self._max_batch_bytes)
            if not batch:
                return
            self._in_flight += len(batch)
            try:
                await self._append(journal, batch)
            except BaseException:
                self._builder.put_back(journal, batch)
                raise
            finally:
                self._in_flight -= len(batch)

    async def _append_intents(self, intents: Mapping[str, bytes]) -> None:
        outcomes = await asyncio.gather(
            *(_as_coroutine(self._append(journal, content)) for journal, content in intents.items()),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self._builder.finish()


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
