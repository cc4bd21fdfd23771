"""The entry of appends: their resolution, the order of a stream's appends, and a primary's own appends, its pulses.

A queue keeps the order of arrival. So a stream's append is enqueued immediately, unless earlier appends of the stream
to the journal are elsewhere: not resolved yet, in the queue of an earlier replica, or forwarded to another broker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from coranto.errors import CorantoError, StatusError, status_error
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import is_plain
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import JournalQueue, queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.ownership import Signal
from coranto_broker.priority_limiter import PriorityLimiter
from coranto_broker.replication.replica import PULSE_SECONDS, PulseFailed, Replica

_NO_PRIMARY: Final = pb.JOURNAL_NOT_FOUND, pb.NOT_JOURNAL_PRIMARY_BROKER, pb.NO_JOURNAL_PRIMARY_BROKER
_NO_FAILURE: Final = pb.OK, *_NO_PRIMARY, pb.INSUFFICIENT_JOURNAL_BROKERS, pb.SUSPENDED
"""Statuses of a pulse that need no report. After all but OK, a change of the Route follows."""


def recognize(host: AppendHost, append: QueuedAppend) -> bool:
    """Resolve an append if that needs no waiting. Return True if its request is known to be well-formed."""
    request = append.request
    if (append.claims is not UNRESTRICTED and not append.claims.covers_all) or request.HasField("header"):
        return False
    resolution = host.resolver.known(request.journal, request.min_etcd_revision)
    if resolution is None or resolution.replica is None or resolution.status != pb.OK or not resolution.is_local:
        return False
    append.resolution = resolution
    append.is_plain = is_plain(request)
    return append.is_plain


async def resolve(host: AppendHost, append: QueuedAppend) -> AppendOutcome | CorantoError | None:
    """Resolve an append that is in no queue. Return its outcome if it is refused or must be forwarded."""
    return None if append.resolution is not None else await AppendFsm(host, append).run()


class StreamOrder:
    """The order of one stream's appends to one journal. Call `ended` when an append is answered."""

    def __init__(self, host: AppendHost) -> None:
        self._host = host
        self._unplaced: deque[QueuedAppend] = deque()
        self._placing: asyncio.Task[None] | None = None
        self._place: JournalQueue | bytes | None = None  # The queue or broker of the appends under way.
        self._under_way = 0  # Placed and not answered.
        self._changed = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """True if no append is under way."""
        return not self._under_way and self._placing is None

    def add(self, append: QueuedAppend) -> None:
        """Add an append at the end."""
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
        """Count an append that was answered."""
        self._under_way -= 1
        if self._placing is not None:
            self._changed.set()

    def close(self) -> None:
        """Stop placing appends, because the client has left."""
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
        except Exception as error:  # noqa: BLE001  # The error fails only this append.
            outcome = error
        place = self._place
        if outcome is None:
            place = queue_of(append.resolved.require_replica)
        elif append.state is State.PROXY:
            place = append.resolved.header.process_id.SerializeToString()
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


class Pulses:
    """Sends the pulses of one broker, a limited number at a time."""

    def __init__(self, host: AppendHost) -> None:
        self._host = host
        self._limiter = PriorityLimiter()

    async def pulse(self, replica: Replica) -> Signal | None:
        """Make an empty append to a journal as its primary. Return a signal that fires when its Route changes.

        Raises PulseFailed if the pulse should be repeated soon.
        """
        no_resume = pb.AppendRequest.SUSPEND_NO_RESUME
        request = pb.AppendRequest(journal=replica.journal, do_not_proxy=True, suspend=no_resume)
        append = QueuedAppend(request, content=b"")
        append.is_pulse = True
        try:
            async with self._limiter.slot(replica.journal), asyncio.timeout(PULSE_SECONDS):
                if (refusal := await resolve(self._host, append)) is not None:
                    append.settle(refusal)
                else:
                    queue_of(append.resolved.require_replica).enqueue(append)
                outcome = await append.settled()
            replica.last_pulse = outcome.status, self._host.clock.now()
            if outcome.status not in _NO_FAILURE:
                failure: StatusError = status_error(outcome.status, f"pulse of {replica.journal}")
                raise failure
        except (CorantoError, OSError, TimeoutError) as error:
            changed = append.resolution.invalidated if append.resolution is not None else None
            raise PulseFailed(str(error) or "timeout", changed) from error
        finally:
            append.leave()
        return outcome.resolution.invalidated
