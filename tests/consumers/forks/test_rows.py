"""A checkpoint and tables are copied in one transaction, and a fenced-off owner never commits again."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import BigInteger, Column, Index, MetaData, String, Table, inspect, select, text

from coranto.errors import CorruptData, Fenced, InvalidInput
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.forks.checkpoints import fork_checkpoint
from coranto_consumers.forks.rows import copy_row, drop_tables, promote_row, retire_row
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import SqlStore

TOTALS = Table(
    "totals",
    MetaData(),
    Column("name", String(50), primary_key=True),
    Column("cents", BigInteger, nullable=False),
    Column("note", String(20)),
)
Index("totals_by_note", TOTALS.c.note)


def renamed(found: Checkpoint) -> Checkpoint:
    return fork_checkpoint(found, {"shop/orders": "new/shop/orders"})


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


def test_a_copy_is_consistent_while_the_original_commits(store: SqlStore) -> None:
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


def test_a_copy_does_not_change_existing_checkpoints_and_tables(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    commit(store, fence, 1)
    copy_row(store, "old", "new", renamed, {"totals": "totals_2"})
    with pytest.raises(InvalidInput, match="'new' has a checkpoint already"):
        copy_row(store, "old", "new", renamed, {})
    with pytest.raises(InvalidInput, match="table totals_2: has rows already"):
        copy_row(store, "old", "newer", renamed, {"totals": "totals_2"})
    assert store.read("newer") is None, "the change is atomic"
    with pytest.raises(InvalidInput, match="'nobody' has no checkpoint"):
        copy_row(store, "nobody", "newer", renamed, {})
    with pytest.raises(InvalidInput, match="table gone: is not in"):
        copy_row(store, "old", "newer", renamed, {"gone": "copy"})
    with pytest.raises(InvalidInput, match="cannot be copied to gazette_checkpoints"):
        copy_row(store, "old", "newer", renamed, {"totals": "gazette_checkpoints"})
    assert sum_of(store, "totals_2") == sum_of(store, "totals") == 1


def test_a_zombie_neither_commits_nor_restarts_and_one_of_two_changes_wins(store: SqlStore) -> None:
    fence, _ = store.raise_fence("old")
    commit(store, fence, 1)
    copy_row(store, "old", "new", renamed, {})
    zombie, restored = store.raise_fence("new")
    assert restored == fork_checkpoint(Checkpoint({"shop/orders": Source(1)}), {"shop/orders": "new/shop/orders"})
    with store.transaction("new", zombie) as begun:  # It commits once the consumer is retired.
        found, changed = store.read("new"), Checkpoint({"shop/orders": Source(1)})
        assert found is not None
        if not store.is_sqlite:  # On SQLite, others wait for its end.
            promote_row(store, "new", found, "live", changed)
            with pytest.raises(Fenced):
                begun.commit(Checkpoint({"new/shop/orders": Source(7)}))
    if store.is_sqlite:
        promote_row(store, "new", found, "live", changed)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="'new' is promoted already: it continues as 'live'"):
            store.raise_fence("new")
    with pytest.raises(InvalidInput, match="is promoted already"):
        commit(store, zombie, 7, name="new")
    with pytest.raises(InvalidInput, match="is promoted already"):
        promote_row(store, "new", found, "other", changed)
    with pytest.raises(InvalidInput, match="is promoted already"):
        copy_row(store, "old", "new", renamed, {})
    assert store.read("live") == Restored(1, changed)
    assert sum_of(store, "totals") == 1

    copy_row(store, "old", "newer", renamed, {})
    before = store.read("newer")
    zombie, _ = store.raise_fence("newer")
    with pytest.raises(Fenced, match="has started or committed during this call"):
        retire_row(store, "newer", before)
    with pytest.raises(InvalidInput, match="'live' is a consumer of the store already"):
        promote_row(store, "newer", Restored(zombie, restored), "live", changed)
    assert store.read("newer") == Restored(zombie, restored), "the change is atomic"
    retire_row(store, "newer", store.read("newer"))
    for call in (store.raise_fence, store.read, lambda name: commit(store, zombie, 7, name=name)):
        with pytest.raises(InvalidInput, match="'newer' was a forked consumer, and is dropped"):
            call("newer")
    copy_row(store, "old", "newer", renamed, {})
    later = store.read("newer")
    assert later is not None
    assert later.fence > zombie + 1, "the fence of a name never decreases"
    with pytest.raises(Fenced):
        commit(store, zombie, 7, name="newer")
    retire_row(store, "nobody", None)
    with pytest.raises(InvalidInput, match="is dropped"):
        store.raise_fence("nobody")
    commit(store, fence, 2)  # The original is not affected.


def test_checkpoint_parsers_refuse_retired_consumers() -> None:
    for note in (Retired(), Retired("live")):
        with pytest.raises(CorruptData):
            Checkpoint.from_bytes(note.to_bytes())
        assert Retired.from_bytes(note.to_bytes()) == note
    assert Retired.from_bytes(Checkpoint({"a": Source(1)}).to_bytes()) is None


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
