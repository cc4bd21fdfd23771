"""The decision on an append, and its shorter forms for batches and inline commits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import AppendRange, BatchPlan
from coranto_broker.append.decision import (
    AppendDecision,
    ChangeSuspension,
    Commit,
    JournalSnapshot,
    Need,
    Refuse,
    Synchronize,
    apply_registers,
    decide,
    is_plain,
    judge_content,
    next_fragment,
    steady,
)
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.spool import CommittedState, empty_at

JOURNAL = "a/journal"
NOW = 1_700_000_000.0
DAY = 24 * 60 * 60
Suspend = pb.JournalSpec.Suspend
Wish = pb.AppendRequest
SPEC = pb.JournalSpec(name=JOURNAL, fragment=pb.JournalSpec.Fragment(length=1000, compression_codec=pb.SNAPPY))
REGISTERS = labels.label_set(author="me")
FULLY = ChangeSuspension(Suspend(level=Suspend.FULL, offset=100))


def committed(begin: int, end: int, first: float = 0.0, registers: pb.LabelSet | None = None) -> CommittedState:
    total = ZERO_SUM if begin == end else b"s" * 20
    return CommittedState(Fragment(JOURNAL, begin, end, total, Codec.GZIP), registers or pb.LabelSet(), first)


def check(
    request: pb.AppendRequest, spec: pb.JournalSpec, spool: CommittedState, begin: int, end: int, flushed_at: int = 0
) -> AppendDecision:
    return decide(request, JournalSnapshot(spec, spool, IndexSummary(begin, end, begin == end, flushed_at), NOW))


def rolled(spool: CommittedState, to: int = 0) -> Fragment:
    """Return the empty fragment that begins at `to`, or at the spool's end."""
    return empty_at(spool.fragment, to or spool.fragment.end, Codec(SPEC.fragment.compression_codec))


def request(**fields: object) -> pb.AppendRequest:
    return pb.AppendRequest(journal=JOURNAL, **fields)  # type: ignore[arg-type]


def test_an_ordinary_append_may_continue() -> None:
    assert check(request(), SPEC, committed(50, 100), 0, 100) == Commit(pb.LabelSet())
    empty = CommittedState(empty_at(committed(0, 0).fragment, 0, Codec.SNAPPY), pb.LabelSet())
    assert check(request(), SPEC, empty, 0, 0) == Commit(pb.LabelSet())


def test_content_below_its_durability_demand_is_refused_but_not_barriers() -> None:
    snapshot = JournalSnapshot(SPEC, committed(50, 100), IndexSummary(0, 100, False, 0), NOW, refusal="one zone")
    assert decide(request(), snapshot, b"x") == Refuse(pb.INSUFFICIENT_JOURNAL_BROKERS, pb.LabelSet(), "one zone")
    assert steady(snapshot) is None
    assert BatchPlan(snapshot).admit(request(), b"x") is None
    for content in (b"", None):  # Content is checked when it arrives.
        assert decide(request(), snapshot, content) == Commit(pb.LabelSet())
    assert judge_content(request(), SPEC, 1, REGISTERS, "one zone") == Refuse(
        pb.INSUFFICIENT_JOURNAL_BROKERS, REGISTERS, "one zone"
    )


def test_the_first_known_content_rolls() -> None:
    for first in (committed(0, 100), committed(60, 100)):
        assert check(request(), SPEC, first, first.fragment.begin, 100) == Commit(pb.LabelSet(), rolled(first))


@pytest.mark.parametrize(
    ("selector", "registers", "status"),
    [
        ("author=me", REGISTERS, pb.OK),
        ("author=you", REGISTERS, pb.REGISTER_MISMATCH),
        ("author=you", pb.LabelSet(), pb.OK),  # Empty registers satisfy every selector.
        ("!author", REGISTERS, pb.REGISTER_MISMATCH),
        (labels.HELD, pb.LabelSet(), pb.REGISTER_MISMATCH),  # Except selectors that check for a loss.
        (f"{labels.HELD},author=me", pb.LabelSet(), pb.REGISTER_MISMATCH),
        (f"{labels.HELD},author=me", labels.label_set({labels.HELD: "", "author": "me"}), pb.OK),
        (f"!{labels.HELD},author=me", pb.LabelSet(), pb.OK),
    ],
)
def test_registers_are_checked(selector: str, registers: pb.LabelSet, status: int) -> None:
    checked = request(check_registers=labels.parse_selector(selector))
    found = check(checked, SPEC, committed(50, 100, registers=registers), 0, 100)
    assert found == (Commit(registers) if status == pb.OK else Refuse(pb.REGISTER_MISMATCH, registers))


def test_registers_are_checked_before_offsets() -> None:
    checked = request(check_registers=labels.parse_selector("author=you"), offset=7)
    spool = committed(50, 100, registers=REGISTERS)
    assert check(checked, SPEC, spool, 0, 100) == Refuse(pb.REGISTER_MISMATCH, REGISTERS)


def test_an_append_at_the_start_finds_an_empty_journal() -> None:
    first = request(at_start=True)
    assert check(first, SPEC, committed(0, 0), 0, 0) == check(request(), SPEC, committed(0, 0), 0, 0)
    for spool_end, index_end in ((1, 0), (0, 1), (1, 1)):
        refused = check(first, SPEC, committed(0, spool_end), 0, index_end)
        assert refused == Refuse(pb.WRONG_APPEND_OFFSET, pb.LabelSet())
    assert apply_registers(first, pb.LabelSet()) is None
    assert apply_registers(request(), pb.LabelSet()) is not None


@pytest.mark.parametrize(
    ("offset", "index_end", "flags", "decision"),
    [
        (0, 150, 0, Refuse(pb.INDEX_HAS_GREATER_OFFSET, pb.LabelSet())),
        (150, 150, 0, Synchronize(150)),
        (100, 150, 0, Refuse(pb.WRONG_APPEND_OFFSET, pb.LabelSet())),
        (100, 100, 0, Commit(pb.LabelSet())),
        (100, 0, 0, Commit(pb.LabelSet())),
        (99, 100, 0, Refuse(pb.WRONG_APPEND_OFFSET, pb.LabelSet())),
        (0, 150, pb.JournalSpec.O_RDONLY, Commit(pb.LabelSet())),
        (0, 150, pb.JournalSpec.O_WRONLY, Refuse(pb.INDEX_HAS_GREATER_OFFSET, pb.LabelSet())),
    ],
)
def test_offsets(offset: int, index_end: int, flags: int, decision: AppendDecision) -> None:
    spec = pb.JournalSpec(name=JOURNAL, flags=flags, fragment=SPEC.fragment)
    assert check(request(offset=offset), spec, committed(50, 100), 0, index_end) == decision


def test_a_strict_check_of_a_read_only_journal_decides_as_if_it_were_writable() -> None:
    spec = pb.JournalSpec(name=JOURNAL, flags=pb.JournalSpec.O_RDONLY, fragment=SPEC.fragment)
    held = committed(50, 100, registers=labels.label_set({labels.HELD: ""}))
    strict = request(check_registers=labels.parse_selector(labels.HELD))
    assert check(strict, spec, held, 0, 150) == Refuse(pb.INDEX_HAS_GREATER_OFFSET, held.registers)
    assert check(strict, spec, held, 0, 100) == Commit(held.registers)


def test_a_resumed_journal_continues_at_its_stored_offset() -> None:
    spec = pb.JournalSpec(name=JOURNAL, suspend=pb.JournalSpec.Suspend(offset=500))
    assert check(request(), spec, committed(0, 0), 0, 0) == Synchronize(500)


@pytest.mark.parametrize(
    ("spool", "roll_to", "flush_seconds", "now", "expected"),
    [
        (committed(0, 0), 0, 0, 0.0, (0, Codec.SNAPPY)),  # Empty: takes the spec's codec.
        (committed(100, 1100), 0, 0, 0.0, None),  # As long as the spec says, not longer.
        (committed(100, 1101), 0, 0, 0.0, (1101, Codec.SNAPPY)),
        (committed(100, 200), 100, 0, 0.0, None),  # Begins there already.
        (committed(100, 200), 200, 0, 0.0, (200, Codec.SNAPPY)),
        (committed(100, 200), 300, 0, 0.0, (300, Codec.SNAPPY)),
        (committed(100, 200, first=119.0), 0, 60, 119.9, None),
        (committed(100, 200, first=119.0), 0, 60, 120.0, (200, Codec.SNAPPY)),
        (committed(100, 200, first=120.0), 0, 60, 179.9, None),
    ],
)
def test_rolls(
    spool: CommittedState, roll_to: int, flush_seconds: int, now: float, expected: tuple[int, Codec] | None
) -> None:
    spec = pb.JournalSpec.Fragment()
    spec.CopyFrom(SPEC.fragment)
    spec.flush_interval.FromSeconds(flush_seconds)
    proposal = next_fragment(spool, roll_to, spec, now)
    if expected is None:
        assert proposal == spool.fragment
    else:
        offset, codec = expected
        assert proposal == Fragment(JOURNAL, offset, offset, ZERO_SUM, codec)


@pytest.mark.parametrize(
    ("wish", "level", "index", "expected"),
    [
        # wish, level of the journal's spec, (begin, end, stored at) of the index, result
        (Wish.SUSPEND_RESUME, Suspend.NONE, (0, 100, 0), Commit(pb.LabelSet())),
        (Wish.SUSPEND_RESUME, Suspend.PARTIAL, (0, 100, 0), ChangeSuspension(Suspend(level=Suspend.NONE, offset=100))),
        (Wish.SUSPEND_NO_RESUME, Suspend.NONE, (0, 100, 0), Commit(pb.LabelSet())),
        (Wish.SUSPEND_NO_RESUME, Suspend.PARTIAL, (0, 100, 0), Refuse(pb.SUSPENDED, pb.LabelSet())),
        (Wish.SUSPEND_KEEP, Suspend.PARTIAL, (0, 100, 0), Commit(pb.LabelSet())),
        (Wish.SUSPEND_NOW, Suspend.PARTIAL, (0, 100, 0), Refuse(pb.SUSPENDED, pb.LabelSet())),
        (
            Wish.SUSPEND_NOW,
            Suspend.NONE,
            (0, 100, 0),
            ChangeSuspension(Suspend(level=Suspend.PARTIAL, offset=100), rolled(committed(50, 100))),
        ),
        (Wish.SUSPEND_IF_FLUSHED, Suspend.NONE, (0, 100, 0), Commit(pb.LabelSet())),  # Not stored yet.
        (Wish.SUSPEND_IF_FLUSHED, Suspend.NONE, (0, 100, int(NOW) - DAY + 1), Commit(pb.LabelSet())),
        (
            Wish.SUSPEND_IF_FLUSHED,
            Suspend.NONE,
            (0, 100, int(NOW) - DAY),
            ChangeSuspension(Suspend(level=Suspend.PARTIAL, offset=100), rolled(committed(50, 100))),
        ),
    ],
)
def test_suspension(
    wish: pb.AppendRequest.Suspend.ValueType,
    level: pb.JournalSpec.Suspend.Level.ValueType,
    index: tuple[int, int, int],
    expected: AppendDecision,
) -> None:
    spec = pb.JournalSpec(name=JOURNAL, suspend=Suspend(level=level), fragment=SPEC.fragment)
    begin, end, flushed_at = index
    assert check(request(suspend=wish), spec, committed(50, 100), begin, end, flushed_at) == expected


@pytest.mark.parametrize(
    ("wish", "level"), [(Wish.SUSPEND_NOW, Suspend.NONE), (Wish.SUSPEND_IF_FLUSHED, Suspend.PARTIAL)]
)
def test_a_journal_without_content_is_fully_suspended(
    wish: pb.AppendRequest.Suspend.ValueType, level: pb.JournalSpec.Suspend.Level.ValueType
) -> None:
    spec = pb.JournalSpec(name=JOURNAL, suspend=Suspend(level=level), fragment=SPEC.fragment)
    assert check(request(suspend=wish), spec, committed(100, 100), 0, 0) == FULLY
    proposed = committed(50, 100)  # The index includes it once all replicas have acknowledged it.
    found = check(request(suspend=wish), spec, proposed, 0, 0)
    partly = ChangeSuspension(Suspend(level=Suspend.PARTIAL, offset=100), rolled(proposed))
    assert found == (partly if level == Suspend.NONE else Refuse(pb.SUSPENDED, pb.LabelSet()))


def test_appends_that_suspend_hold_no_content() -> None:
    allowed = {
        wish for wish in Wish.Suspend.values() if judge_content(request(suspend=wish), SPEC, 1, REGISTERS) is None
    }
    assert allowed == {Wish.SUSPEND_RESUME, Wish.SUSPEND_NO_RESUME}
    read_only = pb.JournalSpec(name=JOURNAL, flags=pb.JournalSpec.O_RDONLY)
    assert judge_content(request(), read_only, 1, REGISTERS) == Refuse(pb.NOT_ALLOWED, REGISTERS)
    assert judge_content(request(), read_only, 0, REGISTERS) is None


def test_registers_change_only_with_content() -> None:
    changing = request(union_registers=labels.label_set(author="me"))
    assert judge_content(changing, SPEC, 1, REGISTERS) is None
    with pytest.raises(InvalidInput, match="registers change only with content"):
        judge_content(changing, SPEC, 0, REGISTERS)


def test_the_stores_health_is_needed_before_any_other_check() -> None:
    spec = pb.JournalSpec(name=JOURNAL, fragment=SPEC.fragment)
    spec.fragment.stores.append("file:///")
    wrong = request(offset=7)

    def found(**of_store: object) -> AppendDecision:
        return decide(
            wrong, JournalSnapshot(spec, committed(50, 100), IndexSummary(0, 100, empty=False), NOW, **of_store)
        )  # type: ignore[arg-type]

    assert found(store_problem=None, listed=False) == Need.STORE
    assert found(store_problem="full") == Refuse(pb.FRAGMENT_STORE_UNHEALTHY, pb.LabelSet(), "full")
    assert found(store_problem="", listed=False) == Need.LISTING
    assert found() == Refuse(pb.WRONG_APPEND_OFFSET, pb.LabelSet())


def test_a_loss_is_confirmed_by_an_empty_append_at_the_journals_end() -> None:
    def found(offset: int, content: bytes | None = None, **confirmed: bool) -> AppendDecision:
        known = IndexSummary(0, 150, empty=False)
        return decide(
            request(offset=offset),
            JournalSnapshot(SPEC, committed(50, 100), known, NOW, recorded=False, **confirmed),
            content,
        )

    refused = Refuse(pb.INDEX_HAS_GREATER_OFFSET, pb.LabelSet())
    assert found(0) == found(149) == found(150, b"x") == refused
    assert found(150) == found(150, b"") == Need.EMPTY_APPEND
    assert found(150, loss_confirmed=True) == Synchronize(150)

    def at_start(end: int, **confirmed: bool) -> AppendDecision:
        snapshot = JournalSnapshot(SPEC, committed(end, end), IndexSummary(), NOW, recorded=False, **confirmed)
        return decide(pb.AppendRequest(journal="a/journal", at_start=True), snapshot)

    assert at_start(0) == Need.EMPTY_APPEND
    assert at_start(0, loss_confirmed=True) == Need.RECORD
    assert at_start(5) == Refuse(pb.INDEX_HAS_GREATER_OFFSET, pb.LabelSet())
    synchronized = JournalSnapshot(SPEC, committed(150, 150), IndexSummary(0, 150, empty=False), NOW, recorded=False)
    assert decide(request(offset=150), replace(synchronized, loss_confirmed=True)) == Need.RECORD
    assert isinstance(decide(request(offset=150), replace(synchronized, recorded=True)), Commit)


# ------------------------------------------------------------------------------------------ one decision

NAMES = ["author", "epoch"]
PAIRS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["1", "2"]), max_size=2)


@st.composite
def requests(draw: st.DrawFn) -> pb.AppendRequest:
    made = request(offset=draw(st.sampled_from([0, 0, 0, 99, 100, 101, 150])))
    made.do_not_proxy, made.min_etcd_revision = draw(st.booleans()), draw(st.sampled_from([0, 7]))
    if draw(st.integers(0, 5)) == 0:
        made.suspend = draw(st.sampled_from(list(Wish.Suspend.values())))
    if include := draw(PAIRS | st.just({labels.HELD: ""})):
        made.check_registers.CopyFrom(labels.label_selector(include=include, exclude=draw(PAIRS)))
    if union := draw(PAIRS):
        made.union_registers.CopyFrom(labels.label_set(union))
    if subtract := draw(PAIRS):
        made.subtract_registers.CopyFrom(labels.label_set(subtract))
    return made


@st.composite
def snapshots(draw: st.DrawFn) -> JournalSnapshot:
    spec = pb.JournalSpec(name=JOURNAL, flags=draw(st.sampled_from([pb.JournalSpec.O_RDWR] * 4 + [2, 4])))
    spec.fragment.length, spec.fragment.compression_codec = draw(st.sampled_from([20, 50, 1000])), pb.SNAPPY
    spec.fragment.flush_interval.seconds = draw(st.sampled_from([0, 0, 60]))
    spec.suspend.level = draw(st.sampled_from([Suspend.NONE] * 4 + list(Suspend.Level.values())))
    spec.suspend.offset = draw(st.sampled_from([0, 0, 90, 110]))
    if draw(st.booleans()):
        spec.fragment.stores.append("file:///")
    spool = committed(
        draw(st.sampled_from([0, 50, 60, 100])),
        100,
        first=NOW - draw(st.sampled_from([0, 30, 90])),
        registers=labels.label_set(draw(PAIRS | st.just({labels.HELD: "1"}))),
    )
    begin = draw(st.sampled_from([0, 0, 50, 60, 100]))
    known = IndexSummary(
        begin, draw(st.sampled_from([100, 100, 100, 150])), draw(st.integers(0, 5)) == 0, int(NOW) - 100
    )
    return JournalSnapshot(
        spec,
        spool,
        known,
        NOW,
        store_problem=draw(st.sampled_from(["", "", "", None, "full"])),
        listed=draw(st.integers(0, 5)) > 0,
        recorded=draw(st.integers(0, 5)) > 0,
        loss_confirmed=draw(st.booleans()),
    )


def grown(snapshot: JournalSnapshot, length: int, registers: pb.LabelSet) -> JournalSnapshot:
    """Return the snapshot after an append of that length has committed to the same fragment."""
    old, known = snapshot.committed.fragment, snapshot.known
    fragment = Fragment(JOURNAL, old.begin, old.end + length, b"t" * 20, old.codec)
    begin = old.begin if known.empty else known.begin
    return replace(
        snapshot,
        committed=CommittedState(fragment, registers, snapshot.committed.first_append_time or NOW),
        known=IndexSummary(begin, max(known.end, fragment.end), empty=False),
    )


@given(requests(), snapshots(), st.integers(0, 60), st.integers(1, 60))
@example(
    request(), JournalSnapshot(SPEC, committed(50, 100, NOW, REGISTERS), IndexSummary(0, 100, empty=False), NOW), 30, 3
)
@settings(max_examples=600, deadline=None)
def test_in_a_steady_range_the_short_answer_equals_the_decision(
    asked: pb.AppendRequest, snapshot: JournalSnapshot, growth: int, length: int
) -> None:
    """Inline commits and batches call `apply_registers` instead of `decide`."""
    found = steady(snapshot)
    if found is None:
        return
    later = grown(snapshot, growth, snapshot.committed.registers) if growth else snapshot
    after = apply_registers(asked, later.committed.registers)
    if after is None or not found.holds(later.committed.fragment, NOW):
        return
    assert decide(asked, later, bytes(length)) == Commit(after)
    if is_plain(asked):
        assert after is later.committed.registers


@given(snapshots(), st.floats(0, 200))
def test_a_steady_range_ends_with_the_flush_interval(snapshot: JournalSnapshot, seconds: float) -> None:
    found = steady(snapshot)
    if found is not None and found.holds(snapshot.committed.fragment, NOW + seconds):
        assert decide(request(), replace(snapshot, now=NOW + seconds), b"x") == Commit(snapshot.committed.registers)


@given(st.lists(st.tuples(requests(), st.integers(0, 20)), min_size=1, max_size=6), snapshots())
@settings(max_examples=300, deadline=None)
def test_a_batch_admits_and_refuses_as_single_decisions_do(
    appends: list[tuple[pb.AppendRequest, int]], snapshot: JournalSnapshot
) -> None:
    plan = BatchPlan(snapshot)
    for asked, length in appends:
        try:
            expected: AppendDecision | None = decide(asked, snapshot, bytes(length))
        except InvalidInput:
            expected = None
        answer = plan.admit(asked, bytes(length))
        match answer:
            case AppendRange():
                assert expected == Commit(answer.registers)
                assert answer.end - answer.begin == length
                snapshot = grown(snapshot, length, answer.registers) if length else snapshot
            case Refuse():
                assert expected == answer
            case None:
                assert not isinstance(expected, Commit) or expected.roll is not None
                if isinstance(expected, Refuse):
                    assert expected.status not in (pb.REGISTER_MISMATCH, pb.WRONG_APPEND_OFFSET)
