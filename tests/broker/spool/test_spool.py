"""The spool's transitions: every state and every kind of request, and invariants over any sequence of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool.spool import ProposalEffect, Spool, empty_at
from tests.sampling import examples

JOURNAL = "a/journal"
NONE = pb.LabelSet()
OTHER = labels.label_set(other="register")


def commit(spool: Spool, content: bytes, registers: pb.LabelSet = NONE, now: float = 10.0) -> None:
    spool.check_content(spool.delta)
    spool.extend(content)
    decision = spool.decide(spool.next_fragment(), registers, now)
    assert decision.effect is ProposalEffect.COMMIT
    spool.adopt(decision)


def spool_in(state: str) -> Spool:
    """Return a spool at offset 100 without content, or at [100, 103) with it, perhaps with two bytes of delta."""
    spool = Spool(JOURNAL)
    spool.adopt(spool.decide(empty_at(spool.fragment, 100, Codec.GZIP), NONE, 1.0))
    if "content" in state:
        commit(spool, b"abc")
    if "delta" in state:
        spool.check_content(0)
        spool.extend(b"de")
    return spool


STATES = ["empty", "content", "empty with delta", "content with delta"]

# Outcomes of proposals, by the spool's state in the order of STATES.
KEEP, BACK, COMMIT, MISMATCH = (
    ProposalEffect.KEEP,
    ProposalEffect.ROLL_BACK,
    ProposalEffect.COMMIT,
    ProposalEffect.MISMATCH,
)
TABLE: dict[str, tuple[tuple[ProposalEffect, bool], ...]] = {
    # proposal:              (outcome, rolled) in each state
    "own fragment": ((KEEP, True), (KEEP, False), (BACK, True), (BACK, False)),
    "own, other registers": ((MISMATCH, True), (MISMATCH, False), (MISMATCH, True), (MISMATCH, False)),
    "extended by delta": ((KEEP, True), (KEEP, False), (COMMIT, False), (COMMIT, False)),
    "extended, other registers": ((MISMATCH, True), (MISMATCH, False), (COMMIT, False), (COMMIT, False)),
    "extended, wrong sum": ((MISMATCH, False), (MISMATCH, False), (MISMATCH, False), (MISMATCH, False)),
    "extended, wrong codec": ((MISMATCH, True), (MISMATCH, False), (MISMATCH, False), (MISMATCH, False)),
    "part of delta": ((MISMATCH, True), (MISMATCH, True), (MISMATCH, False), (MISMATCH, False)),
    "empty at end": ((KEEP, True), (KEEP, True), (BACK, True), (BACK, True)),
    "empty at end, other registers": ((MISMATCH, True), (MISMATCH, True), (MISMATCH, True), (MISMATCH, True)),
    "empty beyond": ((KEEP, True), (KEEP, True), (BACK, True), (BACK, True)),
    "empty beyond, other registers": ((KEEP, True), (KEEP, True), (BACK, True), (BACK, True)),
    "content beyond": ((MISMATCH, True), (MISMATCH, True), (MISMATCH, True), (MISMATCH, True)),
    "behind": ((MISMATCH, False), (MISMATCH, False), (MISMATCH, False), (MISMATCH, False)),
}


def proposal_of(kind: str, spool: Spool) -> tuple[Fragment, pb.LabelSet]:
    own, extended = spool.fragment, spool.next_fragment()
    wrong = b"\x01" * 20
    registers = OTHER if "other registers" in kind else NONE
    fragments = {
        "own fragment": own,
        "own, other registers": own,
        "extended by delta": extended,
        "extended, other registers": extended,
        "extended, wrong sum": replace(extended, sum=wrong, begin=own.begin - 1),
        "extended, wrong codec": replace(extended, codec=Codec.SNAPPY),
        "part of delta": replace(own, end=own.end + 1, sum=wrong),
        "empty at end": empty_at(own, own.end, own.codec),
        "empty at end, other registers": empty_at(own, own.end, own.codec),
        "empty beyond": empty_at(own, own.end + 50, Codec.NONE),
        "empty beyond, other registers": empty_at(own, own.end + 50, Codec.NONE),
        "content beyond": replace(own, end=own.end + 50, sum=wrong),
        "behind": Fragment(JOURNAL, 90, 95, wrong, own.codec),
    }
    return fragments[kind], registers


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("state", STATES)
def test_every_state_and_proposal(state: str, kind: str) -> None:
    spool = spool_in(state)
    before, delta = spool.committed, spool.delta
    proposal, registers = proposal_of(kind, spool)
    expected, rolled = TABLE[kind][STATES.index(state)]
    if kind == "extended, wrong codec" and state == "empty":
        # An empty proposal at our end rolls to its codec.
        expected = KEEP

    decision = spool.decide(proposal, registers, now=20.0)
    assert (spool.committed, spool.delta) == (before, delta), "deciding must change nothing"
    assert (decision.effect, decision.rolled) == (expected, rolled)

    spool.adopt(decision)
    response = decision.response()
    if expected is MISMATCH:
        assert response.status == pb.PROPOSAL_MISMATCH
        assert Fragment.from_wire(response.fragment) == spool.fragment
        assert response.HasField("registers")
        assert spool.delta == (0 if rolled else delta)
    else:
        assert response == pb.ReplicateResponse(status=pb.OK)
        assert spool.fragment == proposal
        assert spool.registers == registers
        assert spool.delta == 0
    if rolled:
        assert decision.completed == (before if before.fragment.length else None)
        if proposal.end > before.fragment.end:
            assert spool.registers == registers
    else:
        assert decision.completed is None


def test_a_mismatch_leaves_the_delta_to_be_committed() -> None:
    spool = spool_in("content with delta")
    good = spool.next_fragment()
    spool.adopt(spool.decide(replace(good, sum=b"\x07" * 20), NONE, 5.0))
    decision = spool.decide(good, NONE, 5.0)
    assert decision.effect is ProposalEffect.COMMIT


def test_first_append_time_is_the_time_of_the_first_commit_of_a_fragment() -> None:
    spool = spool_in("empty")
    commit(spool, b"one", now=30.0)
    commit(spool, b"two", now=40.0)
    assert spool.committed.first_append_time == 30.0
    spool.adopt(spool.decide(empty_at(spool.fragment, spool.end, Codec.NONE), NONE, 50.0))
    assert spool.committed.first_append_time == 0.0


@pytest.mark.parametrize("delta", [-1, 1, 3])
def test_content_at_a_wrong_delta_is_refused(delta: int) -> None:
    spool = spool_in("content with delta")
    with pytest.raises(InvalidInput, match=f"at delta {delta} but this spool expects 2"):
        spool.check_content(delta)


def test_roll_back_restores_the_sum() -> None:
    spool = spool_in("content with delta")
    spool.roll_back()
    assert spool.next_fragment() == spool.fragment
    commit(spool, b"xyz")
    assert spool.fragment.sum == hashlib.sha1(b"abcxyz").digest()


class SpoolMachine(RuleBasedStateMachine):
    """Runs any requests in any order, against a model that keeps all bytes."""

    @initialize()
    def start(self) -> None:
        self.spool = Spool(JOURNAL)
        self.committed: dict[int, int] = {}  # The byte that committed at each offset.
        self.content = b""  # Of the current fragment.
        self.pending = b""
        self.registers = NONE
        self.end = 0

    @rule(content=st.binary(min_size=1, max_size=5))
    def send_content(self, content: bytes) -> None:
        assert self.spool.check_content(len(self.pending)) == len(self.content) + len(self.pending)
        self.spool.extend(content)
        self.pending += content

    @rule(delta=st.integers(-3, 20))
    def send_content_elsewhere(self, delta: int) -> None:
        if delta != len(self.pending):
            with pytest.raises(InvalidInput):
                self.spool.check_content(delta)

    @rule(
        begin=st.integers(-3, 3),
        end=st.integers(-3, 8),
        sum=st.sampled_from(["zero", "own", "next", "random"]),
        codec=st.sampled_from(Codec),
        keep_registers=st.booleans(),
    )
    def propose(self, begin: int, end: int, sum: str, codec: Codec, keep_registers: bool) -> None:
        own = self.spool.fragment
        sums = {"zero": ZERO_SUM, "own": own.sum, "next": self.spool.next_fragment().sum, "random": b"\x09" * 20}
        first = max(0, own.begin + begin)
        proposal = Fragment(JOURNAL, first, max(first, own.end + end), sums[sum], codec)
        self.offer(proposal, self.registers if keep_registers else labels.label_set(at=str(end + 10)))

    @rule(keep_registers=st.booleans())
    def propose_to_commit(self, keep_registers: bool) -> None:
        registers = self.registers if keep_registers else labels.label_set(at=str(self.end))
        self.offer(self.spool.next_fragment(), registers)

    @rule(beyond=st.integers(0, 9), codec=st.sampled_from(Codec))
    def propose_to_roll(self, beyond: int, codec: Codec) -> None:
        self.offer(empty_at(self.spool.fragment, self.end + beyond, codec), self.registers)

    @rule()
    def propose_to_roll_back(self) -> None:
        self.offer(self.spool.fragment, self.registers)

    @rule()
    def lose_the_stream(self) -> None:
        self.spool.roll_back()
        self.pending = b""

    def offer(self, proposal: Fragment, registers: pb.LabelSet) -> None:
        decision = self.spool.decide(proposal, registers, now=1.0)
        if decision.completed is not None:
            assert decision.completed.fragment.sum == hashlib.sha1(self.content).digest()
        self.spool.adopt(decision)
        if decision.effect is ProposalEffect.COMMIT:
            assert self.pending, "an empty delta cannot commit"
            for index, byte in enumerate(self.pending):
                assert self.end + index not in self.committed, "an offset was written twice"
                self.committed[self.end + index] = byte
            self.content += self.pending
            self.end += len(self.pending)
            self.pending, self.registers = b"", registers
            return
        if decision.rolled:
            if proposal.end > self.end:
                self.registers = registers
            self.end, self.content, self.pending = proposal.end, b"", b""
        elif decision.effect is not ProposalEffect.MISMATCH:
            self.pending = b""

    @invariant()
    def agrees_with_the_model(self) -> None:
        fragment = self.spool.fragment
        assert fragment.end == self.end
        assert fragment.length == len(self.content)
        assert fragment.sum == (hashlib.sha1(self.content).digest() if self.content else ZERO_SUM)
        assert self.spool.delta == len(self.pending)
        assert self.spool.registers == self.registers
        following = self.spool.next_fragment()
        assert following.end == self.end + len(self.pending)
        if self.pending:
            assert following.sum == hashlib.sha1(self.content + self.pending).digest()


TestSpoolMachine = SpoolMachine.TestCase
TestSpoolMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_content_may_be_hashed_by_another_thread() -> None:
    plain, helped = Spool(JOURNAL), Spool(JOURNAL)
    work = []
    for number, content in enumerate((b"one", b"two", b"three")):
        plain.extend(content)
        if number:
            work.append(helped.extend_later(content))
        else:
            helped.extend(content)
        assert helped.delta == plain.delta
    for job in work:
        job()
    assert helped.next_fragment() == plain.next_fragment()
    assert helped.next_fragment().sum == hashlib.sha1(b"onetwothree").digest()

    late = helped.extend_later(b"never committed")
    helped.roll_back()
    late()  # The content was rolled back before.
    helped.extend(b"four")
    assert helped.next_fragment().sum == hashlib.sha1(b"four").digest()
