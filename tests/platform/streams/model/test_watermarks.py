"""Times noted by writers, and the time windows of readers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.errors import CorruptData, InvalidInput
from coranto.streams.model.frontier import graph_of
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Stream, marks_journal
from coranto.streams.model.watermarks import TimeMark, TimeWindow, Watermark, Watermarks, passed
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import StreamWriter
from tests.platform.streams.random_streams import random_stream, segment
from tests.platform.streams.stream_world import STREAM, StreamWorld
from tests.sampling import examples

ONE = graph_of(Stream("s", {0: segment(0, KeyRange.FULL)}))


def test_time_follows_the_slowest_writer() -> None:
    marks = Watermarks(timeout=100)
    assert marks.add(TimeMark("a", 10, {0: 5}), 1) == Watermark(10, 10, {0: 5})
    assert marks.add(TimeMark("b", 8, {1: 7}), 2) is None, "a new writer does not move time back"
    assert marks.add(TimeMark("a", 30, {0: 9}), 3) is None
    assert marks.add(TimeMark("b", 20, {1: 8}), 4) == Watermark(20, 30, {0: 9, 1: 8})
    assert marks.add(TimeMark("a", 29, {0: 10}), 5) is None, "a writer's own time does not go back either"


def test_a_silent_writer_delays_time_only_until_the_timeout() -> None:
    marks = Watermarks(timeout=100)
    marks.add(TimeMark("a", 10, {0: 5}), 0)
    marks.add(TimeMark("b", 11, {0: 6}), 0)
    assert marks.add(TimeMark("a", 50, {0: 7}), 50) == Watermark(11, 50, {0: 7})
    assert marks.add(TimeMark("a", 55, {0: 7}), 100) is None
    assert marks.add(TimeMark("a", 60, {0: 8}), 100.5) == Watermark(60, 60, {0: 8})
    assert marks.add(TimeMark("b", 12, {0: 9}), 101) is None, "it may return, and time does not go back"
    assert marks.add(TimeMark("a", 70, {0: 10}), 102) is None, "it delays time again"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.just(0.5) | st.floats(20.5, 40)), max_size=40),
    st.fixed_dictionaries({name: st.sampled_from([0.0, 86_400.0, 10.0**9, -(10.0**9)]) for name in "abc"}),
    st.fixed_dictionaries({name: st.none() | st.integers(0, 40) for name in "abc"}),
)
def test_wrong_or_adjusted_clocks_do_not_drop_an_active_writer(
    notes: list[tuple[str, float]], ahead: dict[str, float], steps: dict[str, int | None]
) -> None:
    """Each writer notes a time at least every 40 s of true time; the timeout is 120 s."""
    marks, now, times = Watermarks(120), 0.0, dict.fromkeys("abc", 0.0)
    for number, (writer, pause) in enumerate([(name, 0.0) for name in "abc"] + notes):
        if steps[writer] == number:
            ahead[writer] += 3600
        now += pause
        for name in (*(other for other in "abc" if times[other] < now - 1 and pause > 20), writer):
            times[name] = now
            marks.add(TimeMark(name, now, {0: number}), now + ahead[name])
        lower = marks.found[-1].lower if marks.found else 0
        assert lower <= min(times.values()), "time follows the slowest writer"


def test_a_writer_whose_clock_is_ahead_does_not_drop_other_writers() -> None:
    """Its clock is a day ahead. Formerly each of its marks exceeded the timeout of all other writers."""
    marks = Watermarks(timeout=120)
    marks.add(TimeMark("slow", 10, {0: 5}), 1000)
    assert marks.add(TimeMark("ahead", 50, {1: 5}), 1001 + 86_400) is None
    assert marks.add(TimeMark("ahead", 60, {1: 6}), 1002 + 86_400) is None
    assert marks.add(TimeMark("slow", 20, {0: 6}), 1003) == Watermark(20, 60, {0: 6, 1: 6})
    # The same if its clock is set forward or back.
    for step in (3600, -7200):
        assert marks.add(TimeMark("ahead", 70, {1: 7}), 1004 + 86_400 + step) is None
    assert marks.add(TimeMark("slow", 30, {0: 7}), 1005) == Watermark(30, 70, {0: 7, 1: 7})


@pytest.mark.parametrize("off", [1000.0, -1000.0, 10.0**9])
def test_a_writer_whose_clock_is_off_does_not_make_others_silent(off: float) -> None:
    """Otherwise time would continue without them, and readers would assume that all events are read."""
    marks = Watermarks(timeout=100)
    for second in range(0, 1000, 40):
        marks.add(TimeMark("right", second, {0: second}), second)
        marks.add(TimeMark("off", second + 20, {0: second}), second + 20 + off)
        assert marks.found[-1].lower <= second + 1
    # It is the only writer left, so its clock counts.
    for second in range(1000, 1200, 40):
        marks.add(TimeMark("off", second, {0: second}), second + off)
    assert marks.found[-1].lower > 1000


def test_a_stepped_or_frozen_clock_does_not_make_others_silent() -> None:
    marks = Watermarks(timeout=100)
    for second in range(0, 1000, 40):
        stepped = {0: 0.0, 400: 10.0**6, 480: -(10.0**6)}
        step = next(by for since, by in sorted(stepped.items(), reverse=True) if second >= since)
        marks.add(TimeMark("right", second, {0: second}), second)
        marks.add(TimeMark("frozen", second + 30, {0: second}), 5.0)
        marks.add(TimeMark("stepped", second + 30, {0: second}), second + step)
        assert marks.found[-1].lower <= second + 1


@given(st.integers(0, 2**32), st.lists(st.sampled_from([0.0, 500.0, -500.0, 10.0**9]), min_size=3, max_size=3))
@settings(max_examples=examples(60), deadline=None)
def test_writers_that_keep_noting_times_are_never_skipped(seed: int, skews: list[float]) -> None:
    """With marks at most half the timeout apart and any clock offset, no watermark exceeds a noted time."""
    rng = random.Random(seed)
    marks, noted, last = Watermarks(timeout=100), [0.0] * 3, [0.0] * 3
    for writer in range(3):
        marks.add(TimeMark(str(writer), 0, {}), skews[writer])
    now = 0.0
    for _ in range(60):
        now += rng.uniform(0, 16)
        writer = max(range(3), key=lambda each: now - last[each]) if rng.random() < 0.8 else rng.randrange(3)
        if max(now - each for each in last) > 50:
            return
        noted[writer] += rng.randrange(5)
        last[writer] = now
        marks.add(TimeMark(str(writer), noted[writer], {0: 1}), now + skews[writer])
        assert marks.found[-1].lower <= min(noted)


def test_a_writer_that_left_does_not_count() -> None:
    marks = Watermarks(timeout=100)
    marks.add(TimeMark("a", 10, {0: 5}), 0)
    marks.add(TimeMark("b", 30, {0: 6}), 1)
    assert marks.add(TimeMark("a", 10, left=True), 2) == Watermark(30, 30, {0: 6})
    assert marks.add(TimeMark("b", 30, left=True), 2) is None


def test_the_window_of_a_reader_advances_with_it() -> None:
    marks = Watermarks()
    for time in (10, 20, 30):
        marks.add(TimeMark("a", time, {0: time}), time)

    def window(offset: int) -> TimeWindow:
        return marks.window(StreamPosition({0: SegmentPosition(offset)}), ONE)

    assert window(0) == TimeWindow(None, 10)
    assert window(9) == TimeWindow(None, 10)
    assert window(10) == TimeWindow(10, 20)
    assert window(29) == TimeWindow(20, 30)
    assert window(30) == TimeWindow(30, None)
    marks.add(TimeMark("a", 40, {0: 40}), 40)
    assert window(35) == TimeWindow(30, 40)
    assert len(marks.found) <= 2


def test_a_cut_is_compared_in_the_segments_of_the_reader_across_splits() -> None:
    left, right = KeyRange.FULL.split(2)
    graph = graph_of(
        Stream(
            "s",
            {
                0: segment(0, KeyRange.FULL),
                1: segment(1, left, frozenset([0]), 1),
                2: segment(2, right, frozenset([0]), 1),
            },
        )
    )
    assert passed(StreamPosition.of({1: 0}), {0: 99}, graph)
    assert not passed(StreamPosition.of({0: 99}), {0: 99, 1: 1}, graph)
    assert passed(StreamPosition.of({1: 1}), {0: 99, 1: 1, 2: 50}, graph), "another reader has segment 2"
    assert not passed(StreamPosition.of({1: 1, 2: 49}), {0: 99, 1: 1, 2: 50}, graph)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_a_reader_past_a_watermark_has_read_all_earlier_times(seed: int) -> None:
    """Compare with the definition: writers, segments that fill one after another, and a reader of everything."""
    rng = random.Random(seed)
    stream = random_stream(rng, scalings=2, longest=6)
    graph = graph_of(stream)
    marks, times = Watermarks(), dict.fromkeys("ab", 0.0)
    written: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    journal: list[tuple[int, int, float]] = []
    for writer in "ab":
        # Both note a time before reading starts, because time does not wait for unknown writers.
        marks.add(TimeMark(writer, 0, {}), 0)
    for number in sorted(stream.segments):
        for offset in range(stream.segments[number].sealed_at or 0):
            writer = rng.choice("ab")
            if rng.random() < 0.5:
                times[writer] += rng.randrange(5)
                marks.add(TimeMark(writer, times[writer], dict(written[writer])), len(journal))
            journal.append((number, offset, times[writer] + rng.randrange(3)))
            written[writer][number] = offset + 1
    for read in range(len(journal) + 1):
        ends = dict.fromkeys(stream.segments, 0)
        ends.update((number, offset + 1) for number, offset, _ in journal[:read])
        position = StreamPosition({number: SegmentPosition(end) for number, end in ends.items()})
        lower = marks.window(position, graph).lower
        assert all(time >= (lower or 0) for _, _, time in journal[read:])


def test_marks_round_trip_as_messages() -> None:
    mark = TimeMark("w", 12.5, {3: 4}, left=True)
    assert TimeMark.of(mark.to_message()) == mark
    for broken in (
        {},
        {"writer": 1, "time": 1, "positions": {}},
        {"writer": "w", "time": True, "positions": {}},
        {"writer": "w", "time": float("nan"), "positions": {}},
        {"writer": "w", "time": float("inf"), "positions": {}},
        {"writer": "w", "time": 1, "positions": {"0": -1}},
    ):
        with pytest.raises(CorruptData):
            TimeMark.of(broken)
    with pytest.raises(InvalidInput):
        Watermarks(0)


async def test_windows_begin_with_the_marks_that_retention_kept(world: StreamWorld) -> None:
    journal = marks_journal(STREAM)
    ends = []
    async with StreamWriter[Any](world.client, STREAM) as writer:
        for time in (10, 20, 30):
            await writer.write_event("key", {"n": time})
            writer.note_time(time)
            await writer.flush()
            ends.append(await world.client.head(journal))
        await writer.write_event("key", {"n": 31})
        real = world.client.read

        def left(name: str, offset: int = 0, **options: Any) -> Any:
            return real(name, max(offset, ends[1]) if name == journal else offset, **options)

        world.client.read = left  # type: ignore[method-assign]
        async with StreamReader[Any](world.client, STREAM) as reader:
            assert (await anext(reader)).data["n"] == 10
            assert await reader.time_window() == TimeWindow(None, 30), "earlier marks are removed"
            assert [event.data["n"] async for event in reader] == [20, 30, 31]
            assert await reader.time_window() == TimeWindow(30, None)
