"""Write streams from blocking code, such as scripts, Dagster assets and Spark tasks."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from coranto.client.client import JournalClient
from coranto.client.handover import BoundedCalls
from coranto.client.loop import Blocking, BlockingWrapper
from coranto.client.sync import SyncJournalClient
from coranto.streams.blocking.generated.wrappers import (
    MultiKeyTransactionWrapper,
    MultiKeyWriterWrapper,
    StreamWriterWrapper,
    TransactionWrapper,
)
from coranto.streams.model.events import EventFormat
from coranto.streams.model.registers import Fence
from coranto.streams.writer.metrics import WriterMetrics
from coranto.streams.writer.multi_key.transaction import MultiKeyTransaction
from coranto.streams.writer.multi_key.writer import MAX_MULTI_KEY_BYTES, MultiKeyWriter
from coranto.streams.writer.stream_writer import (
    CLOSE_SECONDS,
    DEFAULT_BATCH_BYTES,
    DEFAULT_IN_FLIGHT,
    DEFAULT_PENDING_BYTES,
    DEFAULT_RETRY_TIMEOUT,
    DEFAULT_TIMEOUT,
    MAX_TRANSACTION_BYTES,
    StreamWriter,
)
from coranto.streams.writer.transactions import Transaction

E = TypeVar("E")
T = TypeVar("T")

MAX_PENDING_EVENTS: Final = 10_000
"""Maximum pending events. Further calls wait until earlier events are written or have failed."""


class SyncStreamWriter(StreamWriterWrapper[E], Blocking):
    """A blocking writer: `with SyncStreamWriter(client, "orders") as writer:`. Safe for several threads.

    A call that queues an event waits only for space in the queue, not for the event loop's thread.
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
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
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
            retry_timeout=retry_timeout,
            metrics=metrics,
        )
        self._calls = BoundedCalls(MAX_PENDING_EVENTS)

    @property
    def _inner(self) -> StreamWriter[E]:
        return self._writer

    def __enter__(self) -> Self:
        self.open()
        return self

    @property
    def metrics(self) -> WriterMetrics:
        return self._writer.metrics

    def transaction(
        self,
        key: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> SyncTransaction[E]:
        """Return a transaction: `with writer.transaction(key) as txn: txn.write(event)`."""

        writer = self._writer
        return SyncTransaction(
            self._call(
                lambda: writer.transaction(
                    key, timeout=timeout, sequence=sequence, expected_offset=expected_offset, fence=fence
                )
            )
        )

    def flush(self) -> None:
        """Wait until all written events are durable; see `StreamWriter.flush`."""
        self._run_after_calls(self._writer.flush)

    def note_time(self, time: float) -> None:
        """Declare that all events written from now on have this time or a later one; see `StreamWriter.note_time`."""

        async def note() -> None:
            self._writer.note_time(time)

        self._run_after_calls(note)

    def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Close the writer. Unfinished writes have `deadline` seconds to complete; see `StreamWriter.close`."""

        async def close() -> None:
            await self._writer.close(deadline)
            await self._client.close()

        self._run_after_calls(close)


class _Scope(BlockingWrapper):
    """A transaction's `with` block: leaving it commits, and an exception aborts."""

    @property
    @abstractmethod
    def _inner(self) -> Transaction[Any] | MultiKeyTransaction[Any]:
        """The asynchronous transaction."""

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._inner.__aexit__(kind, error, None))


class SyncTransaction(TransactionWrapper[E], _Scope):
    """`Transaction` for blocking code."""

    def __init__(self, transaction: Transaction[E]) -> None:
        self._transaction = transaction

    @property
    def _inner(self) -> Transaction[E]:
        return self._transaction


class SyncMultiKeyWriter(MultiKeyWriterWrapper[E], Blocking):
    """`MultiKeyWriter` for blocking code: `with SyncMultiKeyWriter(client, "orders") as writer:`."""

    def __init__(
        self,
        client: SyncJournalClient,
        stream: str,
        *,
        format: EventFormat[E] | None = None,
        max_transaction_bytes: int = MAX_MULTI_KEY_BYTES,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
    ) -> None:
        self._client = JournalClient.of(client.config)
        self._writer: MultiKeyWriter[E] = MultiKeyWriter(
            self._client,
            stream,
            format=format,
            max_transaction_bytes=max_transaction_bytes,
            retry_timeout=retry_timeout,
        )

    @property
    def _inner(self) -> MultiKeyWriter[E]:
        return self._writer

    def __enter__(self) -> Self:
        self.open()
        return self

    def transaction(self, *, timeout: float = DEFAULT_TIMEOUT) -> SyncMultiKeyTransaction[E]:
        """Return a transaction: `with writer.transaction() as txn: txn.write(key, event)`."""
        return SyncMultiKeyTransaction(self._call(lambda: self._writer.transaction(timeout=timeout)))

    def close(self) -> None:
        async def close() -> None:
            await self._writer.close()
            await self._client.close()

        self._run(close())


class SyncMultiKeyTransaction(MultiKeyTransactionWrapper[E], _Scope):
    """`MultiKeyTransaction` for blocking code."""

    def __init__(self, transaction: MultiKeyTransaction[E]) -> None:
        self._transaction = transaction

    @property
    def _inner(self) -> MultiKeyTransaction[E]:
        return self._transaction
