"""The appends of one stream to one journal: they commit in the order in which they came.

An append at the head of its lane commits at once if it has nothing to wait for, and those that came together are
proposed at once if only replicas must answer (`coranto_broker.append.fast_path`). While such proposals are under way,
further appends wait for one of them to end.

Otherwise the append at the head becomes the lane's *leader*: the append state machine takes it to its commit. Meanwhile
the appends behind it stand in the line of waiting appends as its *followers*, and commit in a group with it, or with an
append of another client. A follower that no group takes along becomes the next leader. The lane goes on with its next
leader as soon as the present one has proposed its group. So several proposals may wait for their acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from coranto.errors import CorantoError, Unavailable
from coranto.security.tokens import Claims
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import fast_path
from coranto_broker.append.fast_path import Candidate, CommittedAppend, Proposed
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.group_commit import MAX_GROUP_APPENDS
from coranto_broker.append.states import State
from coranto_broker.handlers.append_answers import Answers
from coranto_broker.handlers.append_commit import commit_whole, count, response_of
from coranto_broker.handlers.forwarding import forward_whole
from coranto_broker.replication.resolver import Resolution
from coranto_broker.replication.waiting_appends import Line, Refusal, WaitingAppend, Whole

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

Answer = bytes | Exception
"""The encoded response to an append, or the error with which it ends."""

_TURN_APPENDS: Final = 64
"""Appends that commit at once before other work gets its turn."""


class LaneAppend:
    """One append of a lane. `answer` is called once with its outcome, unless its stream ends before."""

    __slots__ = ("answer", "begun", "claims", "found", "request", "waiting", "whole")

    def __init__(
        self, request: pb.AppendRequest, whole: Whole, claims: Claims, begun: float, answer: Callable[[Answer], None]
    ) -> None:
        self.request = request
        self.whole = whole
        self.claims = claims
        self.begun = begun
        self.answer = answer
        self.found: Candidate | None = None
        """Its candidate for the fast path, as of its arrival."""
        self.waiting: WaitingAppend | None = None

    @property
    def is_taken(self) -> bool:
        """True if a group has taken it along."""
        return self.waiting is not None and not self.waiting.is_waiting


class AppendLane:
    """The appends of one stream to one journal that have not been proposed, and those whose outcome is awaited."""

    def __init__(self, broker: Broker, answers: Answers) -> None:
        self._broker = broker
        self._answers = answers
        self._queue: deque[LaneAppend] = deque()
        self._joined: tuple[Line, Resolution] | None = None  # Where followers stand, behind the leader.
        self._leader_header = pb.Header()
        self._run: asyncio.Task[None] | None = None
        self._proposed = 0  # Proposals that were made by the fast path, and that are under way.
        self._ending: set[asyncio.Task[None]] = set()  # They wait for the outcomes of leaders.
        self._begun: set[asyncio.Task[None]] = set()  # Those of them that release their leader if they are cancelled.
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued and nothing is being led."""
        return self._run is None and not self._queue and not self._ending and not self._proposed

    def add(self, append: LaneAppend, found: Candidate | None) -> bool:
        """Take one more append. Its request is well-formed. `found` is its candidate for the fast path.

        Returns True if it waits for `go`.
        """
        if self._run is None and not self._queue and self._commit_at_once(append, found):
            return False
        append.found = found
        self._queue.append(append)
        if self._joined is not None:
            self._follow(append, *self._joined)
        return self._run is None

    def go(self) -> None:
        """Begin with what was added, unless proposals must end first. Call it once all that came together is added."""
        while self._run is None and self._has_waiting():
            if not self._propose():
                if not self._proposed:
                    self._run = asyncio.create_task(self._serve())
                return

    def close(self) -> None:
        """Give up what has not been proposed: the client is gone."""
        self._closed = True
        self._leave_line()
        self._queue.clear()
        for task in (self._run, *self._begun):
            if task is not None:
                task.cancel()

    async def _serve(self) -> None:
        at_once = 0
        try:
            while self._has_waiting():
                # Before one of them leads: a group must not take along what commits by itself.
                self._leave_line()
                if self._propose():
                    continue
                if self._proposed:
                    return  # `go` follows when they have ended.
                append = self._queue.popleft()
                if not self._commit_at_once(append, self.candidate(append)):
                    await self._lead(append)
                    await asyncio.sleep(0)  # The leader has handed the pipeline on by then.
                elif (at_once := at_once + 1) % _TURN_APPENDS == 0:
                    await asyncio.sleep(0)
        finally:
            self._leave_line()
            self._run = None

    def candidate(self, append: LaneAppend) -> Candidate | None:
        """Return an append's candidate for the fast path."""
        return fast_path.candidate(self._broker, append.request) if append.claims.covers_all else None

    def _has_waiting(self) -> bool:
        """Drop what a group has taken along from the head of the queue. Returns True if there is more."""
        while self._queue and self._queue[0].is_taken:
            self._queue.popleft()
        return bool(self._queue)

    def _propose(self) -> bool:
        """Propose appends at the head of the queue together if only replicas must answer.

        The first of them waits. If they cannot be written, it ends with that. Returns False if nothing has changed.
        """
        ready: list[tuple[Candidate, pb.AppendRequest, Whole]] = []
        for append in self._queue:
            found = append.found
            if found is None or not self._broker.resolver.is_current(found.resolution):
                found = append.found = self.candidate(append)
            if found is None or append.is_taken or len(ready) == MAX_GROUP_APPENDS:
                break
            ready.append((found, append.request, append.whole))
        if not ready:
            return False
        try:
            proposed = fast_path.propose(self._broker, ready)
        except Exception as error:  # noqa: BLE001  # The append ends with it, as a call of its own would.
            self._ended(self._queue.popleft(), State.ERROR, error)
            return True
        if proposed is None:
            return False
        self._proposed += 1
        self._broker.spawn(self._gather(proposed, [self._queue.popleft() for _ in proposed.appends]))
        return True

    async def _gather(self, proposed: Proposed, appends: list[LaneAppend]) -> None:
        """Answer appends that were proposed once all replicas have."""
        found: Durability | Exception
        found = Unavailable("this broker is shutting down; what it proposed may be applied")
        try:
            found = await fast_path.gather(proposed)
        except Exception as error:  # noqa: BLE001  # The appends end with it, as calls of their own would.
            found = error
        finally:
            self._proposed -= 1
            for append, each in zip(appends, proposed.appends, strict=True):
                if isinstance(found, Exception):
                    self._ended(append, State.ERROR, found)
                else:
                    commit = each.commit
                    told = commit, commit.begin, commit.sum, each.registers, each.chunks, found
                    self._committed(append, CommittedAppend(proposed.resolution, *told))
        if not self._closed:
            self.go()

    def _commit_at_once(self, append: LaneAppend, found: Candidate | None) -> bool:
        """Commit an append if it has nothing to wait for. Returns False if it has changed nothing."""
        if found is None:
            return False
        try:
            committed = fast_path.commit(self._broker, found, append.request, append.whole)
        except Exception as error:  # noqa: BLE001  # The append ends with it, as a call of its own would.
            self._ended(append, State.ERROR, error)
            return True
        if committed is None:
            return False
        self._committed(append, committed)
        return True

    async def _lead(self, append: LaneAppend) -> None:
        """Take an append and its followers to their proposal. Then another task waits for the outcome."""
        fsm = AppendFsm(self._broker, append.request, append.claims)
        fsm.whole, fsm.on_joined = append.whole, self._leader_joined
        self._leader_header = append.request.header
        try:
            if await fsm.run(State.STREAM_CONTENT, State.FOLLOW) and fsm.state is State.STREAM_CONTENT:
                await fsm.prepare_stream()
                await commit_whole(self._broker, fsm, append.whole)
        except Exception as error:  # noqa: BLE001  # The append ends with it, as a call of its own would.
            fsm.release()
            self._ended(append, State.ERROR, error)
            return
        except BaseException:
            fsm.release()
            raise
        ending = asyncio.create_task(self._finish(append, fsm))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _finish(self, append: LaneAppend, fsm: AppendFsm) -> None:
        """Wait for the outcome of an append that was proposed, taken along, refused or has its primary elsewhere."""
        outcome: Answer
        state = State.ERROR
        task = asyncio.current_task()
        assert task is not None
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        try:
            if self._closed and fsm.state is State.PROXY:
                return
            if fsm.state is State.FOLLOW:
                await fsm.run()
            elif fsm.state not in (State.PROXY, State.ERROR, State.FINISHED):
                await fsm.finish()
            if fsm.state is State.PROXY:
                response = await forward_whole(self._broker, fsm, append.whole)
            else:
                response = response_of(self._broker, fsm, append.begun)
            outcome, state = response.SerializeToString(), fsm.state
        except Exception as error:  # noqa: BLE001  # The append ends with it, as a call of its own would.
            outcome = error
        finally:
            fsm.release()
        self._ended(append, state, outcome)

    # -- Followers -----------------------------------------------------------------------------------------------------

    def _leader_joined(self, line: Line, resolution: Resolution) -> None:
        self._leave_line()
        self._joined = line, resolution
        for append in self._queue:
            if not append.is_taken:
                self._follow(append, line, resolution)

    def _follow(self, append: LaneAppend, line: Line, resolution: Resolution) -> None:
        """Have an append stand in line behind the leader, if the leader's resolution is its own."""
        request, spec = append.request, resolution.spec
        own = self._broker.resolver.known(request.journal, request.min_etcd_revision)
        if own is not resolution or not append.claims.covers(spec.name, spec.labels):
            return
        if request.HasField("header") and request.header != self._leader_header:
            return  # It was forwarded by another resolution than the leader, which has to be checked.
        append.waiting = member = WaitingAppend(request, append.whole, resolution)
        member.outcome.add_done_callback(lambda outcome: self._followed(append, line, outcome.result()))
        line.join(member)

    def _followed(self, append: LaneAppend, line: Line, problem: CorantoError | None) -> None:
        """Answer a follower whose group has its outcome."""
        member = append.waiting
        assert member is not None
        line.leave(member)
        if problem is not None:
            self._ended(append, State.ERROR, problem)
            return
        resolution, answer = member.resolution, member.answer
        assert isinstance(resolution, Resolution)
        assert answer is not None
        if isinstance(answer, Refusal):
            response = pb.AppendResponse(status=answer.status, header=resolution.header)
            if answer.status == pb.REGISTER_MISMATCH:
                response.registers.CopyFrom(answer.registers)
            self._ended(append, State.ERROR, response.SerializeToString())
            return
        commit = member.commit
        assert commit is not None
        self._committed(
            append,
            CommittedAppend(
                resolution,
                commit,
                commit.begin,
                commit.sum,
                answer.registers,
                append.whole.chunks,
                member.durability,
            ),
        )

    def _leave_line(self) -> None:
        """Take all followers out of the line that no group has taken along."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        for append in self._queue:
            if append.waiting is not None and not append.is_taken:
                joined[0].leave(append.waiting)
                append.waiting = None

    # -- Outcomes ------------------------------------------------------------------------------------------------------

    def _committed(self, append: LaneAppend, committed: CommittedAppend) -> None:
        count(self._broker, committed.length, append.begun)
        self._ended(append, State.FINISHED, self._answers.encode(committed))

    def _ended(self, append: LaneAppend, state: State, outcome: Answer) -> None:
        self._broker.metrics.appends.count(state)
        if not self._closed:
            append.answer(outcome)
