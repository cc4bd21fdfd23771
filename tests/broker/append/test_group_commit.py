"""Group commit: a group's outcome is that of its appends one by one."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import Commit, JournalSnapshot, Refuse, decide, next_fragment
from coranto_broker.append.group_commit import GroupPlan, gather
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.ownership import Signal
from coranto_broker.replication import waiting_appends
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.waiting_appends import AppendRange, Line, Refusal, WaitingAppend, Whole
from coranto_broker.spool.spool import CommittedState, ProposalEffect, Spool, new_sum

J = "a/journal"
NOW = 1_700_000_000.0
ODD = pb.AppendRequest(journal=J, suspend=pb.AppendRequest.SUSPEND_NO_RESUME)
Answer = tuple[str, int, int, tuple[tuple[str, str], ...]]


@dataclass
class Journal:
    """A pure spool and what is known of its fragments, with the effects of appends."""

    spec: pb.JournalSpec
    spool: Spool = field(default_factory=lambda: Spool(J))
    content: bytes = b""
    first: int | None = None
    fragments: list[tuple[int, int, bytes]] = field(default_factory=list)
    proposals: int = 0

    @property
    def known(self) -> IndexSummary:
        return IndexSummary(self.first or 0, self.spool.end, self.first is None)

    @property
    def snapshot(self) -> JournalSnapshot:
        return JournalSnapshot(self.spec, self.spool.committed, self.known, NOW)

    def roll(self, to: Fragment | None) -> None:
        if to is not None:
            self._decide(to, self.spool.registers)

    def commit(self, content: bytes, registers: pb.LabelSet) -> None:
        self.spool.extend(content)
        self.content += content
        self._decide(self.spool.next_fragment(), registers)
        self.proposals += 1
        if content and self.first is None:
            self.first = self.spool.fragment.begin

    def _decide(self, proposal: object, registers: pb.LabelSet) -> None:
        decision = self.spool.decide(proposal, registers, NOW)  # type: ignore[arg-type]
        assert decision.effect is not ProposalEffect.MISMATCH
        if decision.completed is not None:
            done = decision.completed.fragment
            self.fragments.append((done.begin, done.end, done.sum))
        self.spool.adopt(decision)


def answered(status: str, begin: int, end: int, registers: pb.LabelSet) -> Answer:
    return status, begin, end, tuple((label.name, label.value) for label in registers.labels)


def one_by_one(journal: Journal, appends: list[tuple[pb.AppendRequest, bytes]]) -> list[Answer]:
    """Each append is checked, rolls the fragment if that is due, and commits under a proposal of its own."""
    answers = []
    for request, content in appends:
        found = decide(request, journal.snapshot, len(content))
        if isinstance(found, Refuse):
            answers.append(answered(pb.Status.Name(found.status), 0, 0, found.registers))
            continue
        assert isinstance(found, Commit)
        journal.roll(found.roll)
        begin = journal.spool.end
        journal.commit(content, found.registers)
        answers.append(answered("OK", begin, journal.spool.end, found.registers))
    return answers


class Resolved:
    """The resolution that members share with their leader."""

    def __init__(self, spec: pb.JournalSpec, signal: Signal) -> None:
        self.spec = spec
        self.invalidated: Signal | None = signal


def in_groups(journal: Journal, appends: list[tuple[pb.AppendRequest, bytes]]) -> list[Answer]:
    """Whoever is first leads, and takes along who may follow."""
    resolved = Resolved(journal.spec, Signal())
    tokens = FlowControl()
    answers: dict[int, Answer] = {}
    line = Line()
    members = []
    for request, content in appends:
        members.append(WaitingAppend(request, Whole(content, 1), resolved))
        line.join(members[-1])
    for number, leader in enumerate(members):
        if number in answers:
            continue
        line.leave(leader)
        request, content = leader.request, leader.whole.content
        found = decide(request, journal.snapshot, len(content))
        if isinstance(found, Refuse):
            answers[number] = answered(pb.Status.Name(found.status), 0, 0, found.registers)
            continue
        assert isinstance(found, Commit)
        journal.roll(found.roll)
        plan = GroupPlan(journal.snapshot)
        place = plan.lead(len(content), found.registers)
        answers[number] = answered("OK", place.begin, place.end, place.registers)
        along, refused = gather(line, plan, resolved, len(content), tokens)
        for each, member in enumerate(members):
            if member.answer is None or each in answers:
                continue
            line.leave(member)
            if isinstance(member.answer, Refusal):
                assert member in refused
                assert not member.outcome.done(), "the group has not committed yet"
                answers[each] = answered(pb.Status.Name(member.answer.status), 0, 0, member.answer.registers)
            else:
                assert member in along
                assert isinstance(member.answer, AppendRange)
                answers[each] = answered("OK", member.answer.begin, member.answer.end, member.answer.registers)
                member.commit_to(journal.spool.fragment)
                assert member.commit is not None
                assert member.commit.sum == hashlib.sha1(member.whole.content, usedforsecurity=False).digest()
        journal.commit(b"".join([content, *(member.whole.content for member in along)]), plan.registers)
    return [answers[number] for number in range(len(appends))]


owners = st.sampled_from(["me", "you"])
contents = st.binary(min_size=0, max_size=6)


@st.composite
def append_requests(draw: st.DrawFn) -> tuple[pb.AppendRequest, bytes]:
    content = draw(contents)
    request = pb.AppendRequest(journal=J, offset=draw(st.one_of(st.just(0), st.integers(0, 40))))
    if draw(st.booleans()):
        strict = draw(st.sampled_from(["", f",{labels.HELD}"]))
        request.check_registers.CopyFrom(labels.parse_selector(f"owner={draw(owners)}{strict}"))
    if content and draw(st.booleans()):
        request.union_registers.CopyFrom(
            labels.label_set({"owner": draw(owners)} | ({labels.HELD: ""} if draw(st.booleans()) else {}))
        )
    if content and draw(st.booleans()):
        request.subtract_registers.CopyFrom(labels.label_set(owner=draw(owners)))
    if draw(st.integers(0, 9)) == 0:
        request.suspend = pb.AppendRequest.SUSPEND_KEEP
    return request, content


@given(
    st.lists(append_requests(), min_size=1, max_size=12),
    st.sampled_from([3, 8, 1 << 20]),
    st.sampled_from([0, 70]),
    st.sampled_from([pb.JournalSpec.O_RDWR, pb.JournalSpec.O_RDWR, pb.JournalSpec.O_RDONLY]),
)
@settings(max_examples=300, deadline=None)
def test_a_group_has_the_outcome_of_its_appends_one_by_one(
    appends: list[tuple[pb.AppendRequest, bytes]], length: int, begin: int, flags: pb.JournalSpec.Flag.ValueType
) -> None:
    def journal() -> Journal:
        made = Journal(pb.JournalSpec(name=J, replication=1, flags=flags))
        made.spec.fragment.length = length
        made.spec.fragment.compression_codec = pb.GZIP
        if begin:
            start = next_fragment(made.spool.committed, begin, made.spec.fragment, NOW)
            made.spool.adopt(made.spool.decide(start, pb.LabelSet(), NOW))
        return made

    async def grouped(journal: Journal) -> list[Answer]:
        return in_groups(journal, appends)

    sequential, group = journal(), journal()
    expected = one_by_one(sequential, appends)
    assert asyncio.run(grouped(group)) == expected
    assert group.content == sequential.content
    assert group.fragments == sequential.fragments
    assert group.spool.committed == sequential.spool.committed
    assert group.proposals <= sequential.proposals
    total = new_sum()
    total.update(group.content[group.spool.fragment.begin - begin :])
    if group.spool.fragment.length:
        assert (group.spool.fragment.sum, group.spool.fragment.codec) == (total.digest(), Codec.GZIP)


async def test_only_those_that_resolved_alike_go_along() -> None:
    spec = pb.JournalSpec(name=J, replication=1)
    spec.fragment.length, spec.fragment.compression_codec = 1 << 20, pb.NONE
    signal = Signal()
    leader = Resolved(spec, signal)
    changed = pb.JournalSpec()
    changed.CopyFrom(spec)
    changed.flags = pb.JournalSpec.O_RDONLY
    spool = Spool(J)
    for other in (Resolved(spec, Signal()), Resolved(changed, signal)):
        line = Line()
        for resolution in (leader, other, leader):
            line.join(WaitingAppend(pb.AppendRequest(journal=J), Whole(b"x", 1), resolution))
        plan = GroupPlan(JournalSnapshot(spec, spool.committed, IndexSummary(), NOW))
        assert [member.answer for member in gather(line, plan, leader, 0, FlowControl()).members] == [
            AppendRange(0, 1, pb.LabelSet())
        ]


async def test_a_leader_waits_for_those_that_are_being_received(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_appends, "GATHER_SECONDS", 600.0)
    line = Line()
    line.expect()
    line.expect()
    gathering = asyncio.create_task(line.gathered())
    await asyncio.sleep(0)
    line.came()
    line.join(WaitingAppend(pb.AppendRequest(journal=J), Whole(b"x", 1), Resolved(pb.JournalSpec(), Signal())))
    line.came()
    await asyncio.wait_for(gathering, 60)
    assert line._passes == 0


async def test_leaders_wait_for_slow_clients_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_appends, "GATHER_SECONDS", 0.0)
    line = Line()
    waits = 0

    async def lead() -> bool:
        """Return whether the leader waited."""
        task = asyncio.create_task(line.gathered())
        await asyncio.sleep(0)
        waited = not task.done()
        await asyncio.wait_for(task, 60)
        return waited

    assert not await lead()  # Nobody is to come.
    line.expect()
    for _ in range(200):
        waits += await lead()
    assert waits == 8  # After 1, 3, 7, 15, 31, 63 and 63 others.


class Forgetful(GroupPlan):
    """A plan that decides each append in full."""

    def _is_steady(self) -> bool:
        return False


@given(
    st.lists(st.tuples(st.sampled_from((pb.AppendRequest(journal=J), ODD)), st.integers(0, 5)), max_size=12),
    st.integers(0, 3),
    st.integers(0, 30),
    st.sampled_from((IndexSummary(0, 0, empty=True), IndexSummary(0, 9, empty=False), IndexSummary(3, 9, empty=False))),
    st.integers(1, 20),
    st.sampled_from((pb.JournalSpec.O_RDWR, pb.JournalSpec.O_RDONLY)),
)
@settings(max_examples=200, deadline=None)
def test_a_steady_range_admits_the_same_appends_as_full_decisions(
    appends: list[tuple[pb.AppendRequest, int]],
    begin: int,
    length: int,
    known: IndexSummary,
    limit: int,
    flags: pb.JournalSpec.Flag.ValueType,
) -> None:
    spec = pb.JournalSpec(name=J, flags=flags)
    spec.fragment.length, spec.fragment.compression_codec = limit, pb.NONE
    committed = CommittedState(
        Fragment(J, begin, begin + length, ZERO_SUM, Codec.NONE), pb.LabelSet(), NOW if length else 0
    )
    snapshot = JournalSnapshot(spec, committed, known, NOW)
    plan, other = GroupPlan(snapshot), Forgetful(snapshot)
    for request, size in appends:
        assert plan.admit(request, size) == other.admit(request, size)
