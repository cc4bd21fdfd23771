"""Orphaned spools: kept, stored, used for a rescue, or removed."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coranto.coordination.etcd import Compare, EtcdHeader, KeyValue, Op, Put, TxnResult
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import LocalDisk, SystemClock
from coranto.errors import Unavailable
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.metrics import Metrics
from coranto_broker.recovery import orphaned_spools, spool_recovery
from coranto_broker.recovery.deleted_spools import DeletedSpools
from coranto_broker.recovery.in_sync_records import InSyncRecords, Stranded
from coranto_broker.recovery.orphaned_spools import OrphanedSpools
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.in_sync import Epoch, InSyncRecord
from coranto_broker.spool.spool import empty_at
from tests.broker.running import eventually

J = "test/journal"
ME, OTHER = "local#me", "local#other"
MINE = label_set(author="me")


class World:
    """One broker with one spool folder; also etcd, the key space and an observer of spools."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "spools"
        self.spec: pb.JournalSpec | None = pb.JournalSpec(
            name=J, fragment=pb.JournalSpec.Fragment(stores=["file:///frags/"])
        )
        self.successor: tuple[pb.JournalSpec, int] | None = None
        self.route = [ME, OTHER]
        self.used: set[Path] = set()
        self.record: InSyncRecord | None = None
        self.revision = 100
        self.etcd_id = 1
        self.etcd_revision = 0  # The latest revision of etcd, if it is ahead of the record's.
        self.disk = LocalDisk()
        self.clock = SystemClock()
        self.folder = SpoolFolder(folder_of(self.root, J, 7), J, 7, self.disk, self.clock)
        coordinator: Any = self
        self.records = InSyncRecords(coordinator, Layout("/cluster"), MemberId("local", "me"))
        self.stores = StoreRegistry(folder / "root")
        self.persister = FragmentPersister(
            lambda journal, revision: self.spec or (self.successor or [None])[0],
            self.stores,
            self.clock,
            Metrics(),
            judge=self._judge,
        )
        journals: Any = self
        self.deleted = DeletedSpools(folder, self.disk, self.clock, keep_seconds=3600.0)
        self.orphans = OrphanedSpools(
            self.root, self.disk, self.clock, journals, self.records, self.persister, self.deleted
        )

    def write(self, content: bytes, revision: int) -> None:
        spool = DurableSpool(self.folder, self, Fsync.NEVER)
        spool.write(0, content)
        spool.propose(spool.next_fragment(), MINE, primary=True, revision=revision)
        spool.close()

    @property
    def stored(self) -> list[bytes]:
        root = self.stores.file_root
        assert root is not None
        return [path.read_bytes() for path in sorted(root.rglob("0*-*")) if path.is_file()]

    async def checked_again(self, times: int) -> None:
        """Wait until the orphaned spools were checked this many more times."""
        real, counted = self.clock.sleep, 0

        async def sleep(seconds: float) -> None:
            nonlocal counted
            counted += 1
            await real(seconds)

        self.clock.sleep = sleep  # type: ignore[method-assign]
        await eventually(lambda: counted >= times)

    async def _judge(self, sealed: Any) -> in_sync.Judgement:
        if sealed.settled:
            return in_sync.Judgement.FINAL
        return await self.records.judge(J, 7, sealed.stamp, sealed.fragment.end)

    def spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        assert (journal, create_revision) == (J, 7)
        return self.spec

    def successor_of(self, journal: str) -> tuple[pb.JournalSpec, int] | None:
        return self.successor

    def adopt(self, journal: str, create_revision: int) -> None:
        assert (journal, create_revision) == (J, 7)

    def route_of(self, journal: str) -> list[str]:
        return self.route

    def is_used(self, folder: Path) -> bool:
        return folder in self.used

    def exclusively(self, journal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        return asyncio.create_task(work())

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        value = in_sync.encode(self.record) if self.record is not None else b""
        kv = KeyValue(key, value, mod_revision=self.revision) if value else None
        return EtcdHeader(self.etcd_id, 1, max(self.revision, self.etcd_revision), 1), kv

    async def txn(self, compares: list[Compare], ops: list[Op]) -> TxnResult:
        (compare,), (op,) = compares, ops
        succeeded = compare.operand == (self.revision if self.record is not None else 0)
        if succeeded:
            self.revision += 1
            self.record = in_sync.decode(op.value) if isinstance(op, Put) else None
        return TxnResult(succeeded, EtcdHeader(1, 1, self.revision, 1))

    def spool_commit(self, fragment: Fragment, content: Any) -> None: ...
    def spool_complete(self, sealed: Any, *, primary: bool) -> None: ...
    def spool_skip(self, offset: int) -> None: ...
    def spool_ahead(self, end: int) -> None: ...
    def spool_readable(self, end: int) -> None: ...


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(orphaned_spools, "PAUSE_SECONDS", 0.005)
    monkeypatch.setattr("coranto_broker.fragments.persister._BACKOFF_SECONDS", (0.01,))
    monkeypatch.setattr("coranto_broker.fragments.persister._LATER_SECONDS", 0.02)
    world = World(tmp_path)
    running: list[asyncio.Task[None]] = []
    monkeypatch.setattr(world, "run", lambda: running.append(asyncio.create_task(world.orphans.run())), raising=False)
    yield world
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await world.persister.close(0.0)


async def test_the_spool_of_a_deleted_journal_is_set_aside(world: World) -> None:
    world.write(b"abc", 10)
    world.spec = None
    world.record = InSyncRecord(7, (ME,), (Epoch(10, 0),))
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists() and world.record is None)
    assert world.stored == []
    (found,) = world.deleted
    assert (found.journal, found.create_revision) == (J, 7)
    assert world.clock.now() < found.until < world.clock.now() + 3600.0
    assert [path.read_bytes() for path in found.path.glob("*.content")] == [b"abc"]
    note = json.loads((found.path / "deleted.json").read_text())
    assert (note["journal"], note["create_revision"]) == (J, 7)
    assert note["deleted"] < note["until"]
    world.deleted.sweep()
    assert found.path.exists()
    world.clock.now = lambda: found.until  # type: ignore[method-assign]
    world.deleted.sweep()
    assert not found.path.exists()


async def test_with_keep_seconds_zero_a_deleted_journals_spool_is_removed(world: World) -> None:
    world.deleted.keep_seconds = 0.0
    world.write(b"abc", 10)
    world.spec = None
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    assert list(world.deleted) == []


async def test_the_spool_of_a_journal_missing_in_etcd_waits_for_its_return(world: World) -> None:
    world.write(b"abc", 10)
    world.spec, world.successor = None, None
    world.record = InSyncRecord(7, (ME, OTHER), (Epoch(10, 0),), carried=20)
    world.run()  # type: ignore[attr-defined]
    await world.checked_again(3)
    assert world.folder.path.exists()
    stores = pb.JournalSpec.Fragment(stores=["file:///frags/"])
    world.successor = pb.JournalSpec(name=J, fragment=stores), 50
    await eventually(lambda: world.record is not None and world.record.create_revision == 50)
    assert world.record is not None
    assert (world.record.closed, world.record.end, world.record.registers) == (True, 3, MINE)
    assert world.stored == [b"abc"]


@pytest.mark.parametrize("carried", [20, 0], ids=["before the rescue", "after the rescue"])
async def test_a_broker_outside_the_route_stores_its_part_of_a_continued_journal(world: World, carried: int) -> None:
    world.write(b"abc", 10)
    stores = pb.JournalSpec.Fragment(stores=["file:///frags/"])
    world.spec, world.successor = None, (pb.JournalSpec(name=J, fragment=stores), 50)
    former = InSyncRecord(7, (OTHER,), (Epoch(10, 0), Epoch(20, 3)), carried=20)
    world.record = former if carried else in_sync.closed(former, 50, 9, MINE)
    before = world.record
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    assert world.stored == [b"abc"]
    assert list(world.deleted) == []
    assert world.record == before


async def test_the_record_of_a_continued_journal_is_not_removed_with_a_former_one(world: World) -> None:
    world.record = in_sync.closed(InSyncRecord(7, (OTHER,), (Epoch(10, 0),), carried=20), 50, 9, MINE)
    before = world.record
    assert before.formers == (7,)
    await world.records.remove(J, 7)
    assert world.record == before
    world.record = replace(before, members=(ME, OTHER), end=None, registers=None)
    reading = await world.records.verify(J, 7, in_sync.Stamp(10, 10), 9)
    assert reading.record is not None
    assert reading.record.members == (OTHER,), "a former spool says nothing about the current one"
    assert world.record.members == (ME, OTHER)


async def test_a_journal_recreated_at_a_former_revision_waits_for_its_rescue(world: World) -> None:
    world.record = InSyncRecord(50, (OTHER,), (Epoch(10, 0),), carried=60, formers=(7,))
    reading = await world.records.read(J, 7)
    assert reading.record is not None
    assert reading.record.foreign
    assert in_sync.closed(reading.record, 7, 9, MINE).formers == (50,)


@pytest.mark.parametrize("failing", ["recovery", "roll"])
async def test_a_spool_that_cannot_be_read_or_rolled_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (OTHER,), (Epoch(10, 0), Epoch(20, 3)))

    async def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    def refuse_roll(*_: object, **__: object) -> None:
        # Found by simulation: the disk was full at this moment, and the folder was never checked again.
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        if failing == "recovery":
            patched.setattr(orphaned_spools, "recover_spool", refuse)
        else:
            patched.setattr(DurableSpool, "propose", refuse_roll)
        world.run()  # type: ignore[attr-defined]
        await eventually(lambda: list(world.orphans.unreadable) == [world.folder.path])
    await eventually(lambda: not world.folder.path.exists())
    assert world.stored == [b"abc"]
    assert not world.orphans.unreadable


async def test_the_record_of_a_recreated_journal_is_kept(world: World) -> None:
    world.write(b"abc", 10)
    world.spec = None
    world.record = record = InSyncRecord(8, (ME,), (Epoch(10, 0),))
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    await world.checked_again(2)
    assert world.record == record


async def test_content_that_all_members_have_is_stored_and_the_folder_removed(world: World) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (OTHER,), (Epoch(10, 0), Epoch(20, 3)))
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    assert len(world.stored) == 1


async def test_content_that_others_continued_without_is_set_aside(world: World) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (OTHER,), (Epoch(10, 0), Epoch(20, 2)))
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: world.disk.list(world.folder.path) == ["set-aside"])
    assert len(world.disk.list(world.folder.path / "set-aside")) == 2
    assert world.stored == []


async def test_a_journal_without_stores_is_left_alone(world: World) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (ME,), (Epoch(10, 0),))
    world.route = [OTHER]
    assert world.spec is not None
    del world.spec.fragment.stores[:]
    before = world.disk.list(world.folder.path)
    world.run()  # type: ignore[attr-defined]
    await world.checked_again(3)
    assert world.disk.list(world.folder.path) == before
    world.spec.fragment.stores.append("file:///frags/")
    await eventually(lambda: world.record is not None and world.record.closed)


async def test_a_journal_that_has_lost_its_members_is_rescued(world: World) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (ME, OTHER), (Epoch(10, 0),))
    world.route = ["local#new"]
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    assert world.record == InSyncRecord(7, (), (Epoch(10, 0),), end=3, registers=MINE)
    assert len(world.stored) == 1


async def test_a_rescue_with_a_damaged_fragment_continues_after_a_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by simulation: the restarted broker considered it lost, and left the record with an unknown end.
    world.write(b"all of it", 40)
    recovered = spool_recovery.recover(world.folder)
    spool = recovered.durable(world.folder, world, Fsync.NEVER)
    sealed: list[Sealed] = []
    monkeypatch.setattr(world, "spool_complete", lambda each, *, primary: sealed.append(each))
    fragment = spool.fragment
    spool.propose(empty_at(fragment, spool.end, fragment.codec), spool.registers, primary=True)
    spool.close()
    sealed[0].quarantine_content()
    world.record, world.route = InSyncRecord(7, (ME,), (Epoch(40, 0),)), [OTHER]
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: world.record is not None and world.record.claimed)
    await world.checked_again(3)
    assert world.record.members == (ME,), "it knows the journal's end and waits for the content"
    await world.stores.get("file:///frags/").put(fragment, b"all of it")
    world.persister.wake(J)
    await eventually(lambda: world.record is not None and world.record.closed)
    assert (world.record.end, world.record.registers) == (9, MINE)


@pytest.mark.parametrize("route", [[], [OTHER, "local#new"]])
async def test_a_journal_with_a_member_or_without_any_broker_needs_no_rescue(world: World, route: list[str]) -> None:
    world.write(b"abc", 10)
    world.record = record = InSyncRecord(7, (ME, OTHER), (Epoch(10, 0),))
    world.route = route
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: world.persister.pending)
    await world.checked_again(10)
    assert world.record == record
    assert world.stored == []


async def test_the_only_member_rescues_its_journal_immediately(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_spools, "PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(orphaned_spools, "SOON_SECONDS", 0.005)
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (ME,), (Epoch(10, 0),))
    world.route = ["local#new"]
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: not world.folder.path.exists())
    assert world.record == InSyncRecord(7, (), (Epoch(10, 0),), end=3, registers=MINE)
    assert len(world.stored) == 1


async def test_a_member_leaves_a_record_only_as_it_was_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.record = before = InSyncRecord(7, (ME, OTHER), (Epoch(10, 0),))
    world.revision = 200
    stamp = in_sync.Stamp(10, 10)
    real = world.get
    reads = 0

    async def get(key: str) -> tuple[EtcdHeader, KeyValue | None]:
        nonlocal reads
        answer = await real(key)
        reads += 1
        if reads == 1:  # A concurrent write: that member leaves, too.
            world.record = in_sync.left(before, OTHER, 3, MINE)
            world.revision += 1
        return answer

    monkeypatch.setattr(world, "get", get)
    assert await world.records.leave(J, 8, stamp, 3, MINE) is None, "that is another journal"
    world.record, reads = before, 0
    assert await world.records.leave(J, 7, stamp, 3, MINE) == world.record
    assert world.record == InSyncRecord(7, (), (Epoch(10, 0),), end=3, registers=MINE)
    assert await world.records.leave(J, 7, stamp, 3, MINE) is None
    monkeypatch.undo()
    closed_at = world.revision
    with pytest.raises(Stranded):
        await world.records.verify(J, 7, in_sync.Stamp(closed_at, 10), 9)
    world.etcd_revision = closed_at + 1
    reading = await world.records.verify(J, 7, in_sync.Stamp(closed_at + 1, 10), 9)
    assert reading.record == world.record


async def test_a_journal_that_a_member_has_left_needs_no_rescue(world: World) -> None:
    world.write(b"abc", 10)
    world.record = before = in_sync.left(InSyncRecord(7, (ME, OTHER), (Epoch(10, 0),)), OTHER, 1, MINE)
    world.route = ["local#new"]
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: world.persister.pending)
    await world.checked_again(10)
    assert (world.record, world.stored) == (before, []), "others continue where that one left"
    world.record = in_sync.recorded(before, 7, 20, ["local#new"], 1)
    await eventually(lambda: world.disk.list(world.folder.path) == ["set-aside"])


async def test_a_folder_in_use_is_left_alone(world: World) -> None:
    world.write(b"abc", 10)
    world.record = InSyncRecord(7, (OTHER,), (Epoch(10, 0), Epoch(20, 3)))
    world.used.add(world.folder.path)
    world.run()  # type: ignore[attr-defined]
    await world.checked_again(3)
    assert len(world.disk.list(world.folder.path)) == 2
    world.used.clear()
    world.orphans.add(world.folder.path)
    await eventually(lambda: not world.folder.path.exists())


async def test_content_is_not_judged_by_the_records_of_a_replaced_etcd(world: World) -> None:
    # Found by simulation: an exiting broker stored unacknowledged content, as a restored record was too old.
    world.record = InSyncRecord(7, (ME, OTHER), (Epoch(40, 0),))
    stamp = in_sync.Stamp(50, 50)
    assert await world.records.judge(J, 7, stamp, 9) is in_sync.Judgement.FINAL
    world.etcd_id = 2
    with pytest.raises(Unavailable, match="cluster id changed from 0x1 to 0x2"):
        await world.records.judge(J, 7, stamp, 9)


async def test_a_folder_is_removed_only_after_the_closed_record_is_saved_locally(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by simulation: the disk was full, etcd was emptied, and an older record named folders that were gone.
    saved = SavedRecords(world.root.parent, world.disk)
    coordinator: Any = world
    records = InSyncRecords(coordinator, Layout("/cluster"), MemberId("local", "me"), saved=saved)
    world.records = world.orphans._records = records
    save, full = SavedRecords.save, True

    def refuse_closed(each: SavedRecords, journal: str, record: InSyncRecord) -> None:
        if full and record.closed:
            raise OSError(errno.ENOSPC, "no space left on device")
        save(each, journal, record)

    monkeypatch.setattr(SavedRecords, "save", refuse_closed)
    world.write(b"abc", 10)
    world.record, world.route = InSyncRecord(7, (ME,), (Epoch(10, 0),)), ["local#new"]
    world.run()  # type: ignore[attr-defined]
    await eventually(lambda: world.record is not None and world.record.closed)
    await world.checked_again(3)
    assert world.folder.path.exists()
    full = False
    await eventually(lambda: not world.folder.path.exists())
    assert [(each.record.closed, each.record.end) for each in saved] == [(True, 3)]


async def test_a_member_without_the_content_is_removed_and_the_log_gives_its_offsets(world: World) -> None:
    world.record = InSyncRecord(7, (ME, OTHER), (Epoch(10, 0), Epoch(12, 9)))
    with capture_logs() as logs:
        await world.records.verify(J, 7, in_sync.Stamp(10, 10), 5)
    assert world.record.members == (OTHER,)
    (said,) = logs
    facts = {"end": 5, "synced": 10, "recorded": 12, "lost": False, "others": [ME, OTHER]}
    assert said["event"] == "in_sync.content_missing"
    assert {name: said[name] for name in facts} == facts
