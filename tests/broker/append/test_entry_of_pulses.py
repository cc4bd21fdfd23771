"""Pulses: their appends, and which of their outcomes are failures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import entry
from coranto_broker.append.entry import Pulses
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.ownership import Signal
from coranto_broker.replication.replica import PulseFailed
from tests.broker.running import ManualClock


class World:
    """A journal whose pulses end as the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.signal = ManualClock(), Signal()
        self.end: pb.Status.ValueType | Exception = pb.OK
        self.made: list[QueuedAppend] = []
        self.replica: Any = SimpleNamespace(journal="a/b", last_pulse=(pb.OK, 0.0))
        host: Any = SimpleNamespace(clock=self.clock)
        self.pulses = Pulses(host)
        monkeypatch.setattr(entry, "resolve", self._resolve)

    async def _resolve(self, host: object, append: QueuedAppend) -> AppendOutcome:
        self.made.append(append)
        resolution: Any = SimpleNamespace(invalidated=self.signal)
        append.resolution = resolution
        if isinstance(self.end, Exception):
            raise self.end
        return AppendOutcome(resolution, self.end)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_a_pulse_is_an_empty_append_that_wakes_no_journal(world: World) -> None:
    assert await world.pulses.pulse(world.replica) is world.signal
    (append,) = world.made
    assert append.is_pulse
    assert append.content == b""
    assert append.request == pb.AppendRequest(
        journal="a/b", do_not_proxy=True, suspend=pb.AppendRequest.SUSPEND_NO_RESUME
    )
    assert world.replica.last_pulse == (pb.OK, world.clock.now())


@pytest.mark.parametrize("status", [pb.SUSPENDED, pb.INSUFFICIENT_JOURNAL_BROKERS, pb.NOT_JOURNAL_PRIMARY_BROKER])
async def test_refusals_that_end_with_the_route_are_not_failures(world: World, status: pb.Status.ValueType) -> None:
    world.end = status
    assert await world.pulses.pulse(world.replica) is world.signal
    assert world.replica.last_pulse[0] == status


@pytest.mark.parametrize("end", [pb.INDEX_HAS_GREATER_OFFSET, Unavailable("gone"), OSError("disk"), TimeoutError()])
async def test_a_failed_pulse_says_when_to_retry(world: World, end: Any) -> None:
    world.end = end
    with pytest.raises(PulseFailed) as failed:
        await world.pulses.pulse(world.replica)
    assert failed.value.changed is world.signal
