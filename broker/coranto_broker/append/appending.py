"""An append under way: its state, the resources that it holds, and their release.

An append holds nothing until it has acquired the replica's pipeline. It keeps the pipeline while it synchronizes and
streams. Once it has sent its commit or roll-back, it holds only its turn to read acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from coranto.coordination.etcd import Coordinator
from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.security.tokens import Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import preconditions
from coranto_broker.append.states import TRANSITIONS, State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.ownership import Signal
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord
from coranto_broker.replication.pipeline import Pipeline, ReplicationFailed
from coranto_broker.replication.resolver import Resolution, Resolver
from coranto_broker.replication.waiting_appends import WaitingAppend, Whole
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.spool.durable_spool import DurableSpool
from coranto_broker.spool.spool import Hash


class AppendEnvironment(Protocol):
    """The part of the broker that appends use."""

    clock: Clock
    coordinator: Coordinator
    resolver: Resolver

    in_sync: InSyncRecords

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> StoredRecord:
        """Return the in-sync record. Raises Stranded if the broker's own spool may not take part in a pipeline."""
        ...

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: StoredRecord) -> Pipeline:
        """Build a pipeline for the resolution's Route around the broker's own spool."""
        ...

    async def store_problem(self, journal: str, url: str, until: Signal | None) -> str:
        """Return the reason why a fragment store does not take a journal's content, or "" if it does.

        Waits some time for a problem to pass. Raises Invalidated when `until` fires first.
        """
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives the call that needs it."""
        ...

    def grouped(self, appends: int) -> None:
        """Note that this many whole appends are proposed together."""
        ...


class Appending:
    """One append: its request, state, outcome, and the pipeline that it holds.

    `status` and `error` give the outcome: a status other than OK goes into the response, an error fails the RPC.
    """

    def __init__(
        self, environment: AppendEnvironment, request: pb.AppendRequest, claims: Claims = UNRESTRICTED
    ) -> None:
        """`request` is the validated first message of the stream. `claims` are its sender's."""
        self._env = environment
        self._claims = claims
        self.request = request
        self.state = State.RESOLVE
        self.status: pb.Status.ValueType = pb.OK
        self.error: CorantoError | None = None
        self.resolution: Resolution | None = None
        self.registers = pb.LabelSet()
        self.commit: Fragment | None = None
        self.store_health_error = ""
        self.whole: Whole | None = None
        """All content of the client, if it is small and was received before the pipeline was acquired."""
        self.total_chunks = self.delayed_chunks = 0
        self._member: WaitingAppend | None = None  # Our place in the line of waiting appends.
        self._members: list[WaitingAppend] = []  # The appends that commit in our group.
        self._read_through = request.min_etcd_revision
        self._suspend: pb.JournalSpec.Suspend | None = None  # The suspension that UPDATE_SUSPEND writes.
        self._await_change = False  # Resolve only from a key space later than `resolution`'s.
        self._pipeline: Pipeline | None = None
        self._owner: Resolution | None = None  # The resolution whose replica's pipeline we own.
        self._roll_to = 0
        self._synchronizing = False
        self._begin = self._end = 0
        self._sum: Hash | None = None
        self._committing = False
        self._proposal: Fragment | None = None
        self._undone: RolledBack | None = None  # The reason why no replica was asked to commit it.
        self._asks_loss = False  # The append confirms a loss, but only if it turns out to be empty.
        self._loss_confirmed = False

    def release(self) -> None:
        """Release the pipeline if the append still owns it. Rolls back content that was streamed but not proposed."""
        pipeline, owner = self._pipeline, self._owner
        self._pipeline = self._owner = None
        if owner is None:
            return
        if pipeline is not None and self._synchronizing:
            self._shut_down(pipeline, owner)
            pipeline = None
        elif pipeline is not None and self.state is State.STREAM_CONTENT:
            pipeline.propose(pipeline.spool.fragment, pipeline.spool.registers, acknowledge=False)
            if pipeline.error is not None:
                self._shut_down(pipeline, owner)
                pipeline = None
        self._settle(ReplicationFailed("the append that it went along with was given up"))
        owner.require_replica.pipeline.put(pipeline)

    # -- For the states ------------------------------------------------------------------------------------------------

    @property
    def _resolved(self) -> Resolution:
        assert self.resolution is not None  # Every state but the first follows a resolution.
        return self.resolution

    @property
    def _owned(self) -> Pipeline:
        assert self._pipeline is not None  # States that use the pipeline come after those that acquire it.
        return self._pipeline

    @property
    def _require_owner(self) -> Resolution:
        assert self._owner is not None
        return self._owner

    def _to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"append state machine: {self.state.value} must not go to {state.value}")
        self.state = state

    async def _roll_if_due(self) -> None:
        pipeline = self._owned
        spool = pipeline.spool
        proposal = preconditions.propose(
            spool.committed, self._roll_to, self._resolved.spec.fragment, self._env.clock.now()
        )
        if proposal != spool.fragment:
            # A completed fragment is visible at once, so its content must be acknowledged first.
            await pipeline.settled()
            if pipeline.error is not None:
                raise pipeline.error  # Not every replica has the content that the roll would complete.
            pipeline.propose(proposal, spool.registers, acknowledge=False)

    def _settle(self, problem: CorantoError | None) -> None:
        """Tell the members of our group the outcome of the proposal."""
        members, self._members = self._members, []
        for member in members:
            member.settle(problem)

    def _shut_down(self, pipeline: Pipeline, owner: Resolution) -> None:
        """Close a pipeline and give back its spool. A background task reads the ends of its replicas' streams."""
        turn = pipeline.turn()
        owner.require_replica.spool.put(pipeline.close_send())
        if pipeline.local_only:
            turn.done()
            return
        self._env.spawn(pipeline.shut_down(turn))
