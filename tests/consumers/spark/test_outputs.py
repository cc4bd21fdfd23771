"""Values of every Spark type arrive in messages as they left, or are refused."""

import pytest
from pyspark.sql import functions as F

from coranto.client import SyncJournalClient
from coranto.errors import InvalidInput
from coranto_consumers.spark import JournalOutput
from coranto_consumers.spark.outputs import publish_journal_outputs

pytestmark = pytest.mark.integration

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
    """The one line that is published for rows."""
    with SyncJournalClient.of(broker.config) as client:
        publish_journal_outputs([JournalOutput(rows, ["a/sink"], "random")], client)
    [line] = broker.content("a/sink").splitlines()
    return line.decode()


def test_each_value_arrives_as_it_left(broker, spark):
    broker.create("a/sink")
    left = spark.sql("SELECT " + ", ".join(f"{value} AS {name}" for name, value in VALUES.items()))

    line = published(broker, spark, left.select(F.struct("*").alias("value")))

    [row] = (
        spark.createDataFrame([(line,)], "line STRING").select(F.from_json("line", left.schema).alias("v")).collect()
    )
    assert repr(row.v) == repr(left.collect()[0])


def test_a_text_of_json_is_published_as_it_is_written(broker, spark):
    broker.create("a/sink")
    line = published(broker, spark, spark.sql("""SELECT '{"n": 1.000000000000000000001, "m": 1E+400}' AS value"""))
    assert line.endswith(',"n": 1.000000000000000000001, "m": 1E+400}')


@pytest.mark.parametrize("key", ["1", "DATE'2020-01-01'", "X'00'", "named_struct('q', 1)"])
def test_maps_by_other_keys_than_texts_are_refused(broker, spark, key):
    broker.create("a/sink")
    rows = spark.sql(f"SELECT named_struct('list', array(map({key}, 'x'))) AS value")
    with pytest.raises(InvalidInput, match=r"value.list\[\] is map<.*cast its keys to STRING"):
        published(broker, spark, rows)
