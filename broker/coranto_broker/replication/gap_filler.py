"""Fetches content that a replica lacks, from the journal's other brokers.

A disk can lose content of a fragment that was complete, while what follows it is there; or it loses the newest content,
and the journal goes on where other replicas have its end. Then the replica has a *gap*: offsets below content that it
shows, or below the offset where the journal went on, for which it has no file, and which no store lists. What a peer
shows there is part of the journal for good, since a replica shows content only once nobody can go on without it. And no
append can land there, since appends begin at the journal's end.

Each gap is looked for after every listing of the stores. Pieces are fetched from its end to its beginning, each
verified by the SHA-1 of the whole fragment that the peer has. A fetched piece is a completed fragment like others:
readers see it, and the persister stores it. Its file does not survive a restart, after which the gap is found again.

Gaps that recovery found are *expected*: the replica had their content, so it is somewhere. They are looked for after
the first listing, or a second without one, and again with growing pauses. Until they are filled, reads do not jump over
them, and no later fragment is stored; otherwise readers would conclude that the journal begins after the gap. After
`HOPE_SECONDS` nothing waits any more. By then, any other broker that has the content has stored it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import FragmentIndex, OffsetSpan
from coranto_broker.fragments.persister import HOPE_SECONDS
from coranto_broker.spool.durable_spool import FETCHED, Sealed, SettledOffset, SpoolFolder
from coranto_broker.spool.recovery import LostSpan
from coranto_broker.spool.shared_file import SharedFile

MAX_GAPS = 16
"""The number of gaps that are looked for after one listing. More are a matter for an audit."""
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
_log = structlog.get_logger(__name__)


class PiecesAtPeers(Protocol):
    """Access to other brokers' copies of a journal's content."""

    async def fetch_last(self, journal: str, begin: int, end: int, target: SharedFile) -> tuple[Fragment, str] | None:
        """Write the last content of [begin, end), as far as a peer has it in one fragment, to the empty file `target`.

        Returns what was written as a fragment of its own, and the broker that had it; None if no broker has the last
        byte. Raises OSError when writing fails.
        """
        ...


class GapFiller:
    """Fills the gaps of one replica's index. `run` it while the replica runs."""

    def __init__(
        self,
        folder: SpoolFolder,
        index: FragmentIndex,
        peers: PiecesAtPeers,
        *,
        add: Callable[[Sealed], None],
        hold: Callable[[int | None], None],
    ) -> None:
        """`add` shows and stores a fragment. `hold` keeps fragments from this offset on (None: none) from stores."""
        self._folder = folder
        self._index = index
        self._peers = peers
        self._add = add
        self._hold = hold
        self._expected: Sequence[LostSpan] = ()
        self._hope_until = 0.0
        self._due = asyncio.Event()

    def expect(self, lost: Sequence[LostSpan]) -> None:
        """Wait for content that recovery did not find. Call it before any other fragment is added."""
        if lost:
            self._expected = lost
            self._hope_until = self._folder.clock.monotonic() + HOPE_SECONDS
            self._index.expect([OffsetSpan(each.begin, each.end) for each in lost])
            self._hold(lost[0].begin)
            self._due.set()

    def look(self) -> None:
        """Look for gaps soon, because the stores have been listed."""
        self._due.set()

    async def run(self) -> None:
        """Fill gaps until cancelled."""
        failures = 0
        try:
            while True:
                pause = None
                if self._expected:
                    pause = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)] if failures else 0.0
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._due.wait()
                self._due.clear()
                if self._index.refreshed or failures:
                    await self._fill()
                self._check_hope()
                failures = failures + 1 if self._expected else 0
        finally:
            self._hold(None)

    def _check_hope(self) -> None:
        """Wait no more for expected content that was found, or that nobody seems to have."""
        if not self._expected:
            return
        left = self._missing()
        missing = [
            each for each in self._expected if any(gap.begin < each.end and each.begin < gap.end for gap in left)
        ]
        if missing and self._folder.clock.monotonic() >= self._hope_until:
            spans = [[each.begin, each.end] for each in missing]
            _log.error("journal.content_not_found", journal=self._folder.journal, spans=spans)
            missing = []
        if len(missing) < len(self._expected):
            self._expected = missing
            self._index.expect([OffsetSpan(each.begin, each.end) for each in missing])
            self._hold(missing[0].begin if missing else None)

    def _missing(self) -> list[OffsetSpan]:
        """Return all gaps; before the first listing, only expected ones, since the stores may have the others."""
        expected = [OffsetSpan(each.begin, each.end) for each in self._expected]
        gaps = self._index.holes(expected)
        if not self._index.refreshed:
            gaps = [gap for gap in gaps if any(each.begin <= gap.begin and gap.end <= each.end for each in expected)]
        return gaps

    async def _fill(self) -> None:
        for begin, end in self._missing()[:MAX_GAPS]:
            at = end
            while at > begin and (found := await self._fetch(begin, at)) is not None:
                at = found

    async def _fetch(self, begin: int, end: int) -> int | None:
        """Fetch the last piece of a gap, and return its beginning; None if nobody has it."""
        partial = self._file(end, "partial")
        try:
            found = await self._peers.fetch_last(self._folder.journal, begin, end, partial)
            if found is None:
                return None
            piece, broker = found
            content = self._file(piece.begin, "copy")
            partial.move(content.path)
        except OSError as error:
            _log.warning("journal.gap_not_filled", journal=self._folder.journal, begin=begin, end=end, error=str(error))
            return None
        finally:
            if not partial.discarded:
                partial.discard()
        content.seal()
        first_append_time, registers = self._origin(piece)
        self._add(
            Sealed(
                piece,
                first_append_time,
                registers,
                content,
                self._file(piece.begin, "copy-log"),
                self._folder.create_revision,
                watermark=SettledOffset(piece.end),
            )
        )
        _log.warning(
            "journal.gap_filled", journal=self._folder.journal, begin=piece.begin, end=piece.end, source=broker
        )
        return piece.begin

    def _file(self, begin: int, kind: str) -> SharedFile:
        """Return a file of a name that recovery removes."""
        return SharedFile(self._folder.disk, self._folder.path / f"{begin:016x}.{kind}{FETCHED}")

    def _origin(self, piece: Fragment) -> tuple[float, pb.LabelSet]:
        """Return the time of the first append and the registers with which the piece's path is made."""
        for each in self._expected:
            if each.begin <= piece.begin < each.end and each.first_append_time:
                return each.first_append_time, each.registers
        return self._folder.clock.now(), pb.LabelSet()
