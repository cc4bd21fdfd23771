"""Flow control: the minimum rate for clients and the maximum rate of a journal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.receiving import start_flow
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.rpc.rolled_back import AppendUnderflow
from tests.broker.running import ManualClock

KIB = 1024


def test_a_silent_client_has_one_second() -> None:
    flow = FlowControl()
    flow.start(64 * KIB, 0, now=10.0)
    assert flow.seconds_until_underflow() == 1.0
    flow.tick(10.9)
    with pytest.raises(AppendUnderflow, match="65536 bytes per second"):
        flow.tick(11.0)


def test_content_earns_credit_up_to_one_second() -> None:
    flow = FlowControl()
    flow.start(100, 0, now=0.0)
    flow.tick(0.5)
    flow.chunk(30)
    assert flow.seconds_until_underflow() == pytest.approx(0.8)
    flow.chunk(10_000)
    assert flow.seconds_until_underflow() == pytest.approx(1.0)


def test_time_spent_by_the_broker_is_not_charged() -> None:
    flow = FlowControl()
    flow.start(100, 0, now=0.0)
    flow.forgive(50.0)
    flow.tick(50.5)
    assert flow.seconds_until_underflow() == pytest.approx(0.5)


def test_no_minimum_rate_never_underflows() -> None:
    flow = FlowControl()
    flow.start(0, 0, now=0.0)
    assert flow.seconds_until_underflow() == float("inf")
    flow.tick(1e6)


def test_the_maximum_rate_makes_chunks_wait() -> None:
    flow = FlowControl()
    flow.start(0, 1000, now=0.0)
    flow.chunk(1000)  # The initial burst.
    assert not flow.throttled
    flow.chunk(500)
    assert flow.throttled
    assert flow.seconds_until_paid() == pytest.approx(0.5)
    flow.tick(0.4)
    assert flow.throttled
    flow.tick(0.5)
    assert not flow.throttled
    assert (flow.total_chunks, flow.delayed_chunks) == (2, 1)


@pytest.mark.parametrize(
    ("cap", "own", "expected"), [(0, 0, 0), (0, 100, 100), (100, 0, 100), (100, 50, 50), (50, 100, 50)]
)
def test_the_brokers_maximum_applies_to_every_journal(cap: int, own: int, expected: int) -> None:
    flow = FlowControl()
    broker: Any = SimpleNamespace(max_append_rate=cap, clock=ManualClock())
    resolution: Any = SimpleNamespace(
        spec=pb.JournalSpec(max_append_rate=own), require_replica=SimpleNamespace(flow_control=flow)
    )
    assert start_flow(broker, resolution) is flow
    flow.chunk(1000)
    assert flow.throttled == bool(expected)
    assert flow.seconds_until_paid() == ((1000 - expected) / expected if expected else 0)


def test_a_throttled_client_is_not_charged_the_minimum_rate() -> None:
    flow = FlowControl()
    flow.start(1000, 100, now=0.0)
    flow.chunk(100)
    flow.chunk(500)
    flow.tick(4.9)
    assert flow.throttled
    flow.tick(5.0)
    assert not flow.throttled


def test_unused_credit_carries_over_and_is_bounded() -> None:
    flow = FlowControl()
    flow.start(0, 1000, now=0.0)
    flow.chunk(1000)
    flow.start(0, 1000, now=1.0)
    flow.chunk(1000)
    assert not flow.throttled
    flow.start(0, 1000, now=1000.0)
    flow.chunk(10_001)
    assert flow.seconds_until_paid() == pytest.approx(0.001)


def test_a_changed_route_lifts_the_maximum_rate() -> None:
    flow = FlowControl()
    flow.start(0, 10, now=0.0)
    flow.chunk(1_000_000)
    flow.lift()
    assert not flow.throttled
    flow.chunk(1_000_000)
    assert not flow.throttled


@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 5000)), max_size=60),
    st.integers(1, 10_000),
    st.integers(0, 10_000),
)
def test_passed_content_stays_within_both_rates(steps: list[tuple[float, int]], min_rate: int, max_rate: int) -> None:
    flow = FlowControl()
    now = passed = 0.0
    flow.start(min_rate, max_rate, now)
    silent = 0.0
    for seconds, size in steps:
        now += seconds
        silent += seconds
        try:
            flow.tick(now)
        except AppendUnderflow:
            assert silent * min_rate + 1e-6 >= min_rate - passed, "cut off although it was fast enough"
            return
        flow.chunk(size)
        while flow.throttled:
            wait = flow.seconds_until_paid()
            assert wait > 0
            now += wait + 1e-9
            flow.tick(now)
        passed += size
        assert not max_rate or passed <= max_rate * (now + 1.0) + 1e-3, "faster than the journal's rate"
