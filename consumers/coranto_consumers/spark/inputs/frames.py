"""DataFrames of a consumer transaction: all rows that were read, and the committed and parsed rows."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from coranto.client.routes import KnownRoute
from coranto.errors import CorruptMessage, InvalidInput
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.application.outputs import column_named
from coranto_consumers.spark.committed.scanning import SUMMARY_PIECE
from coranto_consumers.spark.committed.sequencing import PieceCommit, PieceLimit
from coranto_consumers.spark.decoding.rows import (
    COMMIT_OFFSET,
    FIELDS,
    LINE,
    PARSED_PREFIX,
    PIECE,
    SUMMARY,
    nullable,
    required,
)
from coranto_consumers.spark.journals.placing import numbered_partitions
from coranto_consumers.spark.journals.ranges import ReadPlan
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.session.versions import arrow_schema
from coranto_consumers.spark.source.batch_reader import JournalPartition, JournalReader
from coranto_consumers.spark.source.data_source import planned_reader

METADATA = ("_journal", "_offset", "_producer", "_clock")
"""Metadata columns of committed rows."""
COMMITTED_AT = PARSED_PREFIX + COMMIT_OFFSET
"""The metadata column of committed rows that applications have to request."""

PIECE_COLUMN: Final = PARSED_PREFIX + PIECE.name
SUMMARY_COLUMN: Final = PARSED_PREFIX + SUMMARY.name
_DDL: Final = "value_schema"
_ALL: Final = re.compile(r"\s*+\*\s*+(?:,|$)")
_LOW, _HIGH, _COMMIT = "_coranto_low", "_coranto_high", "_coranto_commit"
_LINE = PARSED_PREFIX + LINE.name


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Reads the partitions of a reader. The input rows are the numbers of partitions."""

    reader: JournalReader
    partitions: tuple[JournalPartition, ...]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from self.reader.read(self.partitions[number])

    def read(self) -> Iterator[Any]:
        """Yield the record batches of all partitions."""
        for partition in self.partitions:
            yield from self.reader.read(partition)


class PlannedRows(NamedTuple):
    """The rows of a plan: all messages of its ranges with their pieces, and the ranges' summaries."""

    task: ReadTask
    schema: StructType
    places: tuple[str, ...] = ()

    def along(self, routes: Mapping[str, KnownRoute]) -> PlannedRows:
        partitions = tuple(each.along(routes) for each in self.task.partitions)
        return self._replace(task=ReadTask(self.task.reader, partitions))

    def by_tasks(self, spark: SparkSession) -> DataFrame:
        """Return the rows, read by tasks on demand. Spark starts no process to plan them."""
        return self.partitions(spark).mapInArrow(self.task, self.schema)

    def partitions(self, spark: SparkSession) -> DataFrame:
        """Return the task's input: the numbers of its partitions, each in a partition of its own."""
        return numbered_partitions(spark, len(self.task.partitions), self.places)

    def read_here(self) -> Any:
        return pa.Table.from_batches(self.task.read(), arrow_schema(self.schema))


def planned_rows(options: SourceOptions, plan: ReadPlan, schema: StructType) -> PlannedRows:
    """Return the rows of a plan, with messages parsed into an application's columns.

    A message without a value for a column that is not nullable in `schema` is a misfit. Raises InvalidInput for columns
    that messages of the framing cannot be parsed into.
    """
    own = (*FIELDS.values(), PIECE, LINE, SUMMARY)
    # Only the columns that are needed below, because rows are cached with all their columns.
    needed = [
        StructField(PARSED_PREFIX + field.name, field.dataType)
        for field in own
        if PARSED_PREFIX + field.name in (*METADATA, PIECE_COLUMN, _LINE, SUMMARY_COLUMN)
    ]
    asked = StructType([*needed, *map(required, schema.fields)])
    rows = StructType([*needed, *_nullable(schema.fields).fields])
    reader = planned_reader(options, plan, asked)
    return PlannedRows(ReadTask(reader, tuple(reader.partitions())), rows, plan.places)


def read_lines(options: SourceOptions, plan: ReadPlan) -> dict[tuple[str, int], bytes]:
    """Read the lines that begin in a plan's ranges in this process. Return them by journal and offset."""
    names = [PARSED_PREFIX + name for name in ("journal", "offset", "value")]
    kinds = (StringType(), LongType(), BinaryType())
    asked = StructType([*map(StructField, names, kinds), StructField(PIECE_COLUMN, LongType())])
    reader = planned_reader(options, plan, asked)
    found: dict[tuple[str, int], bytes] = {}
    for batch in ReadTask(reader, tuple(reader.partitions())).read():
        for row in batch.to_pylist():
            if row[PIECE_COLUMN] != SUMMARY_PIECE:
                found[row[names[0]], row[names[1]]] = row[names[2]]
    return found


def choose_committed(
    spark: SparkSession, rows: DataFrame, limits: Sequence[PieceLimit], commits: Sequence[PieceCommit] | None
) -> DataFrame:
    """Return the committed messages among sequenced rows, each once: the rows within the limits of their pieces.

    With `commits`, they have the column `COMMITTED_AT`.
    """
    messages = rows.where(F.col(PIECE_COLUMN) != SUMMARY_PIECE)
    own_offset = [] if commits is None else [F.col("_offset").alias(COMMITTED_AT)]
    if not limits and not commits:
        return messages.drop(PIECE_COLUMN).select("*", *own_offset)
    pieces: dict[int, dict[str, int]] = {limit.piece: {_LOW: limit.lo, _HIGH: limit.hi} for limit in limits}
    for piece, offset in commits or ():
        pieces.setdefault(piece, {})[_COMMIT] = offset
    known = [{PIECE_COLUMN: piece, **values} for piece, values in pieces.items()]
    table = pa.Table.from_pylist(
        known, pa.schema([(name, pa.int64()) for name in (PIECE_COLUMN, _LOW, _HIGH, _COMMIT)])
    )
    joined = messages.join(F.broadcast(spark.createDataFrame(table)), PIECE_COLUMN, "left")
    within = (F.col("_clock") > F.col(_LOW)) & (F.col("_clock") <= F.col(_HIGH))
    committed = joined.where(F.col(_LOW).isNull() | within)
    offset_column = [F.coalesce(_COMMIT, "_offset").alias(COMMITTED_AT) for _ in own_offset]
    return committed.select("*", *offset_column).drop(PIECE_COLUMN, _LOW, _HIGH, _COMMIT)


def parse_schema(ddl: str, registered: StructType | None = None) -> StructType:
    """Return the columns of an application's `value_schema`, which may include `COMMITTED_AT`. Raises InvalidInput.

    `*` at the beginning stands for the columns of a registered type. These are nullable, because messages of other
    versions may lack them. A message without a column that the schema itself declares NOT NULL is a misfit. Parts of
    columns are nullable.
    """
    require_ddl(ddl)
    star, rest = _ALL.match(ddl), ddl
    if star is not None:
        if registered is None:
            raise InvalidInput(
                "`*` stands for the fields of a registered type: give the consumer a registry", field=_DDL
            )
        rest = ddl[star.end() :]
        if not rest.strip():
            return _checked(_nullable(registered.fields))
    try:
        schema = StructType.fromDDL(rest)
    except PySparkException as error:
        raise InvalidInput(
            f"{ddl!r} is not a list of columns: {error}; write it as `id BIGINT, name STRING`", field=_DDL
        ) from error
    if not isinstance(schema, StructType):
        raise InvalidInput(
            f"{ddl!r} is a type, not a list of columns; write it as `id BIGINT, name STRING`", field=_DDL
        )
    if star is not None and registered is not None:
        if twice := sorted(set(registered.names) & set(schema.names)):
            raise InvalidInput(f"column {twice[0]} is among those that `*` stands for; leave it out", field=_DDL)
        schema = StructType([*_nullable(registered.fields).fields, *schema.fields])
    return _checked(schema)


def _nullable(fields: Sequence[StructField]) -> StructType:
    return StructType([StructField(field.name, field.dataType, True) for field in fields])


def require_ddl(columns: object) -> None:
    """Raise InvalidInput for a `value_schema` that is not text, such as a StructType."""
    if not isinstance(columns, str):
        shown = ", ".join(f"{each.name} {each.dataType.simpleString()}" for each in getattr(columns, "fields", ()))
        raise InvalidInput(
            f"is a {type(columns).__name__}, and not a text with a list of columns; write it as "
            f"`{shown or 'id BIGINT, name STRING'}`",
            field=_DDL,
        )


def _checked(schema: StructType) -> StructType:
    """Check an application's columns, and return them with nullable parts. Raises InvalidInput."""
    asked = {name: schema[name].dataType.simpleString() for name in schema.names if name == COMMITTED_AT}
    if asked.get(COMMITTED_AT, "bigint") != "bigint":
        raise InvalidInput(f"column {COMMITTED_AT} is a BIGINT, not {asked[COMMITTED_AT]}", field=_DDL)
    own = {PARSED_PREFIX + name for name in FIELDS} - asked.keys()
    reserved = sorted(name for name in schema.names if name in own or name.startswith("_coranto_"))
    if reserved:
        raise InvalidInput(f"column {reserved[0]} is reserved; give yours another name", field=_DDL)
    return StructType([StructField(each.name, nullable(each.dataType), each.nullable) for each in schema.fields])


def nothing_committed(spark: SparkSession, schema: StructType, *, commits: bool) -> DataFrame:
    """Return an application's frame for a transaction without messages."""
    names = [name.removeprefix(PARSED_PREFIX) for name in (*METADATA, *([COMMITTED_AT] if commits else []))]
    own = [StructField(PARSED_PREFIX + name, FIELDS[name].dataType) for name in names]
    return spark.createDataFrame([], StructType([*_nullable(schema.fields).fields, *own]))


def parsed_values(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return rows with the application's columns, which workers have parsed already."""
    return rows.select(*(column_named(name) for name in schema.names), *_metadata(rows))


def _metadata(rows: DataFrame) -> list[str]:
    return [*METADATA, *(name for name in rows.columns if name == COMMITTED_AT)]


class CheckedRows(NamedTuple):
    """The committed messages of a transaction, including misfits."""

    all: DataFrame
    """The application's columns, with nulls for values that do not fit."""
    fitting: DataFrame
    messages: int
    """The number of all rows."""
    dead: DataFrame
    """Journal, offset and line of the messages that do not fit."""
    misfits: int


def check_misfits(rows: DataFrame, schema: StructType, misfits: MisfitPolicy) -> CheckedRows:
    """Count committed rows and misfits.

    Raises CorruptMessage for a misfit that ends the run: any with `MisfitPolicy.FAIL`, and one with nulls in columns
    that are not nullable with `MisfitPolicy.NULLS`.
    """
    misfit = F.col(_LINE).isNotNull()
    lacks = [column_named(field.name).isNull() for field in schema.fields if not field.nullable]
    if misfits is not MisfitPolicy.NULLS:
        lacks = [F.lit(misfits is MisfitPolicy.FAIL)]
    fatal = misfit & functools.reduce(operator.or_, lacks, F.lit(False))
    first = F.min(F.when(fatal, F.struct("_journal", "_offset"))).alias("first")
    [found] = rows.agg(F.count(F.lit(1)).alias("messages"), F.count(_LINE).alias("misfits"), first).collect()
    if found.first is not None:
        columns = ", ".join(
            f"{field.name} {field.dataType.simpleString()}{'' if field.nullable else ' NOT NULL'}"
            for field in schema.fields
        )
        journal, offset = found.first
        raise CorruptMessage(journal, offset, f"its value does not fit the columns {columns}")
    dead = rows.where(misfit).select(
        F.col("_journal").alias("journal"), F.col("_offset").alias("offset"), F.col(_LINE).alias("line")
    )
    everything = parsed_values(rows, schema)
    fitting = parsed_values(rows.where(~misfit), schema) if found.misfits else everything
    return CheckedRows(everything, fitting, int(found.messages), dead, int(found.misfits))
