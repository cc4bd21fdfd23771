"""The reader of `spark.readStream.format("journal")`.

One Spark process plans micro-batches (`query_planner.py`), and executors read them. Planning fetches each batch's
content once, so this process limits the throughput: some hundred megabytes per second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from coranto.client import ClientConfig
from coranto.errors import InvalidInput
from coranto.offsets import vector_to_json
from coranto.security.tokens import Capability
from coranto_consumers.journals.discovery import ContentExtent, heads_of, open_journals, wait_until_sealed
from coranto_consumers.journals.framings import name_of
from coranto_consumers.journals.ranges import plan_transaction
from coranto_consumers.spark.decoding.rows import BatchBuilder, RowLayout
from coranto_consumers.spark.session.access import for_tasks, without_keys
from coranto_consumers.spark.session.fetching import read_together, task_client
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from coranto_consumers.spark.streaming.batches import JournalBatch, StreamPart
from coranto_consumers.spark.streaming.offsets import Position, dumps, loads
from coranto_consumers.spark.streaming.query_planner import QueryJournals, QueryPlanner
from coranto_consumers.spark.streaming.stream_options import StreamOptions

_WORTHWHILE_BYTES: Final = 2 << 20
"""One task reads ranges of up to this many bytes together, because a task costs some tens of milliseconds."""
_MIN_LINE_BYTES: Final = len('{"_meta":{"uuid":"00000000-0000-1000-8000-000000000000"}}\n')


@dataclass
class StreamPartition(InputPartition):
    parts: tuple[StreamPart, ...]
    client: ClientConfig = field(repr=False)
    """The client's configuration for this task, with a token for its journals instead of keys."""


class JournalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches, and reads them. Spark pickles the reader before it uses it."""

    def __init__(self, options: StreamOptions, layout: RowLayout) -> None:
        self._options = options
        self._layout = layout
        self._journals = QueryJournals(options.source)
        self._initial: dict[str, Any] | None = None
        self._target: dict[str, ContentExtent] | None = None
        self._waiting_since: float | None = None
        self._ended: dict[str, int] = {}
        """The heads of journals that end in an unfinished line."""
        self._planner = QueryPlanner(options, self._journals, commits=layout.has_commits)
        self._planned: tuple[str, list[StreamPartition]] = "", []

    def __getstate__(self) -> dict[str, object]:
        """Leave out keys and the state of the planning process, which executors do not need."""
        source = replace(self._options.source, client=without_keys(self._options.source.client))
        fresh = JournalStreamReader(replace(self._options, source=source), self._layout)
        return fresh.__dict__

    @errors_to_driver()
    def initialOffset(self) -> dict[str, Any]:
        """Return the start offsets of a new query. Journals without an offset are read from their beginning."""
        if self._initial is None:
            starting, times = self._options.starting, self._options.source.times
            found: Mapping[str, Position | None]
            if times.starting is not None:
                client, heads = self._journals.client, self._journals.refresh()
                found = {
                    name: _position(times.span(name).first_offset(client, name, each.begin, each.head), each)
                    for name, each in heads.items()
                }
            elif starting == {}:
                found = {}
            else:
                heads = self._journals.refresh()
                found = dict.fromkeys(open_journals(heads, heads_of(heads))) if starting is None else starting
                if unknown := sorted(found.keys() - heads.keys()):
                    problem = f"names {unknown[0]}, which is not among the journals that are read: "
                    raise InvalidInput(problem + ", ".join(sorted(heads)), field="option startingOffsets")
            heads = self._journals.heads
            self._initial = dumps({name: at or _position(heads[name].head, heads[name]) for name, at in found.items()})
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        with errors_to_driver():
            self._target = wait_until_sealed(self._journals.refresh, self._options.source.client.retry_timeout)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the journals' heads, for the query's progress."""
        return dict(vector_to_json(heads_of(self._journals.heads))) or None

    @errors_to_driver()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Plan the next batch, and return its end. Returns `start` if there is nothing to read yet."""
        heads = self._target or self._journals.refresh_throttled()
        begun = self._planner.drop_truncated(self._planner.accepted(loads(start), heads), heads)
        states = self._planner.entry(begun, heads)
        limited = not isinstance(limit, ReadAllAvailable)
        offsets = {name: state.position.offset for name, state in states.items()}
        readable = open_journals(heads, {**offsets, **self._ended})
        behind = {name: (offset, heads[name].head) for name, offset in offsets.items() if name in readable}
        least = _MIN_LINE_BYTES if name_of(self._options.source.framing) == "json" else 1
        if limited and self._waits(sum(head - offset for offset, head in behind.values()) // least, behind):
            return start
        ranges = plan_transaction(behind, self._options.max_bytes if limited else 1 << 62)
        planned = {each.journal: each for each in ranges}
        batches = self._planner.plan(ranges, states, heads, limited)
        if limited and self._waits(sum(batch.rows for batch in batches.values()), behind):
            return start
        self._waiting_since = None
        end = {**begun}
        for name, state in states.items():
            batch = batches.get(name)
            if batch is not None and batch.parts:
                after = _identified(batch.state.position, heads[name])
                end[name] = after if state.position.created else replace(after, since=state.position.offset)
                self._planner.set_state(name, replace(batch.state, position=end[name]))
                self._ended.pop(name, None)
                continue
            if batch is not None and planned[name].end >= heads[name].head:
                self._ended[name] = heads[name].head
            if name not in begun and name in readable:
                end[name] = replace(_identified(state.position, heads[name]), since=state.position.offset)
                self._planner.set_state(name, replace(state, position=end[name]))
        found = dumps(end)
        self._planned = _key(start, found), self._partitions(batches)
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the partitions of a batch. A batch from before a restart is planned again."""
        key, planned = self._planned
        if key == _key(start, end):
            return planned
        with errors_to_driver():
            return self._partitions(self._planner.plan_again(start, end))

    def _partitions(self, batches: Mapping[str, JournalBatch]) -> list[StreamPartition]:
        parts = [part for name in sorted(batches) for part in batches[name].parts]
        if self._options.source.min_partitions > 1:
            return [self._partition([part]) for part in parts]
        found: list[list[StreamPart]] = []
        size = 0
        for part in parts:
            if not found or size + part.length > _WORTHWHILE_BYTES:
                found.append([])
                size = 0
            found[-1].append(part)
            size += part.length
        return [self._partition(each) for each in found]

    def _partition(self, parts: Sequence[StreamPart]) -> StreamPartition:
        journals = {part.numbered.range.journal for part in parts}
        return StreamPartition(tuple(parts), for_tasks(self._options.source.client, Capability.READ, journals))

    def _waits(self, messages: int, behind: Mapping[str, tuple[int, int]]) -> bool:
        """Return True if a batch with `messages` messages must wait for more."""
        if messages >= self._options.min_messages or self._target is not None:
            return False
        if not any(head > offset for offset, head in behind.values()):
            self._waiting_since = None
            return True
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._options.max_delay

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, StreamPartition):
            return
        source = self._options.source
        batches = BatchBuilder(self._layout)
        ranges = [part.numbered.range for part in partition.parts]
        with (
            errors_to_driver(),
            task_client(partition.client, source.cache_bytes) as client,
            read_together(client, ranges, source.framing) as content,
        ):
            for part in partition.parts:
                # The options may not name a journal that was created since the query began.
                span = source.times.span_or_unbounded(part.numbered.range.journal)
                for lines in part.read(content, source.framing):
                    yield from batches.build(lines.where(span.mask(lines.clocks)))

    def stop(self) -> None:
        self._journals.close()


def _key(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    return json.dumps([start, end], sort_keys=True)


def _position(offset: int, found: ContentExtent) -> Position:
    return Position(offset, journal_id=found.journal_id)


def _identified(position: Position, head: ContentExtent) -> Position:
    """Add the id and creation revision of a position's journal, which identify it among journals of one name."""
    return replace(position, created=head.created, journal_id=head.journal_id or position.journal_id)
