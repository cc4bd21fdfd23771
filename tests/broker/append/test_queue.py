"""The queue: which appends it commits inline or in batches, with the outcomes of one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import grpc.aio
import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import CorantoError
from coranto.fragments.fragment import sum_from_wire, sum_of
from coranto.specs.durability import ACK_REPLICAS
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import Batch
from coranto_broker.append.queue import JournalQueue, queue_of
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.append.receiving import ContentStream
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import FaultyDisk, RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Commits:
    """Counts of appends offered for an inline commit, and of inline commits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.done = 0
        commit = JournalQueue._commit_inline

        def counted(queue: JournalQueue, append: QueuedAppend) -> bool:
            self.asked += not append.is_pulse
            found = commit(queue, append)
            self.done += found
            return found

        monkeypatch.setattr(JournalQueue, "_commit_inline", counted)

    @contextmanager
    def expected(self, done: int, *, asked: int | None = None) -> Iterator[None]:
        before = self.asked, self.done
        yield
        assert (self.asked - before[0], self.done - before[1]) == (done if asked is None else asked, done)


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    return Commits(monkeypatch)


@pytest.fixture
async def broker(broker_settings: BrokerSettings) -> AsyncIterator[tuple[BrokerProcess, RawClient]]:
    async with running_broker(broker_settings) as found:
        yield found


async def begun(client: RawClient, spec: pb.JournalSpec) -> bytes:
    """Create a journal, complete its first fragment, begin the next, and return the content."""
    await create(client, spec)
    for content in (b"first", b"second"):
        assert (await client.append(J, content)).status == pb.OK
    return b"firstsecond"


async def test_all_paths_give_the_same_answer(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    await begun(client, spec())
    metrics = process.broker.metrics
    groups = metrics.group_appends.sum
    with commits.expected(1):
        quick = await client.append(J, b"some", b"more", union_registers=labels.label_set(author="me"))
    monkeypatch.setattr(JournalQueue, "_commit_inline", lambda *_: False)
    batched = await client.append(J, b"some", b"more", union_registers=labels.label_set(author="me"))
    monkeypatch.setattr(JournalQueue, "_propose_next", lambda *_: False)
    slow = await client.append(J, b"some", b"more", union_registers=labels.label_set(author="me"))
    assert (quick.commit.begin, quick.commit.end) == (11, 19)
    assert (batched.commit.begin, batched.commit.end) == (19, 27)
    assert (slow.commit.begin, slow.commit.end) == (27, 35)
    assert sum_from_wire(quick.commit.sum) == sum_of(b"somemore")
    assert quick.registers == labels.label_set(author="me")
    assert quick.total_chunks == 2
    for other in (batched, slow):
        other.commit.begin, other.commit.end = 11, 19
        assert quick == other
    assert metrics.append_bytes.value == 35
    assert metrics.group_appends.sum == groups + 3
    assert await client.content(J) == b"firstsecondsomemoresomemoresomemore"


async def test_an_append_that_needs_more_than_a_check_does_not_commit_inline(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    _, client = broker
    content = await begun(client, spec())
    with commits.expected(1):
        assert (await client.append(J, b"x", union_registers=labels.label_set(author="you"))).status == pb.OK
    content += b"x"
    cases: list[tuple[dict[str, object], pb.Status.ValueType]] = [
        ({"offset": len(content)}, pb.OK),
        ({"offset": len(content) - 1}, pb.WRONG_APPEND_OFFSET),
        ({"suspend": pb.AppendRequest.SUSPEND_NO_RESUME}, pb.OK),
        ({"check_registers": labels.label_selector(include={"author": "me"})}, pb.REGISTER_MISMATCH),
    ]
    for parameters, status in cases:
        with commits.expected(0, asked=1):
            response = await client.append(J, b"y", **parameters)
        assert response.status == status, parameters
        content += b"y" if status == pb.OK else b""
    assert response.registers == labels.label_set(author="you")
    with commits.expected(1):
        same = labels.label_selector(include={"author": "you"})
        assert (await client.append(J, b"z", check_registers=same, do_not_proxy=True)).registers == response.registers
    assert await client.content(J) == content + b"z"


async def test_a_known_revision_causes_no_wait(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    content = await begun(client, spec())
    revision = (await client.listing())[0].header.etcd.revision
    with commits.expected(1):
        assert (await client.append(J, b"x", min_etcd_revision=revision)).status == pb.OK
    known = process.broker.keyspace.known_revision
    assert process.broker.resolver.known(J, known) is not None
    assert process.broker.resolver.known(J, known + 1) is None
    assert await client.content(J) == content + b"x"


async def test_registers_that_changed_since_an_append_began_are_checked_again(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    await begun(client, spec())
    await client.append(J, b"x", union_registers=labels.label_set(author="me", epoch="1"))
    replica = process.broker.resolver.local_replicas[0]
    advance: dict[str, object] = {
        "check_registers": labels.label_selector(include={"epoch": "1"}),
        "union_registers": labels.label_set(epoch="2"),
    }
    first, second, third = (client.stub.Append() for _ in range(3))
    for call in (first, second):
        await call.write(pb.AppendRequest(journal=J, **advance))  # type: ignore[arg-type]
    await third.write(pb.AppendRequest(journal=J, union_registers=labels.label_set(author="you")))
    for call in (first, second, third):
        await call.write(pb.AppendRequest(content=b"y"))
    queue = queue_of(replica)
    await eventually(lambda: queue.arrivals.coming == 3)
    with commits.expected(2, asked=3):
        for call, status in ((third, pb.OK), (first, pb.OK), (second, pb.REGISTER_MISMATCH)):
            await call.write(pb.AppendRequest())
            await call.done_writing()
            response = await call
            assert response.status == status
            assert response.registers == labels.label_set(author="you", epoch="1" if call is third else "2")


async def test_a_fragment_that_is_long_enough_is_completed_first(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    short = spec()
    short.fragment.length = 1024
    content = await begun(client, short)
    with commits.expected(2, asked=3):
        for letter in (b"a", b"b", b"c"):
            assert (await client.append(J, letter * 1000)).status == pb.OK
    replica = process.broker.resolver.local_replicas[0]
    assert [(entry.begin, entry.end) for entry in replica.index.entries] == [(0, 5), (5, 2011), (2011, 3011)]
    assert await client.content(J) == content + b"a" * 1000 + b"b" * 1000 + b"c" * 1000


async def test_changes_while_an_append_is_received_are_applied(
    broker: tuple[BrokerProcess, RawClient], spec: MakeSpec, commits: Commits
) -> None:
    process, client = broker
    read_only = spec()
    content = await begun(client, read_only)
    replica = process.broker.resolver.local_replicas[0]
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal=J))
    await call.write(pb.AppendRequest(content=b"late"))
    queue = queue_of(replica)
    await eventually(lambda: queue.arrivals.coming == 1)
    read_only.flags = pb.JournalSpec.O_RDONLY
    (listed,) = (await client.listing())[0].journals
    await client.apply(read_only, revision=listed.mod_revision)
    with commits.expected(0, asked=1):
        await call.write(pb.AppendRequest())
        await call.done_writing()
        assert (await call).status == pb.NOT_ALLOWED
    assert await client.content(J) == content


async def test_the_rate_limit_is_kept(broker_settings: BrokerSettings, spec: MakeSpec, commits: Commits) -> None:
    async with running_broker(broker_settings.model_copy(update={"max_append_rate": 1 << 20})) as (_, client):
        await begun(client, spec())
        with commits.expected(0, asked=1):
            assert (await client.append(J, b"x")).status == pb.OK


@pytest.mark.parametrize("full", [".content", ".commits"])
async def test_a_disk_that_fails_fails_the_append_and_leaves_no_trace(
    broker_settings: BrokerSettings, spec: MakeSpec, commits: Commits, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr("coranto_broker.server.process.LocalDisk", lambda: disk)
    async with running_broker(broker_settings) as (_, client):
        content = await begun(client, spec())
        disk.full = full
        with commits.expected(0, asked=1), pytest.raises(grpc.aio.AioRpcError, match="no space left"):
            await client.append(J, b"lost")
        disk.full = None
        assert (await client.append(J, b"kept")).commit.begin == len(content)
        with commits.expected(1):
            assert (await client.append(J, b"again")).status == pb.OK
        assert await client.content(J) == content + b"keptagain"


# ------------------------------------------------------------------------------------------------------- with replicas


class Replicas:
    """Three brokers with separate disks, and a journal with three replicas."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[BrokerProcess] = []
        self.raw: list[RawClient] = []
        self.disks: list[FaultyDisk] = []
        self.proposed: list[int] = []
        """The number of appends of each batch."""
        propose = Batch.propose

        def counted(batch: Batch, stream: ContentStream | None = None) -> None:
            self.proposed.append(len(batch.members))
            propose(batch, stream)

        def disk() -> FaultyDisk:
            self.disks.append(FaultyDisk())
            return self.disks[-1]

        monkeypatch.setattr(Batch, "propose", counted)
        monkeypatch.setattr("coranto_broker.server.process.LocalDisk", disk)

    @property
    def endpoint(self) -> str:
        return self.processes[0].endpoint

    async def member(self, *, primary: bool) -> int:
        """Return the number of the primary, or of another replica."""
        (listing,) = await self.raw[0].listing()
        route = listing.journals[0].route
        names = [process.broker.member.suffix for process in self.processes]
        found = names.index(route.members[route.primary].suffix)
        return found if primary else (found + 1) % 3

    async def contents(self) -> set[bytes]:
        """Return the journal's content from each replica."""
        return {await raw.content(J, do_not_proxy=True) for raw in self.raw}


@pytest.fixture
async def replicas(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Replicas]:
    found = Replicas(monkeypatch)
    async with AsyncExitStack() as stack:
        for number in range(3):
            settings = broker_settings.model_copy(
                update={"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            )
            process, raw = await stack.enter_async_context(running_broker(settings))
            found.processes.append(process)
            found.raw.append(raw)
        wanted = spec()
        wanted.replication = 3
        await create(found.raw[0], wanted)
        yield found


async def begin(client: JournalClient) -> bytes:
    for content in (b"first\n", b"second\n"):
        await client.append(J, content)
    return b"first\nsecond\n"


async def test_appends_to_replicas_that_arrive_together_are_proposed_together(replicas: Replicas) -> None:
    async with JournalClient(replicas.endpoint) as client:
        whole = await begin(client)
        for _ in range(20):  # A stream is open, and the peers are called over frames.
            done = await asyncio.gather(*(client.append(J, b"%06d\n" % number) for number in range(40)))
            for number, each in enumerate(done):
                assert (each.begin, each.end, each.sum) == (len(whole), len(whole) + 7, sum_of(b"%06d\n" % number))
                whole += b"%06d\n" % number
            assert {each.durability.replicas for each in done} == {3}
        assert await replicas.contents() == {whole}
        assert max(replicas.proposed) > 1
        assert sum(replicas.proposed) > 400


async def test_appends_that_arrive_together_fit_into_the_smallest_message_limit(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    (least,) = (each.ge for each in BrokerSettings.model_fields["max_message_bytes"].metadata if hasattr(each, "ge"))
    async with AsyncExitStack() as stack:
        for number in range(2):
            changes = {"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number)}
            settings = broker_settings.model_copy(update={**changes, "max_message_bytes": least})
            process, raw = await stack.enter_async_context(running_broker(settings))
        wanted = spec()
        wanted.replication = 2
        await create(raw, wanted)
        client = await stack.enter_async_context(JournalClient(process.endpoint, retry_timeout=0))
        await begin(client)
        for _ in range(3):
            await asyncio.gather(*(client.append(J, b"x" * 30_000) for _ in range(40)))


async def test_conditions_hold_among_appends_that_are_proposed_together(replicas: Replicas) -> None:
    async with JournalClient(replicas.endpoint) as client:
        whole = await begin(client)
        await client.append(J, b"claimed\n", union_registers=labels.label_set(turn="0"))
        whole += b"claimed\n"

        async def take(turn: int, who: int) -> bool:
            try:
                await client.append(
                    J,
                    b"%d by %d\n" % (turn, who),
                    check_registers=labels.label_selector(include={"turn": str(turn)}),
                    union_registers=labels.label_set(turn=str(turn + 1)),
                )
            except CorantoError:
                return False
            return True

        for turn in range(30):
            won = await asyncio.gather(*(take(turn, who) for who in range(5)))
            assert sum(won) == 1
            whole += b"%d by %d\n" % (turn, won.index(True))
        assert await replicas.contents() == {whole}
        assert len(replicas.proposed) >= 20


@pytest.mark.parametrize("primary", [True, False])
@pytest.mark.parametrize("full", [".content", ".commits"])
async def test_a_full_disk_of_any_replica_loses_no_acknowledged_content(
    replicas: Replicas, primary: bool, full: str
) -> None:
    acknowledged: list[tuple[int, bytes]] = []
    failed = 0

    async def append(client: JournalClient, number: int, retry_timeout: float) -> None:
        nonlocal failed
        content = b"%06d\n" % number
        try:
            acknowledged.append(((await client.append(J, content, retry_timeout=retry_timeout)).begin, content))
        except CorantoError:
            failed += 1

    async with JournalClient(replicas.endpoint) as client:
        await begin(client)
        await asyncio.gather(*(append(client, number, 60) for number in range(40)))
        assert failed == 0
        disk = replicas.disks[await replicas.member(primary=primary)]
        disk.full = full
        await asyncio.gather(*(append(client, 100 + number, 0) for number in range(20)))
        assert failed == 20
        disk.full = None
        for number in range(200, 220):
            await append(client, number, 60)
        assert failed == 20
    (whole,) = await replicas.contents()
    for begin_offset, content in acknowledged:
        assert whole[begin_offset : begin_offset + len(content)] == content
    assert len(acknowledged) == 60
    assert all(whole.count(content) == 1 for _, content in acknowledged)


async def test_appends_with_a_durability_demand_are_batched_too(replicas: Replicas, spec: MakeSpec) -> None:
    (listing,) = await replicas.raw[0].listing()
    wanted = listing.journals[0].spec
    wanted.labels.CopyFrom(labels.label_set({ACK_REPLICAS: "3"}))
    await replicas.raw[0].apply(wanted, revision=listing.journals[0].mod_revision)
    async with JournalClient(replicas.endpoint) as client:
        await begin(client)
        for _ in range(5):
            done = await asyncio.gather(*(client.append(J, b"%d\n" % number) for number in range(30)))
            assert {each.durability.replicas for each in done} == {3}
    assert max(replicas.proposed) > 1
