"""Stores in SQLite files in a recovery log."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from coranto.errors import CorruptData
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.contract import SHARD, StoreContract, checkpoint, commit
from coranto_consumers.stores.sqlite_file import DATABASE_FILE, WAL_FILE, SqliteStore
from tests.consumers.stores.in_logs import LOG, CopyingSubject, LogSubject, SqliteSubject


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> SqliteSubject:
        return SqliteSubject(tmp_path)


class TestCopyingSqliteStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> CopyingSubject:
        return CopyingSubject(tmp_path)


async def test_only_changes_are_recorded(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await subject.open())
    await store.restore_checkpoint(SHARD)
    for number in range(50):
        await subject.add(store, number, b"x" * 10_000)
    await commit(store, 1)
    before = len(subject.log)
    await subject.add(store, 50)
    await commit(store, 2)
    assert before > 500_000
    assert len(subject.log) - before < 50_000


async def test_rolled_back_work_is_not_recorded(tmp_path: Path) -> None:
    """The work is so large that SQLite spills pages to its log before the transaction ends."""
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await subject.open())
    await store.restore_checkpoint(SHARD)
    store.connection.execute("PRAGMA cache_size = 5")
    for _ in range(3):
        for number in range(100):
            await subject.add(store, number, b"x" * 10_000)
        store.connection.execute("ROLLBACK")
        await subject.add(store, 7)
        before = len(subject.log)
        await commit(store, 100)
        assert len(subject.log) - before < 100_000
    found = await subject.open()
    assert await found.restore_checkpoint(SHARD) == checkpoint(100)
    assert await subject.numbers(found) == [7, 7, 7]
    assert cast(SqliteStore, found).connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_an_applications_own_commit_takes_effect_with_the_checkpoint(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await subject.open())
    await store.restore_checkpoint(SHARD)
    await subject.add(store, 1)
    store.connection.commit()
    other = SqliteSubject(tmp_path / "other")
    other.journals.journals[LOG].content += subject.log
    assert await other.numbers(await restored(other)) == []
    await commit(store, 100)
    assert await subject.numbers(await restored(subject)) == [1]


async def restored(subject: LogSubject) -> Store:
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    return store


async def test_the_database_is_copied_once_its_log_has_grown(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    subject.copy_bytes = 200_000
    store = cast(SqliteStore, await restored(subject))
    begins = set()
    for number in range(60):
        await subject.add(store, number, bytes(8_000))
        store.connection.execute("DELETE FROM numbers WHERE number <= ?", (number - 5,))
        await commit(store, number + 1)
        hints = await subject.recorders[-1].hints()
        begins.add(min(segment.first_offset for segment in hints.live_segments()))
        assert set(subject.recorders[-1]._fsm.paths) <= {f"/{DATABASE_FILE}", f"/{WAL_FILE}"}
    assert len(begins) > 2
    assert max(begins) > len(subject.log) / 2
    # Content before the last copy is obsolete.
    subject.hints = hints
    subject.journals.journals[LOG].content[: max(begins)] = bytes(max(begins))
    found = await restored(subject)
    assert sorted(await subject.numbers(found)) == [55, 56, 57, 58, 59]


async def test_pipelined_transactions_are_all_stored(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    pending: asyncio.Future[None] | None = None
    for number in range(20):
        await subject.add(store, number)
        if pending is not None:
            await pending
        pending = asyncio.ensure_future(await store.start_commit(SHARD, checkpoint(number), [asyncio.sleep(0)]))
    assert pending is not None
    await pending
    found = await restored(subject)
    assert sorted(await subject.numbers(found)) == list(range(20))


@pytest.mark.parametrize("statement", ["PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA wal_checkpoint(RESTART)"])
async def test_a_wal_checkpoint_by_the_application_is_detected(statement: str, tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    await subject.add(store, 1)
    await commit(store, 1)
    connection = store.connection
    connection.execute("ROLLBACK")
    connection.execute(statement)
    await subject.add(store, 2)
    with pytest.raises(CorruptData, match="another program than its store"):
        await commit(store, 2)


async def test_no_other_connection_can_open_the_database(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    other = sqlite3.connect(subject.recorders[-1].directory / DATABASE_FILE, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM numbers")
    other.close()
    await store.destroy()


async def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await subject.open())
    recorder = subject.recorders[-1]
    recorder.write(recorder.create(DATABASE_FILE), 0, b"not a database at all" * 100)
    (recorder.directory / DATABASE_FILE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptData, match="cannot be opened"):
        await store.restore_checkpoint(SHARD)


async def test_using_a_store_before_its_restore_is_an_error(tmp_path: Path) -> None:
    store = cast(SqliteStore, await SqliteSubject(tmp_path).open())
    with pytest.raises(sqlite3.ProgrammingError, match="restore"):
        store.connection.execute("SELECT 1")


async def test_a_schema_may_grow(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    await subject.add(store, 1)
    await commit(store, 1)

    def with_more(recorder: Recorder) -> SqliteStore:
        return SqliteStore(
            recorder, "CREATE TABLE IF NOT EXISTS more (x); CREATE INDEX IF NOT EXISTS i ON numbers (number)"
        )

    old: Callable[[Recorder], SqliteStore] = subject.store
    for make in (with_more, with_more, old):
        subject.store = make
        store = cast(SqliteStore, await restored(subject))
        assert store.connection.execute("SELECT count(*) FROM more").fetchone() == (0,)
        assert await subject.numbers(store) == [1]
