"""Comparison of a mirror with etcd after the watch has reconnected.

A watch that continues does not verify earlier changes. An etcd that lost acknowledged changes in a crash reuses their
revisions for other changes, and its members can diverge. So the keys and their revisions are read as of the
revision where the watch continues, and must be equal to the mirror's.

A difference ends the process. Loading the keys again would not be enough: keys that are not mirrored, such as in-sync
records, may be lost as well, and a process that relies on having written them would acknowledge appends that the
records do not protect. A process that starts again reads all of them, and writes the missing ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from coranto.coordination.etcd import Coordinator, Snapshot
from coranto.coordination.keyspace_state import Entries
from coranto.effects import Clock
from coranto.errors import CoordinationError, Unavailable

_RETRY_SECONDS: Final = 0.5
_NAMED: Final = 3
_log = structlog.get_logger(__name__)


class MirrorCheck:
    """Compares the latest state given to `request`. A later state replaces a pending one."""

    def __init__(self, coordinator: Coordinator, prefix: str, clock: Clock) -> None:
        self._coordinator = coordinator
        self._prefix = prefix
        self._clock = clock
        self._next: tuple[Entries, int] | None = None
        self._wanted = asyncio.Event()

    def request(self, entries: Entries, revision: int) -> None:
        """Request a comparison of `entries`, the mirror's as of `revision`."""
        self._next = entries, revision
        self._wanted.set()

    async def run(self) -> None:
        """Compare until cancelled. Raises CoordinationError for the first difference."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._next is not None:
                entries, revision = self._next
                snapshot = await self._read(revision)
                if snapshot is not None:
                    self._compare(entries, snapshot)

    async def _read(self, revision: int) -> Snapshot | None:
        """Read all keys as of a revision. None if a later state is pending, or the revision has been compacted."""
        while not self._wanted.is_set():
            try:
                return await self._coordinator.range(self._prefix, revision=revision, keys_only=True)
            except Unavailable:
                await self._clock.sleep(_RETRY_SECONDS)
            except CoordinationError as error:
                _log.warning("keyspace.not_compared", prefix=self._prefix, revision=revision, error=str(error))
                return None
        return None

    def _compare(self, entries: Entries, snapshot: Snapshot) -> None:
        require_equal(self._prefix, snapshot.header.revision, entries.differences(snapshot.kvs))


def require_equal(prefix: str, revision: int, differing: Mapping[str, tuple[int, int]]) -> None:
    """Raise CoordinationError if keys differ between the mirror and etcd. `differing` is a result of `differences`."""
    if not differing:
        return
    shown = [f"{key} ({_shown(ours)} here, {_shown(theirs)} in etcd)" for key, (ours, theirs) in differing.items()]
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    _log.error("keyspace.differs", prefix=prefix, revision=revision, keys=len(differing), first=next(iter(differing)))
    raise CoordinationError(
        f"etcd's keys are not those that it sent to this process. As of revision {revision}, {len(differing)} keys "
        f"differ: {', '.join(shown[:_NAMED])}{more}. etcd lost changes that it had acknowledged, as 3.5.0 to 3.5.2 do "
        "when they are killed, or its members differ, or it was restored from a backup, or it left changes out of a "
        "watch. Start this process again, and see what `coranto doctor` says about etcd"
    )


def _shown(revision: int) -> str:
    return f"changed at revision {revision}" if revision else "absent"
