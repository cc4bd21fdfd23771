"""The choice of a broker for each call, by known routes, zones and the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
import structlog

from coranto.client import ClientConfig, ClientTls, JournalClient, SyncJournalClient
from coranto.client.dispatch import Dispatcher
from coranto.client.routes import KnownRoute
from coranto.errors import EtcdTransactionFailed, NotPrimaryBroker, Unavailable
from coranto.security.tokens import Keys
from coranto.testing.clocks import HurriedClock
from coranto.testing.command_line import RemoteBroker
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto.wire import protocol_pb2 as pb

KEYS = Keys.parse("c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=")
JOURNAL = "test/journal"


def header(*endpoints: str, primary: int = 0, revision: int = 5, zones: str = "", cluster: int = 1) -> pb.Header:
    zone_of = zones or "a" * len(endpoints)
    route = pb.Route(
        members=[pb.ProcessSpec.ID(zone=zone_of[i], suffix=f"broker-{i}") for i in range(len(endpoints))],
        endpoints=endpoints,
        primary=primary if endpoints else -1,
    )
    return pb.Header(route=route, etcd=pb.Header.Etcd(cluster_id=cluster, member_id=1, revision=revision, raft_term=1))


# ---------------------------------------------------------------------------------------------------- which may be used


def way_along(config: ClientConfig, endpoint: str) -> str:
    """Return the endpoint of an append after an answer that names `endpoint` as the primary."""

    async def run() -> str:
        dispatcher = Dispatcher(config, HurriedClock())
        dispatcher.answered(dispatcher.to_seed(JOURNAL), pb.OK, header(endpoint))
        ways = {dispatcher.to_primary(JOURNAL).endpoint, dispatcher.to_replica(JOURNAL).endpoint}
        await dispatcher.close()
        assert len(ways) == 1
        return ways.pop()

    return asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:1", "http://broker.example:80", "http://[fe80::1]:1"])
def test_a_route_does_not_send_a_token_over_a_readable_connection(endpoint: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert way_along(ClientConfig("127.0.0.1:1", auth=KEYS), endpoint) == "127.0.0.1:1"
    assert [entry["endpoint"] for entry in logs if entry["log_level"] == "warning"] == [endpoint]
    assert way_along(ClientConfig("127.0.0.1:1"), endpoint) == endpoint
    assert way_along(ClientConfig("127.0.0.1:1", auth=KEYS), "http://127.0.0.1:2") == "http://127.0.0.1:2"
    assert way_along(ClientConfig("127.0.0.1:1", auth=KEYS), "https://10.0.0.1:1") == "https://10.0.0.1:1"


@pytest.mark.parametrize("auth", [None, KEYS])
@pytest.mark.parametrize("tls", [None, ClientTls()])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "unix:///run/b.sock", "http://broker.example:1"])
def test_a_route_does_not_leave_tls(endpoint: str, tls: ClientTls | None, auth: Keys | None) -> None:
    config = ClientConfig("https://broker.example", tls=tls, auth=auth)
    assert way_along(config, endpoint) == "https://broker.example"
    assert way_along(config, "https://10.0.0.1:1") == "https://10.0.0.1:1"


@pytest.mark.parametrize("endpoint", ["", "ftp://broker:1", "http://broker:1/path", "http://:1"])
def test_a_route_to_an_invalid_endpoint_is_ignored(endpoint: str) -> None:
    assert way_along(ClientConfig("127.0.0.1:1"), endpoint) == "127.0.0.1:1"


def test_without_a_cache_all_calls_use_the_endpoint() -> None:
    assert way_along(ClientConfig("127.0.0.1:1", route_cache=0), "http://127.0.0.1:2") == "127.0.0.1:1"


async def test_previously_avoided_brokers_are_forgotten() -> None:
    clock = HurriedClock()
    dispatcher = Dispatcher(ClientConfig("127.0.0.1:1"), clock)
    for number in range(10):
        dispatcher.answered(
            dispatcher.to_seed(JOURNAL), pb.OK, header(f"http://127.0.0.1:{number + 2}", revision=number)
        )
        dispatcher.failed(dispatcher.to_primary(JOURNAL), grpc.StatusCode.UNAVAILABLE)
        await clock.sleep(10.0)
    assert len(dispatcher._avoided) == 1
    await dispatcher.close()


async def test_connections_are_bounded() -> None:
    dispatcher = Dispatcher(ClientConfig("127.0.0.1:1"), HurriedClock())
    for port in range(1000, 1200):
        dispatcher.answered(dispatcher.to_seed(JOURNAL), pb.OK, header(f"http://127.0.0.1:{port}", revision=port))
        assert dispatcher.to_primary(JOURNAL).endpoint == f"http://127.0.0.1:{port}"
    assert len(dispatcher._others) == 64
    await dispatcher.close()


# ------------------------------------------------------------------------------------------------- with several brokers


@pytest.fixture
async def brokers() -> AsyncIterator[Sequence[FakeBroker]]:
    """Three brokers that serve the journal. The second is its primary; the last two are in zone b."""
    async with contextlib.AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(FakeBroker()) for _ in range(3)]
        for broker in brokers:
            broker.create(JOURNAL).elsewhere = broker is brokers[0]
        set_route(brokers, primary=1)
        yield brokers


def set_route(brokers: Sequence[FakeBroker], primary: int) -> None:
    """Make all brokers report a route over all of them, with a new revision."""
    for broker in brokers:
        broker.route = header(*(f"http://{each.endpoint}" for each in brokers), primary=primary, zones="abb").route
        broker.advance()


def client_of(*seeds: FakeBroker, zone: str = "", retry_timeout: float = 5.0) -> JournalClient:
    endpoint = ",".join(seed.endpoint for seed in seeds)
    return JournalClient(endpoint, zone=zone, clock=HurriedClock(), retry_timeout=retry_timeout)


async def test_appends_go_to_the_primary(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client:
        for _ in range(3):
            await client.append(JOURNAL, b"x")
        await client.list()
    assert [broker.calls for broker in brokers] == [["Append", "List"], ["Append", "Append"], []]
    assert not brokers[0].requests[0].do_not_proxy
    assert all(request.do_not_proxy for request in brokers[1].requests)


async def test_streamed_content_goes_to_the_primary_through_proxies_if_needed(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client:
        await client.head(JOURNAL)
        async with client.appender(JOURNAL) as append:
            await append.write(b"content")
            await append.commit()
        await client.fragments(JOURNAL)
    assert brokers[0].calls == ["Read"]
    # The first broker may be a replica with an outdated head, and it answers that it is not the primary.
    assert brokers[1].calls == ["Read", "Append", "ListFragments"]
    assert not brokers[1].requests[0].do_not_proxy


async def test_a_head_comes_from_the_primary_even_if_a_stale_replica_is_asked_first(
    brokers: Sequence[FakeBroker],
) -> None:
    brokers[1].journals[JOURNAL].spool += b"appended elsewhere"
    assert brokers[0].journals[JOURNAL].head < brokers[1].journals[JOURNAL].head
    async with client_of(brokers[0]) as client:
        assert await client.head(JOURNAL) == brokers[1].journals[JOURNAL].head


@pytest.mark.parametrize(("zone", "allowed"), [("a", {0}), ("b", {1, 2}), ("", {0, 1, 2})])
async def test_reads_go_to_brokers_of_the_zone(brokers: Sequence[FakeBroker], zone: str, allowed: set[int]) -> None:
    for broker in brokers:
        broker.journals[JOURNAL].elsewhere = False
        await broker.write(JOURNAL, b"content")
    async with client_of(brokers[1], zone=zone) as client:
        await client.append(JOURNAL, b"")
        for _ in range(3):
            assert [chunk.content async for chunk in client.read(JOURNAL)] == [b"content"]
    readers = {index for index, broker in enumerate(brokers) if "Read" in broker.calls}
    assert len(readers) == 1
    assert readers <= allowed


async def test_a_read_is_redirected_by_a_broker_without_the_journal(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        await broker.write(JOURNAL, b"content")
    async with client_of(brokers[0], zone="b") as client:
        assert [chunk.content async for chunk in client.read(JOURNAL)] == [b"content"]
    assert brokers[0].calls == ["Read"]
    assert brokers[0].requests[0].do_not_proxy
    assert sorted(brokers[1].calls + brokers[2].calls) == ["Read"]


async def test_a_listed_route_avoids_a_refusal_of_the_first_read(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        await broker.write(JOURNAL, b"content")
    listed = KnownRoute.listed(brokers[1].route or pb.Route())
    async with client_of(brokers[0], zone="b") as client:
        client.suggest_routes({JOURNAL: listed})
        assert [chunk.content async for chunk in client.read(JOURNAL)] == [b"content"]
    assert not brokers[0].calls
    assert sorted(brokers[1].calls + brokers[2].calls) == ["Read"]


async def test_an_outdated_listed_route_is_corrected(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        await broker.write(JOURNAL, b"content")
    wrong = pb.Route(
        members=[pb.ProcessSpec.ID(zone="a", suffix="broker-0")], endpoints=[f"http://{brokers[0].endpoint}"]
    )
    async with client_of(brokers[2]) as client:
        client.suggest_routes({JOURNAL: KnownRoute.listed(wrong)})
        assert [chunk.content async for chunk in client.read(JOURNAL)] == [b"content"]
    assert brokers[0].calls == ["Read"]
    assert sorted(brokers[1].calls + brokers[2].calls) == ["Read"]


async def test_a_change_of_primary_is_followed(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client:
        await client.append(JOURNAL, b"x")
        set_route(brokers, primary=2)
        brokers[1].journals[JOURNAL].elsewhere = True
        await client.append(JOURNAL, b"y")
        await client.append(JOURNAL, b"z")
    assert [broker.calls for broker in brokers] == [["Append"], ["Append"], ["Append", "Append"]]
    assert brokers[2].journals[JOURNAL].content == b"yz"


async def test_a_refusal_without_a_later_route_leads_back_to_the_endpoint(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client:
        await client.append(JOURNAL, b"x")
        brokers[1].at(CallPoint.APPEND_BEGUN, pb.NOT_JOURNAL_PRIMARY_BROKER)
        await client.append(JOURNAL, b"y")
    assert [broker.calls for broker in brokers] == [["Append", "Append"], ["Append"], []]


async def test_an_unreachable_primary_is_avoided_for_a_while(brokers: Sequence[FakeBroker]) -> None:
    clock = HurriedClock()
    async with JournalClient(brokers[0].endpoint, clock=clock, retry_timeout=5.0) as client:
        await client.append(JOURNAL, b"x")
        await brokers[1].refuse()
        for _ in range(3):
            await client.append(JOURNAL, b"y")
        assert brokers[0].calls == ["Append"] * 4
        await brokers[1].accept()
        while not brokers[1].journals[JOURNAL].content:
            await clock.sleep(6)
            await client.append(JOURNAL, b"z")
    assert brokers[0].journals[JOURNAL].content.startswith(b"xyyy")
    assert brokers[1].journals[JOURNAL].content == b"z"


async def test_a_reader_continues_at_another_replica(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        await broker.write(JOURNAL, b"one")
    async with client_of(brokers[0], zone="b") as client:
        await client.append(JOURNAL, b"")
        async with contextlib.aclosing(client.read(JOURNAL, block=True)) as chunks:
            assert (await anext(chunks)).content == b"one"
            first = next(broker for broker in brokers if "Read" in broker.calls)
            assert first is not brokers[0]
            for broker in brokers:
                await broker.write(JOURNAL, b"two")
            assert (await anext(chunks)).content == b"two"
            await first.refuse()
            for broker in brokers:
                await broker.write(JOURNAL, b"three")
            assert (await anext(chunks)).content == b"three"
    others = [broker for broker in brokers[1:] if broker is not first]
    assert "Read" in brokers[0].calls + others[0].calls


async def test_a_new_cluster_at_the_same_endpoints(brokers: Sequence[FakeBroker]) -> None:
    """Reports of missing journals by brokers leave no routes."""
    async with client_of(brokers[0]) as client:
        await client.append(JOURNAL, b"x")
        for broker in brokers:
            broker.route = pb.Route(primary=-1)
            broker.advance()
        await client.append(JOURNAL, b"y")
        await client.append(JOURNAL, b"z")
    assert [broker.calls for broker in brokers] == [["Append", "Append"], ["Append"], []]


# ------------------------------------------------------------------------------------------------------- several seeds


@pytest.mark.parametrize("down", [0, 1, 2])
async def test_any_seed_may_be_down(brokers: Sequence[FakeBroker], down: int) -> None:
    for broker in brokers:
        broker.route = pb.Route(primary=-1)
        await broker.write(JOURNAL, b"content")
    await brokers[down].refuse()
    async with client_of(*brokers) as client:
        assert (await client.list()).names == (JOURNAL,)
        await client.append(JOURNAL, b"x")
        assert await client.head(JOURNAL) == 8
        assert [chunk.content async for chunk in client.read(JOURNAL)] == [b"contentx"]
    async with client_of(*brokers) as client:
        with pytest.raises(EtcdTransactionFailed):
            await client.apply([pb.ApplyRequest.Change(delete=JOURNAL, expect_mod_revision=77)])
    async with client_of(*brokers) as client, client.appender(JOURNAL) as append:
        await append.write(b"y")
        await append.commit()
    assert sum(broker.journals[JOURNAL].content.endswith(b"y") for broker in brokers) == 1


async def test_the_next_seed_is_used_when_one_becomes_unavailable(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        broker.route = pb.Route(primary=-1)
    async with client_of(*brokers) as client:
        await client.list()
        await brokers[0].refuse()
        await client.list()
        await brokers[1].refuse()
        await client.list()
    assert [broker.calls for broker in brokers] == [["List"]] * 3


async def test_calls_with_all_seeds_down_are_unavailable(brokers: Sequence[FakeBroker]) -> None:
    for broker in brokers:
        await broker.refuse()
    async with client_of(*brokers, retry_timeout=0.3) as client:
        with pytest.raises(Unavailable, match=r"cannot connect to .*refused.*\). Check the address"):
            await client.list()
        with pytest.raises(Unavailable, match=r"cannot connect to .*\. Check the address"):
            await client.apply([pb.ApplyRequest.Change(delete=JOURNAL, expect_mod_revision=-1)])


async def test_an_append_whose_answer_is_lost_at_the_primary_is_retried(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client:
        await client.append(JOURNAL, b"x")
        brokers[1].at(CallPoint.APPEND_APPLIED, Break.CUT)
        await client.append(JOURNAL, b"y", retry_unknown=True)
        brokers[1].at(CallPoint.APPEND_BEGUN, *[pb.NOT_JOURNAL_PRIMARY_BROKER] * 3)
        await client.append(JOURNAL, b"z")
    assert brokers[1].journals[JOURNAL].content.startswith(b"y")


async def test_an_explicit_append_raises_a_refusal(brokers: Sequence[FakeBroker]) -> None:
    async with client_of(brokers[0]) as client, client.appender(JOURNAL) as append:
        brokers[0].at(CallPoint.APPEND_BEGUN, pb.NOT_JOURNAL_PRIMARY_BROKER)
        with pytest.raises(NotPrimaryBroker):
            await append.commit()


def test_blocking_clients_follow_routes_too() -> None:
    first, second = RemoteBroker(), RemoteBroker()
    try:
        for remote in (first, second):
            remote.fake.create(JOURNAL)
            remote.fake.route = header(f"http://{second.fake.endpoint}").route
        config = ClientConfig(first.fake.endpoint, zone="b", retry_timeout=60.0)
        with SyncJournalClient.of(pickle.loads(pickle.dumps(config))) as client:
            client.append(JOURNAL, b"x")
            client.append(JOURNAL, b"y")
            copy = pickle.loads(pickle.dumps(client))
            assert copy.config == config
            assert [chunk.content for chunk in client.read(JOURNAL)] == [b"y"]
    finally:
        first.stop()
        second.stop()
    assert first.fake.calls == ["Append"]
    assert second.fake.calls == ["Append", "Read"]
