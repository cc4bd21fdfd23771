"""Reading streams from code that blocks, such as scripts, Dagster assets and notebooks.

The readers of `reader` and `groups` with the same methods; what they mean and raise is said there. They work on the
event loop that all blocking clients of the process share. Use each one from one thread at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from coranto.client.client import JournalClient
from coranto.client.loop import Blocking, run_blocking
from coranto.client.sync import SyncJournalClient
from coranto.messages.framing import Framing
from coranto.streams.delivery import DEFAULT_READ_AHEAD, Event, StreamTransaction
from coranto.streams.group_reader import DEFAULT_BEAT, DEFAULT_TIMEOUT, GroupReader
from coranto.streams.group_state import Checkpoint, GroupState
from coranto.streams.groups import ReaderGroup
from coranto.streams.positions import StreamPosition
from coranto.streams.reader import StreamReader
from coranto.streams.watermarks import TimeWindow

E = TypeVar("E")
T = TypeVar("T")


class _SyncReading(Generic[E]):
    """What blocking readers share. `timeout` bounds the wait for each event or transaction, in seconds."""

    def __init__(self, client: JournalClient, reader: StreamReader[E] | GroupReader[E], timeout: float | None) -> None:
        self._client = client
        self._reader = reader
        self._timeout = timeout

    def __iter__(self) -> Iterator[Event[E]]:
        return self

    def __next__(self) -> Event[E]:
        """The next event. Raises TimeoutError, with nothing taken, and what the asynchronous reader raises."""
        event = run_blocking(_next(self._reader, self._timeout))
        if event is None:
            raise StopIteration
        return event

    def transactions(self) -> Iterator[StreamTransaction[E]]:
        """The rest by transaction, each one whole. Raises as `next` does."""
        while (transaction := run_blocking(_bounded(self._reader.next_transaction(), self._timeout))) is not None:
            yield transaction

    def position(self) -> StreamPosition:
        async def position() -> StreamPosition:
            return self._reader.position()

        return run_blocking(position())

    def time_window(self) -> TimeWindow:
        return run_blocking(self._reader.time_window())


class SyncStreamReader(_SyncReading[E], Blocking):
    """`StreamReader` for code that blocks: `with SyncStreamReader(client, "name") as reader:`."""

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
        own = JournalClient.of(client.config)
        reader = StreamReader(
            own,
            stream,
            format=format,
            begin=begin,
            end=end,
            block=block,
            skip_truncated=skip_truncated,
            read_ahead=read_ahead,
        )
        super().__init__(own, reader, timeout)
        self._stream_reader = reader

    def close(self) -> None:
        async def close() -> None:
            await self._stream_reader.close()
            await self._client.close()

        run_blocking(close())

    def cut(self) -> Mapping[int, int]:
        return self.position()


class SyncGroupReader(_SyncReading[E]):
    """`GroupReader` for code that blocks: `with group.reader("name") as reader:`."""

    def __init__(self, client: JournalClient, reader: GroupReader[E], timeout: float | None) -> None:
        super().__init__(client, reader, timeout)
        self._group_reader = reader

    def __enter__(self) -> Self:
        run_blocking(self._group_reader.open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(consumed=kind is None)

    def close(self, *, consumed: bool = True) -> None:
        run_blocking(self._group_reader.close(consumed=consumed))

    @property
    def is_finished(self) -> bool:
        return self._group_reader.is_finished

    def commit(self) -> StreamPosition:
        return run_blocking(self._group_reader.commit())


class SyncReaderGroup(Blocking):
    """`ReaderGroup` for code that blocks. Close it when its readers are closed."""

    def __init__(self, client: SyncJournalClient, stream: str, name: str) -> None:
        self._client = JournalClient.of(client.config)
        self._group = ReaderGroup(self._client, stream, name)

    def close(self) -> None:
        run_blocking(self._client.close())

    def create(self, begin: Mapping[int, int] | None = None) -> bool:
        return run_blocking(self._group.create(begin))

    def reader(
        self,
        reader: str | None = None,
        *,
        format: Framing[E] | None = None,
        auto_commit: bool = True,
        on_checkpoint: Callable[[str], object] | None = None,
        beat: float = DEFAULT_BEAT,
        miss_after: float = DEFAULT_TIMEOUT,
        skip_truncated: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
        timeout: float | None = None,
    ) -> SyncGroupReader[E]:
        """As `ReaderGroup.reader`, whose `timeout` is `miss_after` here; `timeout` bounds the wait for each event.

        `on_checkpoint` is called on another thread, while this one waits for the next event.
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
            timeout=miss_after,
            skip_truncated=skip_truncated,
            read_ahead=read_ahead,
        )
        return SyncGroupReader(self._client, made, timeout)

    def state(self) -> GroupState:
        return run_blocking(self._group.state())

    def begin_checkpoint(self, name: str) -> None:
        run_blocking(self._group.begin_checkpoint(name))

    def initiate_checkpoint(self, name: str, *, timeout: float | None = None) -> StreamPosition:
        """As `ReaderGroup.initiate_checkpoint`; raises TimeoutError after `timeout` seconds, and it goes on."""
        return run_blocking(_bounded(self._group.initiate_checkpoint(name), timeout))

    def checkpoint(self, name: str | None = None) -> Checkpoint | None:
        return run_blocking(self._group.checkpoint(name))

    def reader_offline(self, reader: str, position: StreamPosition | None = None) -> None:
        run_blocking(self._group.reader_offline(reader, position))

    def reset(self, begin: Mapping[int, int] | None = None) -> None:
        run_blocking(self._group.reset(begin))

    def release(self, cut: Mapping[int, int]) -> None:
        run_blocking(self._group.release(cut))

    def released_cut(self) -> Mapping[int, int] | None:
        return run_blocking(self._group.released_cut())


async def _bounded(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await work


async def _next(reader: StreamReader[E] | GroupReader[E], timeout: float | None) -> Event[E] | None:
    try:
        async with asyncio.timeout(timeout):
            return await anext(reader)
    except StopAsyncIteration:
        return None
