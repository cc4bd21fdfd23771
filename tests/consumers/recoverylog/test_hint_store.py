"""Hints and owners in a real etcd."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from coranto.cluster import EtcdServer
from coranto.coordination.etcd import Delete, KeyValue, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import CorruptData, Fenced, InvalidInput, TxnOutcomeUnknown, Unavailable
from coranto.testing.fake_broker import FakeBroker
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Author, Handoff, Hints, LiveFnode, LogSegment, Ownership
from coranto_consumers.recoverylog.hint_store import EtcdAuthority, HintKeys, HintStore
from coranto_consumers.recoverylog.operations import Fnode

if TYPE_CHECKING:
    from .conftest import Owners

LOG = "recovery/logs/one"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server


@pytest.fixture
async def coordinator(etcd: EtcdServer) -> AsyncIterator[EtcdCoordinator]:
    async with EtcdCoordinator(etcd.endpoint) as connected:
        yield connected


@pytest.fixture
def keys() -> HintKeys:
    return HintKeys(f"/test/{next(_numbers)}/hints", "a/shard", backups=2)


@pytest.fixture
async def assignment(coordinator: EtcdCoordinator, keys: HintKeys) -> KeyValue:
    key = f"{keys.prefix}/assign"
    await coordinator.txn([], [Put(key, b"")])
    _, kv = await coordinator.get(key)
    assert kv is not None
    return kv


def hints(number: int) -> Hints:
    return Hints(LOG, (LiveFnode(Fnode(number), (LogSegment(Author(7), number, 0, 0, number, 0, LOG),)),))


async def test_keys_and_values_have_the_layout_of_gazette(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    store = HintStore(coordinator, keys)
    assert await store.store_recorded(hints(5))
    await store.store_recovered(hints(4))
    found = {kv.key.removeprefix(keys.prefix): kv.value for kv in (await coordinator.range(keys.prefix)).kvs}
    assert found == {"/a/shard.primary": hints(5).to_json(), "/a/shard.backup.0": hints(4).to_json()}
    assert json.loads(found["/a/shard.primary"])["live_nodes"][0]["segments"][0]["author"] == 7


async def test_backups_rotate(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    store = HintStore(coordinator, keys)
    assert (await store.fetch()).pick(LOG) == Hints(LOG)
    for number in (1, 2, 3):
        await store.store_recovered(hints(number))
    stored = await store.fetch()
    assert stored.primary is None
    assert stored.backups == (hints(3), hints(2))
    assert stored.pick(LOG) == hints(3)
    await store.store_recorded(hints(9))
    stored = await store.fetch()
    assert stored.pick(LOG) == hints(9)
    assert stored.present == [hints(9), hints(3), hints(2)]
    await store.store_recovered(hints(3))
    assert (await store.fetch()).backups == (hints(3), hints(2))


async def test_hints_in_the_binary_encoding_are_read(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    await coordinator.txn([], [Put(keys.primary, hints(5).to_wire().SerializeToString())])
    assert (await HintStore(coordinator, keys).fetch()).primary == hints(5)


async def test_a_shard_without_backups(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    store = HintStore(coordinator, replace(keys, backups=0))
    await store.store_recovered(hints(1))
    assert await store.store_recorded(hints(2))
    assert await store.fetch() == replace(await store.fetch(), primary=hints(2), backups=())


async def test_hints_without_files_are_not_stored(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    store = HintStore(coordinator, keys)
    await store.store_recorded(hints(5))
    assert not await store.store_recorded(Hints(LOG))
    await store.store_recovered(Hints(LOG))
    assert (await store.fetch()).present == [hints(5)]


async def test_the_error_of_an_unreadable_value_names_its_key(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    await coordinator.txn([], [Put(keys.primary, b"{}")])
    with pytest.raises(CorruptData, match=r"a/shard\.primary"):
        await HintStore(coordinator, keys).fetch()
    await coordinator.txn([], [Put(keys.author, b"{}")])
    with pytest.raises(CorruptData, match=r"a/shard\.author"):
        await EtcdAuthority(coordinator, keys, LOG).current()


async def test_nothing_is_written_without_the_assignment(
    coordinator: EtcdCoordinator, keys: HintKeys, assignment: KeyValue
) -> None:
    store = HintStore(coordinator, keys, guard=assignment)
    authority = EtcdAuthority(coordinator, keys, LOG, guard=assignment)
    await coordinator.txn([], [Put(assignment.key, b"a change of its value does not matter")])
    await store.store_recorded(hints(1))
    await store.store_recovered(hints(1))
    await authority.claim(Author(7))
    before = (await coordinator.range(keys.prefix)).kvs
    await coordinator.txn([], [Delete(assignment.key)])
    await coordinator.txn([], [Put(assignment.key, b"of another process")])
    for attempt in (
        lambda: store.store_recorded(hints(2)),
        lambda: store.store_recovered(hints(2)),
        lambda: authority.claim(Author(8)),
    ):
        with pytest.raises(Fenced, match="not assigned"):
            await attempt()
    after = [kv for kv in (await coordinator.range(keys.prefix)).kvs if kv.key != assignment.key]
    assert after == [kv for kv in before if kv.key != assignment.key]


async def test_recorded_hints_may_fail_while_etcd_is_unreachable(keys: HintKeys) -> None:
    class Gone:
        def __init__(self, error: Exception) -> None:
            self.error = error

        async def txn(self, *arguments: object, **options: object) -> None:
            raise self.error

    for error in (Unavailable("gone"), TxnOutcomeUnknown("gone")):
        assert not await HintStore(Gone(error), keys).store_recorded(hints(1))


async def test_owners_are_claimed_and_confirmed(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    authority = EtcdAuthority(coordinator, keys, LOG)
    assert await authority.current() is None
    await authority.claim(Author(7))
    assert await authority.current() == Ownership(Author(7))
    handoff = Handoff(Author(7), LOG, 5, 1234, 100, 115)
    await authority.confirm(handoff)
    await authority.confirm(handoff)
    assert await authority.current() == Ownership(Author(7), handoff)
    await authority.claim(Author(8))
    # The confirmed handoff stays until the next takeover is confirmed.
    assert await authority.current() == Ownership(Author(8), handoff)
    with pytest.raises(Fenced, match="0x8 is"):
        await authority.confirm(handoff)


async def test_all_keys_are_removed_with_the_shard(coordinator: EtcdCoordinator, keys: HintKeys) -> None:
    store = HintStore(coordinator, keys)
    for number in (1, 2, 3):
        await store.store_recovered(hints(number))
    await store.store_recorded(hints(4))
    await EtcdAuthority(coordinator, keys, LOG).claim(Author(7))
    await store.remove()
    assert (await coordinator.range(keys.prefix)).kvs == ()


@pytest.mark.parametrize(
    ("prefix", "shard", "backups"),
    [("", "s", 1), ("relative", "s", 1), ("/a/", "s", 1), ("/a", "", 1), ("/a", "s", -1)],
)
def test_invalid_keys_are_refused(prefix: str, shard: str, backups: int) -> None:
    with pytest.raises(InvalidInput):
        HintKeys(prefix, shard, backups)


async def test_owners_take_over_a_log_through_etcd(
    broker: FakeBroker, coordinator: EtcdCoordinator, keys: HintKeys, owners: Owners
) -> None:
    """Each owner recovers from the stored hints. After a loss of all brokers, stale owners stay fenced off."""
    store, authority = HintStore(coordinator, keys), EtcdAuthority(coordinator, keys, LOG)
    stale = None
    for number in range(4):
        recovery = await owners.recover((await store.fetch()).pick(LOG), authority=authority)
        assert len(recovery.fsm.paths) == number
        owner = await owners.record(recovery, authority=authority)
        await store.store_recovered(recovery.hints)
        owner.create(str(number)).close()
        if stale is not None:
            broker.journals[LOG].registers = pb.LabelSet()
            stale.recorder.create("stale")
            with pytest.raises(Fenced):
                await stale.recorder.barrier()
        assert await store.store_recorded(await owner.recorder.hints())
        stale = owner
    stored = await store.fetch()
    assert [len(each.live_fnodes) for each in stored.present] == [4, 3, 2]
