"""Removing what is dead of recovery logs: fragments that no hints lead to.

Anything that some hints still need must stay: those of every shard whose history has been in the log (forks share
logs), the backups too. A log is left alone while any of its shards lacks hints with files in it, for nothing tells then
what that shard will need: it is played from its first byte. Nor is anything removed of a log that only hints name, and
that is no recovery log of the shards at hand: whoever may apply a shard may give it hints, which name any journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto_consumers.recoverylog.hint_store import StoredHints
from coranto_consumers.recoverylog.segments import Segment

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ShardHints:
    """What is known of a shard's recovery log."""

    shard: str
    log: str
    hints: StoredHints


@dataclass(frozen=True, slots=True)
class LiveSegments:
    """What must stay of each log, and the logs of which nothing may go, with the reason."""

    by_log: Mapping[str, Sequence[Segment]]
    kept: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was, or would be, removed of a log. `kept` says why nothing was, when that is so."""

    log: str
    removed: Sequence[Fragment]
    remaining: int = 0
    kept: str = ""

    @property
    def removed_bytes(self) -> int:
        """Content of the removed fragments, uncompressed."""
        return sum(fragment.length for fragment in self.removed)


def live_segments(shards: Sequence[ShardHints]) -> LiveSegments:
    """What the hints of all shards lead to. The last segment of each has no end: players read on from there."""
    by_log: dict[str, list[Segment]] = {}
    kept: dict[str, str] = {}
    own = {shard.log for shard in shards}
    for shard in shards:
        by_log.setdefault(shard.log, [])
        if shard.hints.primary is None or any(backup is None for backup in shard.hints.backups):
            kept[shard.log] = f"shard {shard.shard} has not stored all of its hints yet"
        for hints in shard.hints.present:
            segments = hints.live_segments().segments
            if not segments:
                kept[shard.log] = f"hints of shard {shard.shard} have no files"
                continue
            last = segments[-1]
            endless = Segment(
                last.author, last.first_seq_no, last.first_offset, last.first_checksum, last.last_seq_no, 0, last.log
            )
            for segment in (*segments[:-1], endless):
                by_log.setdefault(segment.log, []).append(segment)
                if segment.log not in own:
                    kept[segment.log] = f"only hints of shard {shard.shard} name it; it is the log of no shard at hand"
    return LiveSegments(by_log, kept)


def is_dead(fragment: Fragment, segments: Sequence[Segment]) -> bool:
    """Whether no segment has content in the fragment."""
    return all(
        segment.first_offset >= fragment.end or 0 < segment.last_offset <= fragment.begin for segment in segments
    )


async def prune_logs(client: JournalClient, shards: Sequence[ShardHints], *, dry_run: bool = False) -> list[Pruned]:
    """Remove dead fragments of the recovery logs of `shards`, which must be all that ever recorded into those logs.

    Works from here, with the stores' credentials of this process. Raises InvalidInput when a store is below a folder of
    the brokers that this process does not know, and the first failure to remove, once no removal is under way.
    """
    live = live_segments(shards)
    found: list[Pruned] = []
    for log, segments in sorted(live.by_log.items()):
        if log in live.kept:
            found.append(Pruned(log, (), kept=live.kept[log]))
            continue
        fragments = [info.fragment for info in await client.fragments(log) if info.persisted]
        dead = [fragment for fragment in fragments if is_dead(fragment, segments)]
        if not dry_run:
            await _remove(client, dead)
        found.append(Pruned(log, dead, len(fragments) - len(dead)))
    return found


async def _remove(client: JournalClient, dead: Sequence[Fragment]) -> None:
    root = client.config.file_root
    for fragment in dead:
        if root is None and fragment.backing_store.startswith("file:"):
            raise InvalidInput(
                f"{fragment.backing_store} is below a folder of the brokers: say which by $CORANTO_FILE_ROOT"
            )
    stores, limit = StoreRegistry(root), asyncio.Semaphore(_AT_ONCE)

    async def remove(fragment: Fragment) -> None:
        async with limit:
            await stores.get(fragment.backing_store).remove(fragment)

    for outcome in await asyncio.gather(*map(remove, dead), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
