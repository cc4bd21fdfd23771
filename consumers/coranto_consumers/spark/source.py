"""`spark.read.format("journal")`: journals as DataFrames.

::

    spark.read.format("journal").options(endpoint="127.0.0.1:8080", selector="name:prefix=flights/events/").load()

has a row for each message: `journal`, `offset` (at which it begins), `next_offset`, `producer` (six bytes), `clock`,
`flags` and `value`, which is the line without its newline. A schema given by the user chooses columns (Spark offers
Python sources no other way) and may declare `value` as BINARY.

With a schema of the messages' fields, such as `carrier STRING, arr_delay DOUBLE`, lines are parsed into these columns
as by Spark's reader of JSON files. The source's own columns then begin with an underscore: `_journal`, `_offset`,
`_value`. See `options.py` for the options.

Spark plans a read in one process and runs it in others, so `coranto` must be installed in all of them. The package
`pyspark_coranto` beside this one makes the name `journal` known without registration. Call `register` where Spark does
not discover it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from pyspark import SparkFiles, TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.disk_cache import DiskCache
from coranto.errors import InvalidInput
from coranto.security.tokens import Capability
from coranto_consumers.spark.access import for_tasks, without_keys
from coranto_consumers.spark.discovery import earliest, find_journals, fragment_begins, head_of, match_journals
from coranto_consumers.spark.options import EARLIEST, LATEST, Isolation, SourceOptions
from coranto_consumers.spark.ranges import Range, ReadPlan, Slice, split
from coranto_consumers.spark.reading import read_lines
from coranto_consumers.spark.rows import (
    FIELDS,
    PIECE,
    UUID_FIELDS,
    BatchBuilder,
    RowLayout,
    is_raw,
    parsed_layout,
    raw_layout,
)
from coranto_consumers.spark.scanning import read_committed, read_sequenced
from coranto_consumers.spark.task_errors import told_to_driver


@dataclass
class JournalPartition(InputPartition):
    """The ranges that one task reads."""

    parts: Slice
    client: ClientConfig = field(repr=False)
    """For this task: with a token for its journals instead of keys."""


class JournalDataSource(DataSource):
    """The data source. `options.OPTIONS` describes its options."""

    @classmethod
    def name(cls) -> str:
        return "journal"

    def schema(self) -> StructType:
        with told_to_driver():
            options = SourceOptions.parse(self.options)
        names = [name for name in FIELDS if options.include_uuid or name not in UUID_FIELDS]
        fields = [FIELDS[name] for name in names]
        if options.isolation is Isolation.SEQUENCED:
            fields.append(PIECE)
        return StructType(fields)

    def reader(self, schema: StructType) -> JournalReader:
        with told_to_driver():
            options = SourceOptions.parse(self.options)
            if options.parses_lines or not is_raw(schema):
                layout = parsed_layout(schema, options.text_column, options.misfits)
            else:
                layout = raw_layout(schema, sequenced=options.isolation is Isolation.SEQUENCED)
            return JournalReader(options, layout)


def register(spark: SparkSession) -> None:
    """Make `format("journal")` known to a session without `pyspark_coranto` on its Python path."""
    spark.dataSource.register(JournalDataSource)


class JournalReader(DataSourceReader):
    """Plans a read, and reads. Spark pickles it, and calls `partitions` and `read` in different processes."""

    def __init__(self, options: SourceOptions, layout: RowLayout) -> None:
        self._options = options
        self._layout = layout

    def __getstate__(self) -> dict[str, object]:
        """Leave out keys: executors have no use for them."""
        options = replace(self._options, client=without_keys(self._options.client))
        return {"_options": options, "_layout": self._layout}

    def partitions(self) -> list[InputPartition]:
        with told_to_driver():
            if self._options.isolation is Isolation.SEQUENCED:
                slices: Sequence[Slice] = ReadPlan.loads(self._options.slices).slices
            else:
                with SyncJournalClient.of(self._options.client) as client:
                    slices = [(part,) for part in plan_read(client, self._options)]
            return [self._partition(parts) for parts in slices]

    def _partition(self, parts: Slice) -> JournalPartition:
        journals = {part.journal for part in parts}
        return JournalPartition(parts, for_tasks(self._options.client, Capability.READ, journals))

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by a single one that is None or a plain InputPartition.
        if not isinstance(partition, JournalPartition):
            return
        with told_to_driver():
            yield from self._read(partition)

    def _read(self, partition: JournalPartition) -> Iterator[pa.RecordBatch]:
        options = self._options
        batches = BatchBuilder(self._layout)
        config = replace(partition.client, disk_cache=_disk_cache(options.cache_bytes))
        with SyncJournalClient.of(config, timeout=config.patience) as client:
            match options.isolation:
                case Isolation.READ_UNCOMMITTED:
                    for part in partition.parts:
                        for lines in read_lines(client, part, options.framing):
                            yield from batches.build(lines)
                case Isolation.READ_COMMITTED:
                    for part in partition.parts:
                        for lines in read_committed(client, part, options.framing):
                            yield from batches.build(lines)
                case Isolation.SEQUENCED:
                    plan = ReadPlan.loads(options.slices)
                    for part in partition.parts:
                        for lines, pieces in read_sequenced(client, part, plan, options.framing):
                            yield from batches.build(lines, pieces)


def _disk_cache(max_bytes: int) -> DiskCache | None:
    """Return the cache that the tasks of this executor share, or None outside of an executor.

    It is in the folder of the executor's files, which Spark removes when the executor ends.
    """
    if not max_bytes or TaskContext.get() is None:
        return None
    return DiskCache(Path(SparkFiles.getRootDirectory()) / "coranto-fragments", max_bytes)


def plan_read(client: SyncJournalClient, options: SourceOptions) -> list[Range]:
    """Return the ranges of a read, one for each task. Raises InvalidInput for offsets that the journals do not have."""
    if options.pattern:
        journals = match_journals(client, options.pattern, field="option subscribePattern")
    else:
        wanted = options.selector if options.journals is None else options.journals
        journals = find_journals(client, wanted, field="options")
    for name, offsets in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        if offsets is not None and set(offsets) != set(journals):
            raise InvalidInput(
                f"must name exactly the journals that are read: {', '.join(journals)}", field=f"option {name}"
            )
    ranges = []
    for journal in journals:
        head = head_of(client, journal)
        begins = fragment_begins(client, journal)
        first = earliest(begins, head)
        start = EARLIEST if options.starting is None else options.starting[journal]
        end = LATEST if options.ending is None else options.ending[journal]
        start = first if start == EARLIEST else start
        end = head if end == LATEST else end
        if not start <= end <= head:
            raise InvalidInput(
                f"[{start}, {end}) is not a range of {journal}, whose head is {head}; give offsets from 0 to that",
                field="options",
            )
        # If a user's offset is within a line, reading begins with the next line.
        whole = Range(journal, start, end, head, aligned=start <= first)
        if options.isolation is Isolation.READ_UNCOMMITTED:
            ranges += split(whole, options.max_bytes, begins)
        elif whole.length:
            ranges.append(whole)
    return ranges
