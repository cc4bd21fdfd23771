"""Group commit: small appends that wait for the pipeline commit with the append that has it, under one proposal.

An append is *whole* once its client has sent everything up to the end of the stream, and it is small. While a whole
append waits for the pipeline, its `WaitingAppend` stands in the replica's line. The *leader* is another whole append
that has the pipeline and is about to propose. It takes along as many members as may follow it, in their order: their
contents are written one after the other, one proposal commits all of them, and each append gets its own answer.

`GroupPlan` tracks the journal as it will be once all admitted appends have committed, and has
`coranto_broker.append.decision` decide each append from that. So a group has the same outcome as its appends one by
one. A group ends before an append that needs more than a decision: a new fragment, an explicit offset that the replicas
must roll to, a change of the journal's suspension, or tokens of a limited rate. That append gets the pipeline in its
turn.

A group does not depend on its members' clients. If a client goes away before the proposal, its append leaves no trace.
If it goes away later, its content is part of the journal, as with any append whose answer is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import Commit, JournalSnapshot, Refuse, decide, extend, is_plain, is_torn, steady
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.replication.waiting_appends import AppendRange, Refusal, Resolved, WaitingAppend
from coranto_broker.spool.spool import CommittedState
from coranto_broker.spool.steady import Steady

MAX_GROUP_BYTES = 1 << 20
"""Most content of one group, in bytes. It must fit into one message to each replica."""

MAX_GROUP_APPENDS = 256
"""Most appends of one group. Admitting them must not block the event loop for long."""

PROPOSALS_IN_FLIGHT = 2
"""A whole append waits while this many proposals are unacknowledged. Meanwhile others gather behind it."""


_FINAL_REFUSALS = (pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET)
"""The refusals that say everything with their status and registers. Others are for the state machine to answer."""


class GroupPlan:
    """The journal as it will be once all appends admitted so far have committed."""

    def __init__(self, snapshot: JournalSnapshot) -> None:
        """`snapshot` is that on which the leader was decided."""
        self._leader = snapshot
        self._committed = snapshot.committed
        self._known = snapshot.known
        self._steady: Steady | None = None
        self._steadiness_known = False

    @property
    def registers(self) -> pb.LabelSet:
        return self._committed.registers

    def lead(self, length: int, registers: pb.LabelSet) -> AppendRange:
        """Admit the leader's append, which may commit and leaves these registers."""
        return self._admit(length, registers)

    def admit(self, request: pb.AppendRequest, length: int, *, torn: bool = False) -> AppendRange | Refusal | None:
        """Admit or refuse an append. None means that it must get the pipeline itself.

        `torn` is as in `decide`.
        """
        if not length and request.HasField("durability"):
            return None  # Replicas have to be asked.
        if length and not torn and self._is_steady():
            registers = self.registers if is_plain(request) else extend(request, self.registers)
            if registers is not None:
                return self._admit(length, registers)
        try:
            found = decide(request, self._snapshot(), length, torn=torn)
        except InvalidInput:
            return None  # It gets the pipeline, and then the reason.
        if isinstance(found, Refuse) and found.status in _FINAL_REFUSALS:
            return Refusal(found.status, found.registers)
        if not isinstance(found, Commit) or found.roll is not None:
            return None
        return self._admit(length, found.registers)

    def _snapshot(self) -> JournalSnapshot:
        return replace(self._leader, committed=self._committed, known=self._known)

    def _is_steady(self) -> bool:
        """Return True if appends with content may follow without a roll. Admitting others does not change that."""
        fragment = self._committed.fragment
        if not self._steadiness_known and fragment.length:
            self._steadiness_known = True
            self._steady = steady(self._snapshot())
        return self._steady is not None and self._steady.holds(fragment, self._leader.now)

    def _admit(self, length: int, registers: pb.LabelSet) -> AppendRange:
        fragment, known = self._committed.fragment, self._known
        begin, end = fragment.end, fragment.end + length
        if length:
            # The old sum can stay: nobody asks for the sum of content that is not written yet.
            extended = Fragment(fragment.journal, fragment.begin, end, fragment.sum, fragment.codec)
            first_append_time = self._committed.first_append_time or self._leader.now
            self._committed = CommittedState(extended, registers, first_append_time)
            self._known = IndexSummary(fragment.begin if known.empty else known.begin, max(known.end, end), empty=False)
        return AppendRange(begin, end, registers)


class TakenGroup(NamedTuple):
    """Appends that a leader takes along: `members` commit with it; `refused` ones are refused once it has committed."""

    members: list[WaitingAppend]
    refused: list[WaitingAppend]


class Tokens(Protocol):
    """The tokens of a journal's append rate (a `FlowControl`)."""

    def affords(self, size: int) -> bool: ...
    def spend(self, size: int) -> None: ...


def gather(
    line: Iterable[WaitingAppend],
    plan: GroupPlan,
    leader: Resolved,
    size: int,
    tokens: Tokens,
    *,
    whole_lines: bool = False,
) -> TakenGroup:
    """Take along the members that may follow the leader, and those that are refused because of what they follow.

    The leader's content has `size` bytes. Members must have the leader's journal spec and be invalidated by the same
    signal. `whole_lines` is as in `is_torn`. A refusal may depend on what the group appends, so it is
    answered only after the group has committed. Does not suspend: a member is taken along only if it commits with this
    very proposal.
    """
    members: list[WaitingAppend] = []
    refused: list[WaitingAppend] = []
    for member in line:
        if not member.is_waiting:
            continue
        length = len(member.whole.content)
        resolution = member.resolution
        if resolution.invalidated is not leader.invalidated or resolution.spec != leader.spec:
            break
        if len(members) + 1 == MAX_GROUP_APPENDS or size + length > MAX_GROUP_BYTES or not tokens.affords(length):
            break
        answer = plan.admit(member.request, length, torn=is_torn(member.whole.content, whole_lines))
        if answer is None:
            break
        member.take_along(answer)
        if isinstance(answer, Refusal):
            refused.append(member)
            continue
        tokens.spend(length)
        members.append(member)
        size += length
    return TakenGroup(members, refused)
