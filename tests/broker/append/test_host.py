"""The host of appends: counts of their outcomes, and a replica that may not replicate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coranto.errors import Unavailable
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import ProposalPath, State
from coranto_broker.metrics import Metrics
from coranto_broker.recovery.in_sync_records import Stranded
from tests.broker.running import ManualClock

NOTHING: Any = None


class World:
    """A host with recorded collaborators."""

    def __init__(self) -> None:
        self.metrics, self.clock = Metrics(), ManualClock()
        self.restarted: list[object] = []
        resolver: Any = SimpleNamespace(restart=self.restarted.append)
        records: Any = SimpleNamespace(verify=self._verify)
        self.host = AppendHost(
            clock=self.clock,
            coordinator=NOTHING,
            resolver=resolver,
            in_sync=records,
            peers=NOTHING,
            stores=NOTHING,
            metrics=self.metrics,
            quotas=NOTHING,
            max_append_rate=0,
            spawn=NOTHING,
        )

    async def _verify(self, *_: object) -> None:
        raise Stranded("others continued")

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_appends_are_counted_by_their_final_state() -> None:
    world = World()
    fragment = Fragment("a/b", 0, 9, sum_of(b"x" * 9), Codec.NONE)
    committed, refused, gone = (QueuedAppend(pb.AppendRequest(journal="a/b"), begun=100.0) for _ in range(3))
    world.clock.advance(2)
    committed.state = State.FINISHED
    committed.settle(AppendOutcome(NOTHING, fragment=fragment, begin=4, end=9))
    refused.settle(Unavailable("later"))
    for append in (committed, refused, gone):
        world.host.ended(append)
    ends = [world.value("coranto_appends_total", outcome=state.value) for state in (State.FINISHED, State.ERROR)]
    assert ends == [1.0, 1.0]
    assert world.value("coranto_appends_total", outcome="resolve") == 1.0
    assert world.value("coranto_append_bytes_total") == 5.0
    assert world.value("coranto_append_seconds_sum") == 2.0


def test_streamed_content_is_not_counted_as_a_batch() -> None:
    world = World()
    for path, appends in ((ProposalPath.BATCH, 7), (ProposalPath.STREAMED, 1), (ProposalPath.INLINE, 1)):
        world.host.proposed(path, appends)
    assert world.value("coranto_group_appends_sum") == 8.0


async def test_a_replica_whose_spool_others_continued_without_is_replaced() -> None:
    world = World()
    folder = SimpleNamespace(create_revision=1)
    replica = SimpleNamespace(journal="a/b", folder=folder, stranded=False)
    resolution: Any = SimpleNamespace(require_replica=replica)
    spool: Any = SimpleNamespace(stamp=None, end=0)
    with pytest.raises(Stranded):
        await world.host.verify(resolution, spool)
    assert replica.stranded
    assert world.restarted == [replica]
