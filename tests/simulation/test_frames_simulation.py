"""Frames in the simulated world: many seeds are sound and cover all paths, and planted bugs are caught."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from coranto.client.append.stream import AppendStream, NotSent
from coranto.client.append.streams import AppendStreams
from coranto.fragments.fragment import Fragment
from coranto.specs.durability import Durability
from coranto.transport.calls import FrameCall
from coranto.transport.connection import FrameConnection
from coranto.transport.frames import Frame, FrameDecoder
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch, StreamedAppend
from coranto_broker.append.batch import Batch
from coranto_broker.replication.peers import PeerStream
from coranto_broker.replication.pipeline import Extension, Pipeline
from coranto_broker.server.frames import FrameContext
from tests.simulation.broker.options import FRAME_FAULTS, frames_of, options_of
from tests.simulation.broker.run import RunReport, run

from .coverage import PLANTED_SEEDS, missing, seeds_until

SEEDS = 12
FIRST = 100
"""The seeds below are from `test_simulation`. Half of them have frames."""

INTERESTING = {
    *(f"fault: {fault}" for fault in FRAME_FAULTS),
    "a client read no answers",
    "an append over frames was acknowledged",
    "an append over frames had no answer",
    "appends moved to frames",
    "appends were forwarded over frames",
    "journals were replicated over frames",
    "log: client.frames_unreachable",
    "tcp: a connection was reset with bytes that nobody had read",
    "tcp: a reader was paused",
    "tcp: a writer was paused",
    "tcp: an end gave its connection up",
}

FRAMES: dict[str, Any] = {"frames": True, "frame_read_bytes": 512, "append_streams": True, "shuffle": False}
REPLICATED = FRAMES | {"brokers": 3, "replication": 3, "min_append_rate": 0}
ALONE = FRAMES | {"brokers": 1, "replication": 1, "lease_seconds": 10.0}


def framed(seed: int) -> RunReport:
    """Run a seed as the command does, but always with frames."""
    return run(options_of(seed) if frames_of(seed)["frames"] else options_of(seed, frames=True))


@pytest.mark.exhaustive  # Half of the seeds of `test_simulation.py` have frames.
def test_the_seeds_are_sound_and_cover_the_interesting_paths() -> None:
    wanted = dict.fromkeys(INTERESTING, 1)
    coverage: Counter[str] = Counter()
    for seed in seeds_until(SEEDS, coverage, wanted):
        report = framed(FIRST + seed)
        assert report.sound, f"\n{report}"
        coverage += report.coverage
    assert missing(coverage, wanted) == {}


def test_half_of_the_seeds_have_frames_unless_options_are_given() -> None:
    have = sum(options_of(seed).frames for seed in range(200))
    assert 70 < have < 130
    assert not any(options_of(seed, brokers=3).frames for seed in range(20))


def test_a_run_with_frames_is_reproducible_and_prints_its_replay_command() -> None:
    seed = next(seed for seed in range(20) if options_of(seed).frames)
    first, second = run(options_of(seed)), run(options_of(seed))
    assert (first.digest, first.steps) == (second.digest, second.steps)
    assert first.coverage["tcp: a reader was paused"] == second.coverage["tcp: a reader was paused"]
    failed = run(options_of(seed), prepare=lambda world: world.problems.append("made up"))
    assert f"python -m tests.simulation.broker --seed {seed}" in str(failed)
    assert "frame_read_bytes=" in str(failed)


# -- Planted bugs ------------------------------------------------------------------------------------------------------


def found(seeds: int = PLANTED_SEEDS, **options: Any) -> set[str]:
    """Return the names of the anomalies and problems of the first of `seeds` seeds that has any."""
    names: set[str] = set()
    for seed in range(seeds):
        report = run(options_of(seed, **{"seconds": 8.0, "appends": 15, "faults": ()} | options))
        names |= {anomaly.name for anomaly in report.anomalies} | set(report.problems)
        if names:
            break
    return names


def test_there_is_no_anomaly_without_planted_bugs() -> None:
    assert found(3, **REPLICATED) == set()
    assert found(3, **ALONE) == set()
    assert found(3, **REPLICATED | {"faults": ("break calls", "slow readers")}) == set()


def test_an_answer_to_another_append_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_now = FrameContext.write, FrameContext.write_now

    def swapped(message: Any) -> Any:
        if isinstance(message, AppendAnswers) and len(message.answers) > 1:
            one, other = message.answers[0], message.answers[-1]
            one.id, other.id = other.id, one.id
        return message

    monkeypatch.setattr(FrameContext, "write", lambda context, message: real(context, swapped(message)))
    monkeypatch.setattr(FrameContext, "write_now", lambda context, message: real_now(context, swapped(message)))
    assert found(**ALONE)


def test_a_frame_dropped_when_reading_pauses_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FrameConnection.data_received

    def data_received(connection: FrameConnection, data: bytes) -> None:
        paused = connection._reading_paused
        real(connection, data)
        if connection._reading_paused and not paused:
            connection._frames.pop()

    monkeypatch.setattr(FrameConnection, "data_received", data_received)
    assert found(**ALONE) & {"unanswered"}


Move = Callable[[AppendStream, AppendStream], None]


def move_by(move: Move) -> Any:
    """Return a handover to frames that does not wait, and moves appends in flight by `move`."""
    real = AppendStreams._move

    async def moved(streams: AppendStreams, *arguments: Any) -> None:
        framed, former = streams._framed, streams._stream
        if framed is not None and framed.is_open and former is not None and former._sent:
            move(former, framed)
            former.finish()
            streams._stream, streams._framed, streams._port, streams._moved = framed, None, None, True
        else:
            await real(streams, *arguments)

    return moved


def test_a_handover_that_loses_appends_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppendStreams, "_move", move_by(lambda former, framed: former._sent.clear()))
    assert "unanswered" in found(**REPLICATED)


def test_a_handover_that_doubles_appends_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[tuple[AppendStream, int], StreamedAppend] = {}
    real = AppendStream._next_batch

    def next_batch(stream: AppendStream) -> AppendBatch:
        batch = real(stream)
        kept.update({(stream, append.id): append for append in batch.appends})
        return batch

    doubled: list[asyncio.Future[bytes]] = []

    def again(former: AppendStream, framed: AppendStream) -> None:
        for number in former._sent:
            append = kept[former, number]
            doubled.append(asyncio.ensure_future(framed.append(append.request, append.content, None)))

    monkeypatch.setattr(AppendStream, "_next_batch", next_batch)
    monkeypatch.setattr(AppendStreams, "_move", move_by(again))
    assert "duplicate" in found(**REPLICATED)


def test_a_handover_that_overtakes_appends_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AppendStreams, "_move", move_by(lambda former, framed: None))
    assert "out-of-order" in found(2 * PLANTED_SEEDS, **REPLICATED | {"congestion": 0.1})


def unanswered_as(monkeypatch: pytest.MonkeyPatch, report: Callable[[AppendStream, StreamedAppend, Any], None]) -> None:
    """Let broken streams report their unanswered appends by `report`."""
    real_fail, real_next = AppendStream._fail, AppendStream._next_batch
    kept: dict[tuple[AppendStream, int], StreamedAppend] = {}

    def next_batch(stream: AppendStream) -> AppendBatch:
        batch = real_next(stream)
        kept.update({(stream, append.id): append for append in batch.appends})
        return batch

    def fail(stream: AppendStream, problem: str) -> None:
        for number, sent in stream._sent.items():
            if isinstance(stream._call, FrameCall) and not sent.done.done():
                report(stream, kept[stream, number], sent.done)
        real_fail(stream, problem)

    monkeypatch.setattr(AppendStream, "_next_batch", next_batch)
    monkeypatch.setattr(AppendStream, "_fail", fail)


BREAKS = REPLICATED | {"faults": ("break calls",)}


def test_unanswered_appends_reported_as_not_applied_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    unanswered_as(monkeypatch, lambda stream, append, done: done.set_exception(NotSent("it was")))
    assert found(**BREAKS) & {"misreported-append", "foreign-answer", "aborted-read"}


def test_unanswered_appends_reported_as_applied_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[pb.Header] = []
    real = AppendStream._answered

    def answered(stream: AppendStream, answer: AppendAnswer) -> None:
        headers.append(pb.AppendResponse.FromString(answer.response).header)
        real(stream, answer)

    def applied(stream: AppendStream, append: StreamedAppend, done: asyncio.Future[AppendAnswer]) -> None:
        header = next(each for each in headers if each.route.members)
        response = pb.AppendResponse(header=header, registers=pb.LabelSet())
        response.commit.journal, response.commit.end = append.request.journal, len(append.content)
        response.commit.compression_codec = pb.NONE
        response.commit.sum.CopyFrom(sha1_of(append.content))
        done.set_result(AppendAnswer(response=response.SerializeToString()))

    monkeypatch.setattr(AppendStream, "_answered", answered)
    unanswered_as(monkeypatch, applied)
    assert found(**BREAKS) & {"misreported-append", "lost-write", "under-replicated-ack", "not-linearizable"}


def sha1_of(content: bytes) -> pb.SHA1Sum:
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    parts = [int.from_bytes(digest[at : at + size], "big") for at, size in ((0, 8), (8, 8), (16, 4))]
    return pb.SHA1Sum(part1=parts[0], part2=parts[1], part3=parts[2])


def acknowledge_early(monkeypatch: pytest.MonkeyPatch, when: Callable[[Pipeline], bool]) -> None:
    real = Pipeline.gather_ok

    async def gather(pipeline: Pipeline, *arguments: Any) -> Durability:
        if when(pipeline):
            pipeline.spool.publish(pipeline.spool.fragment)
            return Durability(3, 1)
        return await real(pipeline, *arguments)

    monkeypatch.setattr(Pipeline, "gather_ok", gather)


def is_framed(pipeline: Pipeline) -> bool:
    streams = [stream for _, stream in pipeline._streams if isinstance(stream, PeerStream)]
    return any(isinstance(stream._call, FrameCall) for stream in streams)


def test_an_answer_before_acknowledgements_over_frames_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge_early(monkeypatch, is_framed)
    assert "under-replicated-ack" in found(**REPLICATED | {"congestion": 0.1})


def test_appends_counted_as_acknowledged_by_a_move_to_frames_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acknowledge_early(monkeypatch, lambda pipeline: pipeline.renew_at < 0)
    assert "under-replicated-ack" in found(2 * PLANTED_SEEDS, **REPLICATED | {"congestion": 0.1})


def test_a_decoder_that_joins_a_split_header_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FrameDecoder.feed

    def feed(decoder: FrameDecoder, data: bytes) -> list[Frame]:
        if decoder._introduced and 0 < len(decoder._incomplete) < 5:
            decoder._incomplete.clear()  # The rest is parsed as the beginning of a frame.
        return real(decoder, data)

    monkeypatch.setattr(FrameDecoder, "feed", feed)
    assert found(**ALONE) & {"broken-frames", "unanswered"}


# -- Planted bugs of batches -------------------------------------------------------------------------------------------

CONGESTED = REPLICATED | {"congestion": 0.1}


def test_a_batch_that_answers_before_all_replicas_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Batch._await_acks

    async def await_acks(batch: Batch, *arguments: Any) -> None:
        for append, outcome in batch._outcomes(Durability(3, 1)):
            append.settle(outcome)
        batch.members, batch.refused = [], []
        await real(batch, *arguments)

    monkeypatch.setattr(Batch, "_await_acks", await_acks)
    assert "under-replicated-ack" in found(**CONGESTED)


def garble_some(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let primaries sometimes send other content than they propose. Return the counts of messages."""
    real, garbled = Extension.encoded, Counter[str]()

    def encoded(extension: Extension) -> bytes:
        message = pb.ReplicateRequest.FromString(real(extension))
        garbled["messages"] += 1
        if garbled["messages"] % 5 == 0:
            garbled["garbled"] += 1
            message.content = bytes(len(message.content))
        return message.SerializeToString()

    monkeypatch.setattr(Extension, "encoded", encoded)
    return garbled


def test_content_that_differs_from_the_sum_of_its_proposal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    garbled = garble_some(monkeypatch)
    # A replica that has refused one ends the call at the next one, which does not follow. There is no other effect.
    assert found(3, **CONGESTED) <= {"broken-frames"}
    assert garbled["garbled"]


def test_a_replica_that_ignores_the_sum_of_a_proposal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fragment.is_wire

    def is_wire(fragment: Fragment, wire: pb.Fragment) -> bool:
        claimed = pb.Fragment()
        claimed.CopyFrom(wire)
        claimed.sum.CopyFrom(fragment.to_wire().sum)
        return real(fragment, claimed)

    garble_some(monkeypatch)
    monkeypatch.setattr(Fragment, "is_wire", is_wire)
    assert "under-replicated-ack" in found(**CONGESTED)


def test_an_answer_counted_for_a_later_proposal_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PeerStream._received
    owed: Counter[int] = Counter()

    def received(stream: PeerStream, response: pb.ReplicateResponse) -> None:
        key = id(stream)
        if owed[key]:
            owed[key] -= 1  # It was counted before it arrived.
            return
        real(stream, response)
        if stream._call.can_write_now and stream._requested:
            owed[key] += 1
            real(stream, response)

    monkeypatch.setattr(PeerStream, "_received", received)
    assert "under-replicated-ack" in found(**CONGESTED)
