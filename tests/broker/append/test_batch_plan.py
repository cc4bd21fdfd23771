"""Plans of batches: a batch has the same outcome as its appends one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import BatchPlan
from coranto_broker.append.decision import Commit, JournalSnapshot, Refuse, decide, next_fragment, steady
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.spool import CommittedState, ProposalEffect, Spool, new_sum

J = "a/journal"
NOW = 1_700_000_000.0
ODD = pb.AppendRequest(journal=J, suspend=pb.AppendRequest.SUSPEND_NO_RESUME)
Answer = tuple[str, int, int, tuple[tuple[str, str], ...]]


@dataclass
class Journal:
    """A pure spool with the summary of its fragments, and the effects of appends."""

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
    """Check each append, roll the fragment if due, and commit under a separate proposal."""
    answers = []
    for request, content in appends:
        found = decide(request, journal.snapshot, content)
        if isinstance(found, Refuse):
            answers.append(answered(pb.Status.Name(found.status), 0, 0, found.registers))
            continue
        assert isinstance(found, Commit)
        journal.roll(found.roll)
        begin = journal.spool.end
        journal.commit(content, found.registers)
        answers.append(answered("OK", begin, journal.spool.end, found.registers))
    return answers


def in_batches(journal: Journal, appends: list[tuple[pb.AppendRequest, bytes]]) -> list[Answer]:
    """Decide on the first append, and batch those behind it that the plan admits."""
    answers: list[Answer] = []
    while len(answers) < len(appends):
        request, content = appends[len(answers)]
        found = decide(request, journal.snapshot, content)
        if isinstance(found, Refuse):
            answers.append(answered(pb.Status.Name(found.status), 0, 0, found.registers))
            continue
        assert isinstance(found, Commit)
        journal.roll(found.roll)
        plan = BatchPlan(journal.snapshot)
        place = plan.commit(len(content), found.registers)
        answers.append(answered("OK", place.begin, place.end, found.registers))
        contents = [content]
        for following, more in appends[len(answers) :]:
            admitted = plan.admit(following, more)
            if admitted is None:
                break
            if isinstance(admitted, Refuse):
                answers.append(answered(pb.Status.Name(admitted.status), 0, 0, admitted.registers))
            else:
                answers.append(answered("OK", *admitted))
                contents.append(more)
        journal.commit(b"".join(contents), plan.registers)
    return answers


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
def test_a_batch_has_the_outcome_of_its_appends_one_by_one(
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

    sequential, batch = journal(), journal()
    expected = one_by_one(sequential, appends)
    assert in_batches(batch, appends) == expected
    assert batch.content == sequential.content
    assert batch.fragments == sequential.fragments
    assert batch.spool.committed == sequential.spool.committed
    assert batch.proposals <= sequential.proposals
    total = new_sum()
    total.update(batch.content[batch.spool.fragment.begin - begin :])
    if batch.spool.fragment.length:
        assert (batch.spool.fragment.sum, batch.spool.fragment.codec) == (total.digest(), Codec.GZIP)


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
    plan, other = BatchPlan(snapshot, steady(snapshot)), BatchPlan(snapshot)
    for request, size in appends:
        assert plan.admit(request, bytes(size)) == other.admit(request, bytes(size))
