"""An owner's commits to several tables, and the removal of its leftover files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import Transaction

from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, InvalidInput, SqlStoreError
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.contract import SHARD, checkpoint
from coranto_consumers.stores.iceberg.changes import append
from coranto_consumers.stores.iceberg.files import file_location
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.state import key_of, state_of
from coranto_consumers.stores.iceberg.writing import FileWriter

ONE, TWO = "shop.one", "shop.two"
ROWS = pa.record_batch({"n": pa.array([1, 2], pa.int64())})


class Warehouse:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalogs: list[SqlCatalog] = []
        self.catalog().create_namespace("shop")
        for name in (ONE, TWO):
            self.catalogs[0].create_table(name, ROWS.schema)

    def catalog(self) -> SqlCatalog:
        uri = f"sqlite:///{self.folder}/catalog.db"
        self.catalogs.append(SqlCatalog("lake", uri=uri, warehouse=f"file://{self.folder}"))
        return self.catalogs[-1]

    def owner(self) -> IcebergOwner:
        owner = IcebergOwner(self.catalog(), ONE, sleep=lambda seconds: None)
        owner.raise_fence(SHARD)
        owner.sweep()
        return owner

    def rows(self, name: str) -> list[int]:
        found: list[int] = self.catalogs[0].load_table(name).scan().to_arrow().column("n").to_pylist()
        return found

    @property
    def files(self) -> set[Path]:
        return set(self.folder.rglob("*.parquet"))


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    warehouse = Warehouse(tmp_path)
    yield warehouse
    for catalog in warehouse.catalogs:
        catalog.engine.dispose()


def write(owner: IcebergOwner, name: str):
    """Write rows to a file of a table, and return the change that adds it."""
    owner.register_table(name)
    writer = FileWriter.of(owner.load(name), owner.name_of(owner.next_number))
    files = list(writer.write([ROWS]))

    def add(transaction: Transaction, summary: Mapping[str, str]) -> None:
        append(transaction, summary, files, writer)

    return add


def commit(owner: IcebergOwner, offset: int, *names: str) -> None:
    owner.commit(checkpoint(offset), {name: write(owner, name) for name in names}, owner.next_number)


def test_tables_commit_atomically(warehouse: Warehouse) -> None:
    old = warehouse.owner()
    commit(old, 100, ONE, TWO)
    zombie = {name: write(old, name) for name in (ONE, TWO)}
    new = warehouse.owner()
    with pytest.raises(Fenced):
        old.commit(checkpoint(200), zombie, old.next_number)
    commit(new, 300, TWO)  # The home has no rows, but its checkpoint is committed, too.
    assert (warehouse.rows(ONE), warehouse.rows(TWO)) == ([1, 2], [1, 2, 1, 2])
    assert state_of(new.load(), SHARD).checkpoint == checkpoint(300)


@pytest.mark.parametrize("repair", ["the property is deleted", "the table is made again"])
def test_an_owner_from_before_a_repair_is_fenced_by_an_owner_of_the_same_number(
    repair: str, warehouse: Warehouse
) -> None:
    old = warehouse.owner()
    stale = write(old, ONE)
    if repair == "the property is deleted":
        with old.load().transaction() as transaction:
            transaction.remove_properties(key_of(SHARD))
    else:
        warehouse.catalogs[0].drop_table(ONE)
        warehouse.catalogs[0].create_table(ONE, ROWS.schema)
    with pytest.raises(Fenced):
        old.commit(checkpoint(100), {ONE: stale}, old.next_number)
    new = warehouse.owner()
    assert new.state.fence == old.state.fence
    with pytest.raises(Fenced, match="has started over with fence 1, which is this one's, too"):
        old.commit(checkpoint(100), {ONE: stale}, old.next_number)
    with pytest.raises(Fenced):
        old.register_table("shop.three")
    commit(new, 200, ONE)
    assert (warehouse.rows(ONE), warehouse.owner().state.checkpoint) == ([1, 2], checkpoint(200))


STEPS = ("load_table", "_update_and_stage_table", "_write_metadata", "_delete_old_metadata")
"""The steps of a commit: read the tables, check the changes, write their metadata, and finish after the swap."""


def at(monkeypatch: pytest.MonkeyPatch, owner: IcebergOwner, step: str, work: Callable[[], None]) -> list[bool]:
    """Run `work` once, when a commit of an owner reaches a step. Return a list that then has an entry."""
    original, met = getattr(owner.catalog, step), list[bool]()

    def hung(*arguments: object, **named: object) -> object:
        if not met:
            met.append(True)
            work()
        return original(*arguments, **named)

    monkeypatch.setattr(owner.catalog, step, hung)
    return met


@pytest.mark.parametrize("names", [(ONE,), (ONE, TWO)])
@pytest.mark.parametrize("step", STEPS)
def test_an_owner_that_hung_at_any_step_commits_nothing(
    step: str, names: Sequence[str], warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = warehouse.owner()
    zombie = {name: write(old, name) for name in names}
    met = at(monkeypatch, old, step, lambda: commit(warehouse.owner(), 200, *names))
    if step == STEPS[-1]:  # After the swap, its commit counts, and the next is refused.
        old.commit(checkpoint(100), zombie, old.next_number)
    with pytest.raises(Fenced):
        old.commit(checkpoint(300), zombie, old.next_number)
    assert met
    monkeypatch.undo()
    new = warehouse.owner()
    assert new.state.checkpoint == checkpoint(200)
    assert {len(warehouse.rows(name)) for name in names} == {4 if step == STEPS[-1] else 2}


@pytest.mark.parametrize("names", [(ONE,), (ONE, TWO)])
@pytest.mark.parametrize("step", STEPS[1:])
def test_an_unknown_outcome_is_resolved(
    step: str, names: Sequence[str], warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = warehouse.owner()
    changes = {name: write(owner, name) for name in names}

    def fail() -> None:
        raise ConnectionError("gone")

    at(monkeypatch, owner, step, fail)
    number, applied = owner.next_number, step == STEPS[-1]
    if applied and len(names) == 1:  # pyiceberg itself warns, and continues.
        with pytest.warns(UserWarning, match="delete old metadata"):
            owner.commit(checkpoint(100), changes, number)
    else:
        with pytest.raises(CommitOutcomeUnknown) as unknown:
            owner.commit(checkpoint(100), changes, number)
        if applied:
            owner.resolve(number, unknown.value)
        else:
            with pytest.raises(SqlStoreError, match="was not applied"):
                owner.resolve(number, unknown.value)
    assert owner.state.committed == (number if applied else number - 1)
    assert [len(warehouse.rows(name)) for name in names] == [2 if applied else 0] * len(names)
    assert warehouse.owner().state.checkpoint == (checkpoint(100) if applied else Checkpoint())


def test_a_concurrent_change_of_one_table_makes_the_whole_commit_retry(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = warehouse.owner()
    changes = {name: write(owner, name) for name in (ONE, TWO)}
    catalog = warehouse.catalogs[-1]
    original, attempts = catalog._write_metadata, []

    def write_down(*arguments, **named) -> None:
        attempts.append(1)
        if len(attempts) == 2:  # After one table's metadata is written, another writer changes the other table.
            warehouse.catalogs[0].load_table(TWO).append(pa.Table.from_batches([ROWS]))
        original(*arguments, **named)

    monkeypatch.setattr(catalog, "_write_metadata", write_down)
    owner.commit(checkpoint(100), changes, owner.next_number)
    assert len(attempts) == 4
    assert (warehouse.rows(ONE), sorted(warehouse.rows(TWO))) == ([1, 2], [1, 1, 2, 2])


def test_without_the_home_in_the_same_transaction_a_zombie_would_commit(warehouse: Warehouse) -> None:
    """The fence of the home protects other tables only because all commit together."""
    old = warehouse.owner()
    change = write(old, TWO)
    stale = {ONE: old.load(), TWO: old.load(TWO)}
    warehouse.owner()
    old._stage({TWO: old.load(TWO)}, {TWO: change})[TWO].commit_transaction()
    assert len(list(old.load(TWO).scan().plan_files())) == 1, "it names a file that the new owner has swept"
    with pytest.raises(CommitFailedException):
        old._commit(old.state, old._stage(stale, {TWO: change}), [TWO])
    assert len(old.load(TWO).snapshots()) == 1


def test_the_next_owner_removes_uncommitted_files(warehouse: Warehouse) -> None:
    dead = warehouse.owner()
    commit(dead, 100, ONE, TWO)
    named = warehouse.files
    table = dead.load(TWO)
    for number in (1, 2):  # One superseded attempt in a committed folder, and one in an uncommitted folder.
        list(FileWriter.of(table, dead.name_of(number)).write([ROWS]))
    assert len(warehouse.files - named) == 2
    for _ in range(2):
        new = warehouse.owner()
        assert warehouse.files == named
        list(FileWriter.of(table, dead.name_of(2)).write([ROWS]))  # The owner was hanging, not dead.
    commit(new, 200, ONE)
    named = warehouse.files - set(Path(file_location(table, dead.name_of(2)).removeprefix("file://")).rglob("*"))
    warehouse.owner()
    assert warehouse.files == named
    assert (warehouse.rows(ONE), warehouse.rows(TWO)) == ([1, 2, 1, 2], [1, 2])


def test_tables_that_share_a_location_keep_the_files_of_each_other(warehouse: Warehouse) -> None:
    shared = warehouse.folder / "shared"
    for name, place in ((ONE, f"file://{shared}/"), (TWO, str(shared))):
        with warehouse.catalogs[0].load_table(name).transaction() as transaction:
            transaction.set_properties({"write.data.path": place})
    dead = warehouse.owner()
    commit(dead, 100, ONE, TWO)
    named = warehouse.files
    list(FileWriter.of(dead.load(TWO), dead.name_of(1)).write([ROWS]))  # A superseded attempt.
    warehouse.owner()
    assert warehouse.files == named
    assert (warehouse.rows(ONE), warehouse.rows(TWO)) == ([1, 2], [1, 2])
    lost = set(FileWriter.of(dead.load(TWO), dead.name_of(1)).write([ROWS]))
    table = warehouse.catalogs[0].load_table(TWO)
    table.append(pa.Table.from_batches([ROWS]))
    first, *_ = (each.snapshot_id for each in table.snapshots())
    table.maintenance.expire_snapshots().by_id(first).commit()
    left = warehouse.files
    warehouse.owner()
    assert (len(lost), warehouse.files) == (1, left), "one table's files are unknown after the expiry"


def test_a_commit_in_flight_cannot_arrive_after_it_was_cancelled(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection broke, and the catalog's server still works on the commit."""
    owner = warehouse.owner()
    change = write(owner, ONE)
    stale = owner.load()
    under_way = owner._stage({ONE: stale}, {ONE: change})
    with pytest.raises(SqlStoreError, match="was not applied"):
        owner.resolve(owner.next_number, CommitOutcomeUnknown("broke"))
    with pytest.raises(CommitFailedException):
        under_way[ONE].commit_transaction()
    assert warehouse.rows(ONE) == []

    def away(*_: object) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(warehouse.catalogs[-1], "load_table", away)
    with pytest.raises(CommitOutcomeUnknown, match="broke"):
        owner.resolve(owner.next_number, CommitOutcomeUnknown("broke"))


def test_a_cancelled_commit_leaves_no_manifests(warehouse: Warehouse) -> None:
    owner = warehouse.owner()
    changes = {name: write(owner, name) for name in (ONE, TWO)}
    before = set(warehouse.folder.rglob("*.avro"))

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        owner.commit(checkpoint(100), changes, owner.next_number, stop)
    assert set(warehouse.folder.rglob("*.avro")) == before
    owner.commit(checkpoint(100), changes, owner.next_number)
    assert (warehouse.rows(ONE), warehouse.rows(TWO)) == ([1, 2], [1, 2])


def test_a_table_dropped_before_it_had_rows_is_not_a_loss(warehouse: Warehouse) -> None:
    warehouse.owner().register_table(TWO)
    warehouse.catalogs[0].drop_table(TWO)
    commit(warehouse.owner(), 100, ONE)
    assert warehouse.owner().state.checkpoint == checkpoint(100)


def test_tables_that_were_rolled_back_or_dropped_are_refused(warehouse: Warehouse) -> None:
    owner = warehouse.owner()
    commit(owner, 100, TWO)
    first = owner.load(TWO).metadata.snapshots[0].snapshot_id
    commit(owner, 200, TWO)
    owner.load(TWO).manage_snapshots().set_current_snapshot(first).commit()
    with pytest.raises(CorruptData, match=r"shop\.two was rolled back behind the checkpoint"):
        commit(owner, 300, TWO)
    with pytest.raises(CorruptData, match=r"shop\.two was rolled back behind the checkpoint"):
        warehouse.owner()
    warehouse.catalogs[0].drop_table(TWO)
    with pytest.raises(CorruptData, match=r"table shop\.two is gone"):
        warehouse.owner()
    with pytest.raises(InvalidInput, match=r"there is no table shop\.three"):
        IcebergOwner(warehouse.catalog(), "shop.three").raise_fence(SHARD)
