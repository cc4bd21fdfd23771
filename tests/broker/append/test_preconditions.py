"""What must hold before an append, when fragments roll, and what registers become."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.preconditions import (
    Verdict,
    foresee,
    may_have_content,
    next_registers,
    propose,
    registers_match,
)
from coranto_broker.append.preconditions import check as check_known
from coranto_broker.fragments.index_summary import IndexSummary
from coranto_broker.spool.spool import CommittedState

JOURNAL = "a/journal"
NOW = 1_700_000_000.0
DAY = 24 * 60 * 60
Suspend = pb.JournalSpec.Suspend
Wish = pb.AppendRequest
SPEC = pb.JournalSpec(name=JOURNAL, fragment=pb.JournalSpec.Fragment(length=1000, compression_codec=pb.SNAPPY))
REGISTERS = labels.label_set(author="me")


def committed(begin: int, end: int, first: float = 0.0, registers: pb.LabelSet | None = None) -> CommittedState:
    total = ZERO_SUM if begin == end else b"s" * 20
    return CommittedState(Fragment(JOURNAL, begin, end, total, Codec.GZIP), registers or pb.LabelSet(), first)


def check(
    request: pb.AppendRequest, spec: pb.JournalSpec, spool: CommittedState, begin: int, end: int, flushed_at: int = 0
) -> Verdict:
    return check_known(request, spec, spool, IndexSummary(begin, end, begin == end, flushed_at), now=NOW)


def request(**fields: object) -> pb.AppendRequest:
    return pb.AppendRequest(journal=JOURNAL, **fields)  # type: ignore[arg-type]


def test_an_ordinary_append_may_go_on() -> None:
    assert check(request(), SPEC, committed(50, 100), 0, 100) == Verdict()
    assert check(request(), SPEC, committed(0, 0), 0, 0) == Verdict()


def test_the_first_known_content_rolls() -> None:
    assert check(request(), SPEC, committed(0, 100), 0, 100) == Verdict(roll_to=100)
    assert check(request(), SPEC, committed(60, 100), 60, 100) == Verdict(roll_to=100)


@pytest.mark.parametrize(
    ("selector", "registers", "status"),
    [
        ("author=me", REGISTERS, pb.OK),
        ("author=you", REGISTERS, pb.REGISTER_MISMATCH),
        ("author=you", pb.LabelSet(), pb.OK),  # Empty registers satisfy every selector.
        ("!author", REGISTERS, pb.REGISTER_MISMATCH),
        (labels.HELD, pb.LabelSet(), pb.REGISTER_MISMATCH),  # But for those that ask whether they were lost.
        (f"{labels.HELD},author=me", pb.LabelSet(), pb.REGISTER_MISMATCH),
        (f"{labels.HELD},author=me", labels.label_set({labels.HELD: "", "author": "me"}), pb.OK),
        (f"!{labels.HELD},author=me", pb.LabelSet(), pb.OK),
    ],
)
def test_registers_are_checked(selector: str, registers: pb.LabelSet, status: int) -> None:
    checked = request(check_registers=labels.parse_selector(selector))
    assert check(checked, SPEC, committed(50, 100, registers=registers), 0, 100).status == status


def test_registers_are_checked_before_offsets() -> None:
    checked = request(check_registers=labels.parse_selector("author=you"), offset=7)
    spool = committed(50, 100, registers=REGISTERS)
    assert check(checked, SPEC, spool, 0, 100) == Verdict(pb.REGISTER_MISMATCH)


@pytest.mark.parametrize(
    ("offset", "index_end", "flags", "verdict"),
    [
        (0, 150, 0, Verdict(pb.INDEX_HAS_GREATER_OFFSET)),
        (150, 150, 0, Verdict(roll_to=150, resync=True)),
        (100, 150, 0, Verdict(pb.WRONG_APPEND_OFFSET)),
        (100, 100, 0, Verdict()),
        (100, 0, 0, Verdict()),
        (99, 100, 0, Verdict(pb.WRONG_APPEND_OFFSET)),
        (0, 150, pb.JournalSpec.O_RDONLY, Verdict()),
        (0, 150, pb.JournalSpec.O_WRONLY, Verdict(pb.INDEX_HAS_GREATER_OFFSET)),
    ],
)
def test_offsets(offset: int, index_end: int, flags: int, verdict: Verdict) -> None:
    spec = pb.JournalSpec(name=JOURNAL, flags=flags)
    assert check(request(offset=offset), spec, committed(50, 100), 0, index_end) == verdict


def test_a_strict_check_has_a_read_only_journal_judged_as_one_that_is_written_to() -> None:
    spec = pb.JournalSpec(name=JOURNAL, flags=pb.JournalSpec.O_RDONLY)
    held = committed(50, 100, registers=labels.label_set({labels.HELD: ""}))
    strict = request(check_registers=labels.parse_selector(labels.HELD))
    assert check(strict, spec, held, 0, 150) == Verdict(pb.INDEX_HAS_GREATER_OFFSET)
    assert check(strict, spec, held, 0, 100) == Verdict()


def test_a_resumed_journal_goes_on_at_its_stored_offset() -> None:
    spec = pb.JournalSpec(name=JOURNAL, suspend=pb.JournalSpec.Suspend(offset=500))
    assert check(request(), spec, committed(0, 0), 0, 0) == Verdict(roll_to=500, resync=True)


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
    proposal = propose(spool, roll_to, spec, now)
    if expected is None:
        assert proposal == spool.fragment
    else:
        offset, codec = expected
        assert proposal == Fragment(JOURNAL, offset, offset, ZERO_SUM, codec)


def test_union_wins_over_what_is_there_and_over_subtraction() -> None:
    registers = labels.label_set(author="me", epoch="1")
    changed = next_registers(
        registers,
        request(
            subtract_registers=labels.label_set(epoch="1", author="you"),
            union_registers=labels.label_set(author="she"),
        ),
    )
    assert changed == labels.label_set(author="she")
    assert next_registers(registers, request()) == registers


LABELS = st.builds(
    pb.Label, name=st.sampled_from(["aa", "bb", "cc", "x y"]), value=st.sampled_from(["", "1", "2", "é", "no way"])
)
SETS = st.lists(LABELS, max_size=4).map(lambda found: pb.LabelSet(labels=found))


def is_well_formed(message: pb.LabelSet | pb.AppendRequest) -> bool:
    try:
        labels.validate_label_set(message) if isinstance(message, pb.LabelSet) else validate(message)
    except InvalidInput:
        return False
    return True


@given(SETS.filter(is_well_formed), SETS, st.none() | SETS, SETS, st.booleans(), st.booleans())
@example(labels.label_set(aa="1"), labels.label_set(aa="1"), None, labels.label_set(aa="2"), False, False)
@example(pb.LabelSet(), pb.LabelSet(), None, labels.label_set(aa="2"), False, False)
def test_what_is_foreseen_is_what_becomes_of_registers(
    registers: pb.LabelSet,
    include: pb.LabelSet,
    exclude: pb.LabelSet | None,
    union: pb.LabelSet,
    subtracts: bool,
    prefix: bool,
) -> None:
    for label in union.labels:
        label.prefix = prefix
    asked = request(check_registers=pb.LabelSelector(include=include, exclude=exclude), union_registers=union)
    if subtracts:
        asked.subtract_registers.CopyFrom(labels.label_set(bb="1"))
    before = registers.SerializeToString()
    foreseen = foresee(asked, registers)
    assert registers.SerializeToString() == before
    if foreseen is not None:
        validate(asked)
        assert registers_match(asked, registers)
        assert foreseen == next_registers(registers, asked)


def test_an_entry_that_is_advanced_is_foreseen() -> None:
    registers = labels.label_set({"coranto.dev/held": "1", "entry": "one", "other": "two"})
    asked = request(
        check_registers=labels.label_selector(include={"coranto.dev/held": "", "entry": "one"}),
        union_registers=labels.label_set(entry="next"),
    )
    assert foresee(asked, registers) == labels.label_set({"coranto.dev/held": "1", "entry": "next", "other": "two"})
    asked.union_registers.labels[0].value = "é"  # Right, but for others to tell.
    assert foresee(asked, registers) is None
    asked.union_registers.labels[0].value = "next"
    asked.content = b"beside parameters"
    assert foresee(asked, registers) is None


@pytest.mark.parametrize(
    ("wish", "level", "index", "expected"),
    [
        # wish, level of the journal's spec, (begin, end, stored at) of the index, what follows
        (Wish.SUSPEND_RESUME, Suspend.NONE, (0, 100, 0), Verdict()),
        (Wish.SUSPEND_RESUME, Suspend.PARTIAL, (0, 100, 0), Verdict(suspend=Suspend(level=Suspend.NONE, offset=100))),
        (Wish.SUSPEND_NO_RESUME, Suspend.NONE, (0, 100, 0), Verdict()),
        (Wish.SUSPEND_NO_RESUME, Suspend.PARTIAL, (0, 100, 0), Verdict(pb.SUSPENDED)),
        (Wish.SUSPEND_KEEP, Suspend.PARTIAL, (0, 100, 0), Verdict()),
        (Wish.SUSPEND_NOW, Suspend.PARTIAL, (0, 100, 0), Verdict(pb.SUSPENDED)),
        (
            Wish.SUSPEND_NOW,
            Suspend.NONE,
            (0, 100, 0),
            Verdict(suspend=Suspend(level=Suspend.PARTIAL, offset=100), roll_to=100),
        ),
        (Wish.SUSPEND_NOW, Suspend.NONE, (0, 0, 0), Verdict(suspend=Suspend(level=Suspend.FULL, offset=100))),
        (Wish.SUSPEND_IF_FLUSHED, Suspend.PARTIAL, (0, 0, 0), Verdict(suspend=Suspend(level=Suspend.FULL, offset=100))),
        (Wish.SUSPEND_IF_FLUSHED, Suspend.NONE, (0, 100, 0), Verdict()),  # Not stored yet.
        (Wish.SUSPEND_IF_FLUSHED, Suspend.NONE, (0, 100, int(NOW) - DAY + 1), Verdict()),
        (
            Wish.SUSPEND_IF_FLUSHED,
            Suspend.NONE,
            (0, 100, int(NOW) - DAY),
            Verdict(suspend=Suspend(level=Suspend.PARTIAL, offset=100), roll_to=100),
        ),
    ],
)
def test_suspension(
    wish: pb.AppendRequest.Suspend.ValueType,
    level: pb.JournalSpec.Suspend.Level.ValueType,
    index: tuple[int, int, int],
    expected: Verdict,
) -> None:
    spec = pb.JournalSpec(name=JOURNAL, suspend=Suspend(level=level))
    begin, end, flushed_at = index
    assert check(request(suspend=wish), spec, committed(50, 100), begin, end, flushed_at) == expected


def test_appends_that_suspend_hold_no_content() -> None:
    allowed = {wish for wish in Wish.Suspend.values() if may_have_content(request(suspend=wish))}
    assert allowed == {Wish.SUSPEND_RESUME, Wish.SUSPEND_NO_RESUME}
