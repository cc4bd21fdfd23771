"""Producers with clocks that are far off."""

from __future__ import annotations

from structlog.testing import capture_logs

from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.skew import SkewedClock, SkewWatch, skewed_clocks
from coranto.messages.uuids import ProducerId, clock_from_ns

HOUR = 3600
NOW = 1_900_000_000
A, B = ProducerId(b"\x01AAAAA"), ProducerId(b"\x01BBBBB")


def clock_at(seconds: float) -> int:
    return clock_from_ns(int(seconds * 10**9))


# Reporting.


def test_clocks_far_off_are_reported() -> None:
    before = Source(100, {A: ProducerState(clock_at(NOW), -1, 90)})
    fast, slow = ProducerState(clock_at(NOW + 2 * HOUR), -1, 150), ProducerState(clock_at(NOW - 2 * HOUR), -1, 150)
    assert skewed_clocks(before, Source(200, {A: fast}), NOW) == [SkewedClock(A, 2 * HOUR)]
    assert skewed_clocks(before, Source(200, {B: slow}), NOW + 5) == [SkewedClock(B, -2 * HOUR)]
    assert skewed_clocks(before, Source(200, {B: ProducerState(clock_at(NOW - 0.5 * HOUR), -1, 150)}), NOW) == []
    # B wrote long ago, and the journal was also written long ago.
    assert skewed_clocks(before, Source(200, {B: ProducerState(slow.last_ack, -1, 100)}), NOW) == []
    assert skewed_clocks(Source(), Source(200, {B: slow}), NOW) == []
    # No clock counts as slow compared with a clock that is itself ahead.
    assert skewed_clocks(before, Source(200, {B: slow}), NOW - 2.5 * HOUR) == []


def test_each_producer_is_warned_about_once() -> None:
    watch = SkewWatch("j", Source())
    sources = [Source(100 * n, {A: ProducerState(clock_at(NOW + 30 * HOUR) + n, -1, 100 * n)}) for n in (1, 2)]
    with capture_logs() as logs:
        assert [len(watch.check(source, NOW)) for source in sources] == [1, 0]
    assert [(entry["journal"], entry["producer"], entry["seconds_ahead"]) for entry in logs] == [
        ("j", A.hex(), 30 * HOUR)
    ]
