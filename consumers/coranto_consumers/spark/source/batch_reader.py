"""Batch reads of `format("journal")`: the plan, and the tasks that read its parts."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from coranto.client import ClientConfig, SyncJournalClient
from coranto.errors import CorantoError
from coranto.security.tokens import Capability
from coranto_consumers.journals.ranges import NumberedRange
from coranto_consumers.journals.reading import JournalContent, Lines, read_lines
from coranto_consumers.spark.committed.joint_reading import CommittedReader
from coranto_consumers.spark.decoding.rows import BatchBuilder, RowLayout
from coranto_consumers.spark.options.source_options import Isolation, SourceOptions
from coranto_consumers.spark.session.access import for_tasks, without_keys
from coranto_consumers.spark.session.fetching import machine_folder, read_together, task_client
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import push_filters
from coranto_consumers.spark.source.planning import FilterBounds, Shares, plan_read

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


@dataclass
class JournalPartition(InputPartition):
    """The ranges that one task reads. In a committed read, ranges are numbered per journal."""

    parts: tuple[NumberedRange, ...]
    client: ClientConfig = field(repr=False)
    """The client's configuration for this task, with a token for its journals instead of keys."""


class _TakesFilters(partial["list[Filter]"]):
    """The method `pushFilters` of a reader.

    Spark fails a read if a reader overrides this method of `DataSourceReader`, but the session does not push filters.
    So this callable looks like the original method.
    """

    __func__ = staticmethod(push_filters())


class JournalReader(DataSourceReader):
    """Plans a read, and reads its parts. Spark calls `partitions` and `read` in different processes."""

    def __init__(self, options: SourceOptions, layout: RowLayout) -> None:
        self._options = options
        self._layout = layout
        self._planned: Shares | None = None
        self._failure: CorantoError | None = None
        self._filter_bounds = FilterBounds()
        self._name = uuid.uuid4().hex

    @property
    def pushFilters(self) -> _TakesFilters:
        """Limit the plan to rows that may pass filters. Returns all filters, because Spark must apply them again."""
        return _TakesFilters(self._narrow)

    def _narrow(self, filters: list[Filter]) -> list[Filter]:
        self._filter_bounds = FilterBounds.of(filters, self._layout.own)
        self._planned = self._failure = None
        return filters

    def _plan(self) -> Shares:
        if self._failure is not None:
            raise self._failure
        if self._planned is None:
            try:
                with SyncJournalClient.of(self._options.client) as client:
                    self._planned = plan_read(client, self._options, self._filter_bounds)
            except CorantoError as error:
                self._failure = error
                raise
        return self._planned

    def __getstate__(self) -> dict[str, object]:
        """Leave out keys, which executors do not use, and the shares of tasks: each task gets its own."""
        planned = Shares({}, ())
        # Spark would replace an error here by its own. `partitions` raises the error next.
        with contextlib.suppress(CorantoError):
            planned = self._plan()._replace(of_tasks=())
        options = replace(self._options, client=without_keys(self._options.client))
        return {**self.__dict__, "_options": options, "_planned": planned, "_failure": None}

    def partitions(self) -> list[JournalPartition]:
        with errors_to_driver():
            return [self._partition(parts) for parts in self._plan().of_tasks]

    def _partition(self, parts: tuple[NumberedRange, ...]) -> JournalPartition:
        journals = {part.range.journal for part in parts}
        return JournalPartition(parts, for_tasks(self._options.client, Capability.READ, journals))

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        # Spark replaces an empty list of partitions by one partition that is None or a plain InputPartition.
        if not isinstance(partition, JournalPartition):
            return
        with errors_to_driver(), task_client(partition.client, self._options.cache_bytes) as client:
            framing, isolation = self._options.framing, self._options.isolation
            # If a journal has several ranges, the committed rows of each depend on all, so tasks may read all of them.
            once = [
                each.range
                for each in partition.parts
                if isolation is not Isolation.READ_COMMITTED or len(self._plan().ranges[each.range.journal]) == 1
            ]
            with read_together(client, once, framing) as content:
                batches = BatchBuilder(self._layout)
                for numbered in partition.parts:
                    span = self._options.times.span(numbered.range.journal)
                    for lines in self._lines(content, numbered):
                        mask = span.mask(lines.clocks)
                        if self._filter_bounds != FilterBounds():
                            mask &= self._filter_bounds.mask(lines.begins, lines.clocks)
                        yield from batches.build(lines.where(mask))

    def _lines(self, content: JournalContent, numbered: NumberedRange) -> Iterator[Lines]:
        if self._options.isolation is Isolation.READ_UNCOMMITTED:
            return (lines.messages for lines in read_lines(content, numbered.range, self._options.framing))
        journal = numbered.range.journal
        name = f"{self._name}-{hashlib.sha256(journal.encode()).hexdigest()[:16]}"
        shared = (folder := machine_folder()) and folder / "coranto-scans" / name
        ranges, framing = self._plan().ranges[journal], self._options.framing
        reader = CommittedReader(content, ranges, framing, shared, commits=self._layout.has_commits)
        return reader.read(numbered.number)
