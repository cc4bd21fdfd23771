"""Publishers of messages, alone or in transactions that span journals.

`SyncPublisher` and `Publisher` append the batches of a `TransactionBuilder` (transactions.py) through a callable
`append(journal, content)`. If the append of an acknowledgement fails, or returns a result whose `may_repeat` is true,
the next transaction has another producer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from coranto.messages.framing import Framing
from coranto.messages.transactions import Phase, TransactionBuilder
from coranto.messages.uuids import Flags, ProducerClock, ProducerId

M = TypeVar("M")

__all__ = ["Destination", "Phase", "Publisher", "SyncPublisher", "TransactionBuilder"]

Destination: TypeAlias = str | Callable[[M], str]
"""The journal of a message: its name, or a function from the message to that name (see `mapping.by_key`)."""

DEFAULT_BATCH_BYTES: Final = 1 << 20
DEFAULT_PENDING_BYTES: Final = 32 << 20


class SyncPublisher(Generic[M]):
    """Publishes through a blocking `append(journal, content)`. Several threads may share it; one appends at a time.

    When an append raises, its batch is kept. Any later call retries it, or `rollback` drops it. Nothing is appended in
    the background, so call `flush` after the last `publish`. A journal's messages are appended when they reach
    `max_batch_bytes`. When more than `max_pending_bytes` are queued for all journals together, the largest queues are
    appended first.
    """

    def __init__(
        self,
        append: Callable[[str, bytes], object],
        *,
        producer: ProducerId,
        clock: ProducerClock,
        framing: Framing[M],
        max_batch_bytes: int = DEFAULT_BATCH_BYTES,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        self._append = append
        self._builder = TransactionBuilder(producer, clock, framing)
        self._max_batch_bytes = max_batch_bytes
        self._max_pending_bytes = max_pending_bytes
        self._lock = threading.RLock()

    @property
    def producer(self) -> ProducerId:
        """The producer of the next message."""
        return self._builder.producer

    def publish(self, journal: Destination[M], message: M) -> str:
        """Publish a message outside of transactions: it commits when it is appended, at the latest by the next `flush`.

        Returns the message's UUID. The journal is chosen before the UUID is. Raises InvalidInput when the message
        cannot be written.
        """
        with self._lock:
            name = journal if isinstance(journal, str) else journal(message)
            self._builder.add_outside(name, message)
            uuid = self._builder.last_uuid
            self._append_full(name)
            return uuid

    def add(self, journal: Destination[M], message: M) -> str:
        """Publish a message as part of the open transaction; otherwise like `publish`."""
        with self._lock:
            name = journal if isinstance(journal, str) else journal(message)
            self._builder.add(name, message)
            uuid = self._builder.last_uuid
            self._append_full(name)
            return uuid

    def publish_table(self, journal: str, table: Any) -> int:
        """Publish the rows of a table outside of transactions, and return their number.

        `table` is an Arrow table, or a DataFrame of pandas or Polars (see `columnar_json.table_of`); each row becomes a
        JSON message. The framing must be `JsonLines`. UUIDs are stamped by whole columns, which is several times as
        fast as publishing rows one by one.

        Raises InvalidInput, usually before anything is published, and the errors of `publish`. After a failed append,
        or if later rows are too large to be encoded (2 GiB), only a part of the rows may be published.
        """
        return self._add_table(journal, table, Flags.OUTSIDE_TXN)

    def add_table(self, journal: str, table: Any) -> int:
        """Publish the rows of a table as part of the open transaction; otherwise like `publish_table`."""
        return self._add_table(journal, table, Flags.CONTINUE_TXN)

    def _add_table(self, journal: str, table: Any, flags: Flags) -> int:
        from coranto.messages.columnar_json import parts_of, table_of

        rows = table_of(table)
        with self._lock:
            for part in parts_of(rows):
                self._builder.add_rows(journal, part, flags, self._max_batch_bytes)
                while self._builder.pending_bytes(journal) >= self._max_batch_bytes:
                    self._append_batch(journal)
                self._append_full(journal)
        return int(rows.num_rows)

    def flush(self) -> None:
        """Append all queued messages."""
        with self._lock:
            for journal in self._builder.pending_journals():
                while self._append_batch(journal):
                    pass

    def prepare(self) -> dict[str, bytes]:
        """Append all messages and return the transaction's ack intents, for the caller to persist."""
        with self._lock:
            self.flush()
            return self._builder.ack_intents()

    def acknowledge(self) -> None:
        """Append the prepared ack intents. If an append raises, call it again."""
        with self._lock:
            self._append_intents(self._builder.commit())

    def commit(self, on_intents: Callable[[Mapping[str, bytes]], object] | None = None) -> dict[str, bytes]:
        """Commit the transaction: `prepare`, let `on_intents` persist the intents, `acknowledge`.

        Returns the intents. Without `on_intents` a crash between two acknowledgements leaves some journals committed
        and others not. When `on_intents` raises, nothing is acknowledged and the transaction stays prepared. Then call
        `acknowledge` if the intents were persisted nevertheless, else `rollback`.
        """
        intents = self.prepare()
        if on_intents is not None:
            on_intents(intents)
        self.acknowledge()
        return intents

    def rollback(self) -> None:
        """Roll back the open transaction: readers drop its messages. If an append raises, call it again."""
        with self._lock:
            self._append_intents(self._builder.rollback_intents())

    def _append_full(self, journal: str) -> None:
        if self._builder.pending_bytes(journal) >= self._max_batch_bytes:
            self._append_batch(journal)
        while self._builder.pending_bytes() > self._max_pending_bytes:
            self._append_batch(max(self._builder.pending_journals(), key=self._builder.pending_bytes))

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
        failure: Exception | None = None
        with self._builder.acknowledging() as appended:
            for journal, content in intents.items():
                try:
                    appended.append(self._append(journal, content))
                except Exception as error:  # noqa: BLE001 - raised after the other journals' appends
                    failure = failure or error
            if failure is not None:
                raise failure


class Publisher(Generic[M]):
    """Publishes through an awaitable `append(journal, content)`, to several journals concurrently and to each in order.

    Full batches are appended in the background. `add` and `publish` wait while more than `max_pending_bytes` are queued
    or being appended, and raise the error of a failed background append. The batch of a failed or cancelled append is
    kept, as in `SyncPublisher`.

    Use it as an asynchronous context manager: a clean exit flushes, and any exit cancels background appends.
    """

    def __init__(
        self,
        append: Callable[[str, bytes], Awaitable[object]],
        *,
        producer: ProducerId,
        clock: ProducerClock,
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
        self._whole = asyncio.Lock()  # Held while a table is added, so that no transaction ends within a table.

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
        """Cancel background appends. Messages not yet appended stay queued."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    @property
    def producer(self) -> ProducerId:
        """The producer of the next message."""
        return self._builder.producer

    async def publish(self, journal: Destination[M], message: M) -> str:
        """Publish a message outside of transactions: it commits when it is appended, at the latest by the next `flush`.

        Returns the message's UUID. The journal is chosen before the UUID is. Raises InvalidInput when the message
        cannot be written. Several tasks may publish concurrently. After a cancellation the message stays queued.
        """
        name = journal if isinstance(journal, str) else journal(message)
        self._builder.add_outside(name, message)
        uuid = self._builder.last_uuid
        await self._append_full(name)
        return uuid

    async def add(self, journal: Destination[M], message: M) -> str:
        """Publish a message as part of the open transaction; otherwise like `publish`."""
        name = journal if isinstance(journal, str) else journal(message)
        self._builder.add(name, message)
        uuid = self._builder.last_uuid
        await self._append_full(name)
        return uuid

    async def publish_table(self, journal: str, table: Any) -> int:
        """Publish the rows of a table outside of transactions, and return their number. See `SyncPublisher`.

        Other tasks may publish in between, but must not add messages for this journal to a transaction: the rest of the
        rows would be rejected. After a cancellation the rows added so far stay queued.
        """
        return await self._add_table(journal, table, Flags.OUTSIDE_TXN)

    async def add_table(self, journal: str, table: Any) -> int:
        """Publish the rows of a table as part of the open transaction; otherwise like `publish_table`.

        If another task commits or rolls back during the call, it waits until all rows are added.
        """
        return await self._add_table(journal, table, Flags.CONTINUE_TXN)

    async def _add_table(self, journal: str, table: Any, flags: Flags) -> int:
        from coranto.messages.columnar_json import parts_of, table_of

        rows = await asyncio.to_thread(table_of, table)
        async with self._whole:
            for part in parts_of(rows):
                self._builder.add_rows(journal, part, flags, self._max_batch_bytes)
                await self._append_full(journal)
                await asyncio.sleep(0)  # Let appends continue between parts.
        return int(rows.num_rows)

    async def flush(self) -> None:
        """Append all queued messages. Cancelling ends only the wait; appends in flight continue."""
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
        """Append all messages and return the transaction's ack intents, for the caller to persist."""
        async with self._whole:
            await self.flush()
            return self._builder.ack_intents()

    async def acknowledge(self) -> None:
        """Append the prepared ack intents. If an append raises or the call is cancelled, call it again."""
        await self._append_intents(self._builder.commit())

    async def commit(
        self, on_intents: Callable[[Mapping[str, bytes]], Awaitable[object]] | None = None
    ) -> dict[str, bytes]:
        """Commit the transaction: `prepare`, let `on_intents` persist the intents, `acknowledge`.

        See `SyncPublisher.commit` for the effects of failures.
        """
        intents = await self.prepare()
        if on_intents is not None:
            await on_intents(intents)
        await self.acknowledge()
        return intents

    async def rollback(self) -> None:
        """Roll back the open transaction: readers drop its messages. If it raises or is cancelled, call it again."""
        async with self._whole:
            # A batch that is being appended must not land after the acknowledgement that rolls it back.
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
        """Remove finished tasks, and raise the error of the first failed one."""
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
        with self._builder.acknowledging() as appended:
            outcomes = await asyncio.gather(
                *(_as_coroutine(self._append(journal, content)) for journal, content in intents.items()),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            appended += outcomes


async def _as_coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
