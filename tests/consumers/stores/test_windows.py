"""A consumer's windows in its store grow with the journals, and a merged window is removed for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.errors import Fenced
from coranto.fragments.windows import Span, Window
from coranto.messages.checkpoints import Checkpoint, Identity, ProducerState, Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.windows import KnownWindow, WindowLog, is_merged, shard_of, sources_before

ONE, TWO = "w/events/one", "w/events/two"


@pytest.fixture
def log(tmp_path: Path) -> WindowLog:
    return WindowLog(SqlStore(f"sqlite:///{tmp_path}/store.db"), "c")


def single(number: int) -> Window:
    return Window(number, number, {ONE: Span(number * 10 - 10, number * 10, 7)}, float(number))


def after(number: int) -> Checkpoint:
    return Checkpoint({ONE: Source(number * 10, {ProducerId(b"abcdef"): ProducerState(number, -1, number * 10)})})


def materialise(store: SqlStore, log: WindowLog, window: Window, at: float) -> None:
    shard = shard_of("c", window)
    fence, _ = store.raise_fence(shard)
    with store.transaction(shard, fence) as transaction:
        log.claim(transaction.connection, window, after(window.last), at)
        transaction.commit(after(window.last))


def test_windows_and_their_state_are_kept(store_url: str) -> None:
    store = SqlStore(store_url)
    log = WindowLog(store, "c")
    assert log.load() == []
    log.replace([], [single(1), single(2)])
    WindowLog(store, "other").replace([], [single(1)])
    materialise(store, log, single(1), 5.0)
    log.remember(single(2), after(2))
    log.remember(single(2), after(1))  # The first recorded result stays.
    assert log.load() == [KnownWindow(single(1), after(1), 5.0), KnownWindow(single(2), after(2), None)]
    assert WindowLog(store, "other").load() == [KnownWindow(single(1))]


def test_a_run_of_a_concurrently_merged_window_cannot_commit(store_url: str) -> None:
    store = SqlStore(store_url)
    log = WindowLog(store, "c")
    known = log.replace([], [single(1), single(2)])
    materialise(store, log, single(1), 5.0)
    late, _ = store.raise_fence(shard_of("c", single(2)))

    log.replace(known, [single(1).merged(single(2))])

    # This run began before the merge, and a second one of the same window begins after it.
    with pytest.raises(Fenced), store.transaction(shard_of("c", single(2)), late) as transaction:
        log.claim(transaction.connection, single(2), after(2), 6.0)
    with pytest.raises(Fenced, match="was merged into a larger one"):
        materialise(store, log, single(2), 6.0)
    (merged,) = log.load()
    assert (merged.window.name, merged.materialized) == ("00000001-00000002", None), "a part was not"
    assert store.read(shard_of("c", single(1))) is None


def test_a_merged_window_is_materialized_if_all_its_parts_are(store_url: str) -> None:
    store = SqlStore(store_url)
    log = WindowLog(store, "c")
    log.replace([], [single(1), single(2), single(3)])
    for number in (2, 1):
        materialise(store, log, single(number), 10.0 - number)
    log.replace(log.load(), [single(1).merged(single(2)), single(3)])
    assert log.load()[0] == KnownWindow(single(1).merged(single(2)), after(2), 9.0)


def record(store: SqlStore, log: WindowLog, window: Window, now: Identity, before: Identity) -> None:
    shard = shard_of("c", window)
    with store.transaction(shard, store.raise_fence(shard).fence) as transaction:
        log.record(transaction.connection, now, before)
        transaction.commit(after(window.last))


def test_a_consumers_record_is_shared_and_refuses_one_of_two_concurrent_changes(store_url: str) -> None:
    store = SqlStore(store_url)
    log = WindowLog(store, "c")
    none, mine, theirs = Identity(), Identity("a=1", frozenset({"table x"})), Identity("a=1", frozenset({"table y"}))
    assert log.identity() == none
    record(store, log, single(1), mine, none)
    record(store, log, single(2), mine, none)  # It began before the first one committed, and records the same.
    with pytest.raises(Fenced, match="from outputs none to table x; try again"):
        record(store, log, single(3), theirs, none)
    assert log.identity() == mine
    record(store, log, single(3), theirs, mine)
    assert log.identity() == theirs
    assert WindowLog(store, "other").identity() == none


def test_one_of_two_concurrent_changes_of_the_windows_is_refused(store_url: str) -> None:
    store = SqlStore(store_url)
    log = WindowLog(store, "c")
    known = log.replace([], [single(1), single(2), single(3)])
    log.replace(known, [single(1).merged(single(2)), single(3)])
    with pytest.raises(Fenced):
        log.replace(known, [single(1), single(2).merged(single(3))])
    assert [each.window.name for each in log.load()] == ["00000001-00000002", "00000003"]


def test_states_come_from_the_nearest_window_with_a_state() -> None:
    known = [KnownWindow(single(1), after(1)), KnownWindow(single(2)), KnownWindow(single(3)), KnownWindow(single(4))]
    assert sources_before(known, single(1)) == ({}, [])
    assert sources_before(known, single(2)) == (dict(after(1).sources), [])
    assert sources_before(known, single(4)) == (dict(after(1).sources), [single(2), single(3)])
    assert sources_before(known[1:], single(3)) == ({}, [single(2)])


def test_only_recorded_merges_count_as_merged() -> None:
    windows = [single(1).merged(single(2)), single(3)]
    shards = ("c@00000001", "c@00000001-00000002", "c@00000003", "c@00000003-00000004", "c", "other@00000001", "c@x")
    assert [shard for shard in shards if is_merged("c", shard, windows)] == ["c@00000001"]
