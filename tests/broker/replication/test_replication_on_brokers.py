"""Several brokers in this process: replication, proxying, and brokers that start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import InsufficientBrokers, NotDurable
from coranto.specs.durability import ACK_ZONES, Durability
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Cluster:
    """Brokers broker-0, broker-1, … that can be started and stopped individually."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._stacks: dict[int, AsyncExitStack] = {}
        self.processes: dict[int, BrokerProcess] = {}
        self.clients: dict[int, RawClient] = {}

    async def start(self, *numbers: int, **changed: object) -> None:
        for number in numbers:
            settings = self._settings.model_copy(
                update={"id": f"broker-{number}", "data_dir": self._settings.data_dir / str(number)} | changed
            )
            stack = AsyncExitStack()
            self.processes[number], self.clients[number] = await stack.enter_async_context(running_broker(settings))
            self._stacks[number] = stack

    async def stop(self, number: int, *, gracefully: bool) -> None:
        process = self.processes.pop(number)
        if gracefully:
            await process.exit_gracefully()
        del self.clients[number]
        await self._stacks.pop(number).aclose()

    async def close(self) -> None:
        for number in list(self.processes):
            await self.stop(number, gracefully=False)

    async def route(self) -> tuple[int, set[int]]:
        """Return the journal's primary (-1: none) and all its members, by number."""
        client = next(iter(self.clients.values()))
        (listing,) = await client.listing()
        route = listing.journals[0].route
        numbers = [int(member.suffix.rpartition("-")[2]) for member in route.members]
        return (numbers[route.primary] if route.primary >= 0 else -1), set(numbers)

    async def settled(self, count: int) -> tuple[int, set[int]]:
        """Return the route, once it has a primary and `count` consistent members."""
        keyspace = next(iter(self.processes.values())).broker.keyspace

        async def consistent() -> bool:
            primary, members = await self.route()
            return primary in self.processes and len(members) == count and keyspace.state.consistent(J)

        await eventually(consistent)
        return await self.route()


@pytest.fixture
async def cluster(broker_settings: BrokerSettings) -> AsyncIterator[Cluster]:
    cluster = Cluster(broker_settings)
    try:
        yield cluster
    finally:
        await cluster.close()


@pytest.fixture
def replicated(spec: MakeSpec) -> MakeSpec:
    def make(replication: int, **fields: object) -> pb.JournalSpec:
        made = spec(**fields)
        made.replication = replication
        return made

    return make


async def test_every_replica_holds_acknowledged_content(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0, 1, 2)
    await cluster.clients[0].apply(replicated(3))
    primary, members = await cluster.settled(3)
    assert members == {0, 1, 2}
    whole = b""
    for n in range(20):
        content = bytes([n]) * (n * 3000 + 1)
        response = await cluster.clients[primary].append(J, content, union_registers=labels.label_set(count=str(n)))
        assert (response.status, response.commit.begin) == (pb.OK, len(whole))
        whole += content
        for number in members:
            # I1: at the time of the acknowledgement, not later.
            assert await cluster.clients[number].content(J, len(whole) - 1, do_not_proxy=True) == whole[-1:]
    for number in members:
        assert await cluster.clients[number].content(J, do_not_proxy=True) == whole


async def test_responses_report_durability_and_labels_demand_it(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0, zone="a")
    await cluster.start(1, zone="b")
    zones = replicated(
        2, labels=labels.label_set({ACK_ZONES: "2"}), stores=("file:///frags/",), fragment={"length": 1024}
    )
    await cluster.clients[0].apply(zones)
    await cluster.settled(2)
    async with JournalClient(cluster.processes[0].endpoint) as client:
        await client.append(J, b"the first fragment is stored early")
        first = await client.append(J, b"in two zones")
        assert first.durability == Durability(2, 2)
        assert await first.durable(zones=2) == first.durability, "no replica has to be asked"
        with pytest.raises(NotDurable, match=r"of test/journal is at 2 replicas.*wanted: in a fragment store"):
            await first.stored(retry_timeout=0)
        assert await first.durable(zones=2, synced=True) == Durability(2, 2, 2, 2)
        with pytest.raises(NotDurable, match="wanted: at 3 replicas"):
            await first.durable(replicas=3, retry_timeout=0)

        def change(**wanted: str) -> pb.JournalSpec:
            zones.labels.CopyFrom(labels.label_set({f"coranto.dev/{name}": wanted[name] for name in wanted}))
            return zones

        async def apply(spec: pb.JournalSpec) -> None:
            found = (await client.list(f"name={J}")).journals[0]
            change = pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=found.mod_revision)
            await client.apply([change])

        await apply(change(fsync="commit"))
        assert (await client.append(J, bytes(2000))).durability == Durability(2, 2, 2, 2)
        await apply(change(**{"ack-zones": "2", "fsync": "never"}))
        assert (await client.append(J, b"begins another fragment")).durability == Durability(2, 2)
        await first.stored()

        await cluster.start(2, zone="a")
        await cluster.stop(1, gracefully=True)
        await cluster.settled(2)
        with pytest.raises(InsufficientBrokers, match=r"in 1 zone.*Start brokers in other zones"):
            await client.append(J, b"refused", retry_timeout=0)
        (head,) = await client.heads(f"name={J}")
        assert "Start brokers in other zones" in head.demand_unmet
        assert head.append_status == pb.INSUFFICIENT_JOURNAL_BROKERS
        await apply(change(**{"ack-zones": "2", "ack-unmet": "accept"}))
        second = await client.append(J, b"accepted")
        assert second.durability == Durability(2, 1)
        (head,) = await client.heads(f"name={J}")
        assert head.acknowledged_below_demand == 1


async def test_appends_and_reads_reach_the_journal_through_any_broker(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0, 1, 2)
    await cluster.clients[0].apply(replicated(1))
    primary, _ = await cluster.settled(1)
    outsider = next(number for number in (0, 1, 2) if number != primary)
    client = cluster.clients[outsider]

    appended = await client.append(J, b"through ", b"a proxy")
    validate(appended)
    assert appended.status == pb.OK
    assert appended.header.process_id.suffix == f"broker-{primary}"
    assert await client.content(J) == b"through a proxy"
    listed = await client.stub.ListFragments(pb.FragmentsRequest(journal=J))
    assert [each.spec.end for each in listed.fragments] == [15]

    refused = await client.append(J, b"x", do_not_proxy=True)
    validate(refused)
    assert refused.status == pb.NOT_JOURNAL_PRIMARY_BROKER
    assert refused.header.process_id.suffix == f"broker-{outsider}"
    assert refused.header.route.members[refused.header.route.primary].suffix == f"broker-{primary}"
    (refusal,) = await client.read(J, do_not_proxy=True)
    assert refusal.status == pb.NOT_JOURNAL_BROKER

    # Errors are forwarded, and a stream without a commit rolls back at the primary.
    with pytest.raises(grpc.aio.AioRpcError, match="unexpected EOF"):
        await client.append_messages(pb.AppendRequest(journal=J), pb.AppendRequest(content=b"y"))
    assert (await client.append(J, b"!")).commit.begin == 15


async def test_a_proxied_read_that_blocks_is_woken_and_ended(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0, 1)
    await cluster.clients[0].apply(replicated(1))
    primary, _ = await cluster.settled(1)
    outsider = 1 - primary
    call = cluster.clients[outsider].stub.Read(pb.ReadRequest(journal=J, block=True))
    await cluster.clients[primary].append(J, b"content")
    metadata, chunk = await call.read(), await call.read()
    assert isinstance(metadata, pb.ReadResponse)
    assert isinstance(chunk, pb.ReadResponse)
    assert chunk.content == b"content"
    waiting = asyncio.ensure_future(call.read())
    await asyncio.wait_for(cluster.processes[outsider].exit_gracefully(), 30)
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await asyncio.wait_for(waiting, 60)


async def test_too_few_brokers(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0)
    await cluster.clients[0].apply(replicated(2))
    await eventually(lambda: cluster.processes[0].broker.resolver.local_replicas)
    refused = await cluster.clients[0].append(J, b"x")
    assert refused.status == pb.INSUFFICIENT_JOURNAL_BROKERS
    await cluster.start(1)
    await cluster.settled(2)
    accepted = await cluster.clients[0].append(J, b"x")
    assert accepted.status == pb.OK


@pytest.mark.parametrize("gracefully", [True, False])
async def test_the_primary_leaves_and_the_journal_continues(
    cluster: Cluster, replicated: MakeSpec, gracefully: bool
) -> None:
    await cluster.start(0, 1, 2)
    await cluster.clients[0].apply(replicated(2))
    primary, _ = await cluster.settled(2)
    await cluster.clients[primary].append(J, b"first", union_registers=labels.label_set(author="me"))
    await cluster.stop(primary, gracefully=gracefully)

    following, _ = await cluster.settled(2)
    assert following != primary
    mine = labels.parse_selector("author=me")
    response = await cluster.clients[following].append(J, b" second", check_registers=mine)
    assert response.status == pb.OK
    assert (response.commit.begin, response.registers) == (5, labels.label_set(author="me"))

    # The first one returns, with an old spool, and replaces all others.
    await cluster.start(primary)
    for number in [number for number in cluster.processes if number != primary]:
        await cluster.stop(number, gracefully=True)
        if len(cluster.processes) == 2:
            await cluster.settled(2)
    assert set(cluster.processes) == {primary}
    (head,) = await cluster.clients[primary].read(J, -1)
    assert head.write_head == 12


async def test_appends_continue_while_brokers_start_and_stop(cluster: Cluster, replicated: MakeSpec) -> None:
    await cluster.start(0, 1)
    fragment = {"length": 20_000, "compression_codec": pb.GZIP, "refresh_interval": 1}
    await cluster.clients[0].apply(replicated(2, stores=("file:///frags/",), fragment=fragment))
    await cluster.settled(2)
    acknowledged: list[tuple[int, bytes]] = []
    unknown: list[bytes] = []
    done = asyncio.Event()

    async def write(name: str) -> None:
        count = 0
        while not done.is_set():
            count += 1
            content = f"<{name} {count} {'x' * (count % 977)}>".encode()
            number = sorted(cluster.clients)[count % len(cluster.clients)]
            try:
                response = await cluster.clients[number].append(J, content)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                unknown.append(content)
                continue
            except asyncio.CancelledError:
                assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]
                unknown.append(content)  # Its channel was closed.
                continue
            if response.status == pb.OK:
                acknowledged.append((response.commit.begin, content))
            else:
                await asyncio.sleep(0.01)

    async def more(count: int) -> None:
        goal = len(acknowledged) + count
        await eventually(lambda: len(acknowledged) >= goal)

    writers = [asyncio.create_task(write(name)) for name in ("a", "b", "c")]
    try:
        await more(50)
        await cluster.start(2)
        await more(50)
        await cluster.stop(0, gracefully=True)
        await more(50)
        await cluster.start(3)
        await cluster.stop(1, gracefully=False)
        await more(50)
        await cluster.settled(2)
        await more(50)
    finally:
        done.set()
        await asyncio.gather(*writers)

    _, members = await cluster.settled(2)
    whole = b""

    async def complete() -> bool:
        """Return whether both replicas serve all content of either. An abandoned append may have committed just now."""
        nonlocal whole
        heads = {(await cluster.clients[number].read(J, -1))[0].write_head for number in members}
        contents = [await cluster.clients[number].content(J) for number in members]
        if {len(content) for content in contents} != heads or len(heads) > 1:
            return False
        assert len(set(contents)) == 1, "replicas differ"
        whole = contents[0]
        return True

    await eventually(complete)
    covered = 0
    for begin, content in acknowledged:
        assert whole[begin : begin + len(content)] == content
        covered += len(content)
    for content in unknown:
        covered += len(content) * whole.count(content)
    assert covered == len(whole)
