"""Losses by the rules of retention, for fragments of any offsets and ages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coranto.audit.clocks import CLOCK_SECONDS
from coranto.audit.losses import Expected, lost, merged, shortest
from coranto.audit.remembered import KnownFragment
from coranto.fragments.fragment import Codec, Fragment
from coranto.fragments.retention import expired

NOW = 1_700_000_000.0
HOUR = 3600.0


def known(begin: int, end: int, age: float | None = None) -> KnownFragment:
    """Return a fragment that was stored `age` seconds ago, or that only brokers had."""
    return KnownFragment(begin, end, f"{begin:020x}{end:020x}", 0 if age is None else int(NOW - age))


def expected(*fragments: KnownFragment, retention: float = 0.0, head: int = 0, seen: float = HOUR) -> Expected:
    head = head or max(each.end for each in fragments)
    return Expected(0, head, fragments, NOW - seen, retention)


def test_present_content_is_not_lost() -> None:
    assert lost(expected(known(0, 10, 99), known(10, 20, 9)), [(0, 10), (10, 20)], 20, NOW) == []


def test_without_retention_every_gap_is_a_loss() -> None:
    wanted = expected(known(0, 10, 99 * HOUR), known(10, 20, 9), known(20, 30, 5))
    assert lost(wanted, [(10, 30)], 30, NOW) == [(0, 10)]
    assert lost(wanted, [(0, 10), (20, 30)], 30, NOW) == [(10, 20)]
    assert lost(wanted, [(0, 20)], 20, NOW) == [(20, 30)]
    assert lost(wanted, [], 0, NOW) == [(0, 30)]


def test_retention_explains_only_old_fragments_at_the_beginning() -> None:
    wanted = expected(known(0, 10, 3 * HOUR), known(10, 20, 2 * HOUR), known(20, 30, 5), retention=HOUR)
    assert lost(wanted, [(20, 30)], 30, NOW) == []
    assert lost(wanted, [(10, 30)], 30, NOW) == []
    assert lost(wanted, [(0, 10), (20, 30)], 30, NOW) == [(10, 20)]
    assert lost(wanted, [], 0, NOW) == [(20, 30)]
    young = expected(known(0, 10, HOUR / 2), known(10, 20, 5), retention=HOUR)
    assert lost(young, [(10, 20)], 20, NOW) == [(0, 10)]


def test_retention_never_explains_the_loss_of_the_last_fragment() -> None:
    wanted = expected(known(0, 10, 3 * HOUR), known(10, 20, 2 * HOUR), retention=HOUR)
    assert lost(wanted, [], 0, NOW) == [(10, 20)]


def test_the_last_audit_bounds_the_age_of_content_unknown_to_audits() -> None:
    wanted = expected(known(0, 10, 3 * HOUR), retention=HOUR, head=30, seen=2 * HOUR)
    assert lost(wanted, [(20, 30)], 30, NOW) == []
    wanted = expected(known(0, 10, 3 * HOUR), retention=HOUR, head=30, seen=HOUR / 2)
    assert lost(wanted, [(20, 30)], 30, NOW) == [(10, 20)]


def test_a_known_loss_stays_a_loss_when_its_retention_ends() -> None:
    missed = known(0, 10, 9 * HOUR)._replace(lost_since=NOW - HOUR)
    assert lost(expected(missed, known(10, 20, 5), retention=HOUR), [(10, 20)], 20, NOW) == [(0, 10)]


def test_the_shortest_retention_applies_and_no_retention_is_the_longest() -> None:
    assert shortest(0.0, 5.0, -1.0, 3.0) == 3.0
    assert shortest(0.0, -1.0) == 0.0


def test_overlapping_and_adjacent_spans_are_merged() -> None:
    assert merged([(5, 9), (0, 2), (2, 4), (8, 12), (3, 3)]) == [(0, 4), (5, 12)]


edges = st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True).map(sorted)
ages = st.lists(st.integers(0, 4 * int(HOUR)), min_size=12, max_size=12)


@given(edges, ages, st.sampled_from([HOUR / 2, HOUR, 2 * HOUR]))
def test_content_that_retention_removes_is_not_lost(cuts: list[int], times: list[int], retention: float) -> None:
    """Brokers and audits follow the same rule."""
    spans = list(zip([0, *cuts], cuts, strict=False))
    stored = [
        Fragment("a/journal", begin, end, bytes(20), Codec.NONE, "file:///", int(NOW) - age)
        for (begin, end), age in zip(spans, times, strict=False)
    ]
    removed = expired(stored, retention, NOW)
    left = [(each.begin, each.end) for each in stored if each not in removed]
    wanted = expected(
        *(KnownFragment(e.begin, e.end, f"{e.begin:040x}", e.mod_time) for e in stored), retention=retention
    )
    assert lost(wanted, left, max(end for _, end in left), NOW) == []


@given(edges, ages, st.data())
def test_young_fragments_must_not_be_missing(cuts: list[int], times: list[int], data: st.DataObject) -> None:
    spans = list(zip([0, *cuts], cuts, strict=False))
    fragments = [known(begin, end, age) for (begin, end), age in zip(spans, times, strict=False)]
    removed = data.draw(st.sampled_from(fragments))
    left = [(each.begin, each.end) for each in fragments if each is not removed]
    found = lost(expected(*fragments, retention=HOUR), left, max((end for _, end in left), default=0), NOW)
    age = NOW - removed.mod_time
    if age < HOUR - CLOCK_SECONDS or removed.begin > 0 or removed is fragments[-1]:
        assert found == [(removed.begin, removed.end)]
    else:
        assert found == []
