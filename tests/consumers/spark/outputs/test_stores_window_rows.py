"""The store of a window's outputs: a commit replaces the rows of its window, and no others."""

from __future__ import annotations

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.errors import Fenced, InvalidInput
from coranto.fragments.windows import Span, Window
from coranto.messages.checkpoints import Checkpoint, Identity, Source
from coranto_consumers.outputs.dead_letters import dead_letter_table
from coranto_consumers.spark import JournalOutput, Outputs, TableOutput
from coranto_consumers.spark.outputs.stores import WindowRows
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.windows import WINDOW_COLUMN, WindowLog, shard_of

JOURNAL = "rows/source"
NUMBERS = Table(
    "numbers",
    MetaData(),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column(WINDOW_COLUMN, BigInteger, primary_key=True, autoincrement=False),
)
ONE, TWO = (Window(number, number, {JOURNAL: Span(number * 10 - 10, number * 10)}, 5.0) for number in (1, 2))
MINE = Identity("name=rows/source", frozenset({"table numbers"}))


@pytest.fixture
def log(tmp_path) -> WindowLog:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    log = WindowLog(store, "numbers")
    log.replace([], [ONE, TWO])
    return log


def rows_of(log: WindowLog, window: Window) -> WindowRows:
    return WindowRows(log._store, window, log, log.identity(), None)


def commit(log: WindowLog, spark, window: Window, *numbers: int) -> None:
    store, shard = rows_of(log, window), shard_of("numbers", window)
    fence, _ = store.raise_fence(shard)
    frame = spark.createDataFrame([(number,) for number in numbers], "n BIGINT")
    written = store.write_all([Outputs([TableOutput(NUMBERS, frame, ["n"])])], shard, fence)
    after = Checkpoint({JOURNAL: Source(window.spans[JOURNAL].end)}, {}, MINE)
    store.commit(shard, fence, written, after, lambda: None)


def found(log: WindowLog) -> list[tuple[int, int]]:
    with log._store.engine.connect() as connection:
        return sorted((row.n, row[1]) for row in connection.execute(select(NUMBERS)))


def test_a_commit_replaces_the_rows_of_its_window_and_records_it(spark, log):
    commit(log, spark, ONE, 1, 2)
    commit(log, spark, TWO, 3)
    commit(log, spark, ONE, 2, 4)
    assert found(log) == [(2, 1), (3, 2), (4, 1)]
    assert log.identity() == MINE
    assert [each.after.offsets for each in log.load() if each.after is not None] == [{JOURNAL: 10}, {JOURNAL: 20}]


def test_a_commit_of_a_window_that_was_merged_changes_nothing(spark, log):
    commit(log, spark, ONE, 1)
    log.replace(log.load(), [ONE.merged(TWO)])
    with pytest.raises(Fenced, match="was merged into a larger one"):
        commit(log, spark, ONE, 2)
    assert found(log) == [(1, 1)]


def test_outputs_that_cannot_be_replaced_are_rejected(spark, log):
    frame = spark.range(1).selectExpr("id AS n")
    plain = Table("plain", MetaData(), Column("n", BigInteger))
    filled = frame.selectExpr("n", f"n AS {WINDOW_COLUMN}")
    for made, problem in (
        (Outputs(journals=[JournalOutput(frame, "a/b")]), "cannot publish"),
        (Outputs([TableOutput(plain, frame)]), f"has no column {WINDOW_COLUMN}"),
        (Outputs([TableOutput(NUMBERS, filled)]), f"the rows have a column {WINDOW_COLUMN}"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            rows_of(log, ONE).write_all([made], "numbers", 1)


def test_old_dead_letters_are_deleted_with_the_rows(spark, log):
    letters = dead_letter_table("letters", by_window=True)
    log._store.create_tables(letters)
    values = {"journal": JOURNAL, "offset": 3, "line": b"x\n", WINDOW_COLUMN: 1}
    with log._store.engine.begin() as connection:
        connection.execute(letters.insert().values(values))
    store, shard = WindowRows(log._store, ONE, log, log.identity(), letters), shard_of("numbers", ONE)
    fence, _ = store.raise_fence(shard)
    store.commit(shard, fence, [], Checkpoint({JOURNAL: Source(10)}, {}, MINE), lambda: None)
    with log._store.engine.connect() as connection:
        assert connection.execute(select(letters)).all() == []
