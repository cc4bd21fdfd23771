"""Heartbeats of a group's reader, and the removal of silent readers."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from coranto.effects import Clock
from coranto.errors import AppendOutcomeUnknown, Unavailable
from coranto.streams.groups.group_state import Beat, GroupState, GroupUpdate, Left, Liveness, Positions
from coranto.streams.groups.state_synchronizer import StateSynchronizer

_log = structlog.get_logger(__name__)


class Presence:
    """Keeps `reader` in its group by heartbeats, and removes silent readers from the group. Times are in seconds.

    `positions` returns the reader's consumed positions that are ahead of a group state.
    """

    def __init__(
        self,
        group: StateSynchronizer[GroupState, GroupUpdate],
        reader: str,
        token: str,
        positions: Callable[[GroupState], Positions],
        *,
        beat: float,
        timeout: float,
        clock: Clock,
    ) -> None:
        self._group = group
        self._reader = reader
        self._token = token
        self._positions = positions
        self._beat = beat
        self._timeout = timeout
        self._clock = clock
        self._liveness = Liveness()
        self._confirmed = clock.monotonic()

    async def run(self) -> None:
        """Send heartbeats and remove silent readers, until cancelled.

        Raises ReaderOffline if the reader is no longer in the group, and other errors that retries do not resolve.
        """
        while True:
            await self._clock.sleep(self._beat)
            try:
                late = self._clock.monotonic() - self._confirmed > self._timeout / 2
                await self.confirm()
                if late:
                    # The same cause may have delayed the heartbeats of the other readers.
                    self._liveness = Liveness()
                for reader, token in self._silent(self._group.state):
                    await self._remove(reader, token)
            except (Unavailable, AppendOutcomeUnknown) as error:
                _log.warning("reader_group.heartbeat_late", reader=self._reader, reason=str(error))

    async def confirm(self) -> None:
        """Append a heartbeat with the reader's positions. Raises ReaderOffline."""
        await self._group.update(lambda state: Beat(self._reader, self._token, self._positions(state)))
        self._confirmed = self._clock.monotonic()

    async def check(self) -> None:
        """Raise ReaderOffline if others have removed the reader. Checks only if its last heartbeat is `timeout` ago."""
        if self._clock.monotonic() - self._confirmed >= self._timeout:
            (await self._group.fetch()).require(self._reader, self._token)
            self._confirmed = self._clock.monotonic()

    def _silent(self, state: GroupState) -> list[tuple[str, str]]:
        return self._liveness.silent(state, self._clock.monotonic(), self._timeout)

    async def _remove(self, reader: str, token: str) -> None:
        def leave(state: GroupState) -> Left | None:
            # A heartbeat may have arrived in the meantime.
            return Left(reader, token) if (reader, token) in self._silent(state) else None

        _log.warning("reader_group.reader_silent", reader=reader, by=self._reader)
        await self._group.update(leave)
