"""The append state machine: drives every append through its states, and receives the client's messages.

`coranto_broker.append.states.TRANSITIONS` is the whole graph, and `_HANDLERS` names the method that acts in each state.
A transition that the table does not allow is a bug and raises RuntimeError. `coranto_broker.append.readiness` has the
states before content may stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from coranto.effects import Bytes
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.specs.validation import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import preconditions
from coranto_broker.append.group_commit import Course, Tokens, gather
from coranto_broker.append.readiness import Readying
from coranto_broker.append.states import TERMINAL, State
from coranto_broker.replication.pipeline import rolled_back
from coranto_broker.replication.waiting_appends import commit_of
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.spool.spool import new_sum


class AppendFsm(Readying):
    """One append. `run` it until content may stream, pass it the client's messages, `finish` it, then `release` it."""

    async def run(self, until: State = State.STREAM_CONTENT) -> bool:
        """Run until the state `until` (returns True) or a terminal state (returns False)."""
        while self.state is not until:
            if self.state in TERMINAL:
                return False
            await self._step()
        return True

    def client_sent(self, message: AppendMessage) -> bool:
        """Handle a message of the client in STREAM_CONTENT. Returns False when no more are wanted: then `finish`."""
        problem: CorantoError | None = None
        content = message.content
        if self._committing:
            problem = InvalidInput("expected the end of the stream after the empty message that commits")
        elif has_parameters(message):
            problem = InvalidInput("only the first message may hold more than content", field="AppendRequest.content")
        elif not content:
            self._committing = True
        elif self._asks_loss:
            self.status = pb.INDEX_HAS_GREATER_OFFSET
            return self._end_of_input(None)
        elif not may_write(self._resolved.spec) or not preconditions.may_have_content(self.request):
            self.status = pb.NOT_ALLOWED
            return self._end_of_input(None)
        else:
            self._write(content)
        if problem is not None or self._owned.error is not None:
            return self._end_of_input(problem)
        self._to(State.STREAM_CONTENT)
        return True

    def client_ended(self) -> bool:
        """Handle the end of the client's stream in STREAM_CONTENT. Returns False: then `finish`."""
        if not self._committing:
            return self._end_of_input(InvalidInput("unexpected EOF: an empty message commits, and none was sent"))
        if self._begin == self._end and registers_change(self.request):
            return self._end_of_input(
                InvalidInput("registers change only with content: append at least one byte", field="union_registers")
            )
        if self._asks_loss:
            self._asks_loss, self._loss_confirmed = False, True
            self._to(State.VALIDATE_PRECONDITIONS)
            return False
        return self._end_of_input(None)

    def client_failed(self, problem: CorantoError) -> bool:
        """Handle a client that broke a rule or the stream in STREAM_CONTENT. Returns False: then `finish`."""
        return self._end_of_input(problem)

    async def drain(self) -> None:
        """Wait until slow replicas, including our own, catch up with the content sent to them."""
        await self._owned.drain()

    async def written(self) -> None:
        """Write all content that the client sent. Call it in STREAM_CONTENT, before `client_ended`."""
        await self._owned.written()

    async def prepare_stream(self) -> None:
        """Roll the fragment if that is due. Call it in STREAM_CONTENT, before the first message."""
        await self._roll_if_due()
        self._begin = self._end = self._owned.spool.end
        # In an empty fragment, the sum that the spool computes for the fragment is also the append's sum.
        self._sum = new_sum() if self._owned.spool.fragment.length else None

    def commit_whole(self, tokens: Tokens) -> None:
        """Write the client's content and that of the group's members, and propose to commit it. Then `finish`.

        Call it in STREAM_CONTENT. `tokens` pay for the members' content; our own is already paid for.
        """
        whole, pipeline, resolution = self.whole, self._owned, self._resolved
        assert whole is not None
        if whole.content and not (may_write(resolution.spec) and preconditions.may_have_content(self.request)):
            self.status = pb.NOT_ALLOWED
            self._end_of_input(None)
            return
        replica = resolution.require_replica
        broken = pipeline.error
        if broken is not None:
            self._end_of_input(None)
            return
        if not pipeline.recorded:  # This append may do what others may not.
            if whole.content:
                self.client_sent(ContentMessage(whole.content))
            if self.state is State.STREAM_CONTENT and self.client_sent(ContentMessage(b"")):
                self.client_ended()
            return
        committed = pipeline.spool.committed
        course = Course(resolution.spec, committed, replica.index.known, self._env.clock.now())
        place = course.take(self.request, len(whole.content))
        self._members = gather(replica.line, course, resolution, len(whole.content), tokens)
        content = b"".join([whole.content, *(member.whole.content for member in self._members)])
        if content:
            pipeline.write(0, content)
        if pipeline.error is not None:
            self._end_of_input(None)
            return
        fragment = committed.fragment
        self.registers = place.registers
        self.commit = commit_of(fragment, place, whole.content)
        for member in self._members:
            member.commit_to(fragment)
        self._env.grouped(1 + len(self._members))
        self._propose(pipeline.spool.next_fragment(), course.registers)

    async def finish(self) -> None:
        """Read the acknowledgements. Cancelling this does not stop the reading."""
        if self.state is State.VALIDATE_PRECONDITIONS:
            if not await self.run():
                return
            await self.prepare_stream()
            self._end_of_input(None)
        await asyncio.shield(self._env.spawn(self._step())) if self._must_outlive else await self._step()

    # -- Its parts -----------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        try:
            self._to(await _HANDLERS[self.state](self))
        except CorantoError as error:
            self.error = self.error or error
            self.state = State.ERROR

    @property
    def _must_outlive(self) -> bool:
        return self._pipeline is not None and not self._pipeline.answers_at_once

    def _write(self, content: Bytes) -> None:
        pipeline = self._owned
        pipeline.write(self._end - self._begin, content)
        if self._sum is not None:
            pipeline.spool.hash(self._sum, content)
        self._end += len(content)

    def _end_of_input(self, problem: CorantoError | None) -> bool:
        """Propose to commit the client's content, or to roll it back."""
        pipeline = self._owned
        pipeline.join()
        spool = pipeline.spool
        if problem is None and self.status == pb.OK and pipeline.error is None:
            proposal = spool.next_fragment()
            if self._sum is None and self._end > self._begin:
                digest = proposal.sum
            else:
                # The sum of an empty append is the SHA-1 of no bytes, unlike the sum of an empty fragment.
                digest = (self._sum or new_sum()).digest()
            self.commit = Fragment(spool.fragment.journal, self._begin, self._end, digest, spool.fragment.codec)
            self.registers = preconditions.next_registers(spool.registers, self.request)
            self._propose(proposal, self.registers)
        else:
            self.error = problem
            self.registers = spool.registers
            if pipeline.error is not None:
                self._undone = rolled_back(pipeline.error)
            self._propose(spool.fragment, spool.registers)
        return False

    def _propose(self, proposal: Fragment, registers: pb.LabelSet) -> None:
        pipeline = self._owned
        self._proposal = proposal
        pipeline.propose(proposal, registers, acknowledge=True)
        if pipeline.error is not None and pipeline.local_only:
            self._undone = self._undone or rolled_back(pipeline.error)  # No other replica was asked.
        self._to(State.READ_ACKNOWLEDGEMENTS)

    async def _read_acknowledgements(self) -> State:
        """Hand the pipeline on, wait for our turn, and read every replica's answer to our proposal."""
        pipeline, owner, proposal = self._owned, self._require_owner, self._proposal
        assert proposal is not None
        broken = pipeline.error is not None
        turn = pipeline.turn()
        self._pipeline = self._owner = None
        replica = owner.require_replica
        if not broken:
            replica.pipeline.put(pipeline)
        else:
            replica.spool.put(pipeline.close_send())
            replica.pipeline.put(None)
        problem: CorantoError | None = Unavailable("this broker is shutting down; what it proposed may be applied")
        try:
            await turn.wait()
            await pipeline.gather_ok(proposal)
            problem = self._undone or pipeline.error
            if broken:
                await pipeline.gather_end()
        finally:
            turn.done()
            self._settle(problem)
        if self.error is not None or self.status != pb.OK:
            return State.ERROR
        if problem is not None:
            raise problem
        return State.FINISHED


_HANDLERS: Mapping[State, Callable[[AppendFsm], Awaitable[State]]] = {
    State.RESOLVE: AppendFsm._resolve,
    State.ACQUIRE_PIPELINE: AppendFsm._acquire_pipeline,
    State.FOLLOW: AppendFsm._follow,
    State.START_PIPELINE: AppendFsm._start_pipeline,
    State.SEND_PIPELINE_SYNC: AppendFsm._send_pipeline_sync,
    State.RECV_PIPELINE_SYNC: AppendFsm._recv_pipeline_sync,
    State.UPDATE_ASSIGNMENTS: AppendFsm._update_assignments,
    State.AWAIT_DESIRED_REPLICAS: AppendFsm._await_desired_replicas,
    State.VALIDATE_PRECONDITIONS: AppendFsm._validate_preconditions,
    State.UPDATE_SUSPEND: AppendFsm._update_suspend,
    State.READ_ACKNOWLEDGEMENTS: AppendFsm._read_acknowledgements,
}


def registers_change(request: pb.AppendRequest) -> bool:
    """Return True if an append asks for a change of registers. Such an append must have content."""
    return request.HasField("union_registers") or request.HasField("subtract_registers")


def has_parameters(message: AppendMessage) -> bool:
    """Return True if a message of the stream holds anything but content."""
    return not isinstance(message, ContentMessage) and bool(
        message.journal
        or message.offset
        or message.do_not_proxy
        or message.suspend
        or message.min_etcd_revision
        or message.HasField("header")
        or message.HasField("check_registers")
        or message.HasField("union_registers")
        or message.HasField("subtract_registers")
    )
