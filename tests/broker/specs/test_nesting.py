"""New names that nest are refused: the conditions for etcd, and races between brokers on a real etcd."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, CompareTarget, Coordinator, Delete, KeyValue, Put, Relation
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace_state import Entries, KeySpaceState
from coranto.coordination.layout import Layout
from coranto.names import nests
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.loop import simulated
from coranto.testing.sim.network import Delays, Network
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.specs.nesting import nesting_pair, with_guards
from tests.broker.running import RawClient, running_broker

MakeSpec = Callable[..., pb.JournalSpec]
LAYOUT = Layout("/cluster")
NAMES = st.lists(st.sampled_from(["aa", "bb", "bb-c", "cc"]), min_size=1, max_size=4).map("/".join)


def state_of(kvs: list[KeyValue], etcd: SimEtcd) -> KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]:
    return KeySpaceState(etcd.header, Entries.load(kvs, lambda kv: None), LAYOUT, JournalEntities())


@settings(max_examples=150)
@given(
    st.sets(NAMES, max_size=5),
    st.sets(NAMES, min_size=1, max_size=4),
    st.sets(NAMES, max_size=3),
    st.integers(0, 3),
    st.sampled_from(["", "deep/er/", "bb/"]),
)
def test_a_transaction_creates_no_nested_names(
    before: set[str], wanted: set[str], later: set[str], crowd: int, folder: str
) -> None:
    """Despite concurrent creations, and for any number of names."""
    with simulated(1) as loop:
        etcd = SimEtcd(loop, Network(loop, loop.rng, Delays()))
        etcd.txn([], [Put(LAYOUT.item_key(name), b"") for name in before], [])
        state = state_of(etcd.prefixed(LAYOUT.root), etcd)
        created = [folder + name for name in sorted(wanted)] + [f"{folder}crowd/{n}" for n in range(crowd * 42)]
        created = [name for name in created if name not in before]
        pair = nesting_pair(state, created)
        expected = any(nests(name, other) for name in created for other in {*before, *created})
        assert (pair is not None) == expected
        if pair is not None:
            assert nests(*pair)
            assert pair[0] in created
            return
        etcd.txn([], [Put(LAYOUT.item_key(name), b"") for name in later - before], [])
        own = [Compare(LAYOUT.item_key(name), CompareTarget.MOD_REVISION, 0) for name in created]
        compares = with_guards(state, created, own)
        assert len(compares) <= MAX_TXN_OPS
        result = etcd.txn(compares, [Put(LAYOUT.item_key(name), b"") for name in created], [])
        clash = any(name == other or nests(name, other) for name in created for other in later - before)
        if clash:
            assert not result.succeeded
        elif not later - before:
            assert result.succeeded
        elif not crowd:
            assert result.succeeded or not created, "with few names, only nested names conflict"


async def conditions_on_whole_prefixes(coordinator: Coordinator, prefix: str) -> None:
    async def holds(key: str, operand: int) -> bool:
        compare = Compare(prefix + key, CompareTarget.CREATE_REVISION, operand, prefix=True)
        return (await coordinator.txn([compare], [Put("elsewhere", b"")])).succeeded

    async def was_unchanged(key: str, revision: int) -> bool:
        compare = Compare(prefix + key, CompareTarget.CREATE_REVISION, revision + 1, Relation.LESS, prefix=True)
        return (await coordinator.txn([compare], [])).succeeded

    assert await holds("a/", 0)
    done = await coordinator.txn([], [Put(f"{prefix}a", b""), Put(f"{prefix}a-b/c", b""), Put(f"{prefix}b/c", b"")])
    assert await holds("a/", 0)
    assert not await holds("b/", 0)
    assert await holds("", done.header.revision)
    await coordinator.txn([], [Put(f"{prefix}b/c", b"changed")])
    assert await was_unchanged("b/", done.header.revision)
    await coordinator.txn([], [Put(f"{prefix}b/d", b"")])
    assert not await was_unchanged("b/", done.header.revision)
    assert not await was_unchanged("", done.header.revision)
    assert await was_unchanged("a", done.header.revision)
    assert await was_unchanged("none", done.header.revision)
    await coordinator.txn([], [Delete(f"{prefix}b/", prefix=True)])
    assert await holds("b/", 0)


async def test_conditions_on_whole_prefixes(etcd: str, broker_settings: BrokerSettings) -> None:
    async with EtcdCoordinator(etcd) as coordinator:
        await conditions_on_whole_prefixes(coordinator, f"{broker_settings.etcd_prefix}/compare/")


def test_conditions_on_whole_prefixes_in_the_simulated_etcd() -> None:
    with simulated(1) as loop:
        network, process = Network(loop, loop.rng, Delays()), Process(loop, "client")
        coordinator = SimCoordinator(SimEtcd(loop, network), network, "client", process, SimClock(loop))
        loop.run_until_complete(conditions_on_whole_prefixes(coordinator, "/compare/"))


async def refusal(client: RawClient, *specs: pb.JournalSpec, revision: int = 0) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.apply(*specs, revision=revision)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value.details() or ""


async def test_names_that_nest_are_refused(client: RawClient, spec: MakeSpec) -> None:
    assert (await client.apply(spec("shop/events"))).status == pb.OK
    assert "shop/events/eu nests with shop/events:" in await refusal(client, spec("shop/events/eu"))
    assert "shop/events/eu/1 nests with shop/events:" in await refusal(client, spec("shop/events/eu/1"), revision=-1)
    assert "shop nests with shop/events:" in await refusal(client, spec("shop"), revision=-1)
    assert "new/one/two nests with new/one:" in await refusal(client, spec("new/one/two"), spec("new/one"))
    for name in ("shop/events-eu", "shop/event", "shop/events.eu", "shop/events=/eu"):
        assert (await client.apply(spec(name))).status == pb.OK
    # A conflict of revisions is still reported as one.
    assert (await client.apply(spec("shop/events"))).status == pb.ETCD_TRANSACTION_FAILED
    assert (await client.apply(spec("shop/other"), spec("shop/events"))).status == pb.ETCD_TRANSACTION_FAILED
    assert (await client.apply(spec("shop/other"), revision=7)).status == pb.ETCD_TRANSACTION_FAILED
    # A deleted name blocks no other.
    gone = pb.ApplyRequest.Change(delete="shop/events", expect_mod_revision=-1)
    assert (await client.stub.Apply(pb.ApplyRequest(changes=[gone]))).status == pb.OK
    assert (await client.apply(spec("shop/events/eu"))).status == pb.OK
    assert "shop/events nests with shop/events/eu:" in await refusal(client, spec("shop/events"))


async def test_journals_with_nested_names_can_be_changed_and_deleted(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    layout = Layout(broker_settings.etcd_prefix)
    async with EtcdCoordinator(broker_settings.etcd) as coordinator:
        puts = [Put(layout.item_key(name), spec(name).SerializeToString()) for name in ("a/bbb", "a/bbb/c")]
        done = await coordinator.txn([], puts)
    revision = done.header.revision
    await process.broker.keyspace.wait_for_revision(revision)
    assert (await client.apply(spec("a/bbb/c", max_append_rate=9), revision=revision)).status == pb.OK
    assert (await client.apply(spec("a/bbb", max_append_rate=9), revision=-1)).status == pb.OK
    assert (await client.apply(spec("a/bbb"))).status == pb.ETCD_TRANSACTION_FAILED
    assert "a/bbb/d nests with a/bbb:" in await refusal(
        client, spec("a/bbb", max_append_rate=8), spec("a/bbb/d"), revision=-1
    )
    delete = pb.ApplyRequest.Change(delete="a/bbb", expect_mod_revision=-1)
    assert (await client.stub.Apply(pb.ApplyRequest(changes=[delete]))).status == pb.OK
    assert (await client.apply(spec("a/bbb/d"), revision=-1)).status == pb.OK


async def test_an_operator_may_allow_nested_names(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    allowing = broker_settings.model_copy(update={"allow_nested_names": True})
    async with running_broker(allowing) as (_, client):
        assert (await client.apply(spec("shop/events"), spec("shop/events/eu"))).status == pb.OK


async def test_one_transaction_creates_its_maximum_of_journals(client: RawClient, spec: MakeSpec) -> None:
    many = [spec(f"many/{letter}/{number:03}") for letter in "ab" for number in range(MAX_TXN_OPS // 2)]
    assert (await client.apply(*many)).status == pb.OK
    assert (await client.apply(*many)).status == pb.ETCD_TRANSACTION_FAILED
    assert (await client.apply(*many, revision=-1)).status == pb.OK
    apart = [spec(f"part-{number:03}/journal") for number in range(MAX_TXN_OPS)]
    assert (await client.apply(*apart)).status == pb.OK
    assert "nests with many/a/000:" in await refusal(
        client, *(spec(f"many/a/000/{number:03}") for number in range(128))
    )


async def test_a_lagging_broker_refuses_no_name_because_of_deleted_journals(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_settings = broker_settings.model_copy(update={"id": "broker-1", "data_dir": tmp_path_factory.mktemp("other")})
    layout = Layout(broker_settings.etcd_prefix)
    async with running_broker(broker_settings) as (_, one), running_broker(other_settings) as (process, two):
        for number in range(10):
            assert (await one.apply(spec(f"lag/{number}/x"), spec(f"lag/{number}-0"))).status == pb.OK
            state = process.broker.keyspace.state
            await process.broker.keyspace.wait_until(
                lambda now, number=number: now.item(f"lag/{number}/x") is not None  # type: ignore[misc]
            )
            async with EtcdCoordinator(broker_settings.etcd) as coordinator:
                names = (f"lag/{number}/x", f"lag/{number}-0")
                await coordinator.txn([], [Delete(layout.item_key(name)) for name in names])
            # The deleted journals that it still knows are around the new name, or have it.
            kind = (spec(f"lag/{number}"), spec(f"lag/{number}/x/y"), spec(f"lag/{number}-0"))[number % 3]
            assert (await two.apply(kind, revision=-(number % 2))).status == pb.OK
            assert process.broker.keyspace.state is not state
        # Journals that Gazette's brokers have just created, and that are to be changed, are not taken for new.
        async with EtcdCoordinator(broker_settings.etcd) as coordinator:
            for number in range(10):
                made = [spec(f"new/{number}"), spec(f"new/{number}/x")]
                await coordinator.txn([], [Put(layout.item_key(made[0].name), made[0].SerializeToString())])
                await process.broker.keyspace.wait_until(
                    lambda now, number=number: now.item(f"new/{number}") is not None  # type: ignore[misc]
                )
                done = await coordinator.txn([], [Put(layout.item_key(made[1].name), made[1].SerializeToString())])
                revision = done.header.revision if number % 2 else -1
                assert (await two.apply(made[1], revision=revision)).status == pb.OK


async def test_of_two_concurrent_creations_one_is_refused(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_settings = broker_settings.model_copy(update={"id": "broker-1", "data_dir": tmp_path_factory.mktemp("other")})
    rng, refusals = random.Random(1), list[str]()
    async with running_broker(broker_settings) as (_, one), running_broker(other_settings) as (_, two):

        async def create(client: RawClient, *specs: pb.JournalSpec) -> bool:
            await asyncio.sleep(rng.uniform(0, 0.002))
            try:
                return (await client.apply(*specs)).status == pb.OK
            except grpc.aio.AioRpcError as error:
                refusals.append(error.details() or "")
                return False

        for number in range(25):
            crowd = [spec(f"race-{number}/b/{each:03}") for each in range(0 if number % 3 else 60)]
            outcomes = await asyncio.gather(
                create(one, spec(f"race-{number}/b/top"), *crowd),
                create(two, spec(f"race-{number}/b/top/of/it")),
                create(two, spec(f"race-{number}/b/top-0")),
                create(one, spec(f"race-{number}/b")) if number % 2 else create(one, spec(f"race-{number}/c")),
            )
            assert sum(outcomes[:2]) == 1 or (number % 2 and outcomes[3] and not any(outcomes[:3])), outcomes
            names = [journal.spec.name for response in await one.listing() for journal in response.journals]
            assert not [(a, b) for a in names for b in names if nests(a, b)]
    assert len(refusals) >= 25
    assert all(" nests with race-" in each for each in refusals)
