"""Journals whose stores would give them one folder are refused."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdHeader, KeyValue
from coranto.coordination.keyspace_state import Entries, Item, KeySpaceState
from coranto.coordination.layout import Layout
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.store_folders import folder_conflict
from coranto_broker.testing.running import RawClient, create

LAYOUT = Layout("/cluster")
MakeSpec = Callable[..., pb.JournalSpec]
State = KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]


def journal(name: str, *stores: str) -> pb.JournalSpec:
    return pb.JournalSpec(name=name, fragment=pb.JournalSpec.Fragment(stores=stores))


def state_of(*specs: pb.JournalSpec) -> State:
    def decode(kv: KeyValue) -> Item[pb.JournalSpec]:
        spec = pb.JournalSpec.FromString(kv.value)
        return Item(spec.name, spec, kv)

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


def test_other_buckets_and_journals_that_go_are_no_conflict() -> None:
    there = [journal("a/b/c", "s3://bucket/")]
    here = journal("b/c", "s3://bucket/a/")
    assert not conflicts(there, journal("b/c", "s3://other/a/"))
    assert not conflicts(there, journal("b/c", "s3://bucket/a/?endpoint=http://127.0.0.1:9000"))
    assert not conflicts(there, journal("b/c-d", "s3://bucket/a/"))
    assert not conflicts(there, journal("b/c", "s3://bucket/a/?find=b/&replace=x/")), "its author says where it is"
    assert not conflicts(there, here, deleted=frozenset({"a/b/c"}))
    assert not conflicts(there, here, journal("a/b/c", "s3://bucket/x/")), "the other one moves away"
    assert not conflicts([*there, here], here), "what is there may stay"


PREFIXES = st.sampled_from(["", "a/", "a/b/", "b/"])
NAMES = st.lists(st.sampled_from(["a", "b", "b-"]), min_size=1, max_size=3).map("/".join)
SPECS = st.dictionaries(NAMES, st.lists(PREFIXES, max_size=2), max_size=4).map(
    lambda found: [journal(name, *(f"gs://bucket/{prefix}" for prefix in stores)) for name, stores in found.items()]
)


@given(SPECS, SPECS)
def test_whatever_shares_a_folder_is_found(before: list[pb.JournalSpec], upserts: list[pb.JournalSpec]) -> None:
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


@pytest.mark.integration
async def test_a_broker_refuses_a_journal_with_the_folder_of_another(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec("deep/test/one", stores=("file:///",)))
    with pytest.raises(grpc.aio.AioRpcError, match="would share a folder with deep/test/one in file:///,") as refused:
        await client.apply(spec("test/one", stores=("file:///deep/",)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await create(client, spec("test/one", stores=("file:///other/",)))
