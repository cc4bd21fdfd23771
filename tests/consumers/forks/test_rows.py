"""A checkpoint and tables are copied at one moment, and whoever was fenced off before never commits again."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, inspect, select, text

from coranto.errors import Fenced, InvalidInput
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.forks.checkpoints import forked
from coranto_consumers.forks.rows import copy_row, drop_tables, replace_row
from coranto_consumers.stores.sql import Restored, SqlStore

TOTALS = Table(
    "totals",
    MetaData(),
    Column("name", String(50), primary_key=True),
    Column("cents", BigInteger, nullable=False),
    Column("note", String(20)),
)
Index("totals_by_note", TOTALS.c.note)


def renamed(found: Checkpoint) -> Checkpoint:
    return forked(found, {"shop/orders": "new/shop/orders"})


def commit(store: SqlStore, fence: int, cents: int, name: str = "old") -> None:
    with store.transaction(name, fence) as transaction:
        transaction.connection.execute(TOTALS.insert().values(name=f"n{cents}", cents=cents))
        transaction.commit(Checkpoint({"shop/orders": Source(cents)}, {"out": b"ack\n"}))


def sum_of(store: SqlStore, table: str) -> int:
    with store.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT COALESCE(SUM(cents), 0) FROM {table}")).scalar_one())


@pytest.fixture
def store(store_url: str) -> SqlStore:
    opened = SqlStore(store_url)
    opened.create_tables(TOTALS)
    return opened


def test_a_copy_is_of_one_moment_while_the_original_commits(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    for cents in range(1, 4):
        commit(store, fence, cents)
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            cents = 4
            while not stop.is_set():
                commit(store, fence, cents)
                cents += 1
        except Exception as error:  # noqa: BLE001 It is raised below.
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(3):
            copy = copy_row(store, "old", f"new{number}", renamed, {"totals": f"totals_{number}"})
            read = copy.sources["new/shop/orders"].read_through
            assert copy.ack_intents == {}
            assert sum_of(store, f"totals_{number}") == read * (read + 1) // 2, "the rows of all commits, and no other"
    finally:
        stop.set()
        thread.join()
    assert not failures
    found = inspect(store.engine)
    assert found.get_pk_constraint("totals_1")["constrained_columns"] == ["name"]
    assert [each["column_names"] for each in found.get_indexes("totals_1")] == [["note"]]


def test_a_copy_spoils_nothing_that_is_there(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    commit(store, fence, 1)
    copy_row(store, "old", "new", renamed, {"totals": "totals_2"})
    with pytest.raises(InvalidInput, match="'new' has a checkpoint already"):
        copy_row(store, "old", "new", renamed, {})
    with pytest.raises(InvalidInput, match="table totals_2: has rows already"):
        copy_row(store, "old", "newer", renamed, {"totals": "totals_2"})
    assert store.read("newer") is None, "all of it or nothing"
    with pytest.raises(InvalidInput, match="'nobody' has no checkpoint"):
        copy_row(store, "nobody", "newer", renamed, {})
    with pytest.raises(InvalidInput, match="table gone: is not in"):
        copy_row(store, "old", "newer", renamed, {"gone": "copy"})
    with pytest.raises(InvalidInput, match="cannot be copied to gazette_checkpoints"):
        copy_row(store, "old", "newer", renamed, {"totals": "gazette_checkpoints"})
    assert sum_of(store, "totals_2") == sum_of(store, "totals") == 1


def test_a_zombie_commits_no_more_and_of_two_changes_one_wins(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    commit(store, fence, 1)
    copy_row(store, "old", "new", renamed, {})
    zombie, restored = store.raise_fence("new")
    assert restored == forked(Checkpoint({"shop/orders": Source(1)}), {"shop/orders": "new/shop/orders"})
    found = store.read("new")
    assert found is not None
    changed = Checkpoint({"shop/orders": Source(1)})
    assert replace_row(store, "new", found, changed) == zombie + 1
    with pytest.raises(Fenced):
        commit(store, zombie, 7, name="new")
    with pytest.raises(Fenced, match="has started or committed meanwhile"):
        replace_row(store, "new", found, changed)
    assert store.read("new") == Restored(zombie + 1, changed)
    replace_row(store, "new", Restored(zombie + 1, changed), Checkpoint())
    copy_row(store, "old", "new", renamed, {})
    later = store.read("new")
    assert later is not None
    assert later.fence > zombie + 1, "the fence of a name never goes back"
    commit(store, fence, 2)  # The original has not noticed anything.


def test_only_named_tables_are_dropped(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    commit(store, fence, 1)
    copy_row(store, "old", "new", renamed, {"totals": "totals_2"})
    assert drop_tables(store, ["totals_2", "gone"]) == ["totals_2"]
    with pytest.raises(InvalidInput, match="of all consumers"):
        drop_tables(store, ["gazette_checkpoints"])
    assert sorted(inspect(store.engine).get_table_names()) == ["gazette_checkpoints", "totals"]
    with store.engine.connect() as connection:
        assert connection.execute(select(TOTALS.c.cents)).scalars().all() == [1]
