"""Recovery logs on real brokers and a real etcd: takeovers, pruning, and the loss of all brokers."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.client.values import FragmentInfo, Suspend
from coranto.cluster import EmbeddedCluster
from coranto.coordination.etcd import Delete, KeyValue, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.lease import LeaseRecord
from coranto.errors import CorruptData, Fenced, InvalidInput, JournalNotFound, JournalSuspended
from coranto.labels import CONTENT_TYPE, JSON_LINES, RECOVERY_LOG, label_set
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import HintKeys, HintStore, LogOwner, LogStandby, ShardHints, prune_logs
from coranto_consumers.stores.contract import SHARD, checkpoint, commit
from coranto_consumers.stores.sqlite_file import SqliteStore

_numbers = itertools.count()
SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER, filler BLOB)"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    # These tests do not restart brokers, so a broker must keep its lease on a busy machine.
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"), lease_seconds=60, etcd_fsync=False, supervise=False
    ) as cluster:
        yield cluster


class Shard:
    """A shard with its log, assigned to one process after the other."""

    def __init__(
        self, client: JournalClient, coordinator: EtcdCoordinator, folder: Path, stack: AsyncExitStack
    ) -> None:
        number = next(_numbers)
        self.client, self.coordinator, self._folder, self._stack = client, coordinator, folder, stack
        self.log = f"recovery/test-{number}/{SHARD}"
        self.keys = HintKeys(f"/test-hints/{number}", SHARD, backups=1)
        self._count = 0

    async def create_log(self, content_type: str = RECOVERY_LOG) -> None:
        spec = pb.JournalSpec(
            name=self.log,
            replication=1,
            labels=label_set([(CONTENT_TYPE, content_type)]),
            flags=pb.JournalSpec.O_RDWR,
            fragment=pb.JournalSpec.Fragment(
                length=1 << 16, compression_codec=pb.SNAPPY, stores=["file:///"], refresh_interval=timedelta(seconds=1)
            ),
        )
        await self.client.apply([pb.ApplyRequest.Change(upsert=spec)])

    async def assign(self) -> KeyValue:
        """Assign the shard to another process."""
        key = f"{self.keys.prefix}/assignment"
        await self.coordinator.txn([], [Delete(key)])
        await self.coordinator.txn([], [Put(key, b"")])
        _, kv = await self.coordinator.get(key)
        assert kv is not None
        return kv

    async def standby(self, guard: KeyValue) -> LogStandby:
        self._count += 1
        folder = self._folder / f"owner-{self._count}"
        standby = LogStandby(self.client, self.coordinator, self.keys, self.log, folder, guard=guard)
        return await self._stack.enter_async_context(standby)

    async def own(self, standby: LogStandby) -> tuple[LogOwner, SqliteStore]:
        """Take over, open the store, and confirm it."""
        owner = await self._stack.enter_async_context(await standby.take_over())
        store = SqliteStore(owner.recorder, SCHEMA, copy_bytes=100_000)
        self.restored = await store.restore_checkpoint(SHARD)
        await owner.opened()
        return owner, store

    async def new_owner(self) -> tuple[LogOwner, SqliteStore]:
        return await self.own(await self.standby(await self.assign()))


@pytest.fixture
async def shard(cluster: EmbeddedCluster, tmp_path: Path) -> AsyncIterator[Shard]:
    async with AsyncExitStack() as stack:
        info = cluster.info
        client = await stack.enter_async_context(JournalClient(info.endpoint, file_root=info.file_root))
        coordinator = await stack.enter_async_context(EtcdCoordinator(info.etcd))
        yield Shard(client, coordinator, tmp_path, stack)


def numbers(store: SqliteStore) -> list[int]:
    return [row[0] for row in store.connection.execute("SELECT number FROM numbers ORDER BY number")]


async def test_a_store_moves_between_processes(shard: Shard) -> None:
    await shard.create_log()
    hot = await shard.standby(await shard.assign())
    for round_ in range(3):
        owner, store = await shard.own(hot)
        assert numbers(store) == list(range(round_))
        # The next process follows while this one works, and gets the assignment during that.
        hot = await shard.standby(await shard.assign())
        await hot.tailing()
        store.connection.execute("INSERT INTO numbers VALUES (?, zeroblob(50000))", (round_,))
        await commit(store, round_)
    owner, store = await shard.own(hot)
    assert numbers(store) == [0, 1, 2]
    assert shard.restored == checkpoint(2)
    assert await owner.store_hints()


async def test_a_process_without_the_assignment_does_not_take_over(shard: Shard) -> None:
    await shard.create_log()
    late = await shard.standby(await shard.assign())
    owner, store = await shard.new_owner()
    head = await shard.client.head(shard.log)
    with pytest.raises(Fenced, match="not assigned"):
        await late.take_over()
    assert await shard.client.head(shard.log) == head
    await commit(store, 1)
    assert await owner.store_hints()


async def test_the_log_must_be_a_recovery_log(shard: Shard) -> None:
    guard = await shard.assign()
    with pytest.raises(JournalNotFound):
        await shard.standby(guard)
    await shard.create_log(JSON_LINES)
    with pytest.raises(InvalidInput, match=r"x-gazette-recoverylog"):
        await shard.standby(guard)


async def until(shard: Shard, condition: Callable[[Sequence[FragmentInfo]], bool]) -> None:
    """Return once the log's fragments meet a condition."""
    async with asyncio.timeout(120):
        while True:
            if condition(await shard.client.fragments(shard.log)):
                return
            await asyncio.sleep(0.05)


async def persist(shard: Shard) -> None:
    """Return once the log is completely in its store, and the journal is suspended."""
    with pytest.raises(JournalSuspended):
        await shard.client.append(shard.log, b"", suspend=Suspend.NOW)
    await until(shard, lambda fragments: all(info.persisted for info in fragments))


async def test_dead_fragments_are_pruned(shard: Shard) -> None:
    await shard.create_log()
    owner, store = await shard.new_owner()
    for number in range(40):
        store.connection.execute("DELETE FROM numbers")
        store.connection.execute("INSERT INTO numbers VALUES (?, zeroblob(20000))", (number,))
        await commit(store, number)
    for _ in range(2):  # Primary and backup hints both refer to the last copy.
        owner, store = await shard.new_owner()
        store.connection.execute("UPDATE numbers SET filler = zeroblob(120000)")
        await commit(store, 100)
        await owner.store_hints()
    await persist(shard)
    stored = await HintStore(shard.coordinator, shard.keys).fetch()
    shards = [ShardHints(SHARD, shard.log, stored)]
    (planned,) = await prune_logs(shard.client, shards, dry_run=True)
    before = len(await shard.client.fragments(shard.log))
    (pruned,) = await prune_logs(shard.client, shards)
    assert pruned.removed == planned.removed
    assert len(pruned.removed) > 5
    assert pruned.remaining == before - len(pruned.removed)
    for backup in (False, True):
        if backup:
            await shard.coordinator.txn([], [Delete(shard.keys.primary)])
        _, store = await shard.new_owner()
        assert numbers(store) == [39]
        assert shard.restored == checkpoint(100)


async def lose_broker(cluster: EmbeddedCluster, shard: Shard) -> None:
    """Replace the only broker, which loses its disk and its lease, and confirm the loss as an operator."""
    brokers = cluster.data_dir / "brokers"
    await asyncio.to_thread(cluster.kill_broker)
    remembered = LeaseRecord.within(brokers / "broker-0").load()
    assert remembered is not None
    await shard.coordinator.lease_revoke(remembered[1])
    shutil.rmtree(brokers)
    os.makedirs(brokers)
    await asyncio.to_thread(cluster.start_broker)
    stored = max(info.fragment.end for info in await shard.client.fragments(shard.log))
    await shard.client.append(shard.log, b"", offset=stored)  # As `coranto journals reset-head` does.


async def test_a_stale_author_stays_fenced_off_after_the_loss_of_all_brokers(
    cluster: EmbeddedCluster, shard: Shard
) -> None:
    await shard.create_log()
    _, stale = await shard.new_owner()
    await commit(stale, 1)
    owner, store = await shard.new_owner()
    store.connection.execute("INSERT INTO numbers VALUES (1, NULL)")
    await commit(store, 2)
    await persist(shard)
    await lose_broker(cluster, shard)
    # The empty registers satisfy the check of every author.
    assert not (await shard.client.append(shard.log, b"")).registers.labels
    stale.connection.execute("INSERT INTO numbers VALUES (666, NULL)")
    with pytest.raises(Fenced, match="not its owner"):
        await commit(stale, 3)
    store.connection.execute("INSERT INTO numbers VALUES (2, NULL)")
    await commit(store, 4)
    assert (await shard.client.append(shard.log, b"")).registers.labels[0].name == "author"
    await owner.store_hints()
    _, third = await shard.new_owner()
    assert numbers(third) == [1, 2]
    assert shard.restored == checkpoint(4)


async def test_content_lost_with_all_brokers_is_not_skipped(cluster: EmbeddedCluster, shard: Shard) -> None:
    await shard.create_log()
    _, store = await shard.new_owner()
    await commit(store, 1)
    await persist(shard)
    store.connection.execute("INSERT INTO numbers VALUES (1, NULL)")
    await commit(store, 2)  # Only in the spool.
    await lose_broker(cluster, shard)
    with pytest.raises(CorruptData, match="lost content"):
        await commit(store, 3)
