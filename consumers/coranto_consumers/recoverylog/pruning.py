"""Pruning of recovery logs: removal of fragments that no hints refer to.

Content stays while any hints need it. That includes backups, and the hints of every shard whose history has been in the
log (forks share logs). A log is not pruned while one of its shards lacks hints with files: such a shard is played from
the log's first byte. A log that is named only by hints, and is not the recovery log of a given shard, is not pruned
either: every user who may apply a shard may give it hints, and these can name any journal.
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
from coranto_consumers.recoverylog.segments import LogSegment

_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class ShardHints:
    """A shard's recovery log and its hints."""

    shard: str
    log: str
    hints: StoredHints


@dataclass(frozen=True, slots=True)
class LiveSegments:
    """The segments that must stay of each log, and the logs that must not be pruned at all, with the reason."""

    by_log: Mapping[str, Sequence[LogSegment]]
    kept: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pruned:
    """The fragments of a log that were, or would be, removed. `kept` is the reason when the log was not pruned."""

    log: str
    removed: Sequence[Fragment]
    remaining: int = 0
    kept: str = ""

    @property
    def removed_bytes(self) -> int:
        """The size of the removed fragments' content in bytes, uncompressed."""
        return sum(fragment.length for fragment in self.removed)


def live_segments(shards: Sequence[ShardHints]) -> LiveSegments:
    """Return the segments that the hints of all shards need.

    The last segment of each history has no end, because players continue reading there.
    """
    by_log: dict[str, list[LogSegment]] = {}
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
            endless = LogSegment(
                last.author, last.first_seq_no, last.first_offset, last.first_checksum, last.last_seq_no, 0, last.log
            )
            for segment in (*segments[:-1], endless):
                by_log.setdefault(segment.log, []).append(segment)
                if segment.log not in own:
                    kept[segment.log] = f"only hints of shard {shard.shard} name it; it is the log of no shard at hand"
    return LiveSegments(by_log, kept)


def is_dead(fragment: Fragment, segments: Sequence[LogSegment]) -> bool:
    """Return True if no segment has content in the fragment."""
    return all(
        segment.first_offset >= fragment.end or 0 < segment.last_offset <= fragment.begin for segment in segments
    )


async def prune_logs(client: JournalClient, shards: Sequence[ShardHints], *, dry_run: bool = False) -> list[Pruned]:
    """Remove dead fragments of the recovery logs of `shards`.

    `shards` must be all shards that ever recorded into these logs. This process removes the fragments itself, with its
    own credentials for the stores. Raises InvalidInput when a store is below a folder of the brokers that this process
    does not know. Raises the first failure to remove a fragment, once no removal is in progress.

    A cancelled call may have removed some of them; the next call removes the rest.
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
                f"{fragment.backing_store} is below a folder of the brokers; name that folder in $CORANTO_FILE_ROOT"
            )
    stores, limit = StoreRegistry(root), asyncio.Semaphore(_CONCURRENCY)

    async def remove(fragment: Fragment) -> None:
        async with limit:
            await stores.get(fragment.backing_store).remove(fragment)

    for outcome in await asyncio.gather(*map(remove, dead), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
