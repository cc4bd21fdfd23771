"""Streams to silent peers, and channels that Gazette's brokers accept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from coranto.effects import SystemClock
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.security.call_tokens import CallTokens
from coranto.security.tokens import TOKEN_SECONDS, Capability, Keys
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.transport.calls import GrpcCall
from coranto.wire import protocol_pb2 as pb
from coranto.wire.frames_pb2 import FramePort
from coranto_broker.replication import peers
from coranto_broker.replication.peers import (
    FIRST_STALL_SECONDS,
    HIGH_WATER_BYTES,
    JOINED_BYTES,
    READABLE_SECONDS,
    STALL_SECONDS,
    Peers,
    PeerStream,
)
from coranto_broker.replication.pipeline import ReplicationFailed

NONE = pb.LabelSet()
EMPTY = Fragment("test/journal", 0, 0, ZERO_SUM, Codec.NONE)


class Call:
    """A Replicate call whose peer answers on demand."""

    def __init__(self, *, seconds: float | None = 0.0) -> None:
        """Set the seconds that sending a message takes; None: it does not end."""
        self.seconds = seconds
        self.sent: list[pb.ReplicateRequest] = []
        self.reading: asyncio.Future[pb.ReplicateResponse] | None = None
        self.cancelled = self.ended = False

    async def write(self, request: pb.ReplicateRequest) -> None:
        await (asyncio.Event().wait() if self.seconds is None else asyncio.sleep(self.seconds))
        self.sent.append(request)

    async def done_writing(self) -> None:
        self.ended = True

    async def read(self) -> pb.ReplicateResponse:
        self.reading = asyncio.get_running_loop().create_future()
        return await self.reading

    def answer(self, response: pb.ReplicateResponse | None = None) -> None:
        assert self.reading is not None
        self.reading.set_result(response or pb.ReplicateResponse())

    def cancel(self) -> None:
        self.cancelled = True
        if self.reading is not None:
            self.reading.cancel()


class Stub:
    def __init__(self, call: Call) -> None:
        self._call = call

    def Replicate(self, metadata: Any) -> Call:
        return self._call


def stream_over(call: Call) -> PeerStream:
    return PeerStream(GrpcCall(call), pb.ProcessSpec.ID(zone="a", suffix="b"))


async def opened(call: Call, answer: pb.ReplicateResponse) -> PeerStream:
    """Return a stream whose first proposal got this answer."""
    stream = stream_over(call)
    stream.propose(EMPTY, NONE, header=None, acknowledge=True)
    asyncio.get_running_loop().call_later(1, call.answer, answer)
    assert await stream.acknowledgement() == answer
    call.sent.clear()
    return stream


def virtually(main: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> None:
    """Run in virtual time, so that timeouts take no real time."""
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main(loop))
        assert not loop.problems


def test_pings_are_rarer_than_the_limit_of_gazettes_brokers() -> None:
    assert dict(peers._OPTIONS)["grpc.keepalive_time_ms"] > 5 * 60 * 1000
    assert "grpc.keepalive_permit_without_calls" not in dict(peers._OPTIONS)


def test_a_peer_has_longer_for_its_first_answer_than_for_others() -> None:
    async def main(loop: SimLoop) -> None:
        call = Call()
        stream = stream_over(call)
        stream.propose(EMPTY, NONE, header=None, acknowledge=True)
        loop.call_later(FIRST_STALL_SECONDS - 1, call.answer)
        assert await stream.acknowledgement() == pb.ReplicateResponse()
        begun = loop.time()
        with pytest.raises(ReplicationFailed, match="did not answer in time"):
            await stream.acknowledgement()
        assert loop.time() - begun == pytest.approx(STALL_SECONDS)
        assert call.cancelled
        with pytest.raises(ReplicationFailed, match="broken"):
            stream.write(0, b"more")

    assert STALL_SECONDS < FIRST_STALL_SECONDS - 1
    virtually(main)


def test_only_requested_responses_are_received_before_they_are_awaited() -> None:
    async def main(loop: SimLoop) -> None:
        call = Call()
        stream = stream_over(call)
        answers = [pb.ReplicateResponse(status=status) for status in (pb.OK, pb.WRONG_ROUTE)]
        for number, answer in enumerate(answers):
            stream.propose(EMPTY, NONE, header=None, acknowledge=True)
            loop.call_later(1 + number, call.answer, answer)
        await asyncio.sleep(3)
        begun = loop.time()
        assert [await stream.acknowledgement(), await stream.acknowledgement()] == answers
        assert loop.time() == begun
        call.answer()
        with pytest.raises(ReplicationFailed, match="not requested"):
            await stream.acknowledgement()
        assert call.cancelled

    virtually(main)


@pytest.mark.parametrize("just_answered", [False, True])
def test_an_abandoned_wait_for_a_response_breaks_the_stream(just_answered: bool) -> None:
    async def main(loop: SimLoop) -> None:
        call = Call()
        stream = stream_over(call)
        for _ in range(2):
            stream.propose(EMPTY, NONE, header=None, acknowledge=True)
        waiting = asyncio.create_task(stream.acknowledgement())
        await asyncio.sleep(1)
        if just_answered:
            call.answer()
            await asyncio.sleep(0)  # The stream has the response, but its waiter has not run.
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert call.cancelled
        with pytest.raises(ReplicationFailed, match="was aborted"):
            await stream.acknowledgement()  # It must not get the first response for the second.

    virtually(main)


def test_a_peer_that_accepts_content_slowly_is_waited_for() -> None:
    async def main(loop: SimLoop) -> None:
        each = STALL_SECONDS / 2
        call = Call(seconds=each)
        stream = stream_over(call)
        for delta in range(10):
            stream.write(delta, b"x")
        stream.propose(EMPTY, NONE, header=None, acknowledge=True)
        stream._stall_seconds = STALL_SECONDS
        loop.call_later(12 * each, call.answer)
        assert await stream.acknowledgement() == pb.ReplicateResponse()
        assert len(call.sent) == 11
        stream.abort()

    virtually(main)


def test_an_append_does_not_wait_for_a_silent_peer_to_accept_content() -> None:
    async def main(loop: SimLoop) -> None:
        call = Call(seconds=None)
        stream = stream_over(call)
        stream.write(0, bytes(HIGH_WATER_BYTES + 1))
        begun = loop.time()
        await stream.drain()
        assert loop.time() - begun == pytest.approx(FIRST_STALL_SECONDS)
        assert call.cancelled
        with pytest.raises(ReplicationFailed, match="broken"):
            stream.write(1, b"more")

    virtually(main)


@pytest.mark.parametrize("takes_both", [True, False])
@pytest.mark.parametrize("size", [3, JOINED_BYTES + 1])
def test_small_content_is_sent_with_its_proposal_to_peers_that_accept_both(takes_both: bool, size: int) -> None:
    async def main(loop: SimLoop) -> None:
        call = Call()
        stream = await opened(call, pb.ReplicateResponse(takes_content_with_proposal=takes_both))
        content, whole = bytes(size), replace(EMPTY, end=size)
        stream.write(0, content)
        stream.propose(whole, NONE, header=None, acknowledge=True)
        stream.propose(EMPTY, NONE, header=None, acknowledge=False)
        await asyncio.sleep(1)
        proposal = pb.ReplicateRequest(proposal=whole.to_wire(), registers=NONE, acknowledge=True)
        last = pb.ReplicateRequest(proposal=EMPTY.to_wire(), registers=NONE)
        if takes_both and size <= JOINED_BYTES:
            proposal.content = content
            assert call.sent == [proposal, last]
        else:
            assert call.sent == [pb.ReplicateRequest(content=content), proposal, last]
        stream.abort()

    virtually(main)


def test_readable_offsets_are_sent_with_the_next_proposal_or_after_a_delay() -> None:
    async def main(loop: SimLoop) -> None:
        call = Call()
        stream = await opened(call, pb.ReplicateResponse(takes_readable=True))
        stream.readable(5)
        await asyncio.sleep(READABLE_SECONDS / 2)
        stream.readable(7)
        stream.propose(EMPTY, NONE, header=None, acknowledge=True)
        await asyncio.sleep(1)
        assert [each.readable for each in call.sent] == [7]
        stream.readable(8)
        await asyncio.sleep(READABLE_SECONDS / 2)
        stream.readable(9)
        assert len(call.sent) == 1
        await asyncio.sleep(1)
        assert call.sent[1:] == [pb.ReplicateRequest(readable=9)]
        stream.readable(10)
        stream.close_send()
        await asyncio.sleep(READABLE_SECONDS / 2)
        assert call.sent[2:] == [pb.ReplicateRequest(readable=10)]
        assert call.ended
        stream.abort()

    virtually(main)


async def test_a_call_for_the_next_pipeline_has_its_own_token_and_reports_its_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SetClock(SystemClock):
        time = 1_000_000.0

        def now(self) -> float:
            return self.time

    clock, loop = SetClock(), asyncio.get_running_loop()
    found = Peers("zone", CallTokens(Keys.parse("AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="), clock))
    prepared: list[Any] = []
    monkeypatch.setattr(found, "stub_at", lambda _: SimpleNamespace(Replicate=lambda metadata: Call()))
    monkeypatch.setattr(found._ready, "prepare", lambda *given: prepared.append(given[3]))
    first = found.metadata(Capability.REPLICATE, "j")
    stream = found.replicate("http://127.0.0.1:1", pb.ProcessSpec.ID(), "j", first)
    clock.time += TOKEN_SECONDS / 2 + 1
    assert stream.on_busy is not None
    stream.on_busy(FramePort(port=1))
    assert prepared == [found.metadata(Capability.REPLICATE, "j")]
    assert prepared != [first]
    assert stream.token_age == 0.0

    class Ready(GrpcCall[pb.ReplicateResponse]):
        begun = loop.time() - 7.0

    monkeypatch.setattr(found._ready, "take", lambda *_: Ready(Call()))
    framed = found.replicate("http://127.0.0.1:1", pb.ProcessSpec.ID(), "j", first)
    assert framed.token_age >= 7.0
    for each in (stream, framed):
        each.abort()
    await found.close()
