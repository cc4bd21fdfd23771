"""The states of an append, and where it may go from each (seed 001 "Append State Machine").

Beside the seed's states there are UPDATE_SUSPEND, because journals can be suspended and woken by appends, and FOLLOW,
because appends that wait for the pipeline may go along with the one that has it (`coranto_broker.append.group_commit`).

Every blocking state also ends in ERROR: when it fails, or (by cancellation of the task) when the client goes away.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """Where an append is."""

    __hash__ = object.__hash__  # That of `Enum` is written in Python, and each step looks up two tables.

    RESOLVE = "resolve"
    ACQUIRE_PIPELINE = "acquire pipeline"
    START_PIPELINE = "start pipeline"
    SEND_PIPELINE_SYNC = "send pipeline sync"
    RECV_PIPELINE_SYNC = "receive pipeline sync"
    UPDATE_ASSIGNMENTS = "update assignments"
    AWAIT_DESIRED_REPLICAS = "await desired replicas"
    VALIDATE_PRECONDITIONS = "validate preconditions"
    UPDATE_SUSPEND = "update suspend"
    FOLLOW = "follow"
    STREAM_CONTENT = "stream content"
    READ_ACKNOWLEDGEMENTS = "read acknowledgements"
    ERROR = "error"
    PROXY = "proxy"
    FINISHED = "finished"


TERMINAL = frozenset({State.ERROR, State.PROXY, State.FINISHED})

TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.RESOLVE: frozenset(
        {
            State.ACQUIRE_PIPELINE,  # We are the primary.
            State.START_PIPELINE,  # We are, and own the pipeline already.
            State.AWAIT_DESIRED_REPLICAS,  # We are not, and shall proxy.
            State.UPDATE_SUSPEND,  # The journal is fully suspended, and shall be woken.
            State.ERROR,
        }
    ),
    State.ACQUIRE_PIPELINE: frozenset(
        {
            State.START_PIPELINE,
            State.FOLLOW,  # Another append has the pipeline, and takes this one along.
            State.RESOLVE,  # The resolution was invalidated meanwhile, or the journal's flags changed.
            State.ERROR,
        }
    ),
    State.FOLLOW: frozenset({State.FINISHED, State.ERROR}),
    State.START_PIPELINE: frozenset(
        {
            State.UPDATE_ASSIGNMENTS,  # The pipeline is good as it is.
            State.VALIDATE_PRECONDITIONS,  # It is, and an append before this one found the rest to be, too.
            State.SEND_PIPELINE_SYNC,  # There was none, or it was of an older Route.
            State.RESOLVE,  # The resolution was invalidated meanwhile.
            State.ERROR,
        }
    ),
    State.SEND_PIPELINE_SYNC: frozenset({State.RECV_PIPELINE_SYNC}),
    State.RECV_PIPELINE_SYNC: frozenset(
        {
            State.UPDATE_ASSIGNMENTS,  # All replicas agree.
            State.SEND_PIPELINE_SYNC,  # One is ahead, or cannot extend our fragment: roll, and propose again.
            State.RESOLVE,  # One knows a later Route.
            State.ERROR,
        }
    ),
    State.UPDATE_ASSIGNMENTS: frozenset(
        {
            State.AWAIT_DESIRED_REPLICAS,  # etcd says already that the Route is consistent, and who is in sync.
            State.SEND_PIPELINE_SYNC,  # The journal was closed at a later offset: go on there.
            State.RESOLVE,  # It does now, at a later revision.
            State.ERROR,
        }
    ),
    State.AWAIT_DESIRED_REPLICAS: frozenset(
        {
            State.VALIDATE_PRECONDITIONS,
            State.PROXY,  # The Route is as it should be, and another broker is its primary.
            State.RESOLVE,  # Too many replicas: the allocator is about to remove some.
            State.ERROR,  # Too few.
        }
    ),
    State.VALIDATE_PRECONDITIONS: frozenset(
        {
            State.STREAM_CONTENT,
            State.SEND_PIPELINE_SYNC,  # An explicit offset has the replicas roll to it.
            State.UPDATE_SUSPEND,  # The journal is to be suspended, or woken.
            State.RESOLVE,  # The resolution was invalidated while the stores were being listed.
            State.ERROR,
        }
    ),
    State.UPDATE_SUSPEND: frozenset({State.RESOLVE, State.ERROR}),
    State.STREAM_CONTENT: frozenset(
        {
            State.STREAM_CONTENT,
            State.READ_ACKNOWLEDGEMENTS,
            State.VALIDATE_PRECONDITIONS,  # It has no content, and confirms that content was lost.
        }
    ),
    State.READ_ACKNOWLEDGEMENTS: frozenset({State.FINISHED, State.ERROR}),
    State.ERROR: frozenset(),
    State.PROXY: frozenset(),
    State.FINISHED: frozenset(),
}
