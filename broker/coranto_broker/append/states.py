"""The states of an append, and the table of events that take it from one to the next (seed 001, "State machine").

`TRANSITIONS` is the machine: the method that acts in a state only names the event that ended it. An event that the
table does not have for a state is a bug. An append that commits inline passes no state (`coranto_broker.append.queue`).
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
    """The reason why an append leaves a state."""

    __hash__ = object.__hash__

    PRIMARY_IS_HERE = "this broker is the journal's primary"
    PIPELINE_IS_OWNED = "this broker is the primary, and the append owns the pipeline already"
    PRIMARY_IS_ELSEWHERE = "another broker is the journal's primary"
    INVALIDATED = "the resolution was invalidated, or the journal's flags changed"
    PIPELINE_ACQUIRED = "the append owns the replica's pipeline"
    PIPELINE_FITS = "an earlier append found this pipeline to be right for the resolution"
    PIPELINE_FOLLOWS_ROUTE = "the pipeline is good, but etcd may need an update"
    PIPELINE_BUILT = "there was no pipeline, or it followed an older Route"
    PROPOSED = "every replica was sent a proposal"
    REPLICAS_AGREE = "all replicas hold the same"
    MUST_ROLL = "replicas must begin a fragment at a later offset"
    ROUTE_IS_OLD = "a replica knows a later Route"
    ETCD_IS_CURRENT = "etcd has the consistent Route and the in-sync record"
    ETCD_CHANGED = "etcd has a later revision, by our transaction or another's"
    REPLICAS_SUFFICE = "the journal has as many replicas as it should have"
    TOO_MANY_REPLICAS = "the allocator is about to remove some replicas"
    MAY_STREAM = "all preconditions hold"
    SUSPENSION_MUST_CHANGE = "the journal must be suspended or woken first"
    CLIENT_SENT = "the client sent a message"
    LOSS_CONFIRMED = "the client ended an append without content, and so confirmed a loss"
    COMMITTED = "the append is part of the journal"
    REFUSED = "the append ends with a status"
    FAILED = "the work of the state failed"


class ProposalPath(enum.Enum):
    """The path of appends to their proposal."""

    INLINE = "inline"
    ALONE = "batch of one"
    BATCH = "batch"
    STREAMED = "streamed"


TERMINAL = frozenset({State.ERROR, State.PROXY, State.FINISHED})

_EVENTS: Mapping[State, Mapping[AppendEvent, State]] = {
    # Find the primary in a key space that is recent enough.
    State.RESOLVE: {
        AppendEvent.PRIMARY_IS_HERE: State.ACQUIRE_PIPELINE,
        AppendEvent.PIPELINE_IS_OWNED: State.START_PIPELINE,
        AppendEvent.PRIMARY_IS_ELSEWHERE: State.AWAIT_DESIRED_REPLICAS,  # Before we proxy to it.
        AppendEvent.SUSPENSION_MUST_CHANGE: State.UPDATE_SUSPEND,  # The journal is fully suspended: wake it.
        AppendEvent.REFUSED: State.ERROR,
        AppendEvent.FAILED: State.ERROR,
    },
    # The append waits in the journal's queue, whose order is the journal's order.
    State.ACQUIRE_PIPELINE: {
        AppendEvent.PIPELINE_ACQUIRED: State.START_PIPELINE,
        AppendEvent.PROPOSED: State.READ_ACKNOWLEDGEMENTS,  # In a batch, which needs no more for it than a decision.
        AppendEvent.INVALIDATED: State.RESOLVE,
        AppendEvent.REFUSED: State.ERROR,  # In a batch, too.
        AppendEvent.FAILED: State.ERROR,
    },
    State.START_PIPELINE: {
        AppendEvent.PIPELINE_FITS: State.VALIDATE_PRECONDITIONS,
        AppendEvent.PIPELINE_FOLLOWS_ROUTE: State.UPDATE_ASSIGNMENTS,
        AppendEvent.PIPELINE_BUILT: State.SEND_PIPELINE_SYNC,
        AppendEvent.INVALIDATED: State.RESOLVE,
        AppendEvent.FAILED: State.ERROR,
    },
    # Replicas of a new pipeline may hold different content, or none. They agree before anything is appended.
    State.SEND_PIPELINE_SYNC: {
        AppendEvent.PROPOSED: State.RECV_PIPELINE_SYNC,
        AppendEvent.FAILED: State.ERROR,
    },
    State.RECV_PIPELINE_SYNC: {
        AppendEvent.REPLICAS_AGREE: State.UPDATE_ASSIGNMENTS,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # One is ahead, or cannot extend our fragment: propose again.
        AppendEvent.ROUTE_IS_OLD: State.RESOLVE,
        AppendEvent.FAILED: State.ERROR,
    },
    # When the allocator sees that it may remove a replica, the others can already continue without it.
    State.UPDATE_ASSIGNMENTS: {
        AppendEvent.ETCD_IS_CURRENT: State.AWAIT_DESIRED_REPLICAS,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # The journal was closed at a later offset: continue there.
        AppendEvent.ETCD_CHANGED: State.RESOLVE,
        AppendEvent.FAILED: State.ERROR,
    },
    # A commit with fewer replicas would be less durable than the journal's spec promises.
    State.AWAIT_DESIRED_REPLICAS: {
        AppendEvent.REPLICAS_SUFFICE: State.VALIDATE_PRECONDITIONS,
        AppendEvent.PRIMARY_IS_ELSEWHERE: State.PROXY,
        AppendEvent.TOO_MANY_REPLICAS: State.RESOLVE,
        AppendEvent.REFUSED: State.ERROR,  # Too few.
        AppendEvent.FAILED: State.ERROR,
    },
    # `coranto_broker.append.decision` decides.
    State.VALIDATE_PRECONDITIONS: {
        AppendEvent.MAY_STREAM: State.STREAM_CONTENT,
        AppendEvent.MUST_ROLL: State.SEND_PIPELINE_SYNC,  # To an explicit offset, or that of the suspension.
        AppendEvent.SUSPENSION_MUST_CHANGE: State.UPDATE_SUSPEND,
        AppendEvent.ETCD_CHANGED: State.RESOLVE,  # While the replicas were being recorded.
        AppendEvent.INVALIDATED: State.RESOLVE,  # While the stores were being probed or listed.
        AppendEvent.REFUSED: State.ERROR,
        AppendEvent.FAILED: State.ERROR,
    },
    State.UPDATE_SUSPEND: {
        AppendEvent.ETCD_CHANGED: State.RESOLVE,
        AppendEvent.FAILED: State.ERROR,
    },
    State.STREAM_CONTENT: {
        AppendEvent.CLIENT_SENT: State.STREAM_CONTENT,
        AppendEvent.PROPOSED: State.READ_ACKNOWLEDGEMENTS,  # To commit the content or, after an error, to roll it back.
        AppendEvent.LOSS_CONFIRMED: State.VALIDATE_PRECONDITIONS,
    },
    # The next append owns the pipeline meanwhile.
    State.READ_ACKNOWLEDGEMENTS: {
        AppendEvent.COMMITTED: State.FINISHED,
        AppendEvent.REFUSED: State.ERROR,
        AppendEvent.FAILED: State.ERROR,
    },
}

TRANSITIONS: Mapping[tuple[State, AppendEvent], State] = {
    (state, event): following for state, events in _EVENTS.items() for event, following in events.items()
}
"""The state machine of an append: the state that follows a state and an event."""
