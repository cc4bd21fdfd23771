"""A shard's progress, for writers that wait until their messages are processed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from coranto.messages.checkpoints import SourceReset


class Progress:
    """Read offsets of sources, and end offsets of the messages published for them.

    Both belong to completed transactions: committed, and acknowledged to readers.
    """

    def __init__(self) -> None:
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self.journal_ids: Mapping[str, str] = {}
        """The ids of the journals that were read, as far as they are known."""
        self._resets: frozenset[SourceReset] = frozenset()
        self._changed = asyncio.Event()

    def advance(self, read_through: Mapping[str, int], publish_at: Mapping[str, int]) -> None:
        """Raise offsets, all together. Lower offsets have no effect."""
        for known, given in ((self.read_through, read_through), (self.publish_at, publish_at)):
            for journal, offset in given.items():
                known[journal] = max(offset, known.get(journal, 0))
        self._changed.set()
        self._changed = asyncio.Event()

    def begin_again(self, journal: str) -> None:
        """Forget the read offset of a source that begins again, such as a recreated journal."""
        self.read_through.pop(journal, None)

    def restored(self, resets: Collection[SourceReset]) -> None:
        """Forget the read offsets of sources that were reset since the last call. `resets` are a checkpoint's."""
        for reset in self._resets ^ frozenset(resets):
            self.begin_again(reset.journal)
        self._resets = frozenset(resets)

    async def wait_for(self, read_through: Mapping[str, int]) -> None:
        """Wait until all of these offsets have been read through."""
        while any(self.read_through.get(journal, 0) < offset for journal, offset in read_through.items()):
            await self._changed.wait()
