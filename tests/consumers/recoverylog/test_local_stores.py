"""Stores whose files live in a recovery log: the contract of all stores, and what is their own."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.client import JournalClient
from coranto.errors import CorruptData, Fenced
from coranto.messages import Checkpoint, ProducerId, ProducerState, Source
from coranto.testing.clocks import HurriedClock
from coranto.testing.memory_journals import MemoryJournals
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Hints, MemoryAuthority, Player, Recorder, RecoveredFiles, new_author
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.contract import SHARD, StoreContract, StoreSubject, checkpoint, commit
from coranto_consumers.stores.json_file import JsonFileStore, checkpoint_from_json, checkpoint_to_json
from coranto_consumers.stores.sqlite_file import DATABASE_FILE, WAL_FILE, SqliteStore

LOG = "recovery/log"


class LogSubject(StoreSubject):
    """A store in a recovery log: opening it takes the log over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journals = MemoryJournals(LOG)
        self.authority = MemoryAuthority()
        self.hints = Hints(LOG)
        self.recorders: list[Recorder] = []

    @property
    def log(self) -> bytearray:
        return self.journals.journals[LOG].content

    async def recover(self) -> RecoveredFiles:
        folder = self.folder / f"owner-{len(self.recorders)}"
        client = cast(JournalClient, self.journals)
        async with Player(client, self.hints, folder, authority=self.authority) as player:
            return await player.hand_off(new_author())

    async def open(self) -> Store:
        recovery = await self.recover()
        recorder = Recorder(
            cast(JournalClient, self.journals), recovery, authority=self.authority, clock=HurriedClock()
        )
        self.recorders.append(await recorder.__aenter__())
        return self.store(recorder)

    def store(self, recorder: Recorder) -> Store:
        raise NotImplementedError


class JsonSubject(LogSubject):
    def store(self, recorder: Recorder) -> JsonFileStore[list[int]]:
        return JsonFileStore(recorder, [])

    async def add(self, store: JsonFileStore[list[int]], number: int) -> None:
        store.state.append(number)

    async def numbers(self, store: JsonFileStore[list[int]]) -> Sequence[int]:
        return list(store.state)


class SqliteSubject(LogSubject):
    copy_bytes = 16 << 20

    def store(self, recorder: Recorder) -> SqliteStore:
        schema = "CREATE TABLE IF NOT EXISTS numbers (number INTEGER, filler BLOB)"
        return SqliteStore(recorder, schema, copy_bytes=self.copy_bytes)

    async def add(self, store: SqliteStore, number: int, filler: bytes = b"") -> None:
        store.connection.execute("INSERT INTO numbers VALUES (?, ?)", (number, filler))

    async def numbers(self, store: SqliteStore) -> Sequence[int]:
        return [row[0] for row in store.connection.execute("SELECT number FROM numbers")]


class CopyingSubject(SqliteSubject):
    """Copies its database at every commit."""

    copy_bytes = 0


class TestJsonFileStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> JsonSubject:
        return JsonSubject(tmp_path)


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> SqliteSubject:
        return SqliteSubject(tmp_path)


class TestCopyingSqliteStore(StoreContract):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> CopyingSubject:
        return CopyingSubject(tmp_path)


KINDS = pytest.mark.parametrize("kind", [JsonSubject, SqliteSubject, CopyingSubject])


@KINDS
async def test_an_owner_leaves_nothing_in_its_folder(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    await commit(store, 100)
    await store.destroy()
    await store.destroy()
    assert os.listdir(tmp_path) == []


@KINDS
async def test_a_restored_owner_that_was_fenced_off_hears_of_it(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    old = await subject.open()
    new = await subject.open()
    with pytest.raises(Fenced):
        await old.restore_checkpoint(SHARD)
    assert await new.restore_checkpoint(SHARD) == Checkpoint()


@KINDS
async def test_a_loss_of_all_brokers_lets_no_former_owner_commit(kind: type[LogSubject], tmp_path: Path) -> None:
    subject = kind(tmp_path)
    old = await subject.open()
    await old.restore_checkpoint(SHARD)
    await commit(old, 100)
    new = await subject.open()
    await new.restore_checkpoint(SHARD)
    subject.journals.journals[LOG].registers = pb.LabelSet()
    with pytest.raises(Fenced):
        await commit(old, 200)
    await commit(new, 300)
    third = await subject.open()
    assert await third.restore_checkpoint(SHARD) == checkpoint(300)


@KINDS
async def test_every_crash_leaves_the_last_durable_transaction(kind: type[LogSubject], tmp_path: Path) -> None:
    """The log is cut behind each of its appends in turn, as if the owner had stopped there."""
    subject = kind(tmp_path)
    store = await subject.open()
    await store.restore_checkpoint(SHARD)
    durable = {0: 0}
    for number in range(1, 6):
        await subject.add(store, number)
        await commit(store, number)
        durable[len(subject.log)] = number
    appends = [0, *subject.journals.journals[LOG].appends]
    content, numbers = bytes(subject.log), set()
    for end in appends:
        cut = kind(tmp_path / str(end))
        cut.journals.journals[LOG].content += content[:end]
        found = await cut.open()
        restored = await found.restore_checkpoint(SHARD)
        expected = max(number for at, number in durable.items() if at <= end)
        seen = sorted(await subject.numbers(found))
        # What was appended may count before its owner heard of it.
        assert seen in (list(range(1, expected + 1)), list(range(1, expected + 2)))
        assert restored == (checkpoint(len(seen)) if seen else Checkpoint())
        numbers.add(len(seen))
        await found.destroy()
    assert numbers == set(range(6))


# -- The JSON file ----------------------------------------------------------------------------------------------------


async def test_the_file_is_laid_out_as_gazettes(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    store = await subject.open()
    store.state.extend([1, 2])
    producers = {ProducerId(b"\x01abcde"): ProducerState(5, 0)}
    sources = {"a/journal": Source(7, producers), "b/journal": Source(0)}
    await (await store.start_commit(SHARD, Checkpoint(sources, {"c/journal": b"ack"}), []))
    folder = (await subject.recover()).directory
    assert [path.name for path in folder.iterdir()] == ["state.json"]
    assert (folder / "state.json").read_text().splitlines() == [
        '{"a/journal":7,"b/journal":0}',
        "[1,2]",
        '{"sources":{"a/journal":{"read_through":7,"producers":[{"id":"AWFiY2Rl","state":{"last_ack":5}}]},'
        '"b/journal":{"producers":null}},"ack_intents":{"c/journal":"YWNr"}}',
    ]


async def test_states_of_other_types_are_dumped_and_loaded(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)

    def new_store(recorder: Recorder) -> JsonFileStore[Any]:
        return JsonFileStore(recorder, {3}, dump=sorted, load=set)

    subject.store = new_store
    store = cast(JsonFileStore[set[int]], await subject.open())
    store.state.add(1)
    await commit(store, 100)
    assert cast(JsonFileStore[set[int]], await subject.open()).state == {1, 3}


async def test_a_state_that_is_no_json_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    store = cast(JsonFileStore[list[Any]], await subject.open())
    store.state.append(object())
    with pytest.raises(TypeError):
        await commit(store, 100)
    store.state[:] = [float("nan")]
    with pytest.raises(ValueError, match="JSON"):
        await commit(store, 100)
    store.state[:] = ["ünïcode \u2028"]
    await commit(store, 100)
    assert cast(JsonFileStore[list[Any]], await subject.open()).state == ["ünïcode \u2028"]


@pytest.mark.parametrize(
    "content", ["", "{}\n[]\n", "{}\n[]\n{}\n{}\n", "nonsense", '{}\n[]\n{"sources":5}\n', "{}\n[]\n5\n"]
)
async def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    subject = JsonSubject(tmp_path)
    recovery = await subject.recover()
    async with Recorder(cast(JournalClient, subject.journals), recovery) as recorder:
        recorder.create("state.json")
        (recorder.directory / "state.json").write_text(content)
        with pytest.raises(CorruptData):
            JsonFileStore(recorder, [])


@given(
    st.dictionaries(
        st.sampled_from(["a/b", "c/d"]),
        st.builds(
            Source,
            st.integers(0, 1 << 62),
            st.dictionaries(
                st.binary(min_size=6, max_size=6).map(ProducerId),
                st.builds(
                    ProducerState, st.integers(0, (1 << 64) - 1), st.integers(-1, 1 << 62), st.integers(0, 1 << 62)
                ),
                max_size=3,
            ),
        ),
    ),
    st.dictionaries(st.sampled_from(["e/f", "g/h"]), st.binary(min_size=1)),
)
def test_checkpoints_survive_json(sources: dict[str, Source], intents: dict[str, bytes]) -> None:
    original = Checkpoint(sources, intents)
    restored = checkpoint_from_json(json.loads(json.dumps(checkpoint_to_json(original))))
    assert restored == original
    assert restored.to_bytes() == original.to_bytes(), "also what takes no part in comparison"


# -- The SQLite database ----------------------------------------------------------------------------------------------


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
    """So much of it that SQLite spills pages to its log before the transaction ends."""
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


async def test_a_commit_of_the_applications_own_takes_effect_with_the_checkpoint(tmp_path: Path) -> None:
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


async def test_the_database_is_copied_when_its_log_has_grown(tmp_path: Path) -> None:
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
    # What is before the last copy is dead.
    subject.hints = hints
    subject.journals.journals[LOG].content[: max(begins)] = bytes(max(begins))
    found = await restored(subject)
    assert sorted(await subject.numbers(found)) == [55, 56, 57, 58, 59]


async def test_pipelined_transactions(tmp_path: Path) -> None:
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
async def test_a_checkpoint_by_the_application_is_noticed(statement: str, tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    await subject.add(store, 1)
    await commit(store, 1)
    connection = store.connection
    connection.execute("ROLLBACK")
    connection.execute(statement)
    await subject.add(store, 2)
    with pytest.raises(CorruptData, match="others than its store"):
        await commit(store, 2)


async def test_no_other_connection_gets_in(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await restored(subject))
    other = sqlite3.connect(subject.recorders[-1].directory / DATABASE_FILE, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM numbers")
    other.close()
    await store.destroy()


async def test_a_database_that_is_none_is_refused(tmp_path: Path) -> None:
    subject = SqliteSubject(tmp_path)
    store = cast(SqliteStore, await subject.open())
    recorder = subject.recorders[-1]
    recorder.write(recorder.create(DATABASE_FILE), 0, b"not a database at all" * 100)
    (recorder.directory / DATABASE_FILE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptData, match="cannot be opened"):
        await store.restore_checkpoint(SHARD)


async def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    store = cast(SqliteStore, await SqliteSubject(tmp_path).open())
    with pytest.raises(sqlite3.ProgrammingError, match="restore"):
        store.connection.execute("SELECT 1")


async def test_a_schema_that_grows(tmp_path: Path) -> None:
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
