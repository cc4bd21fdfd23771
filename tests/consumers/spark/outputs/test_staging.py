"""Values of every Spark type are unchanged in messages, or refused. Rows arrive in tables by any path."""

import pytest
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Identity, Integer, MetaData, Numeric, Table, Text, select

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from coranto_consumers.spark import Add, JournalOutput, Max, Replace, TableOutput, errors_of_tasks
from coranto_consumers.spark.outputs import stores as outputs
from coranto_consumers.spark.outputs.staging import Staged, can_carry, publish_journal_outputs
from coranto_consumers.spark.sink.message_rows import is_encodable
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.merge import plan_merge

VALUES = {
    "dec": "CAST('12345678901234567890.123456789012345678' AS DECIMAL(38,18))",
    "negative": "CAST('-0.10' AS DECIMAL(4,2))",
    "big": "CAST(9007199254740993 AS BIGINT)",
    "tiny": "CAST(-100 AS TINYINT)",
    "real": "CAST(1.1 AS FLOAT)",
    "smallest": "4.9E-324D",
    "nan": "CAST('NaN' AS DOUBLE)",
    "least": "CAST('-Infinity' AS FLOAT)",
    "flag": "TRUE",
    "text": "'é\\u2028 \\t \\\"quoted\\\" \\n'",
    "bytes": "X'00ff10'",
    "first_day": "DATE'0001-01-01'",
    "moment": "TIMESTAMP'2024-01-01 00:00:00.123456'",
    "long_ago": "TIMESTAMP'1900-01-01 00:00:00.000001'",
    "local": "TIMESTAMP_NTZ'2024-01-01 00:00:00.123456'",
    "clock_time": "TIME'12:34:56.123456'",
    "duration": "INTERVAL '1 02:03:04.123456' DAY TO SECOND",
    "names": "map('a', 1.50BD, 'b', NULL)",
    "list": "array(1.10BD, NULL)",
    "nested": "named_struct('at', TIMESTAMP'2024-01-01 00:00:00.000001', 'd', 1.10BD, 'none', CAST(NULL AS INT))",
}


def published(broker, spark, rows) -> str:
    """Return the single line published for rows."""
    with SyncJournalClient.of(broker.config) as client:
        publish_journal_outputs([JournalOutput(rows, ["a/sink"], "random")], client)
    [line] = broker.content("a/sink").splitlines()
    return line.decode()


@pytest.mark.parametrize("left_to_spark", [(), ("clock_time", "duration")], ids=["written by tasks", "by Spark"])
def test_each_value_survives_publication(broker, spark, left_to_spark):
    broker.create("a/sink")
    values = {name: value for name, value in VALUES.items() if name not in ("clock_time", "duration") or left_to_spark}
    left = spark.sql("SELECT " + ", ".join(f"{value} AS {name}" for name, value in values.items()))
    assert is_encodable(left.schema) == (not left_to_spark)

    line = published(broker, spark, left.select(F.struct("*").alias("value")))

    [row] = (
        spark.createDataFrame([(line,)], "line STRING").select(F.from_json("line", left.schema).alias("v")).collect()
    )
    assert repr(row.v) == repr(left.collect()[0])


def test_timestamps_are_in_utc_in_any_session_zone(broker, spark):
    broker.create("a/sink")
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        line = published(broker, spark, spark.sql("SELECT struct(TIMESTAMP'2024-01-01 00:00:00.5' AS at) AS value"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert line.endswith('"at":"2024-01-01T05:00:00.500000Z"}')


def test_a_row_without_a_value_is_refused(broker, spark):
    broker.create("a/sink")
    rows = spark.sql("SELECT IF(id = 1, NULL, struct(id)) AS value FROM range(2)")
    with pytest.raises(InvalidInput, match="a row has no value"), errors_of_tasks():
        published(broker, spark, rows)


def test_a_text_of_json_is_published_unchanged(broker, spark):
    broker.create("a/sink")
    line = published(broker, spark, spark.sql("""SELECT '{"n": 1.000000000000000000001, "m": 1E+400}' AS value"""))
    assert line.endswith(',"n": 1.000000000000000000001, "m": 1E+400}')


@pytest.mark.parametrize("key", ["1", "DATE'2020-01-01'", "X'00'", "named_struct('q', 1)"])
def test_maps_with_keys_other_than_texts_are_refused(broker, spark, key):
    broker.create("a/sink")
    rows = spark.sql(f"SELECT named_struct('list', array(map({key}, 'x'))) AS value")
    with pytest.raises(InvalidInput, match=r"value.list\[\] is map<.*cast its keys to STRING"):
        published(broker, spark, rows)


ROWS = Table(
    "rows",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("text", Text),
    Column("amount", Numeric(20, 3)),
    Column("count", Integer),
)


def written(rows, store: SqlStore, keys: list[str]) -> tuple[Staged, list[tuple]]:
    """Return prepared rows with repeated keys, and the table after their merge."""
    merge = {"text": Max(), "amount": Add(), "count": Add()} if keys else {}
    with store.engine.begin() as connection:
        ROWS.drop(connection, checkfirst=True)
    found = []
    for fence in (1, 2) if keys else (1,):
        staged = outputs.SqlOutputs(store).write(TableOutput(ROWS, rows, keys, merge), "shard", fence)
        with store.engine.begin() as connection:
            staged.merge(connection)
            found = [tuple(row) for row in connection.execute(select(ROWS).order_by("id"))]
    return staged, found


@pytest.mark.parametrize("keys", [[], ["id"]], ids=["appended", "merged"])
def test_rows_arrive_the_same_whether_tasks_stage_them_or_the_driver_writes_them(spark, store_url, keys, monkeypatch):
    store = SqlStore(store_url)
    rows = spark.range(0, 300, numPartitions=3).selectExpr(
        "id",
        "IF(id % 3 = 0, NULL, concat('tab\\t, line\\n, backslash \\\\, ', id)) AS text",
        "CAST(id / 8 AS DECIMAL(20, 3)) AS amount",
        "IF(id % 5 = 0, NULL, CAST(id AS INT)) AS count",
    )

    carried, driver = written(rows, store, keys)
    monkeypatch.setattr(outputs, "CARRIED_TO_APPEND", 0)
    monkeypatch.setattr(outputs, "CARRIED_TO_MERGE", 0)
    staged, tasks = written(rows, store, keys)

    assert driver == tasks
    assert len(tasks) == 300
    assert (len(carried.carried), carried.attempts, carried.rows) == (3, (), 0)
    assert (staged.carried, len(staged.attempts), staged.rows) == ((), 3, 300)


def test_rows_that_delete_others_are_carried_or_staged_with_the_rest(spark, tmp_path, monkeypatch):
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    merge = {"text": Replace(), "amount": Replace(), "count": Replace()}
    columns = "id", "CAST(id AS STRING) AS text", "CAST(id AS DECIMAL(20, 3)) AS amount", "1 AS count"

    def left(rows, fence: int) -> list[int]:
        output = TableOutput(ROWS, rows, ["id"], merge, delete="gone")
        staged = outputs.SqlOutputs(store).write(output, "shard", fence)
        with store.engine.begin() as connection:
            staged.merge(connection)
            return list(connection.execute(select(ROWS.c.id).order_by("id")).scalars())

    assert left(spark.range(6).selectExpr(*columns, "false AS gone"), 1) == list(range(6))
    assert left(spark.range(9).selectExpr(*columns, "id % 2 = 0 AS gone"), 2) == [1, 3, 5, 7]
    monkeypatch.setattr(outputs, "CARRIED_TO_MERGE", 0)
    assert left(spark.range(9).selectExpr(*columns, "id % 3 = 0 AS gone"), 3) == [1, 2, 4, 5, 7, 8]
    with pytest.raises(InvalidInput, match="'gone' is int, and must be BOOLEAN"):
        left(spark.range(1).selectExpr(*columns, "1 AS gone"), 4)


def test_tasks_with_many_rows_stage_them_and_others_carry_few(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "CARRIED_TO_APPEND", 6_000)
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    rows = spark.range(0, 1100, numPartitions=11).selectExpr(
        "id", "repeat('x', IF(id < 100, 1000, 1)) AS text", "CAST(1 AS DECIMAL(20, 3)) AS amount", "1 AS count"
    )

    staged, found = written(rows, store, [])

    assert [row[0] for row in found] == list(range(1100))
    # The first task has too long rows, and the share of later tasks is too small.
    assert (len(staged.attempts), staged.rows) == (1 + 3, 400)
    assert len(staged.carried) == 7


def test_rows_are_carried_only_if_writing_them_is_equivalent_to_merging():
    table = Table(
        "made",
        MetaData(),
        Column("id", Integer, Identity(always=True), primary_key=True),
        Column("at", Integer, default=7),
        Column("n", Integer),
    )
    assert can_carry(plan_merge(table, ["at", "n"], (), {}))
    assert not can_carry(plan_merge(table, ["n"], (), {})), "SQLAlchemy gives a merge the default"
    assert not can_carry(plan_merge(table, ["id", "at"], (), {})), "the database generates the ids"
