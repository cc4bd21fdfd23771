"""Results of splits and merges, and the policies that request them, in virtual time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.errors import InvalidInput, StreamSealed
from coranto.streams.control.scaling import (
    MAX_CHANGES,
    Change,
    Merge,
    Meter,
    Rates,
    RateUnit,
    RateWindows,
    ScalingPolicy,
    Split,
    decide,
    format_policy,
    parse_policy,
    transition,
)
from coranto.streams.model.keys import KEY_SPACE, KeyRange
from coranto.streams.model.stream import Segment, Stream, covers, segment_journal

WINDOWS = RateWindows()


def stream_of(segments: int) -> Stream:
    ranges = KeyRange.FULL.split(segments)
    return Stream("orders", {n: Segment(n, 0, segment_journal("orders", n), keys) for n, keys in enumerate(ranges)})


# --------------------------------------------------------------------------------------------------------- transitions


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.data())
def test_a_transition_covers_the_same_keys(segments: int, data: st.DataObject) -> None:
    stream = stream_of(segments)
    changes: list[Change] = []
    at = 0
    while at < segments:
        kind = data.draw(st.sampled_from(["keep", "split", "merge"]))
        width = data.draw(st.integers(2, 3))
        if kind == "split":
            changes.append(Split(at, width))
        elif kind == "merge" and at + width <= segments:
            changes.append(Merge(tuple(data.draw(st.permutations(range(at, at + width))))))
            at += width - 1
        at += 1
    if not changes:
        with pytest.raises(InvalidInput, match="at least one"):
            transition(stream, changes)
        return
    planned = transition(stream, changes)
    kept = [each.range for each in stream.active() if each not in planned.predecessors]
    assert covers([*kept, *(each.range for each in planned.successors)], KeyRange.FULL)
    assert [each.number for each in planned.successors] == list(range(segments, segments + len(planned.successors)))
    for successor in planned.successors:
        assert (successor.epoch, successor.sealing, successor.begin) == (1, False, 0)
        assert successor.journal == segment_journal("orders", successor.number)
        parents = [each for each in planned.predecessors if each.number in successor.predecessors]
        assert len(parents) == len(successor.predecessors)
        assert all(each.range.overlaps(successor.range) for each in parents)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([Split(7)], "segment 7 of orders is not there; active are 0, 1, 2"),
        ([Split(1, 1)], "cannot be split into 1"),
        ([Split(1, MAX_CHANGES)], "scale in several steps"),
        ([Merge((1,))], "two or more segments"),
        ([Merge((1, 1))], "two or more segments"),
        ([Merge((0, 2))], "not adjacent"),
        ([Split(1), Merge((1, 2))], "segment 1 is in more than one change"),
    ],
)
def test_impossible_changes_are_refused(changes: list[Change], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        transition(stream_of(3), changes)


def test_a_segment_narrower_than_its_parts_cannot_be_split() -> None:
    narrow = [KeyRange(0, 1), KeyRange(1, KEY_SPACE)]
    stream = Stream("orders", {n: Segment(n, 0, segment_journal("orders", n), keys) for n, keys in enumerate(narrow)})
    with pytest.raises(InvalidInput, match="ask for 1 to 1"):
        transition(stream, [Split(0)])


def test_a_sealed_stream_does_not_scale() -> None:
    sealed = Segment(0, 0, segment_journal("orders", 0), KeyRange.FULL, sealing=True, end_of_stream=True)
    with pytest.raises(StreamSealed):
        transition(Stream("orders", {0: sealed}), [Split(0)])


# ------------------------------------------------------------------------------------------------------------ policies


@pytest.mark.parametrize(
    "policy",
    [
        ScalingPolicy.fixed(3),
        ScalingPolicy.by_bytes(1e6),
        ScalingPolicy.by_events(0.25, factor=4, min_segments=2, max_segments=9),
    ],
)
def test_policies_are_labels(policy: ScalingPolicy) -> None:
    assert parse_policy(format_policy(policy)) == policy


def test_omitted_fields_of_a_policy_have_defaults() -> None:
    assert parse_policy("bytes/1000") == ScalingPolicy.by_bytes(1000)
    assert parse_policy("events/10/3") == ScalingPolicy.by_events(10, 3)


@pytest.mark.parametrize(
    "text",
    [
        *("", "bytes", "bytes/x", "bytes/0", "bytes/nan", "bytes/1/1", "bytes/1/2/0", "bytes/1/2/3/2"),
        *("bytes/1/2/3/4/5", "fixed", "fixed/0", "fixed/1/2", "calls/1"),
    ],
)
def test_invalid_policies_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_policy(text)


# ------------------------------------------------------------------------------------------------------------ measuring


def measured(*loads: tuple[float, float], step: float = 10.0) -> Rates:
    """Rates of a segment after one load after another, each of them seconds and a rate per second."""
    meter, now, total = Meter(), 0.0, 0.0
    meter.sample(now, {0: total})
    for seconds, rate in loads:
        for _ in range(int(seconds / step)):
            now, total = now + step, total + rate * step
            meter.sample(now, {0: total})
    return meter.rates()[0]


def test_rates_are_per_window_and_unknown_until_it_is_full() -> None:
    assert measured((110, 5)) == Rates(observed=110)
    assert measured((120, 5)) == Rates(short=pytest.approx(5), observed=120)
    found = measured((2000, 1), (120, 7))
    assert found.short == pytest.approx(7)
    assert found.middle == pytest.approx((120 * 7 + 180) / 300)
    assert found.long == pytest.approx((120 * 7 + 480) / 600)
    assert found.idle == pytest.approx((120 * 7 + 1080) / 1200)


def test_windows_may_begin_between_samples() -> None:
    found = measured((1190, 1), (140, 8), step=70)
    assert found.short == pytest.approx(8)
    assert found.middle == pytest.approx((140 * 8 + 160) / 300)


def test_deleted_segments_are_forgotten_and_memory_is_bounded() -> None:
    meter = Meter(RateWindows(1, 2, 3, 4, 5))
    for now in range(1000):
        meter.sample(now, {0: now, 1: now} if now < 500 else {1: now})
    assert set(meter.rates()) == {1}
    assert len(meter._samples[1]) <= 7
    assert meter.rates()[1].observed >= 5


# ------------------------------------------------------------------------------------------------------------- deciding


def rates(short: float, middle: float, long: float, idle: float | None = 0, observed: float = 600) -> Rates:
    return Rates(short, middle, long, idle, observed)


BUSY = rates(90, 90, 90, 90)  # Neither hot nor cold for a target of 100.
COLD = rates(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("load", "parts"),
    [
        (rates(500, 200, 100), None),  # At each limit, and above none.
        (rates(501, 0, 0), 5),
        (rates(0, 201, 0), 2),
        (rates(0, 390, 0), 3),
        (rates(0, 0, 101), 2),
        (rates(900, 0, 0), 6),  # Limited by the factor.
        (rates(900, 900, 900, observed=599), None),  # In the cool-down.
        (Rates(None, None, None, None, 600), None),
        (Rates(501, None, None, None, 600), 5),
    ],
)
def test_a_segment_is_split_by_the_load_of_three_windows(load: Rates, parts: int | None) -> None:
    policy = ScalingPolicy.by_bytes(100, factor=6)
    expected = [Split(0, parts)] if parts else []
    assert decide(stream_of(2), {0: load, 1: BUSY}, policy, WINDOWS) == expected


@pytest.mark.parametrize(
    ("load", "merges"),
    [
        (rates(1, 1, 1, 49), True),
        (rates(1, 1, 1, 50), False),
        (rates(100, 1, 1, 1), False),
        (rates(1, 100, 1, 1), False),
        (rates(1, 1, 100, 1), False),
        (rates(1, 1, 1, None), False),
        (rates(1, 1, 99, 1), False),  # The merged segment would be at the target.
        (rates(1, 1, 1, 1, observed=599), False),
    ],
)
def test_adjacent_segments_are_merged_when_both_are_cold(load: Rates, merges: bool) -> None:
    found = decide(stream_of(2), {0: load, 1: COLD}, ScalingPolicy.by_events(100), WINDOWS)
    assert found == ([Merge((0, 1))] if merges else [])


def test_only_adjacent_segments_are_merged_and_each_once() -> None:
    stream = stream_of(6)
    loads = {0: COLD, 1: BUSY, 2: COLD, 3: COLD, 4: COLD, 5: COLD}
    assert decide(stream, loads, ScalingPolicy.by_bytes(100), WINDOWS) == [Merge((2, 3)), Merge((4, 5))]
    assert decide(stream, loads, ScalingPolicy.by_bytes(100, min_segments=5), WINDOWS) == [Merge((2, 3))]
    assert decide(stream, loads, ScalingPolicy.by_bytes(100, min_segments=6), WINDOWS) == []


def test_the_number_of_segments_is_bounded_and_the_hottest_are_split_first() -> None:
    stream = stream_of(3)
    loads = {0: rates(600, 0, 0), 1: rates(900, 0, 0), 2: rates(700, 0, 0)}
    assert decide(stream, loads, ScalingPolicy.by_bytes(100, 4, max_segments=7), WINDOWS) == [Split(1, 4), Split(2, 2)]
    assert decide(stream, loads, ScalingPolicy.by_bytes(100, 4, max_segments=3), WINDOWS) == []


def test_decided_changes_fit_into_one_transition() -> None:
    stream = stream_of(60)
    loads = dict.fromkeys(range(60), rates(900, 900, 900, 900))
    decided = decide(stream, loads, ScalingPolicy.by_bytes(1, 50, max_segments=5000), WINDOWS)
    assert len(decided) == 2
    assert len(transition(stream, decided).successors) == 100


def test_a_fixed_number_of_segments_does_not_change() -> None:
    loads = {0: rates(10**9, 10**9, 10**9), 1: COLD}
    assert decide(stream_of(2), loads, ScalingPolicy.fixed(2), WINDOWS) == []


def test_scaling_follows_a_varying_load_without_flapping() -> None:
    """Four hours of a stream by the minute, idle, busy and idle. Every decision is applied."""
    stream, meter, policy = stream_of(1), Meter(), ScalingPolicy.by_bytes(1000, factor=4)
    totals: dict[int, float] = {0: 0.0}
    history: list[tuple[int, int]] = []
    for minute in range(240):
        load = 6500.0 if 30 <= minute < 90 else 10.0
        for each in stream.active():
            totals[each.number] = totals.get(each.number, 0.0) + load * 60 * each.range.share
        meter.sample(minute * 60.0, {each.number: totals[each.number] for each in stream.active()})
        changes = decide(stream, meter.rates(), policy, WINDOWS)
        if changes:
            planned = transition(stream, changes)
            sealed = {
                each.number: dataclasses.replace(each, sealing=True, sealed_at=0) for each in planned.predecessors
            }
            stream = Stream(
                "orders", {**stream.segments, **sealed, **{each.number: each for each in planned.successors}}
            )
            history.append((minute, len(stream.active())))
    counts = [count for _, count in history]
    assert 31 <= history[0][0] <= 33, "within minutes, since the short windows are far above the target"
    assert counts[:2] == [4, 8]
    peak = counts.index(max(counts))
    assert counts[:peak] == sorted(counts[:peak])
    assert counts[peak:] == sorted(counts[peak:], reverse=True)
    assert all(minute < 60 for minute, _ in history[: peak + 1])
    assert all(minute > 90 for minute, _ in history[peak + 1 :])
    assert counts[-1] == 1


def test_units() -> None:
    assert (ScalingPolicy.by_bytes(1).unit, ScalingPolicy.by_events(1).unit) == (RateUnit.BYTES, RateUnit.EVENTS)
    assert ScalingPolicy.fixed(1).unit is None
