"""Group commit: small appends that wait for the pipeline commit with the append that has it, under one proposal.

An append is *whole* once its client has sent everything up to the end of the stream, and it is small. While a whole
append waits for the pipeline, its `WaitingAppend` stands in the replica's line. The *leader* is another whole append
that has the pipeline and is about to propose. It takes along as many members as may follow it, in their order: their
contents are written one after the other, one proposal commits all of them, and each append gets its own answer.

`Course` decides which appends may follow. It tracks the journal as it will be once all admitted appends have committed,
and checks each append against that. So a group has the same outcome as its appends one by one. A group ends before an
append that needs more than a check: a new fragment, an explicit offset that the replicas must roll to, a change of the
journal's suspension, or tokens of a limited rate. That append gets the pipeline in its turn.

A group does not depend on its members' clients. If a client goes away before the proposal, its append leaves no trace.
If it goes away later, its content is part of the journal, as with any append whose answer is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from coranto.fragments.fragment import Fragment
from coranto.specs.validation import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import preconditions
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.replication.waiting_appends import AppendRange, Refusal, Resolved, WaitingAppend
from coranto_broker.spool.spool import CommittedState

MAX_GROUP_BYTES = 1 << 20
"""Most content of one group, in bytes. It must fit into one message to each replica."""

MAX_GROUP_APPENDS = 256
"""Most appends of one group. Admitting them must not block the event loop for long."""

PROPOSALS_IN_FLIGHT = 2
"""A whole append waits while this many proposals are unacknowledged. Meanwhile others gather behind it."""


class Course:
    """The journal as it will be once all appends admitted so far have committed."""

    def __init__(self, spec: pb.JournalSpec, committed: CommittedState, known: IndexSummary, now: float) -> None:
        """`committed` and `known` are the arguments of `preconditions.check`. `now` is wall time in seconds."""
        self._spec = spec
        self._committed = committed
        self._known = known
        self._now = now
        self._plain_fits = False
        """True once a plain append was admitted. Others may follow while the fragment is not longer than the spec's
        length."""

    @property
    def registers(self) -> pb.LabelSet:
        return self._committed.registers

    def take(self, request: pb.AppendRequest, length: int) -> AppendRange:
        """Admit an append whose preconditions have been checked."""
        return self._take(length, preconditions.next_registers(self._committed.registers, request))

    def admit(self, request: pb.AppendRequest, length: int) -> AppendRange | Refusal | None:
        """Check an append's preconditions and admit or refuse it. None means that it must get the pipeline itself."""
        spec, now, committed = self._spec, self._now, self._committed
        plain = is_plain(request)
        if plain and self._plain_fits and 0 < committed.fragment.length <= spec.fragment.length:
            return self.take(request, length)
        if length and not (may_write(spec) and preconditions.may_have_content(request)):
            return None
        verdict = preconditions.check(request, spec, committed, self._known, now)
        if verdict.status in (pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET):
            return Refusal(verdict.status, committed.registers)
        if verdict.status != pb.OK or verdict.resync or verdict.suspend is not None:
            return None
        if preconditions.propose(committed, verdict.roll_to, spec.fragment, now) != committed.fragment:
            return None
        registers = preconditions.next_registers(committed.registers, request)
        if preconditions.outgrown(committed.registers, registers) is not None:
            return None  # It gets the pipeline, and then the reason.
        if plain and length and committed.fragment.length and not self._known.empty and not verdict.roll_to:
            self._plain_fits = True  # The conditions do not change as the fragment grows.
        return self._take(length, registers)

    def _take(self, length: int, registers: pb.LabelSet) -> AppendRange:
        fragment = self._committed.fragment
        begin, end = fragment.end, fragment.end + length
        if length:
            # The old sum can stay: nobody asks for the sum of content that is not written yet.
            extended = Fragment(fragment.journal, fragment.begin, end, fragment.sum, fragment.codec)
            self._committed = CommittedState(extended, registers, self._committed.first_append_time or self._now)
            known = self._known
            self._known = IndexSummary(fragment.begin if known.empty else known.begin, max(known.end, end), empty=False)
        return AppendRange(begin, end, registers)


def is_plain(request: pb.AppendRequest) -> bool:
    """Return True if an append names its journal and sets no header, condition, offset, register or suspension."""
    return len(request.ListFields()) == 1 + request.do_not_proxy + (request.min_etcd_revision != 0)


class Tokens(Protocol):
    """The tokens of a journal's append rate (a `FlowControl`)."""

    def affords(self, size: int) -> bool: ...
    def spend(self, size: int) -> None: ...


def gather(
    line: Iterable[WaitingAppend], course: Course, leader: Resolved, size: int, tokens: Tokens
) -> list[WaitingAppend]:
    """Take along the members that may follow the leader, and return those to commit.

    The leader's content has `size` bytes. Members must have the leader's journal spec and be invalidated by the same
    signal. A refused member gets its answer at once. Does not suspend: a member is taken along only if it commits with
    this very proposal.
    """
    members: list[WaitingAppend] = []
    for member in line:
        if not member.is_waiting:
            continue
        length = len(member.whole.content)
        resolution = member.resolution
        if resolution.invalidated is not leader.invalidated or resolution.spec != leader.spec:
            break
        if len(members) + 1 == MAX_GROUP_APPENDS or size + length > MAX_GROUP_BYTES or not tokens.affords(length):
            break
        answer = course.admit(member.request, length)
        if answer is None:
            break
        member.take_along(answer)
        if isinstance(answer, Refusal):
            member.settle(None)
            continue
        tokens.spend(length)
        members.append(member)
        size += length
    return members
