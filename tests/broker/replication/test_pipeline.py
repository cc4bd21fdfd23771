"""The pipeline: its results from the answers of replicas, and the order of reading them."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.specs.durability import ACK_REPLICAS, ACK_UNMET, ACK_ZONES, Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.pipeline import Extension, LocalStream, Pipeline, ReplicationFailed, SyncResult, Turn
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import empty_at
from tests.broker.running import FaultyDisk, ManualClock

JOURNAL = "a/journal"
NONE = pb.LabelSet()
MINE = labels.label_set(author="me")


class Peer:
    """A replica that gives planned answers, and records sent messages."""

    def __init__(self, *answers: pb.ReplicateResponse | str) -> None:
        self.answers = deque(answers)
        self.sent: list[str] = []
        self.reported: list[int] = []
        self.headers: list[pb.Header | None] = []
        self.broken = False
        self.open = True

    def _send(self, what: str) -> None:
        if self.broken:
            raise ReplicationFailed("the stream is broken")
        self.sent.append(what)

    def write(self, content_delta: int, content: bytes) -> None:
        self._send(f"{content_delta}+{content.decode()}")

    is_open = tells_synced = True

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        header: pb.Header | None,
        acknowledge: bool,
        ask: int,
        traceparent: str = "",
    ) -> None:
        self.headers.append(header)
        self._send(f"[{proposal.begin},{proposal.end})")

    def extend(self, extension: Extension) -> None:
        self.write(0, extension.content)
        self.propose(extension.proposal, extension.registers, header=None, acknowledge=True, ask=0)

    def readable(self, offset: int) -> None:
        self.reported.append(offset)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def acknowledgement(self) -> pb.ReplicateResponse:
        answer = self.answers.popleft()
        if isinstance(answer, str):
            raise ReplicationFailed(answer)
        return answer

    def close_send(self) -> None:
        self.open = False

    def abort(self) -> None:
        self.broken = True

    async def closed(self) -> None:
        if self.answers:
            raise ReplicationFailed("an answer that was not asked for")


class Observer:
    def __init__(self) -> None:
        self.visible = 0

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        self.visible = fragment.end

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.visible = sealed.fragment.end

    def spool_skip(self, offset: int) -> None:
        self.visible = offset

    def spool_ahead(self, end: int) -> None:
        raise AssertionError("the primary's own spool is never ahead")

    def spool_readable(self, end: int) -> None:
        self.visible = end


OK = pb.ReplicateResponse(status=pb.OK)
HEADER = pb.Header(route=pb.Route(primary=0), etcd=pb.Header.Etcd(revision=50))


def mismatch(begin: int, end: int, registers: pb.LabelSet = NONE) -> pb.ReplicateResponse:
    fragment = Fragment(JOURNAL, begin, end, b"s" * 20, Codec.NONE).to_wire()
    return pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH, fragment=fragment, registers=registers)


def wrong_route(revision: int) -> pb.ReplicateResponse:
    return pb.ReplicateResponse(status=pb.WRONG_ROUTE, header=pb.Header(etcd=pb.Header.Etcd(revision=revision)))


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def observer() -> Observer:
    return Observer()


@pytest.fixture
def spool(tmp_path: Path, disk: FaultyDisk, observer: Observer) -> DurableSpool:
    """A spool of [0, 3)."""
    folder = SpoolFolder(folder_of(tmp_path, JOURNAL, 1), JOURNAL, 1, disk, ManualClock())
    spool = DurableSpool(folder, observer, Fsync.NEVER)
    spool.write(0, b"abc")
    spool.propose(spool.next_fragment(), NONE, primary=True)
    return spool


def pipeline(spool: DurableSpool, *peers: Peer) -> Pipeline:
    names = ["primary", *(f"peer-{n}" for n in range(len(peers)))]
    return Pipeline(HEADER, spool, [LocalStream(spool), *peers], names)


async def synced(spool: DurableSpool, *answers: pb.ReplicateResponse | str) -> tuple[SyncResult, Pipeline]:
    pln = pipeline(spool, *(Peer(answer) for answer in answers))
    pln.propose(spool.fragment, spool.registers, acknowledge=True)
    return await pln.gather_sync(), pln


async def test_all_agree(spool: DurableSpool, observer: Observer) -> None:
    result, pln = await synced(spool, OK, OK)
    assert (result, pln.error) == (SyncResult(), None)
    assert observer.visible == 0, "others may still continue without it"
    pln.show()
    assert observer.visible == 3


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([OK, mismatch(0, 9, labels.label_set(author="me"))], SyncResult(9, labels.label_set(author="me"))),
        ([mismatch(7, 7), mismatch(5, 6)], SyncResult(7, NONE)),
        ([mismatch(3, 3), OK], SyncResult(3)),
        ([mismatch(3, 3), mismatch(4, 5)], SyncResult(5, NONE)),
        ([wrong_route(60), wrong_route(55)], SyncResult(read_through=60)),
    ],
)
async def test_peers_that_are_ahead_or_cannot_follow(
    spool: DurableSpool, observer: Observer, answers: list[pb.ReplicateResponse], expected: SyncResult
) -> None:
    result, pln = await synced(spool, *answers)
    assert (result, pln.error) == (expected, None)
    assert observer.visible == 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (mismatch(0, 2), r"PROPOSAL_MISMATCH with \[0, 2\)"),
        (mismatch(1, 3), r"PROPOSAL_MISMATCH with \[1, 3\)"),
        (wrong_route(50), "only at etcd revision 50"),
        (pb.ReplicateResponse(status=pb.NOT_JOURNAL_BROKER), "NOT_JOURNAL_BROKER"),
        ("connection refused", "connection refused"),
    ],
)
async def test_answers_that_end_the_pipeline(
    spool: DurableSpool, observer: Observer, answer: pb.ReplicateResponse | str, problem: str
) -> None:
    _, pln = await synced(spool, OK, answer)
    assert pln.error is not None
    with pytest.raises(ReplicationFailed, match=f"peer-1: .*{problem}"):
        raise pln.error
    assert observer.visible == 0


async def test_a_pipeline_that_ends_gives_up_peers_that_answered_an_error(spool: DurableSpool) -> None:
    well, failed = Peer(OK), Peer(pb.ReplicateResponse(status=pb.NOT_JOURNAL_BROKER))
    pln = pipeline(spool, well, failed)
    pln.propose(spool.fragment, spool.registers, acknowledge=True)
    await pln.gather_sync()
    pln.close_send()
    await pln.gather_end()
    assert (well.broken, failed.broken) == (False, True)


async def test_an_empty_spool_that_disagrees_cannot_be_rolled_further(spool: DurableSpool) -> None:
    spool.propose(empty_at(spool.fragment, 3, Codec.NONE), NONE, primary=True)
    result, pln = await synced(spool, mismatch(3, 3, labels.label_set(author="other")))
    assert result.roll_to is None
    assert pln.error is not None


async def test_content_and_proposals_reach_every_replica_after_the_header(spool: DurableSpool) -> None:
    peer = Peer(OK)
    pln = pipeline(spool, peer)
    pln.propose(spool.fragment, NONE, acknowledge=False)
    pln.write(0, b"de")
    pln.write(2, b"f")
    proposal = spool.next_fragment()
    pln.propose(proposal, NONE, acknowledge=True)
    assert peer.sent == ["[0,3)", "0+de", "2+f", "[0,6)"]
    assert peer.headers == [HEADER, None]
    assert spool.end == 6


async def test_a_commit_is_visible_once_every_replica_has_acknowledged_it(
    spool: DurableSpool, observer: Observer
) -> None:
    peer = Peer(OK, mismatch(0, 3))
    pln = pipeline(spool, peer)
    pln.recorded = True
    for content in (b"d", b"e"):
        pln.write(0, content)
        proposal = spool.next_fragment()
        pln.propose(proposal, NONE, acknowledge=True)
        await pln.gather_ok(proposal)
    assert spool.end == 5
    assert observer.visible == 4
    assert peer.reported == [4]
    assert pln.error is not None


async def test_content_sent_with_its_proposal_is_visible_once_every_replica_has_it(
    spool: DurableSpool, observer: Observer
) -> None:
    peer = Peer(OK, OK, OK)
    pln = pipeline(spool, peer)
    pln.propose(spool.fragment, NONE, acknowledge=True)
    await pln.gather_sync()
    pln.recorded = True
    first, first_turn = pln.extend(b"de", NONE), pln.turn()
    second, second_turn = pln.extend(b"f", MINE), pln.turn()
    assert not pln.has_capacity(2)
    assert pln.has_capacity(3)
    assert peer.sent == ["[0,3)", "0+de", "[0,5)", "0+f", "[0,6)"]
    assert (first.end, second.end, second.sum) == (5, 6, sum_of(b"abcdef"))
    assert (spool.fragment, spool.registers) == (second, MINE)
    for proposal, turn in ((first, first_turn), (second, second_turn)):
        assert observer.visible < proposal.end
        await turn.wait()
        await pln.gather_ok(proposal)
        turn.done()
        assert observer.visible == proposal.end
    assert pln.has_capacity(1)
    assert pln.error is None


@pytest.mark.parametrize("full", [".content", ".commits"])
async def test_content_that_cannot_be_written_here_is_not_sent(
    spool: DurableSpool, disk: FaultyDisk, full: str
) -> None:
    peer = Peer()
    pln = pipeline(spool, peer)
    disk.full = full
    with pytest.raises(RolledBack, match="no space left"):
        pln.extend(b"de", NONE)
    assert peer.sent == []
    assert pln.error is not None
    assert spool.end == 3
    assert pln.is_idle


async def test_content_is_not_sent_once_a_replica_is_known_to_be_gone(spool: DurableSpool) -> None:
    gone, sound = Peer(), Peer()
    pln = pipeline(spool, gone, sound)
    assert pln.is_usable(0.0)
    gone.is_open = False
    assert not pln.is_usable(0.0)
    with pytest.raises(RolledBack, match="the stream is broken"):
        pln.extend(b"de", NONE)
    assert (gone.sent, sound.sent, spool.end) == ([], [], 3)


async def test_content_that_reached_only_some_replicas_breaks_the_pipeline(spool: DurableSpool) -> None:
    broken, sound = Peer(), Peer(OK)
    broken.broken = True
    pln = pipeline(spool, broken, sound)
    proposal, turn = pln.extend(b"de", NONE), pln.turn()
    assert sound.sent == ["0+de", "[0,5)"]
    assert proposal.end == spool.end == 5
    await turn.wait()
    turn.done()
    assert "the stream is broken" in str(pln.error)


async def test_an_acknowledgement_counts_replicas_by_their_answers(spool: DurableSpool) -> None:
    def answer(**reported: Any) -> pb.ReplicateResponse:
        return pb.ReplicateResponse(status=pb.OK, **reported)

    cases: list[tuple[pb.ReplicateResponse, int | None, Durability]] = [
        (answer(), None, Durability(2, 2)),
        (answer(synced=True), None, Durability(2, 2, 1, 1)),
        (answer(synced=True, held_from=3), 2, Durability(0, 0)),
        (answer(synced=True, held_from=2), 2, Durability(1, 1, 1, 1)),
    ]
    pln = Pipeline(HEADER, spool, [LocalStream(spool), Peer(*(each for each, _, _ in cases))], ["a#0", "b#1"])
    for _, since, expected in cases:
        proposal = spool.next_fragment()
        pln.propose(proposal, NONE, acknowledge=True)
        assert await pln.gather_ok(proposal, since) == expected


async def test_a_local_spool_that_syncs_commits_reports_its_sync(tmp_path: Path, disk: FaultyDisk) -> None:
    folder = SpoolFolder(folder_of(tmp_path, JOURNAL, 2), JOURNAL, 2, disk, ManualClock())
    for fsync, survives in ((Fsync.COMMIT, Durability(1, 1, 1, 1)), (Fsync.NEVER, Durability(1, 1))):
        spool = DurableSpool(folder, Observer(), Fsync.INTERVAL)
        pln = Pipeline(HEADER, spool, [LocalStream(spool)], ["a#0"])
        spool.set_fsync(fsync)
        pln.adopt_demand(NONE)
        assert pln.commits_inline == (fsync is not Fsync.COMMIT)
        pln.write(0, b"d")
        proposal = spool.next_fragment()
        pln.propose(proposal, NONE, acknowledge=True)
        assert await pln.gather_ok(proposal) == survives


async def test_an_acknowledgement_read_during_an_exit_claims_only_synced_content(
    spool: DurableSpool, disk: FaultyDisk
) -> None:
    """An exiting broker completes the fragment and flushes the spool. The acknowledgement is read after that."""
    pln = Pipeline(HEADER, spool, [LocalStream(spool)], ["a#0"])
    pln.write(0, b"d")
    proposal = spool.next_fragment()
    pln.propose(proposal, NONE, acknowledge=True)
    content = spool.content_file.path.name
    spool.propose(empty_at(spool.fragment, spool.end, Codec.NONE), spool.registers, primary=True)
    await spool.flush()
    found = await pln.gather_ok(proposal)
    assert found == Durability(1, 1, 1, 1)
    assert content in disk.syncs


@pytest.mark.parametrize("unmet", ["refuse", "accept"])
async def test_a_demand_that_the_replicas_cannot_meet_is_reported_before_content(
    spool: DurableSpool, unmet: str
) -> None:
    pln = Pipeline(HEADER, spool, [LocalStream(spool), Peer()], ["a#0", "a#1"])
    pln.adopt_demand(labels.label_set({ACK_ZONES: "2", ACK_UNMET: unmet}))
    assert "Start brokers in other zones" in pln.demand_unmet
    assert pln.refusal == (pln.demand_unmet if unmet == "refuse" else "")
    pln.adopt_demand(labels.label_set({ACK_REPLICAS: "2"}))
    assert (pln.demand_unmet, pln.refusal) == ("", "")
    pln.adopt_demand(labels.label_set({ACK_ZONES: "many"}))
    assert "labels are invalid" in pln.refusal, "its meaning is unknown"


async def test_a_broken_peer_does_not_keep_others_from_rolling_back(spool: DurableSpool) -> None:
    broken, healthy = Peer("it died"), Peer(OK)
    pln = pipeline(spool, broken, healthy)
    pln.propose(spool.fragment, NONE, acknowledge=False)
    broken.broken = True
    pln.write(0, b"d")
    assert pln.error is not None
    pln.propose(spool.fragment, NONE, acknowledge=True)
    assert healthy.sent[-1] == "[0,3)"
    assert spool.delta == 0


async def test_a_disk_that_fails_breaks_the_pipeline_but_not_the_spool(spool: DurableSpool, disk: FaultyDisk) -> None:
    pln = pipeline(spool)
    disk.full = "content"
    pln.write(0, b"defg")
    assert "no space left" in str(pln.error)
    disk.full = None
    assert pln.close_send() is spool
    assert (spool.end, spool.delta) == (3, 0)


async def test_closing_rolls_back_and_reads_the_ends_of_streams(spool: DurableSpool) -> None:
    peer, chatty = Peer(), Peer(OK)
    pln = pipeline(spool, peer, chatty)
    pln.write(0, b"d")
    assert pln.close_send() is spool
    assert spool.delta == 0
    assert not peer.open
    await pln.gather_end()
    assert "not asked for" in str(pln.error)


async def test_turns_follow_one_another() -> None:
    first = Turn(None)
    second = Turn(first)
    third = Turn(second)
    order: list[str] = []

    async def read(name: str, turn: Turn) -> None:
        await turn.wait()
        order.append(name)
        turn.done()

    tasks = [asyncio.create_task(read("third", third)), asyncio.create_task(read("second", second))]
    finished = asyncio.create_task(third.finished())
    await asyncio.sleep(0)
    assert order == []
    await read("first", first)
    await asyncio.gather(*tasks, finished)
    assert order == ["first", "second", "third"]


async def test_settled_waits_for_the_last_turn(spool: DurableSpool) -> None:
    pln = pipeline(spool)
    await pln.settled()
    turn = pln.turn()
    waiting = asyncio.create_task(pln.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    turn.done()
    await waiting
