"""`Player` rebuilds the files of a recovery log, tails the log as a standby, and takes it over.

It reads the segments that its hints name, then the log up to its head, and continues as more is written. On request it
ends at the log's end: either it leaves the log as it is (`finish`), or it takes the log over (`hand_off`). To take it
over, the player appends a no-op under the new author's name. The no-op continues the history as far as it was read, and
the append sets the log's fence to that author. If the no-op continues the history in the log too, later operations of
earlier authors are not part of the history. If an earlier author appended first, the no-op does not continue the
history: the player continues reading and retries.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import structlog

from coranto.client import JournalClient
from coranto.client.values import Chunk
from coranto.errors import CorruptData, InvalidInput
from coranto.messages.fixed_frame import encode_frame
from coranto_consumers.recoverylog.authority import Authority, Handoff, not_owner_error
from coranto_consumers.recoverylog.fnode_files import FnodeFiles, LocalFnodeFiles
from coranto_consumers.recoverylog.fsm import Fsm
from coranto_consumers.recoverylog.hints import Hints
from coranto_consumers.recoverylog.operations import Author, RecordedOperation, fence_of
from coranto_consumers.recoverylog.playback import Playback

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredFiles:
    """The result of a playback: files in `directory`, and their state `fsm`, as of the end of `log`.

    `handoff` is the operation that took the log over; None when it was not taken over. `hints` lead to this state.
    """

    log: str
    directory: Path
    fsm: Fsm
    hints: Hints
    handoff: Handoff | None = None
    recovered_bytes: int = 0


class Player:
    """Plays `hints` into `directory`, which it empties first. Use as `async with Player(...) as player:`.

    Playing begins with the block. Leaving the block before `finish` or `hand_off` has returned stops playing, and
    removes the directory. A failure does the same, and all methods then raise it. The player records a takeover in
    `authority`, and checks the last takeover that it knows: CorruptData is raised when that is no longer in the log.
    """

    def __init__(
        self,
        client: JournalClient,
        hints: Hints,
        directory: Path,
        *,
        authority: Authority | None = None,
        files: FnodeFiles | None = None,
    ) -> None:
        """Raises InvalidInput for hints that contradict themselves. `files` replaces the directory's files in tests."""
        self._client = client
        self._hints = hints
        self._directory = directory
        self._authority = authority
        self._files = files or LocalFnodeFiles(directory)
        self._playback = Playback(Fsm(hints), self._files)
        self._author: Author | None = None
        self._requested = asyncio.Event()
        self._tailing = asyncio.Event()
        self._task: asyncio.Task[RecoveredFiles] | None = None

    async def __aenter__(self) -> Player:
        self._task = asyncio.create_task(self._play(), name=f"play {self._hints.log}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task = self._running()
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # It was raised to callers that waited.

    async def tailing(self) -> None:
        """Wait until all content was read that was in the log when playing began.

        Raises the failure of playing. Cancelling does not stop the player.
        """
        waiting = asyncio.ensure_future(self._tailing.wait())
        try:
            await asyncio.wait([waiting, self._running()], return_when=asyncio.FIRST_COMPLETED)
            if not self._tailing.is_set():
                self._running().result()
        finally:
            waiting.cancel()

    async def finish(self) -> RecoveredFiles:
        """Play to the current end of the log, without taking it over. Cancelling does not stop the player."""
        return await self._request(None)

    async def hand_off(self, author: Author) -> RecoveredFiles:
        """Play to the end of the log and take it over as `author`. The first call of `finish` or `hand_off` counts.

        Raises Fenced when the authority does not allow this process to take over. Cancelling does not stop the player:
        it may still take the log over.
        """
        if author <= 0:
            raise InvalidInput(f"{author} is not an author; give a number from 1 to 2^32-1", field="author")
        return await self._request(author)

    async def _request(self, author: Author | None) -> RecoveredFiles:
        if not self._requested.is_set():
            self._author = author
            self._requested.set()
        return await asyncio.shield(self._running())

    def _running(self) -> asyncio.Task[RecoveredFiles]:
        if self._task is None:
            raise InvalidInput("a player plays within its block: `async with Player(...) as player:`")
        return self._task

    # -- Playing ------------------------------------------------------------------------------------------------------

    async def _play(self) -> RecoveredFiles:
        try:
            self._files.prepare()
            await self._play_to_end()
            fsm = self._playback.fsm
            if fsm.has_hints_left:
                raise CorruptData(
                    f"{self._hints.log} was played to its end, but files that the hints name were not found; "
                    "recover from other hints"
                )
            self._files.make_live(fsm)
        except BaseException:
            self._files.abandon()
            raise
        _log.info("recovery_log.played", log=self._hints.log, files=len(fsm.live_fnodes), next_seq_no=fsm.next_seq_no)
        return RecoveredFiles(
            self._hints.log,
            self._directory,
            fsm,
            fsm.hints(self._hints.log),
            self._playback.handoff,
            self._playback.recovered_bytes,
        )

    async def _play_to_end(self) -> None:
        playback, log = self._playback, self._hints.log
        heads = await self._heads()
        if playback.fsm.next_hinted is None:
            playback.seek(log, 0)
        through = heads[log]
        while playback.handoff is None:
            segment = playback.fsm.next_hinted
            if segment is not None:
                if playback.wants_seek:
                    playback.seek(segment.log, segment.first_offset)
                    through = heads[segment.log]
                elif playback.position >= through:
                    raise CorruptData(
                        f"{playback.log} was read through offset {through}, and the hinted {segment} was not "
                        "found: its content is lost; recover from other hints"
                    )
            if playback.position < through:
                await self._read(through)
                continue
            playback.at_boundary()
            self._tailing.set()
            if not self._requested.is_set():
                await self._tail()
                through = await self._barrier(log)
            elif self._author is None:
                head = await self._barrier(log)
                if head == through:
                    return
                through = head
            else:
                through = await self._inject(self._author)
        assert self._author is not None
        if self._authority is not None:
            await self._authority.confirm(playback.handoff)

    async def _heads(self) -> dict[str, int]:
        """Return the heads of all logs to read. Raises CorruptData when a head is below known content."""
        # Ask the authority first: a process that takes the log over in between also moves its head.
        owner = await self._authority.current() if self._authority is not None else None
        logs = {self._hints.log: 0} | {segment.log: 0 for segment in self._playback.fsm.hinted_segments}
        for log in logs:
            logs[log] = await self._barrier(log)
        for segment in self._playback.fsm.hinted_segments:
            head = logs[segment.log]
            if segment.first_offset >= head or segment.last_offset > head:
                raise CorruptData(
                    f"{segment.log} ends at offset {head}, below the hinted {segment}: content is lost; "
                    "recover from other hints"
                )
        handoff = owner.handoff if owner is not None else None
        if handoff is not None and handoff.log in logs:
            if logs[handoff.log] < handoff.end:
                raise CorruptData(
                    f"{handoff.log} ends at offset {logs[handoff.log]}, below the {handoff} that took it over "
                    "last: content is lost"
                )
            self._playback.expected = handoff
        return logs

    async def _barrier(self, log: str) -> int:
        """Return the head of a log. All appends that were answered before lie below it."""
        return (await self._client.append(log, b"", retry_unknown=True)).end

    async def _read(self, through: int) -> None:
        """Play [position, through), or less when a seek is needed or the handoff is met."""
        playback = self._playback
        async with contextlib.aclosing(
            self._client.read(playback.log, playback.position, end_offset=through)
        ) as chunks:
            async for chunk in chunks:
                if not self._take(chunk):
                    return

    async def _tail(self) -> None:
        """Play new content until a request comes."""
        playback = self._playback
        requested = asyncio.ensure_future(self._requested.wait())
        reading = asyncio.ensure_future(self._read_on(playback.log, playback.position))
        try:
            await asyncio.wait([requested, reading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (requested, reading):
                task.cancel()
            await asyncio.wait([requested, reading])
        if not reading.cancelled():
            reading.result()

    async def _read_on(self, log: str, offset: int) -> None:
        chunks: AsyncGenerator[Chunk] = self._client.read(log, offset, block=True)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                self._take(chunk)

    def _take(self, chunk: Chunk) -> bool:
        if chunk.offset > self._playback.position:
            self._playback.skip_to(chunk.offset)
        return self._playback.feed(chunk.content)

    async def _inject(self, author: Author) -> int:
        """Append a no-op that continues the history as read so far, and return its end offset."""
        fsm, log = self._playback.fsm, self._hints.log
        if self._authority is not None:
            await self._authority.claim(author)
            owner = await self._authority.current()
            if owner is None or owner.author != author:
                raise not_owner_error(log, author, owner)
        self._playback.await_author(author)
        noop = RecordedOperation(fsm.next_seq_no, fsm.next_checksum, author)
        result = await self._client.append(
            log, encode_frame(noop.to_payload()), union_registers=fence_of(author), retry_unknown=True
        )
        return result.end
