"""Pulses: empty appends that a primary makes to its own journals."""

from __future__ import annotations

import asyncio

from coranto.errors import CorantoError, StatusError, status_error
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.entry import resolve
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import queue_of
from coranto_broker.append.queued_append import BufferedContent, QueuedAppend
from coranto_broker.ownership import Signal
from coranto_broker.priority_limiter import PriorityLimiter
from coranto_broker.replication.replica import PULSE_SECONDS, PulseFailed, Replica

_QUIET = frozenset(
    {
        pb.JOURNAL_NOT_FOUND,
        pb.NOT_JOURNAL_PRIMARY_BROKER,
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.INSUFFICIENT_JOURNAL_BROKERS,
        pb.SUSPENDED,
    }
)
"""Statuses of a pulse that need no report, because a change of the Route follows."""


class Pulses:
    """The pulses of one broker, limited in number."""

    def __init__(self, host: AppendHost) -> None:
        self._host = host
        self._limiter = PriorityLimiter()

    async def pulse(self, replica: Replica) -> Signal | None:
        """Make an empty append to a journal as its primary. Return a signal that fires when its Route changes.

        Raises PulseFailed if the pulse should be repeated soon.
        """
        no_resume = pb.AppendRequest.SUSPEND_NO_RESUME
        request = pb.AppendRequest(journal=replica.journal, do_not_proxy=True, suspend=no_resume)
        append = QueuedAppend(request, content=BufferedContent(b"", 0))
        append.is_pulse = True
        try:
            async with self._limiter.slot(replica.journal), asyncio.timeout(PULSE_SECONDS):
                if (refusal := await resolve(self._host, append)) is not None:
                    append.settle(refusal)
                else:
                    queue_of(append.resolved.require_replica).enqueue(append)
                outcome = await append.settled()
            replica.answer = outcome.status, self._host.clock.now()
            if outcome.status not in (pb.OK, *_QUIET):
                failure: StatusError = status_error(outcome.status, f"pulse of {replica.journal}")
                raise failure
        except (CorantoError, OSError, TimeoutError) as error:
            changed = append.resolution.invalidated if append.resolution is not None else None
            raise PulseFailed(str(error) or "timeout", changed) from error
        finally:
            append.leave()
        return outcome.resolution.invalidated
