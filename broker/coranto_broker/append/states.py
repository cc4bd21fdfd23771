"""The states of an append, and the table of their events (seed 001, "State machine").

`TRANSITIONS` is the machine: the method of a state only returns the event that ended it. An event without an entry for
the state is a bug. An append that commits inline skips all states before FINISHED (`coranto_broker.append.queue`).
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
    STREAM_CONTENT = "stream content"
    READ_ACKNOWLEDGEMENTS = "read acknowledgements"
    ERROR = "error"
    PROXY = "proxy"
    FINISHED = "finished"


class AppendEvent(enum.Enum):
    """The event that ends a state."""

    __hash__ = object.__hash__

    PRIMARY_IS_HERE = "this broker is the journal's primary"
    PIPELINE_IS_OWNED = "this broker is the primary, and the append already owns the pipeline"
    PRIMARY_IS_ELSEWHERE = "another broker is the journal's primary"
    INVALIDATED = "the resolution was invalidated, or the journal's flags changed"
    PIPELINE_ACQUIRED = "the append owns the replica's pipeline"
    PIPELINE_FITS = "the pipeline fits the resolution"
    PIPELINE_FOLLOWS_ROUTE = "the pipeline follows the Route, but etcd may need an update"
    PIPELINE_BUILT = "there was no pipeline, or it followed an older Route"
    PROPOSED = "every replica was sent a proposal"
    REPLICAS_AGREE = "all replicas hold the same content"
    MUST_ROLL = "replicas must begin a fragment at a later offset"
    ROUTE_IS_OLD = "a replica has a later Route"
    ETCD_IS_CURRENT = "etcd has the consistent Route and the in-sync record"
    ETCD_CHANGED = "etcd has a later revision, by our transaction or another's"
    REPLICAS_SUFFICE = "the journal has the replicas of its spec"
    TOO_MANY_REPLICAS = "the allocator is about to remove some replicas"
    MAY_STREAM = "all preconditions hold"
    SUSPENSION_MUST_CHANGE = "the journal must be suspended or woken first"
    CLIENT_SENT = "the client sent a message"
    LOSS_CONFIRMED = "an append without content confirmed a loss"
    COMMITTED = "the append is part of the journal"
    REFUSED = "the append ends with a status"
    FAILED = "the state failed"


class ProposalPath(enum.Enum):
    """The way that appends take to their proposal."""

    INLINE = "inline"
    ALONE = "batch of one"
    BATCH = "batch"
    STREAMED = "streamed"


TERMINAL = frozenset({State.ERROR, State.PROXY, State.FINISHED})

# In addition, each state except STREAM_CONTENT ends in ERROR if it fails.
_EVENTS: Mapping[State, Mapping[AppendEvent, State]] = {
    # Find the primary in a sufficiently recent key space.
    State.RESOLVE: {
        AppendEvent.PRIMARY_IS_HERE: State.ACQUIRE_PIPELINE,
        AppendEvent.PIPELINE_IS_OWNED: State.START_PIPELINE,
        AppendEvent.PRIMARY_IS_ELSEWHERE: State.AWAIT_DESIRED_REPLICAS,  # Before forwarding to it.
        AppendEvent.SUSPENSION_MUST_CHANGE: State.UPDATE_SUSPEND,  # The journal is fully suspended: wake it.
        AppendEvent.REFUSED: State.ERROR,
    },
    # The append waits in the journal's queue, whose order is the journal's order.
    State.ACQUIRE_PIPELINE: {
        AppendEvent.PIPELINE_ACQUIRED: State.START_PIPELINE,
        AppendEvent.PROPOSED: State.READ_ACKNOWLEDGEMENTS,  # In a batch, by a decision alone.
        AppendEvent.INVALIDATED: State.RESOLVE,
        AppendEvent.REFUSED: State.ERROR,  # In a batch.
    },
    State.START_PIPELINE: {
        AppendEvent.PIPELINE_FITS: State.VALIDATE_PRECONDITIONS,
        AppendEvent.PIPELINE_FOLLOWS_ROUTE: State.UPDATE_ASSIGNMENTS,
        AppendEvent.PIPELINE_BUILT: State.SEND_PIPELINE_SYNC,
        AppendEvent.INVALIDATED: State.RESOLVE,
    },
    # Replicas of a new pipeline may hold different content, and must agree before an append.
    State.SEND_PIPELINE_SYNC: {
        AppendEvent.PROPOSED: State.RECV_PIPELINE_SYNC,
    },
    State.RECV_PIPELINE_SYNC: {
        AppendEvent.REPLICAS_AGREE: State.UPDATE_ASSIGNMENTS,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # A replica is ahead, or cannot extend the fragment.
        AppendEvent.ROUTE_IS_OLD: State.RESOLVE,
    },
    # The allocator removes a replica only after the others are recorded to continue without it.
    State.UPDATE_ASSIGNMENTS: {
        AppendEvent.ETCD_IS_CURRENT: State.AWAIT_DESIRED_REPLICAS,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # The journal was closed at a later offset.
        AppendEvent.ETCD_CHANGED: State.RESOLVE,
    },
    # With fewer replicas, a commit would be less durable than the journal's spec demands.
    State.AWAIT_DESIRED_REPLICAS: {
        AppendEvent.REPLICAS_SUFFICE: State.VALIDATE_PRECONDITIONS,
        AppendEvent.PRIMARY_IS_ELSEWHERE: State.PROXY,
        AppendEvent.TOO_MANY_REPLICAS: State.RESOLVE,
        AppendEvent.REFUSED: State.ERROR,  # Too few.
    },
    # `coranto_broker.append.decision` decides.
    State.VALIDATE_PRECONDITIONS: {
        AppendEvent.MAY_STREAM: State.STREAM_CONTENT,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # To an explicit offset, or the suspension's.
        AppendEvent.SUSPENSION_MUST_CHANGE: State.UPDATE_SUSPEND,
        AppendEvent.ETCD_CHANGED: State.RESOLVE,  # While the replicas were being recorded.
        AppendEvent.INVALIDATED: State.RESOLVE,  # While the stores were being probed or listed.
        AppendEvent.REFUSED: State.ERROR,
    },
    State.UPDATE_SUSPEND: {
        AppendEvent.ETCD_CHANGED: State.RESOLVE,
    },
    State.STREAM_CONTENT: {
        AppendEvent.CLIENT_SENT: State.STREAM_CONTENT,
        AppendEvent.PROPOSED: State.READ_ACKNOWLEDGEMENTS,  # To commit or, after an error, roll back the content.
        AppendEvent.LOSS_CONFIRMED: State.VALIDATE_PRECONDITIONS,
    },
    # The next append owns the pipeline.
    State.READ_ACKNOWLEDGEMENTS: {
        AppendEvent.COMMITTED: State.FINISHED,
        AppendEvent.REFUSED: State.ERROR,
    },
}

TRANSITIONS: Mapping[tuple[State, AppendEvent], State] = {
    (state, event): following for state, events in _EVENTS.items() for event, following in events.items()
} | {(state, AppendEvent.FAILED): State.ERROR for state in _EVENTS if state is not State.STREAM_CONTENT}
"""The state machine of an append: the state that follows a state and an event."""
