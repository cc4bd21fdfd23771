"""The Iceberg store of a shard: the contract of all stores, zombies at each step of a commit, and other writers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import EqualTo
from pyiceberg.types import LongType

from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, InvalidInput
from coranto.messages import Checkpoint
from coranto_consumers.stores.contract import SHARD, StoreContract, StoreSubject, checkpoint, commit
from coranto_consumers.stores.iceberg import IcebergShardStore
from coranto_consumers.stores.iceberg.state import state_of
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import Add, Max

TABLE = "shop.numbers"
SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), pa.field("text", pa.string())])


class IcebergSubject(StoreSubject):
    """A table of a catalog. Each owner has its own catalog object, like a process."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.catalogs: list[SqlCatalog] = []

    def catalog(self) -> SqlCatalog:
        self.catalogs.append(SqlCatalog("lake", uri=self.url, warehouse=f"file://{self.folder}"))
        return self.catalogs[-1]

    async def open(self) -> IcebergShardStore:
        # The tests' server never syncs, for speed.
        return IcebergShardStore(self.catalog(), TABLE, SCHEMA, relaxed_durability=True)

    async def add(self, store: Any, number: int) -> None:
        store.append([{"n": number}])

    async def numbers(self, store: Any) -> Sequence[int]:
        found: list[int] = (await store.rows()).column("n").to_pylist()
        return found

    @property
    def files(self) -> set[str]:
        return {str(path) for path in self.folder.rglob("*.parquet") if path.parent.name != "data"}

    def close(self) -> None:
        for catalog in self.catalogs:
            catalog.engine.dispose()


@pytest.fixture
def subject(new_store: Callable[[str], str], tmp_path: Path) -> Iterator[IcebergSubject]:
    subject = IcebergSubject(new_store("sqlite"), tmp_path)
    yield subject
    subject.close()


class TestIcebergShardStore(StoreContract):
    @pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
    def subject(
        self, request: pytest.FixtureRequest, new_store: Callable[[str], str], tmp_path: Path
    ) -> Iterator[IcebergSubject]:
        url = new_store(request.param).partition("?")[0].replace("postgresql://", "postgresql+psycopg://")
        subject = IcebergSubject(url, tmp_path)
        yield subject
        subject.close()


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, catalog: SqlCatalog, step: str, work: Callable[[], None]) -> Iterator[None]:
    """Run `work` once, when a commit through this catalog reaches a step."""
    done: list[bool] = []
    original = getattr(catalog, step)

    def hung(*arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            work()
        return original(*arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(catalog, step, hung)
        yield
    assert done


STEPS = ("load_table", "commit_table", "_update_and_stage_table", "_write_metadata")
"""The steps of a commit: read the table, send the changes, check them, and write the metadata for the swap."""


@pytest.mark.parametrize("step", STEPS)
async def test_a_zombie_that_hung_at_any_step_cannot_commit(
    step: str, subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await subject.open()
    await old.restore_checkpoint(SHARD)
    old.append([{"n": 1}])
    await commit(old, 100)
    kept = subject.files

    async def taken_over() -> None:
        new = await subject.open()
        assert await new.restore_checkpoint(SHARD) == checkpoint(100)
        new.append([{"n": 2}])
        await commit(new, 200)

    old.append([{"n": -1}])
    with at(monkeypatch, subject.catalogs[0], step, lambda: asyncio.run(taken_over())), pytest.raises(Fenced):
        await commit(old, 150)
    assert len(subject.files - kept) == 1, "the file of the fenced owner is swept"
    later = await subject.open()
    assert await later.restore_checkpoint(SHARD) == checkpoint(200)
    assert sorted(await subject.numbers(later)) == [1, 2]


async def test_the_next_owner_sweeps_the_file_of_a_dead_owner(subject: IcebergSubject) -> None:
    dead = await subject.open()
    await dead.restore_checkpoint(SHARD)
    dead.append([{"n": 1}])
    await commit(dead, 100)
    kept = subject.files
    table = subject.catalogs[0].load_table(TABLE)

    def write() -> None:
        """Write the last file of a process that then dies or hangs."""
        list(FileWriter.of(table, dead._owner.name_of(2)).write(pa.Table.from_pylist([{"n": -1}], SCHEMA).to_batches()))

    write()
    assert len(subject.files - kept) == 1
    for late in (True, False):  # It continues after the sweep, and writes its file again.
        later = await subject.open()
        assert await later.restore_checkpoint(SHARD) == checkpoint(100)
        assert subject.files == kept
        if late:
            write()
    later.append([{"n": 2}])
    await commit(later, 200)
    last = await subject.open()
    assert await last.restore_checkpoint(SHARD) == checkpoint(200)
    assert sorted(await subject.numbers(last)) == [1, 2], "no file of a commit is swept"


async def test_a_store_stops_after_an_unknown_outcome(subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await subject.open()
    await store.restore_checkpoint(SHARD)

    def fail(*_: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(subject.catalogs[-1], "_write_metadata", fail)
        for _ in range(2):  # It would reuse the name of a file that may be committed.
            store.append([{"n": 1}])
            with pytest.raises(CommitOutcomeUnknown):
                await commit(store, 100)
    store.append([{"n": 1}])
    with pytest.raises(CommitOutcomeUnknown, match="restore again"):
        await commit(store, 100)
    assert len(subject.files) == 1
    assert await store.restore_checkpoint(SHARD) == Checkpoint()
    assert subject.files == set()
    store.append([{"n": 2}])
    await commit(store, 100)
    assert await subject.numbers(store) == [2]


async def test_without_its_own_check_icebergs_retries_would_let_a_zombie_commit(
    subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows that the test of zombies detects one."""
    old, new = await subject.open(), await subject.open()
    await old.restore_checkpoint(SHARD)
    table = subject.catalogs[0].load_table(TABLE)
    await new.restore_checkpoint(SHARD)
    table.append(pa.Table.from_pylist([{"n": -1}], SCHEMA))  # With the retries of pyiceberg.
    assert await subject.numbers(new) == [-1]
    table = subject.catalogs[0].load_table(TABLE)
    await new.restore_checkpoint(SHARD)
    with pytest.raises(CommitFailedException):
        old._owner._commit(state_of(table, SHARD), old._owner._stage({TABLE: table}, {}))


async def test_other_writers_and_shards_keep_their_rows(
    subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await subject.open(), await subject.open()
    await one.restore_checkpoint("one")
    await two.restore_checkpoint("two")
    one.append([{"n": 1, "text": "one"}])
    two.append(pa.record_batch({"text": ["two"], "n": pa.array([2], pa.int32())}))

    def write_concurrently() -> None:
        subject.catalog().load_table(TABLE).append(pa.Table.from_pylist([{"n": 3, "text": "other"}], SCHEMA))

    with at(monkeypatch, subject.catalogs[0], "_write_metadata", write_concurrently):
        await commit(one, 100, shard="one")
    await commit(two, 200, shard="two")
    table = subject.catalog().load_table(TABLE)
    assert (state_of(table, "one").checkpoint, state_of(table, "two").checkpoint) == (checkpoint(100), checkpoint(200))
    assert len(subject.files) == 2, "a repeated attempt writes no further file"
    current = table.current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary["coranto.shard"] == "two"
    with duckdb.connect() as connection:
        found = table.scan().to_arrow()
        connection.register("found", found)
        assert connection.sql("SELECT n, text FROM found ORDER BY n").fetchall() == [
            (1, "one"),
            (2, "two"),
            (3, "other"),
        ]


async def test_an_unknown_outcome_is_resolved_by_the_next_owner(
    subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, step in enumerate(("_write_metadata", "_delete_old_metadata"), 1):  # Before and after the commit.
        store = await subject.open()
        restored = await store.restore_checkpoint(SHARD)
        store.append([{"n": number}])

        def fail(*_: object) -> None:
            raise ConnectionError("gone")

        catalog = subject.catalogs[-1]
        with monkeypatch.context() as patched:
            patched.setattr(catalog, step, fail)
            if step == "_write_metadata":
                with pytest.raises(CommitOutcomeUnknown) as caught:
                    await commit(store, 100 * number)
                assert store.is_transient(caught.value)
                assert restored == Checkpoint()
            else:
                with pytest.warns(UserWarning, match="delete old metadata"):
                    await commit(store, 100 * number)
    last = await subject.open()
    assert await last.restore_checkpoint(SHARD) == checkpoint(200)
    assert await subject.numbers(last) == [2]


async def test_a_rolled_back_table_is_refused(subject: IcebergSubject) -> None:
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    first = subject.catalogs[0].load_table(TABLE).current_snapshot()
    assert first is not None
    store.append([{"n": 1}])
    await commit(store, 100)
    table = subject.catalogs[0].load_table(TABLE)
    table.manage_snapshots().set_current_snapshot(first.snapshot_id).commit()
    for _ in range(2):
        with pytest.raises(CorruptData, match=r"shop\.numbers was rolled back behind the checkpoint of contract-shard"):
            await (await subject.open()).restore_checkpoint(SHARD)
        subject.catalogs[0].load_table(TABLE).append(pa.Table.from_pylist([{"n": 2}], SCHEMA))  # Others continue.


async def test_expired_snapshots_are_not_a_loss(subject: IcebergSubject) -> None:
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    store.append([{"n": 1}])
    await commit(store, 100)
    committed = subject.catalogs[0].load_table(TABLE).current_snapshot()
    assert committed is not None
    for number in (2, 3):
        subject.catalogs[0].load_table(TABLE).append(pa.Table.from_pylist([{"n": number}], SCHEMA))
    subject.catalogs[0].load_table(TABLE).maintenance.expire_snapshots().by_id(committed.snapshot_id).commit()
    last = await subject.open()
    assert await last.restore_checkpoint(SHARD) == checkpoint(100)
    assert sorted(await subject.numbers(last)) == [1, 2, 3]


@pytest.mark.integration
async def test_a_server_that_may_lose_commits_is_refused(new_store: Callable[[str], str], tmp_path: Path) -> None:
    url = new_store("postgresql").partition("?")[0].replace("postgresql://", "postgresql+psycopg://")
    subject = IcebergSubject(url, tmp_path)
    with pytest.raises(InvalidInput, match="may lose commits: fsync is off: set it to on"):
        await IcebergShardStore(subject.catalog(), TABLE, SCHEMA).restore_checkpoint(SHARD)
    subject.close()


async def test_rows_that_do_not_fit_are_refused(subject: IcebergSubject) -> None:
    with pytest.raises(InvalidInput, match="is a NoopCatalog, which may report an applied commit as failed"):
        IcebergShardStore(NoopCatalog("lake"), TABLE)
    with pytest.raises(InvalidInput, match=r"there is no table shop\.numbers; create it, or give its schema"):
        await IcebergShardStore(subject.catalog(), TABLE).restore_checkpoint(SHARD)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    for rows, problem in (
        ([{"n": "x"}], "do not fit shop.numbers"),
        ([{"n": 2**70}], "do not fit shop.numbers"),
        ([{"n": 1, "text": "\ud800"}], "do not fit shop.numbers"),  # JSON allows it, UTF-8 does not.
        ([{"n": None}], "needs n, which is null"),
        ([{"n": 1, "m": 2}], "has no column 'm': leave it out of the rows, or add it to the table and restart"),
        (pa.table({"n": [1], "m": [2]}), "has no column 'm'"),
        (pa.table({"text": ["a"]}), "do not fit shop.numbers"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            store.append(rows)  # type: ignore[arg-type]
    for options in ({"rules": {"text": Max()}}, {"delete": "gone"}):
        with pytest.raises(InvalidInput, match="needs keys: give the columns for merging rows"):
            IcebergShardStore(subject.catalog(), TABLE, **options)  # type: ignore[arg-type]


async def test_each_partition_has_its_own_files(subject: IcebergSubject) -> None:
    partitioned(subject)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    store.append([{"n": number, "text": "ab"[number % 2]} for number in range(10)])
    await commit(store, 100)
    found = subject.catalogs[-1].load_table(TABLE).scan(row_filter=EqualTo("text", "a"))
    assert [task.file.record_count for task in found.plan_files()] == [5]
    assert sorted(await subject.numbers(store)) == list(range(10))


async def test_rows_replace_the_rows_of_their_keys(subject: IcebergSubject) -> None:
    partitioned(subject)
    for offset, rows, wanted in (
        (100, [(1, "a"), (2, "b"), (1, "c")], [(1, "c"), (2, "b")]),  # The last row of a key counts.
        (200, [(2, "a"), (3, "b")], [(1, "c"), (2, "a"), (3, "b")]),  # One moves to another partition.
        (300, [(3, None)], [(1, "c"), (2, "a"), (3, None)]),
    ):
        store = IcebergShardStore(subject.catalog(), TABLE, keys=["n"], relaxed_durability=True)
        await store.restore_checkpoint(SHARD)
        store.append(pa.record_batch({"n": [n for n, _ in rows], "text": pa.array([t for _, t in rows], pa.string())}))
        assert sorted(rows_of(await store.rows())) == wanted, "rows of the transaction count before it commits"
        await commit(store, offset)
        assert sorted(rows_of(await store.rows())) == wanted
    with pytest.raises(InvalidInput, match="needs n, which is null"):
        store.append(pa.table({"n": pa.array([None], pa.int64())}))
    assert (await store.restore_checkpoint(SHARD)) == checkpoint(300)


async def test_rows_are_deleted_and_merged_by_rules(subject: IcebergSubject) -> None:
    schema = pa.schema([("key", pa.string()), ("n", pa.int64()), ("high", pa.int64())])
    deleting = IcebergShardStore(subject.catalog(), TABLE, SCHEMA, keys=["n"], delete="gone", relaxed_durability=True)
    await deleting.restore_checkpoint(SHARD)
    deleting.append([{"n": 1, "text": "a"}, {"n": 2, "text": "b"}, {"n": 3, "text": "c"}])
    await commit(deleting, 100)
    deleting.append([{"n": 1, "gone": True}, {"n": 2, "gone": True}, {"n": 2, "text": "again"}, {"n": 9, "gone": True}])
    await commit(deleting, 200)
    assert sorted(rows_of(await deleting.rows())) == [(2, "again"), (3, "c")]

    summing = IcebergShardStore(
        subject.catalog(),
        "shop.sums",
        schema,
        keys=["key"],
        rules={"n": Add(), "high": Max()},
        relaxed_durability=True,
    )
    await summing.restore_checkpoint(SHARD)
    for offset in (100, 200):
        summing.append([{"key": "a", "n": 1, "high": offset}, {"key": "a", "n": 2, "high": 7}])
        await commit(summing, offset)
    assert rows_of(await summing.rows()) == [("a", 6, 200)]


async def test_several_tables_are_changed_in_one_commit(
    subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_sums(await subject.open())
    await store.restore_checkpoint(SHARD)
    for offset in (100, 200):
        store.append([{"n": offset}])
        store.append([{"key": "a", "n": offset}], "shop.sums")
        await commit(store, offset)
    store.append([{"key": "b", "n": 1}], "shop.sums")  # The home has no rows, but has its state.
    await commit(store, 300)
    assert sorted(rows_of(await store.rows())) == [(100, None), (200, None)]
    assert sorted(rows_of(await store.rows("shop.sums"))) == [("a", 300), ("b", 1)]

    def fail(*_: object) -> None:
        raise ConnectionError("gone")

    kept = subject.files
    store.append([{"n": -1}])
    store.append([{"key": "a", "n": -1}], "shop.sums")
    with monkeypatch.context() as patched:
        patched.setattr(subject.catalogs[-1], "_write_metadata", fail)
        with pytest.raises(CommitOutcomeUnknown):
            await commit(store, 400)
    assert len(subject.files - kept) == 2
    assert await store.restore_checkpoint(SHARD) == checkpoint(300)
    assert subject.files == kept
    assert sorted(rows_of(await store.rows("shop.sums"))) == [("a", 300), ("b", 1)]
    with pytest.raises(InvalidInput, match=r"this store has no table 'shop\.other': add it with add_table"):
        store.append([], "shop.other")
    with pytest.raises(InvalidInput, match=r"'shop\.sums' is a table of this store already"):
        with_sums(store)


@pytest.mark.parametrize("step", STEPS)
async def test_a_merging_zombie_that_hung_at_any_step_cannot_commit(
    step: str, subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioned(subject)

    def opened() -> IcebergShardStore:
        return with_sums(IcebergShardStore(subject.catalog(), TABLE, keys=["n"], relaxed_durability=True))

    old, catalog = opened(), subject.catalogs[-1]
    await old.restore_checkpoint(SHARD)
    old.append([{"n": 1, "text": "old"}, {"n": 5, "text": "stays"}])
    await commit(old, 100)

    async def taken_over() -> None:
        new = opened()
        assert await new.restore_checkpoint(SHARD) == checkpoint(100)
        new.append([{"n": 1, "text": "new"}])
        new.append([{"key": "a", "n": 2}], "shop.sums")
        await commit(new, 200)

    old.append([{"n": 1, "text": "zombie"}, {"n": 7, "text": "zombie"}])
    if step != "commit_table":  # A commit of a single table.
        old.append([{"key": "a", "n": -1}], "shop.sums")
    with at(monkeypatch, catalog, step, lambda: asyncio.run(taken_over())), pytest.raises(Fenced):
        await commit(old, 150)
    later = opened()
    assert await later.restore_checkpoint(SHARD) == checkpoint(200)
    assert sorted(rows_of(await later.rows())) == [(1, "new"), (5, "stays")]
    assert rows_of(await later.rows("shop.sums")) == [("a", 2)]


async def test_a_repeated_attempt_merges_with_concurrent_writes_and_leaves_no_file(
    subject: IcebergSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = IcebergShardStore(subject.catalog(), TABLE, SCHEMA, keys=["n"], relaxed_durability=True)
    await store.restore_checkpoint(SHARD)

    def write_concurrently() -> None:
        subject.catalog().load_table(TABLE).append(pa.Table.from_pylist([{"n": 1, "text": "other"}], SCHEMA))

    store.append([{"n": 1, "text": "mine"}])
    with at(monkeypatch, subject.catalogs[0], "_write_metadata", write_concurrently):
        await commit(store, 100)
    assert rows_of(await store.rows()) == [(1, "mine")]
    assert len(subject.files) == 1


async def test_a_repartitioned_table_loses_nothing(subject: IcebergSubject) -> None:
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    store.append([{"n": 1, "text": "a"}])
    await commit(store, 100)
    table = subject.catalog().load_table(TABLE)
    with table.update_spec() as spec:
        spec.add_identity("text")
    with table.update_schema() as schema:
        schema.add_column("later", LongType())
    store.append([{"n": 2, "text": "b"}])
    await commit(store, 200)
    assert (await store.rows()).sort_by("n").to_pylist() == [
        {"n": 1, "text": "a", "later": None},
        {"n": 2, "text": "b", "later": None},
    ]


@pytest.mark.parametrize("keys", [(), ("n",)])
async def test_a_concurrently_renamed_column_is_refused(keys: Sequence[str], subject: IcebergSubject) -> None:
    store = IcebergShardStore(subject.catalog(), TABLE, SCHEMA, keys=keys, relaxed_durability=True)
    await store.restore_checkpoint(SHARD)
    with subject.catalog().load_table(TABLE).update_schema() as schema:
        schema.rename_column("text", "note")
    store.append([{"n": 1, "text": "a"}])
    with pytest.raises(InvalidInput, match=r"shop\.numbers has lost the column 'text': restart the shard"):
        await commit(store, 100)
    assert await store.restore_checkpoint(SHARD) == Checkpoint()
    store.append([{"n": 1, "note": "a"}])
    await commit(store, 100)
    assert rows_of(await store.rows()) == [(1, "a")]


def partitioned(subject: IcebergSubject) -> None:
    """Create the table, in partitions by the text."""
    catalog = subject.catalog()
    catalog.create_namespace("shop")
    with catalog.create_table_transaction(TABLE, SCHEMA) as creation, creation.update_spec() as spec:
        spec.add_identity("text")


def with_sums(store: IcebergShardStore) -> IcebergShardStore:
    """Add a table of sums by a key."""
    schema = pa.schema([pa.field("key", pa.string()), pa.field("n", pa.int64())])
    return store.add_table("shop.sums", schema, keys=["key"], rules={"n": Add()})


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]
