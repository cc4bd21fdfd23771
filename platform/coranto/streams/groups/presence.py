"""Signs of life of a group's reader, and the end of readers that give none."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from coranto.effects import Clock
from coranto.errors import AppendOutcomeUnknown, Unavailable
from coranto.streams.groups.group_state import Beat, GroupState, GroupUpdate, Left, Liveness, Positions
from coranto.streams.groups.state_synchronizer import StateSynchronizer

_log = structlog.get_logger(__name__)


class Presence:
    """Keeps reader `reader` in its group, and takes silent ones out of it. Times are seconds.

    `positions` says how far the reader's segments are consumed, where that is further than a state knows.
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
        """Until cancelled. Raises ReaderOffline when the reader is not of the group any more, and other errors that
        trying again will not cure."""
        while True:
            await self._clock.sleep(self._beat)
            try:
                late = self._clock.monotonic() - self._confirmed > self._timeout / 2
                await self.confirm()
                if late:
                    # Whatever kept this reader from its signs of life may have kept the others, too.
                    self._liveness = Liveness()
                for reader, token in self._silent(self._group.state):
                    await self._take_out(reader, token)
            except (Unavailable, AppendOutcomeUnknown) as error:
                _log.warning("a reader's sign of life is late", reader=self._reader, reason=str(error))

    async def confirm(self) -> None:
        """Give a sign of life, with positions. Raises ReaderOffline."""
        await self._group.update(lambda state: Beat(self._reader, self._token, self._positions(state)))
        self._confirmed = self._clock.monotonic()

    async def check(self) -> None:
        """Raises ReaderOffline when others have taken the reader out, which may be only if it was silent for long."""
        if self._clock.monotonic() - self._confirmed >= self._timeout:
            (await self._group.fetch()).require(self._reader, self._token)
            self._confirmed = self._clock.monotonic()

    def _silent(self, state: GroupState) -> list[tuple[str, str]]:
        return self._liveness.silent(state, self._clock.monotonic(), self._timeout)

    async def _take_out(self, reader: str, token: str) -> None:
        def leave(state: GroupState) -> Left | None:
            # It may have given a sign of life that is known only now.
            return Left(reader, token) if (reader, token) in self._silent(state) else None

        _log.warning("a reader is silent and taken for dead", reader=reader, by=self._reader)
        await self._group.update(leave)
