"""Prepared calls over frames for a pipeline: opened in the background, with pauses, and closed if unused."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import grpc
import pytest

from coranto.transport.calls import rpc_error
from coranto.wire.frames_pb2 import FramePort
from coranto_broker.replication import ready_calls
from coranto_broker.replication.ready_calls import ReadyCalls

PEER, J = "http://peer:8080", "test/journal"
PORT = FramePort(port=1, key=b"key")


class Call:
    def __init__(self) -> None:
        self.is_open = True

    def cancel(self) -> None:
        self.is_open = False


class Dialer:
    """A peer that accepts calls, or refuses them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tries = 0
        self.refuses = False

    async def open(self, *_: object) -> Call:
        self.tries += 1
        await asyncio.sleep(0)
        if self.refuses:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "no answer within 5 s")
        self.calls.append(Call())
        return self.calls[-1]


async def prepare(ready: ReadyCalls, journal: str = J) -> list[bool]:
    seen: list[bool] = []
    ready.prepare(PEER, journal, PORT, None, lambda: seen.append(True))
    await asyncio.gather(*ready._dialing)
    return seen


@pytest.fixture
async def dialer() -> Dialer:
    return Dialer()


async def test_a_call_is_opened_once_and_taken_once(dialer: Dialer) -> None:
    made: Any = dialer
    ready = ReadyCalls(lambda _: made)
    assert ready.take(PEER, J) is None
    assert await prepare(ready) == [True]
    assert ready.take(PEER, "another/journal") is None
    assert ready.take(PEER, J) is made.calls[0]
    assert ready.take(PEER, J) is None
    # Not again soon for the same journal, but for another one.
    assert await prepare(ready) == []
    assert await prepare(ready, "another/journal") == [True]
    await ready.close()
    assert [call.is_open for call in dialer.calls] == [True, False]


async def test_the_callback_of_the_current_pipeline_is_called(dialer: Dialer) -> None:
    """While one peer's connection is opened, another peer's may have replaced the pipeline that requested it."""
    made: Any = dialer
    ready = ReadyCalls(lambda _: made)
    seen: list[str] = []
    ready.replace_callback(PEER, J, lambda: seen.append("too early"))
    ready.prepare(PEER, J, PORT, None, lambda: seen.append("former"))
    ready.replace_callback(PEER, J, lambda: seen.append("present"))
    await asyncio.gather(*ready._dialing)
    ready.replace_callback(PEER, J, lambda: seen.append("too late"))
    assert seen == ["present"]
    await ready.close()


@pytest.mark.parametrize("far_refuses", [False, True])
async def test_a_pipeline_is_replaced_once_all_its_peers_have_answered(dialer: Dialer, far_refuses: bool) -> None:
    """Each pipeline takes the prepared calls, and ends the calls of the former one."""
    far, reached = "http://far:8080", asyncio.Event()

    class Far(Dialer):
        async def open(self, *given: object) -> Call:
            await reached.wait()
            return await super().open(*given)

    dialers: dict[str, Any] = {PEER: dialer, far: Far()}
    dialers[far].refuses = far_refuses
    ready = ReadyCalls(lambda endpoint: dialers[endpoint])
    seen: list[str] = []
    for endpoint in (PEER, far):
        ready.prepare(endpoint, J, PORT, None, functools.partial(seen.append, endpoint))
    other = asyncio.Event()
    ready.prepare(PEER, "another/journal", PORT, None, other.set)
    await asyncio.wait_for(other.wait(), 10)  # Another journal does not wait for it.
    assert dialer.tries == 2
    assert seen == []
    reached.set()
    await asyncio.gather(*ready._dialing)
    assert seen == ([PEER] if far_refuses else [PEER, far])
    assert ready.take(PEER, J) is not None
    assert (ready.take(far, J) is None) is far_refuses
    await ready.close()


async def test_a_call_that_is_unused_or_has_ended_is_closed(dialer: Dialer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = dialer
    ready = ReadyCalls(lambda _: made)
    assert await prepare(ready) == [True]
    dialer.calls[0].cancel()
    assert ready.take(PEER, J) is None
    monkeypatch.setattr(ready_calls, "READY_SECONDS", 0.0)
    assert await prepare(ready, "another/journal") == [True]
    for _ in range(100):
        await asyncio.sleep(0.001)
        if not dialer.calls[1].is_open:
            break
    assert not dialer.calls[1].is_open
    assert ready.take(PEER, "another/journal") is None


async def test_an_unreachable_peer_is_logged_once_and_left_alone_for_a_while(
    dialer: Dialer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Any = dialer
    ready = ReadyCalls(lambda _: made)
    dialer.refuses = True
    for number in range(5):
        assert await prepare(ready, f"test/{number}") == []
    assert dialer.tries == 1
    ready._again.clear()  # The pause has ended.
    assert await prepare(ready) == []
    assert dialer.tries == 2
    seen = capsys.readouterr().out
    assert seen.count("replication.frames_unreachable") == 1
    assert "no answer within 5 s" in seen
    ready._again.clear()
    dialer.refuses = False
    assert await prepare(ready) == [True]
    monkeypatch.setattr(ready_calls, "_MAX_REMEMBERED", 2)
    for number in range(5):
        await prepare(ready, f"test/{number}")
    assert len(ready._again) == 2
    await ready.close()


async def test_an_endpoint_without_a_host_is_not_dialled() -> None:
    ready = ReadyCalls(lambda _: None)
    assert await prepare(ready) == []
    assert ready.take(PEER, J) is None
