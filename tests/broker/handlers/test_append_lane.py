"""Lanes: what becomes of appends whose client goes away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.handlers import append_lane
from coranto_broker.handlers.append_answers import Answers
from coranto_broker.handlers.append_lane import AppendLane, LaneAppend
from coranto_broker.replication.waiting_appends import Whole


class Leader:
    """An append that is proposed at once, and owns the pipeline until it is released."""

    made: list[Leader]

    def __init__(self, *_: object) -> None:
        self.state = State.STREAM_CONTENT
        self.error: Exception | None = None
        self.finished = self.released = False
        self.made.append(self)

    async def run(self, *_: object) -> bool:
        return True

    async def prepare_stream(self) -> None:
        self.state = State.READ_ACKNOWLEDGEMENTS

    async def finish(self) -> None:
        await asyncio.sleep(0)
        self.finished, self.error = True, ConnectionError()

    def release(self) -> None:
        self.released = True


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> AppendLane:
    """A lane whose appends are not on the fast path."""

    async def commit(*_: object) -> None:
        return

    Leader.made = []
    monkeypatch.setattr(append_lane, "AppendFsm", Leader)
    monkeypatch.setattr(append_lane, "commit_whole", commit)
    monkeypatch.setattr(append_lane.fast_path, "candidate", lambda *_: None)
    broker: Any = SimpleNamespace(metrics=SimpleNamespace(appends=SimpleNamespace(count=lambda _: None)))
    return AppendLane(broker, Answers())


@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_leader_gives_up_the_pipeline_whenever_its_client_goes_away(lane: AppendLane, turns: int) -> None:
    # Found by simulation: the task that waits for the outcome was cancelled before it began. The journal stood still.
    append = LaneAppend(pb.AppendRequest(journal="a/b"), Whole(b"x", 1), UNRESTRICTED, 0.0, lambda _: None)
    assert lane.add(append, None)
    lane.go()
    for _ in range(turns):
        await asyncio.sleep(0)
    lane.close()
    for _ in range(10):
        await asyncio.sleep(0)
    assert lane.is_idle
    assert [leader.released for leader in Leader.made] == [True]
