"""The initial content of a fork that is not shared: appended from its source, and compared with it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator
from typing import IO, TYPE_CHECKING, Final

from coranto.client.reader import TRANSIENT
from coranto.client.values import AppendResult, Chunk
from coranto.effects import Clock
from coranto.errors import CorruptData, IndexHasGreaterOffset, OffsetNotYetAvailable, Unavailable, WrongAppendOffset
from coranto.fragments.forks import Fork
from coranto.telemetry import ProgressReport

if TYPE_CHECKING:
    from coranto.client import JournalClient

_TIMEOUT_SECONDS: Final = 60.0
_RECHECK_SECONDS: Final = 0.2
_PIECE_BYTES: Final = 1 << 20
_IN_MEMORY_BYTES: Final = 16 << 20
"""The maximum content of one append in memory; more is in a temporary file."""


class InitialContent:
    """Appends the initial content of forks. `progress` counts its bytes."""

    def __init__(self, client: JournalClient, clock: Clock, progress: ProgressReport | None) -> None:
        self._client = client
        self._clock = clock
        self._progress = progress
        self._total = 0

    async def fill(self, fork: Fork) -> None:
        """Append the unshared content of a fork. Continue at the end of an interrupted call's content."""
        at = await self._come_to(fork)
        if self._progress is not None:
            self._total += fork.offset - at
            self._progress.expect(self._total)
        if at == fork.offset:
            return
        known = [info.fragment.end for info in await self._client.fragments(fork.source)]
        boundaries = sorted({fork.offset, *(end for end in known if at < end < fork.offset)})
        while at < fork.offset:
            end = boundaries[bisect_right(boundaries, at)]
            try:
                await self._append(fork, at, end)
            except WrongAppendOffset:
                end = await self._come_to(fork)  # Another call creates the same fork.
                if end == at:
                    raise
            if self._progress is not None:
                self._progress.advance(end - at)
            at = end

    async def _come_to(self, fork: Fork) -> int:
        at = await end_of(self._client, self._clock, fork)
        if not fork.shared_end <= at <= fork.offset:
            raise _other_content(fork, f"it ends at {at}, and the fork begins at {fork.shared_end}")
        return at

    async def _append(self, fork: Fork, begin: int, end: int) -> None:
        """Append the source's content [begin, end) in one append.

        Both ends are between two of the source's appends. So the fork's fragments begin and end between messages, too.
        """
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as piece:
            async with contextlib.aclosing(self._read(fork.source, begin, end)) as chunks:
                async for chunk in chunks:
                    piece.write(chunk.content)
            # The offset makes repeated and concurrent appends of the same content safe.
            await self._append_file(fork.name, piece, begin)

    async def _append_file(self, journal: str, content: IO[bytes], offset: int) -> AppendResult:
        retry_until = self._clock.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                return await self._client.append(journal, _pieces(content), offset=offset, at_start=not offset)
            except TRANSIENT:  # Nothing was applied.
                if self._clock.monotonic() >= retry_until:
                    raise
            await self._clock.sleep(_RECHECK_SECONDS)

    async def _read(self, journal: str, begin: int, end: int) -> AsyncGenerator[Chunk]:
        """Yield committed content [begin, end). Wait for a lagging broker that does not have all of it yet."""
        at, until = begin, self._clock.monotonic() + _TIMEOUT_SECONDS
        while at < end:
            try:
                reading = self._client.read(journal, at, end_offset=end, fail_on_jump=True)
                async with contextlib.aclosing(reading) as chunks:
                    async for chunk in chunks:
                        yield chunk
                        at = chunk.end
            except OffsetNotYetAvailable:
                if self._clock.monotonic() >= until:
                    raise
            if at < end:
                if self._clock.monotonic() >= until:
                    raise Unavailable(f"{journal} can be read only up to {at} of {end} now; fork it again to continue")
                await self._clock.sleep(_RECHECK_SECONDS)

    async def compare(self, fork: Fork) -> None:
        """Check that the fork ends at its offset, and that its appended content is the source's."""
        head = await end_of(self._client, self._clock, fork)
        if head != fork.offset:
            raise _other_content(fork, f"it ends at {head}, not at {fork.offset}")
        ours, theirs = await asyncio.gather(
            *(self._digest(journal, fork.shared_end, fork.offset) for journal in (fork.name, fork.source))
        )
        if ours != theirs:
            raise _other_content(fork, f"its bytes from {fork.shared_end} on differ from {fork.source}")

    async def _digest(self, journal: str, begin: int, end: int) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        async with contextlib.aclosing(self._read(journal, begin, end)) as chunks:
            async for chunk in chunks:
                digest.update(chunk.content)
        return digest.hexdigest()


async def end_of(client: JournalClient, clock: Clock, fork: Fork) -> int:
    """Return the end of all committed content of a fork.

    Raises CorruptData if, for a minute, stores have content that no broker knows: an earlier journal's.
    """
    until = clock.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return (await client.append(fork.name, b"")).end
        except IndexHasGreaterOffset as error:  # The broker that has it may be coming back.
            if clock.monotonic() >= until:
                raise _other_content(fork, "a store has fragments of it that no broker knows") from error
        await clock.sleep(_RECHECK_SECONDS)


async def _pieces(content: IO[bytes]) -> AsyncIterator[bytes]:
    content.seek(0)
    while piece := content.read(_PIECE_BYTES):
        yield piece


def _other_content(fork: Fork, what: str) -> CorruptData:
    return CorruptData(
        f"{fork.name} has other content than a fork of {fork.source}: {what}. A client appended to it while it was "
        f"forming, or its folder has fragments of an earlier journal of that name. Drop it (coranto journals drop-fork "
        f"{fork.name}), and choose another name"
    )
