"""Concurrent reads of several journals into one output, by whole appends or at least whole lines.

Appends of different journals must not be interleaved. An append ends at each write head that a broker reported; in
journals of lines every newline is a boundary too. After writing up to another offset, a journal keeps the *turn*, a
lock of the output, until it reaches a boundary.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coranto import labels
from coranto.client import Chunk, JournalClient, JournalInfo, Moment
from coranto.errors import JournalNotFound, JournalSuspended
from coranto.offsets import JournalOffset
from coranto.wire import protocol_pb2 as pb

_CONCURRENCY = 32
_MAX_LINE_BYTES = 1 << 20
_SAVE_SECONDS = 1.0
_LINE_TYPES = frozenset({labels.JSON_LINES, "text/csv", "text/plain"})


class ContentOutput(Protocol):
    """The destination of content."""

    def write(self, content: bytes, /) -> object: ...

    def flush(self) -> object: ...


@dataclass(frozen=True, slots=True)
class MultiplexOptions:
    """Options of reads. `start` is the first offset for journals without a known offset (-1: their write heads)."""

    start: int = 0
    end: int = 0
    block: bool = False
    begin_mod_time: int = 0
    as_of: Moment | None = None
    """The moment to read, with all of its content, instead of a start and an end."""


@dataclass
class Multiplexer:
    """Reads journals into `output`.

    `offsets` holds the begin offset of each journal, and advances to the end of its written content. `save` is
    called with it at most once per second, after a flush, and by `finish`. `warn` is called when content is missing.
    """

    client: JournalClient
    output: ContentOutput
    reading: MultiplexOptions
    offsets: dict[str, int]
    save: Callable[[dict[str, int]], None]
    warn: Callable[[str], None]
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _saved_at: float = 0.0

    async def read_one(self, journal: str) -> None:
        """Read one journal. Raises the errors of its read."""
        await _Pump(self, journal, by_line=False, alone=True).run(self.reading.start)

    async def read_present(self, journals: Iterable[JournalInfo]) -> None:
        """Read journals up to their write heads. Raises the first failure."""
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def one(info: JournalInfo) -> None:
            async with limit:
                await self._read(info, self.reading.start)

        tasks = [asyncio.create_task(one(info)) for info in journals if not info.is_asleep]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    async def follow(self, selector: pb.LabelSelector) -> None:
        """Follow the matching journals, including those that appear later. Ends only with an error."""
        tasks: dict[str, asyncio.Task[None]] = {}
        start = self.reading.start
        async with contextlib.aclosing(self.client.watch(selector)) as snapshots:
            coming = asyncio.ensure_future(anext(snapshots))
            try:
                while True:
                    await asyncio.wait({coming, *tasks.values()}, return_when=asyncio.FIRST_COMPLETED)
                    for name in [name for name, task in tasks.items() if task.done()]:
                        tasks.pop(name).result()
                    if not coming.done():
                        continue
                    awake = {info.name: info for info in coming.result().journals if not info.is_asleep}
                    coming = asyncio.ensure_future(anext(snapshots))
                    gone = [tasks.pop(name) for name in [*tasks] if name not in awake]
                    await _cancel(gone)
                    for name, info in awake.items():
                        if name not in tasks:
                            tasks[name] = asyncio.create_task(self._read(info, start))
                    # Journals that appear later are new; read them from their beginning.
                    start = max(start, 0)
            finally:
                await _cancel([coming, *tasks.values()])

    def finish(self) -> None:
        """Flush the output and save the final offsets."""
        self.output.flush()
        self.save(self.offsets)

    async def _read(self, info: JournalInfo, start: int) -> None:
        by_line = labels.value_of(info.spec.labels, labels.CONTENT_TYPE) in _LINE_TYPES
        # A journal that was deleted or suspended after the listing has nothing (more) to read.
        gone = (JournalNotFound, JournalSuspended) if self.reading.as_of is None else ()
        with contextlib.suppress(*gone):
            await _Pump(self, info.name, by_line=by_line, alone=False).run(start)

    def _wrote(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.reading.block:
            self.output.flush()
        if now - self._saved_at >= _SAVE_SECONDS:
            self._saved_at = now
            self.output.flush()
            self.save(self.offsets)


class _Pump:
    """Reads one journal."""

    def __init__(self, shared: Multiplexer, journal: str, *, by_line: bool, alone: bool) -> None:
        self._shared = shared
        self._journal = journal
        self._by_line = by_line
        self._alone = alone
        self._journal_id = ""
        self._rest = b""
        self._has_turn = False

    async def run(self, start: int) -> None:
        shared, reading = self._shared, self._shared.reading
        offset = shared.offsets.get(self._journal, start)
        if offset == -1:
            offset = await shared.client.head(self._journal)
        end = reading.end
        if reading.as_of is not None:
            offset, end = reading.as_of.span(self._journal)
        shared.offsets[self._journal] = expected = offset
        if reading.as_of is not None and offset >= end:
            return
        chunks = shared.client.read(
            self._journal,
            offset,
            end_offset=end,
            block=reading.block,
            begin_mod_time=reading.begin_mod_time,
            fail_on_jump=reading.as_of is not None,
        )
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if chunk.offset > expected:
                        shared.warn(
                            f"{self._journal} has no content in [{expected}, {chunk.offset}); continuing after it"
                        )
                        await self._write(self._rest, expected)
                        self._rest = b""
                    self._journal_id = chunk.journal_id
                    await self._take(chunk)
                    expected = chunk.end
            await self._write(self._rest, expected)
        finally:
            self._give_turn()

    async def _take(self, chunk: Chunk) -> None:
        content = self._rest + chunk.content
        cut = len(content)
        is_whole = chunk.end == chunk.write_head
        if self._by_line and not is_whole:
            found = content.rfind(b"\n") + 1
            if found or len(content) <= _MAX_LINE_BYTES:
                cut, is_whole = found, True
        self._rest = content[cut:]
        await self._write(content[:cut], chunk.end - len(self._rest))
        if is_whole:
            self._give_turn()

    async def _write(self, content: bytes, end: int) -> None:
        """Write content that ends at the journal's offset `end`."""
        if not content:
            return
        shared = self._shared
        if not self._alone and not self._has_turn:
            await shared._turn.acquire()
            self._has_turn = True
        shared.output.write(content)
        shared.offsets[self._journal] = JournalOffset(end, self._journal_id)
        shared._wrote()

    def _give_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._shared._turn.release()


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
