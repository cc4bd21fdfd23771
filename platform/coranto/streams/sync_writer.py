"""Writing streams from code that blocks, such as scripts, Dagster assets and Spark tasks.

`SyncStreamWriter` has the methods of `StreamWriter`, which see for what they mean and raise. It works on the event loop
that all blocking clients of the process share.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from coranto.client.client import JournalClient
from coranto.client.loop import Blocking, run_blocking, shared_loop
from coranto.client.sync import SyncJournalClient
from coranto.streams.events import EventFormat
from coranto.streams.metrics import WriterMetrics
from coranto.streams.registers import Fence
from coranto.streams.transactions import Transaction, TransactionState
from coranto.streams.units import CommitResult, EventPosition
from coranto.streams.writer import (
    CLOSE_SECONDS,
    DEFAULT_BATCH_BYTES,
    DEFAULT_IN_FLIGHT,
    DEFAULT_PATIENCE,
    DEFAULT_PENDING_BYTES,
    DEFAULT_TIMEOUT,
    MAX_TRANSACTION_BYTES,
    StreamWriter,
)

E = TypeVar("E")
T = TypeVar("T")

MAX_PENDING_EVENTS: Final = 10_000
"""A call waits while as many events are not settled."""


class SyncStreamWriter(Blocking, Generic[E]):
    """A blocking writer: `with SyncStreamWriter(client, "orders") as writer:`. May be used by several threads.

    Handing over an event waits for room only, not for the loop's thread.
    """

    def __init__(
        self,
        client: SyncJournalClient,
        stream: str,
        *,
        format: EventFormat[E] | None = None,
        writer_id: str | None = None,
        fresh: bool = False,
        max_transaction_bytes: int = MAX_TRANSACTION_BYTES,
        in_flight: int = DEFAULT_IN_FLIGHT,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        patience: float = DEFAULT_PATIENCE,
        metrics: WriterMetrics | None = None,
    ) -> None:
        self._client = JournalClient.of(client.config)
        self._writer: StreamWriter[E] = StreamWriter(
            self._client,
            stream,
            format=format,
            writer_id=writer_id,
            fresh=fresh,
            max_transaction_bytes=max_transaction_bytes,
            in_flight=in_flight,
            batch_bytes=batch_bytes,
            pending_bytes=pending_bytes,
            patience=patience,
            metrics=metrics,
        )
        self._room = threading.Condition()
        self._pending = 0
        self._handed: deque[Callable[[], None]] = deque()
        self._awake = False

    def __enter__(self) -> Self:
        run_blocking(self._writer.open())
        return self

    @property
    def metrics(self) -> WriterMetrics:
        return self._writer.metrics

    def write_event(
        self, key: str, event: E, *, sequence: int | None = None
    ) -> concurrent.futures.Future[EventPosition]:
        """As `StreamWriter.write_event`; what that raises is raised by the future, too."""
        return self._hand(lambda: self._writer.write_event(key, event, sequence=sequence))

    def write_events(
        self,
        key: str,
        events: Sequence[E],
        *,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> concurrent.futures.Future[CommitResult]:
        """As `StreamWriter.write_events`; what that raises is raised by the future, too."""
        return self._hand(
            lambda: self._writer.write_events(
                key, events, sequence=sequence, expected_offset=expected_offset, fence=fence
            )
        )

    def transaction(
        self,
        key: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> SyncTransaction[E]:
        """A transaction: `with writer.transaction(key) as txn: txn.write(event)`."""

        async def make() -> Transaction[E]:
            return self._writer.transaction(
                key, timeout=timeout, sequence=sequence, expected_offset=expected_offset, fence=fence
            )

        return SyncTransaction(run_blocking(make()))

    def flush(self) -> None:
        async def flush() -> None:
            self._take_over()
            await self._writer.flush()

        run_blocking(flush())

    def last_sequence(self, key: str) -> int:
        return run_blocking(self._writer.last_sequence(key))

    def raise_fence(self, key: str, name: str) -> Fence:
        return run_blocking(self._writer.raise_fence(key, name))

    def note_time(self, time: float) -> None:
        async def note() -> None:
            self._take_over()
            self._writer.note_time(time)

        run_blocking(note())

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        async def close() -> None:
            self._take_over()
            await self._writer.close(deadline)
            await self._client.close()

        run_blocking(close())

    # -- Handing over --------------------------------------------------------------------------------------------------

    def _hand(self, write: Callable[[], asyncio.Future[T]]) -> concurrent.futures.Future[T]:
        given: concurrent.futures.Future[T] = concurrent.futures.Future()
        given.set_running_or_notify_cancel()  # What was given is not recalled by cancelling its future.

        def begin() -> None:
            try:
                write().add_done_callback(settle)
            except BaseException as error:  # noqa: BLE001 - it is the caller's, who waits in another thread
                self._make_room()
                given.set_exception(error)

        def settle(done: asyncio.Future[T]) -> None:
            self._make_room()
            error = done.exception()
            if error is not None:
                given.set_exception(error)
            else:
                given.set_result(done.result())

        with self._room:
            while self._pending >= MAX_PENDING_EVENTS:
                self._room.wait()
            self._pending += 1
            self._handed.append(begin)
            wake, self._awake = not self._awake, True
        if wake:
            shared_loop().call(self._take_over)
        return given

    def _take_over(self) -> None:
        with self._room:
            handed, self._handed, self._awake = self._handed, deque(), False
        for begin in handed:
            begin()

    def _make_room(self) -> None:
        with self._room:
            self._pending -= 1
            self._room.notify()


class SyncTransaction(Generic[E]):
    """`Transaction` for code that blocks."""

    def __init__(self, transaction: Transaction[E]) -> None:
        self._transaction = transaction

    def __enter__(self) -> Self:
        run_blocking(self._transaction.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run_blocking(self._transaction.__aexit__(kind, error, None))

    @property
    def state(self) -> TransactionState:
        return run_blocking(_call(lambda: self._transaction.state))

    @property
    def size(self) -> int:
        return self._transaction.size

    def write(self, event: E) -> None:
        run_blocking(_call(lambda: self._transaction.write(event)))

    def commit(self) -> CommitResult:
        return run_blocking(self._transaction.commit())

    def abort(self) -> None:
        run_blocking(_call(self._transaction.abort))


async def _call(function: Callable[[], T]) -> T:
    return function()
