"""The states of an append and the transitions between them (seed 001 "Append State Machine").

There are two states beside the seed's. UPDATE_SUSPEND exists because appends can suspend and wake journals. FOLLOW
exists because an append that waits for the pipeline may commit in a group (`coranto_broker.append.group_commit`).

Every blocking state also ends in ERROR when it fails, or when the client goes away (the task is then cancelled).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """The state of an append."""

    __hash__ = object.__hash__  # `Enum.__hash__` is slow Python code, and each step looks up two tables.

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
            State.ACQUIRE_PIPELINE,  # This broker is the primary.
            State.START_PIPELINE,  # It is, and owns the pipeline already.
            State.AWAIT_DESIRED_REPLICAS,  # Another broker is: proxy.
            State.UPDATE_SUSPEND,  # The journal is fully suspended: wake it.
            State.ERROR,
        }
    ),
    State.ACQUIRE_PIPELINE: frozenset(
        {
            State.START_PIPELINE,
            State.FOLLOW,  # Another append has the pipeline and takes this one along.
            State.RESOLVE,  # The resolution was invalidated meanwhile, or the journal's flags changed.
            State.ERROR,
        }
    ),
    State.FOLLOW: frozenset({State.FINISHED, State.ERROR}),
    State.START_PIPELINE: frozenset(
        {
            State.UPDATE_ASSIGNMENTS,  # The pipeline is good, but etcd may need an update.
            State.VALIDATE_PRECONDITIONS,  # The pipeline is good, and an earlier append found the rest good.
            State.SEND_PIPELINE_SYNC,  # There was no pipeline, or it followed an older Route.
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
            State.AWAIT_DESIRED_REPLICAS,  # etcd already has the consistent Route and the in-sync record.
            State.SEND_PIPELINE_SYNC,  # The journal was closed at a later offset: go on there.
            State.RESOLVE,  # etcd has it now, at a later revision.
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
            State.UPDATE_SUSPEND,  # Suspend or wake the journal.
            State.RESOLVE,  # The resolution was invalidated while the stores were being listed.
            State.ERROR,
        }
    ),
    State.UPDATE_SUSPEND: frozenset({State.RESOLVE, State.ERROR}),
    State.STREAM_CONTENT: frozenset(
        {
            State.STREAM_CONTENT,
            State.READ_ACKNOWLEDGEMENTS,
            State.VALIDATE_PRECONDITIONS,  # The append is empty and confirms that content was lost.
        }
    ),
    State.READ_ACKNOWLEDGEMENTS: frozenset({State.FINISHED, State.ERROR}),
    State.ERROR: frozenset(),
    State.PROXY: frozenset(),
    State.FINISHED: frozenset(),
}
