"""The mirror and a real etcd are compared after each reconnect."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog.testing

from coranto.cluster import EtcdServer
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Coordinator, Delete, EtcdHeader, KeyValue, Op, Put, Snapshot
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import Entries
from coranto.coordination.layout import Layout
from coranto.coordination.mirror_check import MirrorCheck, require_equal
from coranto.effects import SystemClock
from coranto.errors import CoordinationError, Unavailable
from tests.platform.coordination.conftest import JournalKeySpace
from tests.platform.coordination.test_keyspace import WAIT_SECONDS, Faulty, journal

Make = Callable[[Coordinator], JournalKeySpace]


@pytest.mark.integration
async def test_changes_lost_by_a_killed_etcd_are_reported_despite_reused_revisions(
    tmp_path: Path, layout: Layout
) -> None:
    """The number of keys and the revision are the same as before."""
    kept, lost, put_instead = (layout.item_key(name) for name in ("kept", "lost", "put-instead"))
    etcd = EtcdServer(tmp_path / "etcd", fsync=False)
    etcd.start()
    try:
        async with EtcdCoordinator(etcd.endpoint, timeout_seconds=60) as coordinator:
            await coordinator.txn([], [Put(kept, journal("kept"))])
            await asyncio.to_thread(etcd.kill)
            shutil.copytree(tmp_path / "etcd", tmp_path / "other")
            await asyncio.to_thread(etcd.start)
            keyspace = KeySpace(coordinator, layout, JournalEntities())
            await keyspace.start()
            acknowledged = await coordinator.txn([], [Put(lost, journal("lost"))])
            await keyspace.wait_for_revision(acknowledged.header.revision, timeout=WAIT_SECONDS)
            await asyncio.to_thread(etcd.kill)
            with EtcdServer(tmp_path / "other", fsync=False) as other:
                async with EtcdCoordinator(other.endpoint, timeout_seconds=60) as elsewhere:
                    instead = await elsewhere.txn([], [Put(put_instead, journal("put-instead"))])
                    assert instead.header.revision == acknowledged.header.revision
            shutil.rmtree(tmp_path / "etcd")
            shutil.copytree(tmp_path / "other", tmp_path / "etcd")
            await asyncio.to_thread(etcd.start)
            failure = str(await asyncio.wait_for(keyspace.wait_failed(), WAIT_SECONDS))
            await keyspace.close()
    finally:
        etcd.stop()
    revision = acknowledged.header.revision
    assert f"As of revision {revision}, 2 keys differ" in failure
    assert f"{lost} (changed at revision {revision} here, absent in etcd)" in failure
    assert f"{put_instead} (absent here, changed at revision {revision} in etcd)" in failure
    assert "coranto doctor" in failure


@pytest.mark.integration
async def test_a_mirror_that_agrees_continues(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: asyncio.Queue[int] = asyncio.Queue()
    compare = MirrorCheck._compare

    def comparing(check: MirrorCheck, entries: Entries, snapshot: Snapshot) -> None:
        compare(check, entries, snapshot)
        compared.put_nowait(snapshot.header.revision)

    monkeypatch.setattr(MirrorCheck, "_compare", comparing)
    faulty = Faulty(coordinator)
    faulty.reconnects = 5
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    for number in range(10):
        ops: list[Op] = [Put(layout.item_key("one"), journal("one", 1 << (12 + number)))]
        ops += [Delete(layout.item_key(f"item-{number - 1}")), Put(layout.item_key(f"item-{number}"), b"undecodable")]
        changed = await coordinator.txn([], ops)
        await keyspace.wait_for_revision(changed.header.revision, timeout=WAIT_SECONDS)
        if number < 5:
            assert await asyncio.wait_for(compared.get(), WAIT_SECONDS) == changed.header.revision
    assert compared.empty()


@pytest.mark.integration
async def test_a_change_that_the_watch_never_sent_is_reported(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    faulty = Faulty(coordinator)
    faulty.loses, faulty.reconnects = 1, 1
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    with structlog.testing.capture_logs() as logs:
        await coordinator.txn([], [Put(layout.item_key("unseen"), journal("unseen"))])
        await asyncio.wait_for(faulty.lost.wait(), WAIT_SECONDS)
        await coordinator.txn([], [Put(layout.item_key("seen"), journal("seen"))])
        failure = await asyncio.wait_for(keyspace.wait_failed(), WAIT_SECONDS)
    assert f"{layout.item_key('unseen')} (absent here, changed at revision" in str(failure)
    assert ("keyspace.differs", 1) in {(each["event"], each.get("keys")) for each in logs}


@pytest.mark.integration
async def test_a_reloading_mirror_is_compared_up_to_its_last_revision(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    """History is compacted, so only keys without later changes can be compared."""
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    for name in ("stays", "changes", "goes"):
        await coordinator.txn([], [Put(layout.item_key(name), journal(name))])
    changed = await coordinator.txn([], [Put(layout.item_key("other"), journal("other"))])
    await keyspace.wait_for_revision(changed.header.revision, timeout=WAIT_SECONDS)
    faulty.break_next.set()
    ops: list[Op] = [Put(layout.item_key("changes"), journal("changes", 1 << 20)), Delete(layout.item_key("goes"))]
    changed = await coordinator.txn([], ops)
    state = await keyspace.wait_for_revision(changed.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["changes", "other", "stays"]
    faulty.loses = 1
    await coordinator.txn([], [Put(layout.item_key("unseen"), journal("unseen"))])
    await asyncio.wait_for(faulty.lost.wait(), WAIT_SECONDS)
    changed = await coordinator.txn([], [Put(layout.item_key("seen"), journal("seen"))])
    await keyspace.wait_for_revision(changed.header.revision, timeout=WAIT_SECONDS)
    faulty.break_next.set()
    await coordinator.txn([], [Put(layout.item_key("last"), journal("last"))])
    failure = str(await asyncio.wait_for(keyspace.wait_failed(), WAIT_SECONDS))
    assert "1 keys differ" in failure
    assert f"{layout.item_key('unseen')} (absent here, changed at revision" in failure


def test_a_difference_lists_some_of_many_keys() -> None:
    with pytest.raises(CoordinationError, match=r"5 keys differ: /0 \(changed at revision 1 here.*and 2 more\. etcd"):
        require_equal("/", 9, {f"/{number}": (1, 2) for number in range(5)})


class Answering:
    """A coordinator that gives these answers to range reads, in order."""

    def __init__(self, *answers: Snapshot | Exception) -> None:
        self.answers = list(answers)
        self.asked: asyncio.Queue[int] = asyncio.Queue()

    async def range(self, prefix: str, *, revision: int, keys_only: bool) -> Snapshot:
        self.asked.put_nowait(revision)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_comparison_waits_for_etcd_and_ends_at_compacted_history() -> None:
    def entries(*kvs: KeyValue) -> Entries:
        return Entries.load(kvs, lambda kv: None)

    one = KeyValue("/a", mod_revision=3)
    found = Snapshot(EtcdHeader(1, 1, 9, 1), (one,), 1)
    answering = Answering(Unavailable("by the test"), CoordinationError("compacted"), found, found)
    check = MirrorCheck(answering, "/", SystemClock())  # type: ignore[arg-type]
    running = asyncio.create_task(check.run())
    check.request(entries(), 7)
    async with asyncio.timeout(WAIT_SECONDS):
        assert [await answering.asked.get(), await answering.asked.get()] == [7, 7]
        check.request(entries(one), 9)
        assert await answering.asked.get() == 9
        check.request(entries(KeyValue("/a", mod_revision=4)), 9)
        with pytest.raises(CoordinationError, match=r"/a \(changed at revision 4 here, changed at revision 3 in"):
            await running
