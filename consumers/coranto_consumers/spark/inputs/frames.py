"""DataFrames of a consumer transaction: all rows that were read, and the committed and parsed rows."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from coranto.client import ClientConfig
from coranto.client.routes import KnownRoute
from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.columnar import Int64s
from coranto.security.tokens import Capability
from coranto_consumers.journals.framings import ReadFraming
from coranto_consumers.journals.ranges import NumberedRange, ReadPlan
from coranto_consumers.journals.reading import JournalContent, Lines
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.spark.application.outputs import column_named
from coranto_consumers.spark.committed.scanning import (
    SUMMARY_PIECE,
    RangeSummarizer,
    RangeSummary,
    piece_of,
    summary_rows,
)
from coranto_consumers.spark.committed.sequencing import RangeDecision
from coranto_consumers.spark.decoding.rows import (
    COMMIT_OFFSET,
    FIELDS,
    LINE,
    PARSED_PREFIX,
    PIECE,
    SUMMARY,
    BatchBuilder,
    Misfits,
    RowLayout,
    nullable,
    parsed_layout,
    required,
)
from coranto_consumers.spark.inputs.locality import numbered_partitions
from coranto_consumers.spark.session.access import for_tasks
from coranto_consumers.spark.session.fetching import read_together, task_client
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import arrow_schema

METADATA = ("_journal", "_offset", "_producer", "_clock")
Routes = Mapping[str, KnownRoute]
COMMITTED_AT = PARSED_PREFIX + COMMIT_OFFSET
"""The metadata column of committed rows that applications have to request."""

PIECE_COLUMN: Final = PARSED_PREFIX + PIECE.name
SUMMARY_COLUMN: Final = PARSED_PREFIX + SUMMARY.name
_DDL: Final = "value_schema"
_ALL: Final = re.compile(r"\s*+\*\s*+(?:,|$)")
_LOW, _HIGH, _COMMIT = "_coranto_low", "_coranto_high", "_coranto_commit"
_LINE = PARSED_PREFIX + LINE.name
_NEEDED: Final = tuple(
    StructField(PARSED_PREFIX + each.name, each.dataType)
    for each in (*FIELDS.values(), PIECE, LINE, SUMMARY)
    if PARSED_PREFIX + each.name in (*METADATA, PIECE_COLUMN, _LINE, SUMMARY_COLUMN)
)


JOINED_BYTES: Final = 1 << 20
JOINED_RANGES: Final = 4_096


class SequencedRows:
    """Builds Arrow batches from a task's ranges, in order: their messages, and a summary of each range.

    A batch costs about as much for one message as for a hundred, so messages and summaries of small ranges are joined.
    """

    def __init__(self, layout: RowLayout) -> None:
        self._batches = BatchBuilder(layout)
        self._held: list[tuple[Lines, Int64s]] = []
        self._ranges: list[int] = []
        """For each held part, the index of its range in `_read`."""
        self._bytes = 0
        self._read: list[tuple[str, RangeSummarizer]] = []
        """The ranges that were read and are not summarized yet. The current range will be the next element."""
        self._misfits = [0]

    def read(self, content: JournalContent, parts: Sequence[NumberedRange], framing: ReadFraming) -> Iterator[Any]:
        """Yield the batches of ranges. Raises CorruptMessage and OffsetJump."""
        for numbered in parts:
            scan = RangeSummarizer(numbered)
            for lines, pieces in scan.pieces(content, framing):
                if len(lines):
                    yield from self._hold(lines, pieces)
            self._read.append((numbered.range.journal, scan))
            self._misfits.append(0)
            if self._bytes >= JOINED_BYTES or len(self._read) >= JOINED_RANGES:
                yield from self._summarized()
        yield from self._summarized()

    def _hold(self, lines: Lines, pieces: Int64s) -> Iterator[Any]:
        """Hold messages of the current range. Yields batches when enough bytes are held."""
        length = int(lines.ends[-1] - lines.begins[0])
        if self._bytes + length > JOINED_BYTES:
            yield from self._built()
        self._held.append((lines, pieces))
        self._ranges.append(len(self._read))
        self._bytes += length
        if self._bytes >= JOINED_BYTES:
            yield from self._built()

    def _built(self) -> Iterator[Any]:
        """Yield the batches of the held messages, and count misfits."""
        if not self._held:
            return
        lines = Lines.together([each for each, _ in self._held])
        yield from self._batches.build(lines, np.concatenate([pieces for _, pieces in self._held]))
        if self._batches.misfits.any():
            ranges = np.repeat(self._ranges, [len(each) for each, _ in self._held])
            for index in ranges[self._batches.misfits].tolist():
                self._misfits[index] += 1
        self._held.clear()
        self._ranges.clear()
        self._bytes = 0

    def _summarized(self) -> Iterator[Any]:
        yield from self._built()
        found: list[tuple[str, RangeSummary]] = [
            (journal, scan.summary(misfits))
            for (journal, scan), misfits in zip(self._read, self._misfits, strict=False)
        ]
        self._read.clear()
        self._misfits = [0]
        if found:
            yield from self._batches.build(*summary_rows(found))


@dataclass(frozen=True, slots=True)
class SliceTask:
    """Reads one slice of a plan."""

    parts: tuple[NumberedRange, ...]
    layout: RowLayout
    client: ClientConfig = field(repr=False)
    """The client's configuration, with a token for the slice's journals instead of keys."""
    routes: Routes = field(repr=False)

    def read(self) -> Iterator[Any]:
        """Yield record batches of the messages and of the ranges' summaries."""
        config, framing = self.client, self.layout.framing
        if config.route_cache:
            config = replace(config, route_cache=max(config.route_cache, len(self.routes)))
        with errors_to_driver(), task_client(config) as client:
            client.suggest_routes(self.routes)
            with read_together(client, [each.range for each in self.parts], framing) as content:
                yield from SequencedRows(self.layout).read(content, self.parts, framing)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Reads slices of a plan. Its input rows are numbers of slices."""

    slices: tuple[SliceTask, ...]

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column("id").to_pylist():
                yield from self.slices[number].read()


class PlannedRows(NamedTuple):
    """The rows of a plan: all messages of its ranges with their pieces, and the ranges' summaries."""

    task: ReadTask
    schema: StructType
    plan: ReadPlan

    def by_tasks(self, spark: SparkSession) -> DataFrame:
        """Return the rows, which tasks read on demand. Unlike for a data source, Spark starts no planning process."""
        return self.partitions(spark).mapInArrow(self.task, self.schema)

    def partitions(self, spark: SparkSession) -> DataFrame:
        """Return the task's input: the numbers of its slices, each in its own partition."""
        return numbered_partitions(spark, len(self.task.slices), self.plan.places)

    def read_here(self) -> Any:
        batches = (batch for each in self.task.slices for batch in each.read())
        return pa.Table.from_batches(batches, arrow_schema(self.schema))


def sequenced_layout(schema: StructType, framing: ReadFraming, zone: tzinfo | None) -> RowLayout:
    """Return the layout of an application's columns and of columns for sequencing. Raises InvalidInput."""
    # Only the necessary columns, because rows are cached with all their columns.
    asked = StructType([*_NEEDED, *map(required, schema.fields)])
    return parsed_layout(asked, None, Misfits.KEPT, framing, zone)


def planned_rows(layout: RowLayout, plan: ReadPlan, client: ClientConfig, routes: Routes) -> PlannedRows:
    """Return the rows of a plan in a sequenced layout. Tasks try the brokers in `routes` first."""
    slices = []
    for parts in plan.numbered():
        journals = {part.range.journal for part in parts}
        near = {journal: routes[journal] for journal in journals & routes.keys()}
        slices.append(SliceTask(parts, layout, for_tasks(client, Capability.READ, journals), near))
    return PlannedRows(ReadTask(tuple(slices)), _nullable(layout.schema.fields), plan)


def choose_committed(
    spark: SparkSession, rows: DataFrame, decisions: Mapping[int, RangeDecision], *, commits: bool
) -> DataFrame:
    """Return the committed messages among sequenced rows, each once. `commits` adds the column `COMMITTED_AT`."""
    messages = rows.where(F.col(PIECE_COLUMN) != SUMMARY_PIECE)
    pieces: dict[int, dict[str, int]] = {}
    for number, each in decisions.items():
        for segment, low, high in each.limits:
            pieces[piece_of(number, segment)] = {_LOW: low, _HIGH: high}
        for segment, offset in each.acknowledged if commits else ():
            pieces.setdefault(piece_of(number, segment), {})[_COMMIT] = offset
    own_offset = [F.col("_offset").alias(COMMITTED_AT)] if commits else []
    if not pieces:
        return messages.drop(PIECE_COLUMN).select("*", *own_offset)
    known = [{PIECE_COLUMN: piece, **values} for piece, values in pieces.items()]
    table = pa.Table.from_pylist(
        known, pa.schema([(each, pa.int64()) for each in (PIECE_COLUMN, _LOW, _HIGH, _COMMIT)])
    )
    joined = messages.join(F.broadcast(spark.createDataFrame(table)), PIECE_COLUMN, "left")
    within = (F.col("_clock") > F.col(_LOW)) & (F.col("_clock") <= F.col(_HIGH))
    committed = joined.where(F.col(_LOW).isNull() | within)
    offset_column = [F.coalesce(_COMMIT, "_offset").alias(COMMITTED_AT) for _ in own_offset]
    return committed.select("*", *offset_column).drop(PIECE_COLUMN, _LOW, _HIGH, _COMMIT)


def parse_schema(ddl: str, registered: StructType | None = None) -> StructType:
    """Return the columns of an application's `value_schema`, which may include `COMMITTED_AT`. Raises InvalidInput.

    `*` at the beginning stands for the columns of a registered type. These are nullable, because messages of other
    versions may lack them. A message is a misfit if it lacks a column that the schema itself declares NOT NULL.
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
    """Return the empty frame with an application's columns and metadata."""
    names = [name.removeprefix(PARSED_PREFIX) for name in (*METADATA, *([COMMITTED_AT] if commits else []))]
    own = [StructField(PARSED_PREFIX + name, FIELDS[name].dataType) for name in names]
    return spark.createDataFrame([], StructType([*_nullable(schema.fields).fields, *own]))


def parsed_values(rows: DataFrame, schema: StructType) -> DataFrame:
    """Return only the application's columns, which workers have already parsed, and metadata."""
    return rows.select(*(column_named(name) for name in schema.names), *_metadata(rows))


def _metadata(rows: DataFrame) -> list[str]:
    return [*METADATA, *(name for name in rows.columns if name == COMMITTED_AT)]


class CheckedRows(NamedTuple):
    """The committed messages of a transaction, with the policy for misfits applied."""

    rows: DataFrame
    """The application's columns, with nulls for values that do not fit, and without dead letters."""
    messages: int
    """The number of `rows`."""
    misfits: int = 0
    dead: DataFrame | None = None
    """Journal, offset and line of the misfits that are dead letters, if any."""


def check_misfits(rows: DataFrame, schema: StructType, misfits: MisfitPolicy) -> CheckedRows:
    """Count committed rows and misfits. Raises CorruptMessage for a misfit that the policy or NOT NULL forbids."""
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
    if misfits is not MisfitPolicy.DEAD_LETTERS or not found.misfits:
        return CheckedRows(parsed_values(rows, schema), found.messages, found.misfits)
    dead = rows.where(misfit).select(
        F.col("_journal").alias("journal"), F.col("_offset").alias("offset"), F.col(_LINE).alias("line")
    )
    fitting = parsed_values(rows.where(~misfit), schema)
    return CheckedRows(fitting, found.messages - found.misfits, found.misfits, dead)
