"""DataFrames of a consumer transaction: the rows that were read, and the committed and parsed rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from coranto.client import ClientConfig
from coranto.errors import CorantoError, CorruptMessage, InvalidInput, OffsetJump
from coranto_consumers.spark.options import Isolation, client_options
from coranto_consumers.spark.ranges import Range, ReadPlan
from coranto_consumers.spark.rows import FIELDS, PIECE
from coranto_consumers.spark.scanning import SUMMARY_PIECE, RangeSummary
from coranto_consumers.spark.sequencing import Window

METADATA = {"_journal": "journal", "_offset": "offset", "_producer": "producer", "_clock": "clock"}
"""Metadata columns of committed rows, with their names in the source."""

_CORRUPT = "_coranto_corrupt"
_SEQUENCED = StructType([*(FIELDS[name] for name in ("journal", "offset", "producer", "clock", "value")), PIECE])


def read_plan(spark: SparkSession, client: ClientConfig, plan: ReadPlan) -> DataFrame:
    """Return all messages of a plan's ranges with their pieces, and the ranges' summaries."""
    reader = spark.read.format("journal").options(
        **client_options(client), isolation=Isolation.SEQUENCED.value, slices=plan.dumps()
    )
    # Only the columns that are needed below, because rows are cached whole.
    return reader.schema(_SEQUENCED).load()


def collect_summaries(rows: DataFrame, plan: ReadPlan) -> dict[Range, RangeSummary]:
    """Return the summaries of a plan's ranges."""
    found = rows.where(F.col(PIECE.name) == SUMMARY_PIECE).select("value").collect()
    summaries = {summary.number: summary for summary in (RangeSummary.loads(row.value.encode()) for row in found)}
    return {part: summaries[number] for part, number in plan.numbers.items()}


def choose_committed(spark: SparkSession, rows: DataFrame, windows: Sequence[Window]) -> DataFrame:
    """Return the rows that lie within the windows: committed messages, each once."""
    pieces, lows, highs = zip(*((window.piece, window.lo, window.hi) for window in windows), strict=True)
    chosen = spark.createDataFrame(pa.table({PIECE.name: pieces, "lo": lows, "hi": highs}))
    return (
        rows.join(F.broadcast(chosen), PIECE.name)
        .where((F.col("clock") > F.col("lo")) & (F.col("clock") <= F.col("hi")))
        .select("journal", "offset", "producer", "clock", "value")
    )


def parse_schema(ddl: str) -> StructType:
    """Return the columns of an application's `value_schema`. Raises InvalidInput."""
    try:
        schema = StructType.fromDDL(ddl)
    except PySparkException as error:
        raise InvalidInput(
            f"{ddl!r} is not a list of columns: {error}; write it as `id BIGINT, name STRING`", field="value_schema"
        ) from error
    if not isinstance(schema, StructType):
        raise InvalidInput(
            f"{ddl!r} is a type, not a list of columns; write it as `id BIGINT, name STRING`", field="value_schema"
        )
    reserved = sorted({*METADATA, _CORRUPT} & set(schema.names))
    if reserved:
        raise InvalidInput(f"column {reserved[0]} is reserved; give yours another name", field="value_schema")
    return schema


def parse_values(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return rows with their JSON values as columns, and a column that marks values that do not fit; see `take_in`.

    The column is null for values that fit. Other values are neither filtered out nor made to fail here: Spark would
    then parse each value twice, once for the check and once for its columns.
    """
    asked = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    parsed = F.from_json("value", asked, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT})
    misfit = F.when(F.col("parsed").isNull() | F.col(f"parsed.{_CORRUPT}").isNotNull(), True)
    values = [F.col("parsed").getField(name).alias(name) for name in schema.names]
    metadata = [F.col(source).alias(name) for name, source in METADATA.items()]
    return rows.withColumn("parsed", parsed).select(*values, *metadata, misfit.alias(_CORRUPT))


def take_in(parsed: DataFrame, schema: StructType) -> tuple[DataFrame, int]:
    """Evaluate persisted `parse_values`, and return the application's columns and the number of rows.

    Raises CorruptMessage for a value that does not fit the schema.
    """
    first = F.min(F.when(F.col(_CORRUPT), F.struct("_journal", "_offset"))).alias("first")
    [found] = parsed.agg(F.count(F.lit(1)).alias("messages"), first).collect()
    if found.first is not None:
        columns = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema.fields)
        journal, offset = found.first
        raise CorruptMessage(journal, offset, f"its value does not fit the columns {columns}")
    return parsed.drop(_CORRUPT), int(found.messages)


_CORRUPT_MESSAGE = re.compile(r"CorruptMessage: journal (\S+) at offset (\d+): ([^\n]*)")
_OFFSET_JUMP = re.compile(r"OffsetJump: journal (\S+) has no content in \[(\d+), (\d+)\)")
_INVALID_INPUT = re.compile(r"InvalidInput: (?:([^\n:]*): )?([^\n]*)")


def error_of_task(error: PySparkException) -> CorantoError | None:
    """Return the error that a task raised, parsed from Spark's text. None when it was not an error of Coranto's."""
    text = str(error)
    if found := _CORRUPT_MESSAGE.search(text):
        return CorruptMessage(found[1], int(found[2]), found[3].rstrip())
    if found := _OFFSET_JUMP.search(text):
        return OffsetJump(found[1], int(found[2]), int(found[3]))
    if found := _INVALID_INPUT.search(text):
        return InvalidInput(found[2].rstrip(), field=found[1] or "")
    return None
