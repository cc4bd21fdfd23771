"""Read streams from blocking code, such as scripts, Dagster assets and notebooks.

Use each reader from one thread at a time.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from coranto.client.client import JournalClient
from coranto.client.loop import Blocking, BlockingWrapper, run_blocking
from coranto.client.sync import SyncJournalClient
from coranto.messages.framing import Framing
from coranto.streams.blocking.generated.wrappers import (
    GroupReaderWrapper,
    ReaderGroupWrapper,
    StateSynchronizerWrapper,
    StreamReaderWrapper,
)
from coranto.streams.groups.group_reader import DEFAULT_BEAT, DEFAULT_TIMEOUT, GroupReader
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.groups.state_synchronizer import (
    DEFAULT_RETRY_TIMEOUT,
    DEFAULT_SNAPSHOT_EVERY,
    StateModel,
    StateSynchronizer,
)
from coranto.streams.model.positions import StreamPosition
from coranto.streams.reader.delivery import DEFAULT_READ_AHEAD, Event, StreamTransaction
from coranto.streams.reader.stream_reader import StreamReader

E = TypeVar("E")
S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")


class _SyncReading(BlockingWrapper, Generic[E]):
    """Iteration of blocking readers. `_timeout` bounds the wait for each event or transaction, in seconds."""

    _timeout: float | None

    @property
    @abstractmethod
    def _inner(self) -> StreamReader[E] | GroupReader[E]:
        """The asynchronous reader."""

    def __iter__(self) -> Iterator[Event[E]]:
        return self

    def __next__(self) -> Event[E]:
        """Return the next event. Raises TimeoutError, without consuming an event, and errors of the async reader."""
        event = run_blocking(_next(self._inner, self._timeout))
        if event is None:
            raise StopIteration
        return event

    def transactions(self) -> Iterator[StreamTransaction[E]]:
        """Yield the remaining events as whole transactions. Raises the errors of `next`."""
        while (transaction := self.next_transaction()) is not None:
            yield transaction

    def next_transaction(self) -> StreamTransaction[E] | None:
        """Return the next transaction; None at the end. Raises the errors of `next`."""
        return run_blocking(_bounded(self._inner.next_transaction(), self._timeout))


class SyncStreamReader(StreamReaderWrapper[E], _SyncReading[E], Blocking):
    """`StreamReader` for blocking code: `with SyncStreamReader(client, "name") as reader:`."""

    def __init__(
        self,
        client: SyncJournalClient,
        stream: str,
        *,
        format: Framing[E] | None = None,
        begin: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
        block: bool = False,
        skip_truncated: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
        timeout: float | None = None,
    ) -> None:
        self._timeout = timeout
        self._client = JournalClient.of(client.config)
        self._reader: StreamReader[E] = StreamReader(
            self._client,
            stream,
            format=format,
            begin=begin,
            end=end,
            block=block,
            skip_truncated=skip_truncated,
            read_ahead=read_ahead,
        )

    @property
    def _inner(self) -> StreamReader[E]:
        return self._reader

    def close(self) -> None:
        async def close() -> None:
            await self._reader.close()
            await self._client.close()

        run_blocking(close())


class SyncGroupReader(GroupReaderWrapper[E], _SyncReading[E]):
    """`GroupReader` for blocking code: `with group.reader("name") as reader:`."""

    def __init__(self, reader: GroupReader[E], timeout: float | None) -> None:
        self._reader = reader
        self._timeout = timeout

    @property
    def _inner(self) -> GroupReader[E]:
        return self._reader

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(consumed=kind is None)


class SyncReaderGroup(ReaderGroupWrapper, Blocking):
    """`ReaderGroup` for blocking code. Close its readers first."""

    def __init__(self, client: SyncJournalClient, stream: str, name: str) -> None:
        self._client = JournalClient.of(client.config)
        self._group = ReaderGroup(self._client, stream, name)

    @property
    def _inner(self) -> ReaderGroup:
        return self._group

    def close(self) -> None:
        run_blocking(self._client.close())

    def reader(
        self,
        reader: str | None = None,
        *,
        format: Framing[E] | None = None,
        auto_commit: bool = True,
        on_checkpoint: Callable[[str], object] | None = None,
        beat: float = DEFAULT_BEAT,
        reader_timeout: float = DEFAULT_TIMEOUT,
        skip_truncated: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
        timeout: float | None = None,
    ) -> SyncGroupReader[E]:
        """Return a reader of the group; see `ReaderGroup.reader`.

        `reader_timeout` is the `timeout` of `ReaderGroup.reader`. `timeout` bounds the wait for each event. Both are in
        seconds. `on_checkpoint` is called on another thread, while the caller's thread waits for the next event.
        """

        async def at_checkpoint(name: str) -> None:
            if on_checkpoint is not None:
                await asyncio.to_thread(on_checkpoint, name)

        made = self._group.reader(
            reader,
            format=format,
            auto_commit=auto_commit,
            on_checkpoint=None if on_checkpoint is None else at_checkpoint,
            beat=beat,
            timeout=reader_timeout,
            skip_truncated=skip_truncated,
            read_ahead=read_ahead,
        )
        return SyncGroupReader(made, timeout)

    def initiate_checkpoint(self, name: str, *, timeout: float | None = None) -> StreamPosition:
        """Begin a checkpoint and wait until it is complete; see `ReaderGroup.initiate_checkpoint`.

        Raises TimeoutError after `timeout` seconds; the checkpoint continues.
        """
        return run_blocking(_bounded(self._group.initiate_checkpoint(name), timeout))


class SyncStateSynchronizer(StateSynchronizerWrapper[S, U], Blocking):
    """`StateSynchronizer` for blocking code. `update` calls its function on a thread other than the caller's."""

    def __init__(
        self,
        client: SyncJournalClient,
        journal: str,
        model: StateModel[S, U],
        *,
        snapshot_every: int = DEFAULT_SNAPSHOT_EVERY,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
    ) -> None:
        self._client = JournalClient.of(client.config)
        self._synchronizer = StateSynchronizer(
            self._client, journal, model, snapshot_every=snapshot_every, retry_timeout=retry_timeout
        )

    @property
    def _inner(self) -> StateSynchronizer[S, U]:
        return self._synchronizer

    def close(self) -> None:
        run_blocking(self._client.close())


async def _bounded(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await work


async def _next(reader: StreamReader[E] | GroupReader[E], timeout: float | None) -> Event[E] | None:
    try:
        async with asyncio.timeout(timeout):
            return await anext(reader)
    except StopAsyncIteration:
        return None
