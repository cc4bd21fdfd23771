"""Reads at gaps of a replica: content from peers, and its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from coranto.coordination.etcd import EtcdHeader, KeyValue
from coranto.coordination.keyspace_state import Item
from coranto.coordination.layout import MemberId
from coranto.fragments.forks import Fork, Share, fork_labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import FragmentIndex, QueryResult
from coranto_broker.handlers import gaps
from coranto_broker.replication.peer_copies import PeerCopies
from coranto_broker.replication.peers import Peers
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Sealed
from tests.broker.running import ManualClock, RawClient, create, eventually, running_broker

J = "test/journal"
STORE = "file:///frags/"
PARTS = [bytes([65 + number]) * 2000 for number in range(4)]
CONTENT = b"".join(PARTS)
MakeSpec = Callable[..., pb.JournalSpec]


# ------------------------------------------------------------------------------------------------------- real brokers


@dataclass
class Pair:
    """A journal of four complete fragments on two brokers: `here`, where tests remove some of them, and `there`."""

    here: BrokerProcess
    reader: RawClient
    there: BrokerProcess
    asked: int = 0

    @property
    def replica(self) -> Replica:
        return self.here.broker.resolver.local_replicas[0]

    def sealed(self, process: BrokerProcess, number: int) -> Sealed:
        files = process.broker.resolver.local_replicas[0].index.sealed_files()
        return next(sealed for sealed in files if sealed.fragment.begin == 2000 * number)

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.replica.index.forget(self.sealed(self.here, number))

    def rot(self, number: int) -> None:
        """Damage a fragment of the peer on its disk."""
        path = self.sealed(self.there, number).content.path
        path.write_bytes(b"?" + path.read_bytes()[1:])


@pytest.fixture
async def pair(broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        running: list[tuple[BrokerProcess, RawClient]] = []
        for name in ("broker-0", "broker-1"):
            settings = broker_settings.model_copy(update={"id": name, "data_dir": broker_settings.data_dir / name})
            running.append(await stack.enter_async_context(running_broker(settings)))
        wanted = spec(fragment={"length": 1500})
        wanted.replication = 2
        await create(running[0][1], wanted)
        for part in (*PARTS, b"end"):
            assert (await running[0][1].append(J, part)).status == pb.OK
        pair = Pair(*running[0], running[1][0])
        real = PeerCopies.find

        async def find(copies: PeerCopies, *arguments: Any) -> Any:
            pair.asked += copies is pair.here.broker.copies
            return await real(copies, *arguments)

        monkeypatch.setattr(PeerCopies, "find", find)
        await pair.reader.content(J, 8000, block=True, end_offset=8003)
        yield pair


async def test_lost_content_is_read_from_the_peer(pair: Pair) -> None:
    pair.lose(0, 2, 3)
    for direct in (False, True):
        assert await pair.reader.content(J, do_not_proxy=direct) == CONTENT + b"end"
    assert await pair.reader.content(J, 1000, end_offset=5000) == CONTENT[1000:5000]
    (metadata,) = await pair.reader.read(J, 4200, metadata_only=True)
    assert (metadata.offset, metadata.fragment.begin, metadata.fragment.end) == (4200, 4000, 6000)
    assert not metadata.fragment_url
    assert metadata.write_head == 8003


async def test_a_peer_does_not_forward_the_request(pair: Pair) -> None:
    pair.lose(1)
    header = pb.Header()
    header.CopyFrom((await pair.reader.read(J, 0, metadata_only=True))[0].header)
    asked = pair.asked
    (answer,) = await pair.reader.read(J, 2000, do_not_proxy=True, header=header)
    assert (answer.status, answer.write_head, pair.asked) == (pb.OFFSET_NOT_YET_AVAILABLE, 8003, asked)
    # A read that another broker forwards in full may need a peer's content.
    assert await pair.reader.content(J, 2000, end_offset=4000, header=header) == PARTS[1]


async def test_damaged_copies_are_not_served_and_a_good_copy_ends_the_wait(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaps, "PAUSE_SECONDS", 0.01)
    file = pair.sealed(pair.there, 1).content.path
    pair.lose(1)
    pair.rot(1)
    (*_, answer) = await pair.reader.read(J, 2000)
    assert (answer.status, answer.content) == (pb.OFFSET_NOT_YET_AVAILABLE, b"")
    waiting = asyncio.create_task(pair.reader.content(J, 2400, block=True, end_offset=4200))
    asked = pair.asked
    await eventually(lambda: pair.asked > asked)
    file.write_bytes(PARTS[1])
    async with asyncio.timeout(60):
        assert await waiting == CONTENT[2400:4200]


async def test_no_read_jumps_over_content_of_a_peer(pair: Pair) -> None:
    index = pair.replica.index
    pair.lose(0, 1, 2, 3)
    index.refresh([Fragment(J, 4000, 6000, sum_of(PARTS[2]), Codec.NONE, STORE, 1)], 0.0)
    assert await pair.reader.content(J, 0, end_offset=4000) == CONTENT[:4000]
    # If the peer has not listed the first fragment either, the read continues at the second.
    (other,) = (each for each in pair.there.broker.resolver.local_replicas if each.journal == J)
    for number in (0, 1):
        other.index.forget(pair.sealed(pair.there, number))
    other.index.refresh([Fragment(J, 2000, 3000, sum_of(PARTS[1][:1000]), Codec.NONE, STORE, 1)], 0.0)
    (answer,) = await pair.reader.read(J, 10, metadata_only=True)
    assert answer.offset == 2000
    # If no peer has earlier content, the read jumps, and later reads do not ask again.
    other.index.refresh([Fragment(J, 4000, 6000, sum_of(PARTS[2]), Codec.NONE, STORE, 1)], 0.0)
    asked = pair.asked
    for offset in (20, 30):
        (answer,) = await pair.reader.read(J, offset, metadata_only=True)
        assert (answer.offset, pair.asked) == (4000, asked + 1)


async def test_damage_in_a_local_file_is_bridged_by_the_peer(pair: Pair) -> None:
    sealed = pair.sealed(pair.here, 2)
    sealed.content.path.write_bytes(b"?" * 2000)
    sealed.content.quarantine(sealed.content.path.with_name("damaged"))
    assert await pair.reader.content(J) == CONTENT + b"end"
    pair.replica.index.note_sound_jump(4000)  # That concerns only earlier content.
    assert await pair.reader.content(J, 4000) == CONTENT[4000:] + b"end"


async def test_the_reported_head_is_not_below_the_fragment_of_a_peer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.lose(2)
    query = pair.replica.index.query

    async def query_with_old_head(*arguments: Any, **options: Any) -> QueryResult:
        return replace(await query(*arguments, **options), write_head=5000)

    monkeypatch.setattr(pair.replica.index, "query", query_with_old_head)
    (metadata,) = await pair.reader.read(J, 4200, metadata_only=True)
    assert (metadata.fragment.end, metadata.write_head) == (6000, 6000)


# ------------------------------------------------------------------------------------------------------------- answers


class Stub:
    def __init__(self, *answers: pb.ReadResponse) -> None:
        self.answers = answers
        self.requests: list[pb.ReadRequest] = []

    def Read(self, request: pb.ReadRequest, metadata: object) -> Any:
        copy = pb.ReadRequest()
        copy.CopyFrom(request)
        self.requests.append(copy)
        answers = self.answers

        class Call:
            async def __aiter__(self) -> AsyncIterator[pb.ReadResponse]:
                for answer in answers:
                    yield answer

            def cancel(self) -> None:
                return

        return Call()


class KeySpace:
    """A key space with a journal on brokers `a` and `b`."""

    header = EtcdHeader(1, 2, 3, 4)

    @property
    def state(self) -> KeySpace:
        return self

    def route_of(self, item: str) -> pb.Route:
        members = [pb.ProcessSpec.ID(zone="z", suffix=name) for name in "ab"]
        return pb.Route(members=members, primary=0, endpoints=["http://a:1", "http://b:1"])

    def item(self, name: str) -> Item[pb.JournalSpec] | None:
        """Return the journal as a fork of `test/source`, whose fragments it shares up to 100."""
        fork = Fork("test/source", name, 100, 100, 0, (Share("test/source", 0, 100),))
        return Item(name, pb.JournalSpec(name=name, labels=label_set(fork_labels(fork))), KeyValue(name))


def copies_with(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> PeerCopies:
    monkeypatch.setattr(Peers, "stub_at", lambda peers, endpoint: stub if endpoint == "http://b:1" else None)
    return PeerCopies(KeySpace(), MemberId("z", "a"), Peers("z"))


def answered(offset: int, begin: int, end: int, journal: str = J, store: str = "", **fields: Any) -> pb.ReadResponse:
    fragment = Fragment(journal, begin, end, sum_of(b"x" * (end - begin)), Codec.GZIP, store)
    return pb.ReadResponse(offset=offset, write_head=end, fragment=fragment.to_wire(), **fields)


async def test_a_peer_is_asked_for_local_content_at_our_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub(answered(5, 0, 10))
    (copy,), all_answered = await copies_with(stub, monkeypatch).find(J, 5, 77)
    assert (copy.broker, copy.offset, all_answered) == ("z#b", 5, True)
    assert copy.uncompressed == Fragment(J, 0, 10, sum_of(b"x" * 10), Codec.NONE)
    (request,) = stub.requests
    assert (request.do_not_proxy, request.metadata_only, request.block) == (True, True, False)
    assert (request.header.process_id.suffix, request.header.etcd.revision) == ("b", 3)
    assert request.begin_mod_time == 77


@pytest.mark.parametrize(
    "answer",
    [
        answered(5, 0, 10, "another/journal", STORE),
        answered(5, 0, 10, "test/source"),
        answered(5, 0, 101, "test/source", STORE),
        answered(4, 0, 10),
        answered(12, 0, 10),
        answered(5, 6, 10),
        pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND),
        pb.ReadResponse(status=pb.NOT_JOURNAL_BROKER),
        pb.ReadResponse(offset=5, content=b"x"),
        pb.ReadResponse(),
    ],
)
async def test_a_wrong_answer_of_a_peer_is_ignored(answer: pb.ReadResponse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await copies_with(Stub(answer), monkeypatch).find(J, 5, 0) == ([], False)


async def test_a_peer_may_return_a_stored_fragment_that_a_fork_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    (copy,), _ = await copies_with(Stub(answered(5, 0, 100, "test/source", STORE)), monkeypatch).find(J, 5, 0)
    assert copy.fragment.journal == "test/source"


async def test_a_peer_without_content_counts_as_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, offset=5, write_head=9)
    assert await copies_with(Stub(nothing), monkeypatch).find(J, 5, 0) == ([], True)


async def test_an_index_knows_the_ends_of_its_gaps() -> None:
    index = FragmentIndex(ManualClock())
    index.refresh([replace(Fragment(J, 10, 20, sum_of(b""), Codec.NONE, STORE, 1), file_bytes=10)], 0.0)
    index.note_head(30)
    assert (await index.query(3, block=False)).gap == range(3, 10)
    assert not (await index.query(10, block=False)).gap
    assert (await index.query(20, block=True, until_gap=True)).gap == range(20, 30)
    assert not (await index.query(30, block=False)).gap
    assert not (await index.query(-1, block=False)).gap
    assert not (await index.query(40, block=False)).gap
    assert not (await index.query(3, block=False, begin_mod_time=1)).gap
