"""Journals that would share a folder in a store are refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import MAX_TXN_OPS, EtcdHeader, KeyValue, Op, Put
from coranto.coordination.keyspace_state import Entries, Item, KeySpaceState
from coranto.coordination.layout import Layout
from coranto.testing.sim.etcd import SimEtcd
from coranto.testing.sim.loop import simulated
from coranto.testing.sim.network import Delays, Network
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.specs.store_folders import folder_conflict, folder_guards
from tests.broker.running import RawClient, create, running_broker

LAYOUT = Layout("/cluster")
MakeSpec = Callable[..., pb.JournalSpec]
State = KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]


def journal(name: str, *stores: str) -> pb.JournalSpec:
    return pb.JournalSpec(name=name, fragment=pb.JournalSpec.Fragment(stores=stores))


def decode(kv: KeyValue) -> Item[pb.JournalSpec]:
    spec = pb.JournalSpec.FromString(kv.value)
    return Item(spec.name, spec, kv)


def state_of(*specs: pb.JournalSpec) -> State:
    kvs = [KeyValue(LAYOUT.item_key(spec.name), spec.SerializeToString(), 1, 1, 1, 0) for spec in specs]
    return KeySpaceState(EtcdHeader(1, 1, 1, 1), Entries.load(kvs, decode), LAYOUT, JournalEntities())


def conflicts(before: list[pb.JournalSpec], *upserts: pb.JournalSpec, deleted: frozenset[str] = frozenset()) -> bool:
    return folder_conflict(state_of(*before), upserts, deleted) is not None


def test_the_same_folder_by_another_prefix_is_a_conflict() -> None:
    there = [journal("a/b/c", "s3://bucket/", "file:///else/")]
    found = folder_conflict(state_of(*there), [journal("b/c", "s3://bucket/a/")], ())
    assert found == ("b/c", "s3://bucket/a/", "a/b/c", "s3://bucket/")
    assert conflicts(there, journal("b/c/d", "s3://bucket/a/")), "it is within the other's"
    assert conflicts([journal("b/c/d", "s3://bucket/a/")], *there), "it contains the other's"
    assert conflicts([], *there, journal("b/c", "s3://bucket/a/")), "in one Apply"
    assert conflicts([journal("b/c")], *there, journal("b/c", "s3://bucket/a/")), "a journal gets the store later"


def test_other_buckets_and_moved_or_deleted_journals_do_not_conflict() -> None:
    there = [journal("a/b/c", "s3://bucket/")]
    here = journal("b/c", "s3://bucket/a/")
    assert not conflicts(there, journal("b/c", "s3://other/a/"))
    assert not conflicts(there, journal("b/c", "s3://bucket/a/?endpoint=http://127.0.0.1:9000"))
    assert not conflicts(there, journal("b/c-d", "s3://bucket/a/"))
    assert not conflicts(there, journal("b/c", "s3://bucket/a/?find=b/&replace=x/")), "its author says where it is"
    assert not conflicts(there, here, deleted=frozenset({"a/b/c"}))
    assert not conflicts(there, here, journal("a/b/c", "s3://bucket/x/")), "the other one moves away"
    assert not conflicts([*there, here], here), "existing journals may stay"


PREFIXES = st.sampled_from(["", "a/", "a/b/", "b/"])
NAMES = st.lists(st.sampled_from(["a", "b", "b-"]), min_size=1, max_size=3).map("/".join)
SPECS = st.dictionaries(NAMES, st.lists(PREFIXES, max_size=2), max_size=4).map(
    lambda found: [journal(name, *(f"gs://bucket/{prefix}" for prefix in stores)) for name, stores in found.items()]
)


@given(SPECS, SPECS)
def test_every_shared_folder_is_found(before: list[pb.JournalSpec], upserts: list[pb.JournalSpec]) -> None:
    after = {spec.name: spec for spec in [*before, *upserts]}
    present = {spec.name: set(spec.fragment.stores) for spec in before}

    def folder(name: str, url: str) -> str:
        return f"{url.removeprefix('gs://bucket/')}{name}/"

    expected = any(
        one != url and (folder(spec.name, url).startswith(f) or f.startswith(folder(spec.name, url)))
        for spec in upserts
        for url in set(spec.fragment.stores) - present.get(spec.name, set())
        for other in after.values()
        if other.name != spec.name
        for one in other.fragment.stores
        for f in [folder(other.name, one)]
    )
    assert conflicts(before, *upserts) == expected


def put(*specs: pb.JournalSpec) -> list[Op]:
    return [Put(LAYOUT.item_key(spec.name), spec.SerializeToString()) for spec in specs]


@given(SPECS, SPECS, SPECS)
def test_etcd_accepts_one_of_two_transactions_for_one_folder(
    before: list[pb.JournalSpec], one: list[pb.JournalSpec], two: list[pb.JournalSpec]
) -> None:
    if conflicts([], *before) or conflicts(before, *one) or conflicts(before, *two):
        return
    with simulated(1) as loop:
        etcd = SimEtcd(loop, Network(loop, loop.rng, Delays()))
        etcd.txn([], put(*before), [])
        kvs = etcd.prefixed(LAYOUT.items)
        state = KeySpaceState(etcd.header, Entries.load(kvs, decode), LAYOUT, JournalEntities())
        first, second = folder_guards(state, one), folder_guards(state, two)
        assert etcd.txn(first.compares, [*put(*one), *first.puts], []).succeeded
        taken = etcd.txn(second.compares, [*put(*two), *second.puts], []).succeeded
    after = {spec.name: spec for spec in [*before, *one]}
    if {spec.name for spec in one}.isdisjoint(spec.name for spec in two) and conflicts([*after.values()], *two):
        assert not taken


def test_transactions_that_share_a_prefix_do_not_disturb_each_other() -> None:
    state = state_of(journal("a/b", "s3://bucket/"), journal("c/d", "s3://bucket/x/"))
    guards = folder_guards(state, [journal(f"new/{number}", "s3://bucket/") for number in range(100)])
    assert not guards.puts
    assert [compare.key for compare in guards.compares] == [
        LAYOUT.bucket_key(guards.compares[0].key.rpartition("#")[2])
    ], "no name of these begins with the other prefix"
    assert folder_guards(state, [journal("a/b", "s3://bucket/")]) == ([], [])
    assert folder_guards(state, [journal("e/f")]) == ([], [])


async def test_of_two_concurrent_applies_for_one_folder_one_is_refused(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_settings = broker_settings.model_copy(update={"id": "broker-1", "data_dir": tmp_path_factory.mktemp("other")})
    rng, refusals = random.Random(1), list[str]()
    async with running_broker(broker_settings) as (_, one), running_broker(other_settings) as (_, two):

        async def applied(client: RawClient, name: str, store: str) -> bool:
            await asyncio.sleep(rng.uniform(0, 0.002))
            try:
                return (await client.apply(spec(name, stores=(store,)))).status == pb.OK
            except grpc.aio.AioRpcError as error:
                refusals.append(error.details() or "")
                return False

        # Neither prefix is known at first, then one of them, then both.
        for number in range(24):
            folder = f"deep-{number // 3}"
            outcomes = await asyncio.gather(
                applied(one, f"{folder}/test/{number}", "file:///"),
                applied(two, f"test/{number}", f"file:///{folder}/"),
                applied(two, f"beside/{number}", "file:///"),
            )
            assert outcomes[:2] in ([True, False], [False, True]), refusals
            assert outcomes[2], refusals
    assert len(refusals) == 24
    assert all("would share a folder with" in each for each in refusals)


async def test_one_transaction_creates_its_maximum_of_journals_with_stores(client: RawClient, spec: MakeSpec) -> None:
    first = [spec(f"first/{number:03}", stores=("file:///",)) for number in range(MAX_TXN_OPS)]
    assert (await client.apply(*first)).status == pb.OK
    assert (await client.apply(*(spec(f"more/{n:03}", stores=("file:///",)) for n in range(MAX_TXN_OPS)))).status == 0
    with pytest.raises(grpc.aio.AioRpcError, match="apply them in smaller batches"):
        await client.apply(*(spec(f"other/{n:03}", stores=("file:///x/",)) for n in range(MAX_TXN_OPS)))
    other = [spec(f"other/{number:03}", stores=("file:///x/",)) for number in range(MAX_TXN_OPS - 1)]
    assert (await client.apply(*other)).status == pb.OK


async def test_a_broker_refuses_a_journal_with_the_folder_of_another(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec("deep/test/one", stores=("file:///",)))
    with pytest.raises(grpc.aio.AioRpcError, match="would share a folder with deep/test/one in file:///,") as refused:
        await client.apply(spec("test/one", stores=("file:///deep/",)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await create(client, spec("test/one", stores=("file:///other/",)))
