"""The order of one stream's appends to one journal: they commit as they came.

The journal's queue keeps that order. So an append goes straight to the queue, unless earlier ones of the stream are
elsewhere: still to be resolved, in the queue of an earlier replica, or forwarded to another broker.
"""

from __future__ import annotations

import asyncio
from collections import deque

from coranto_broker.append.entry import resolve
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import JournalQueue, queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import State


class StreamOrder:
    """The appends of one stream to one journal that are under way. Call `ended` once one of them is answered."""

    def __init__(self, host: AppendHost) -> None:
        self._host = host
        self._unplaced: deque[QueuedAppend] = deque()  # They wait for their turn to be resolved.
        self._placing: asyncio.Task[None] | None = None
        self._place: JournalQueue | bytes | None = None  # The queue, or the broker, that has those before them.
        self._under_way = 0  # The number of those before them.
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way."""
        return not self._under_way and self._placing is None

    def add(self, append: QueuedAppend) -> None:
        """Take an append behind all others."""
        if self._placing is None:
            if append.resolution is not None:
                queue = queue_of(append.resolution.require_replica)
                if self._may_be_in(queue):
                    self._enter(queue)
                    queue.enqueue(append)
                    return
            self._placing = asyncio.create_task(self._place_all())
        self._unplaced.append(append)

    def ended(self) -> None:
        """Note that an append was answered."""
        self._under_way -= 1
        if self._placing is not None:
            self._changed.set()

    def close(self) -> None:
        """Place nothing more: the client is gone."""
        if self._placing is not None:
            self._placing.cancel()

    async def _place_all(self) -> None:
        try:
            while self._unplaced:
                await self._place_next(self._unplaced[0])
                self._unplaced.popleft()
        finally:
            self._placing = None

    async def _place_next(self, append: QueuedAppend) -> None:
        outcome: AppendOutcome | Exception | None
        try:
            outcome = await resolve(self._host, append)
        except Exception as error:  # noqa: BLE001  # Only this append ends with it.
            outcome = error
        place = self._place
        if outcome is None:
            place = queue_of(append.resolved.require_replica)
        elif not isinstance(outcome, Exception) and outcome.state is State.PROXY:
            place = outcome.resolution.header.process_id.SerializeToString()
        while not self._may_be_in(place):
            self._changed.clear()
            await self._changed.wait()
        self._enter(place)
        if isinstance(place, JournalQueue) and outcome is None:
            place.enqueue(append)
        elif outcome is not None:
            append.settle(outcome)

    def _may_be_in(self, place: JournalQueue | bytes | None) -> bool:
        return not self._under_way or self._place == place

    def _enter(self, place: JournalQueue | bytes | None) -> None:
        self._place = place
        self._under_way += 1
