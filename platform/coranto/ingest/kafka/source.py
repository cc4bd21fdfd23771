"""Kafka topics as a source. Each partition is a split, `topic/partition`, whose position is the next offset.

The split `topic` has the id of the topic as its position. Kafka never reuses an id. So if the id is unchanged after
records were read, the records are of the same topic as before.

Only committed records are read. Offsets of aborted records, markers of transactions and compacted records are gaps,
which positions skip. Offsets that retention has removed before they were read are lost.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from coranto.errors import SourceChanged, Unavailable
from coranto.ingest.kafka.cluster import KafkaCluster, Offsets, Topic, client_options, problem_of
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.kafka.records import RecordRows, values_of
from coranto.ingest.source import Poison, Positions, Read, SourceRow
from coranto.types.kinds import PlainKind, TypeField

_POLL_SECONDS: Final = 0.1
_MAX_RECORDS: Final = 5000
_FIRST_RECORDS: Final = 500
_RECORD_BYTES: Final = 100
"""The estimated bytes of a record in addition to its key and value."""
_SETTLE_SECONDS: Final = 10.0
"""The wait for a new leader of a partition, which may briefly report a lower end."""
_READ_OPTIONS: Final[Mapping[str, object]] = {
    "group.id": "coranto-ingest",  # The library demands one. Nothing is committed to it.
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
}
_PREFETCH: Final[Mapping[str, object]] = {"queued.max.messages.kbytes": 32 << 10}

_log = structlog.get_logger(__name__)
_Place = tuple[str, int]


class KafkaSource:
    """The committed records of topics."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._values = values_of(options)
        self._rows = RecordRows(options, self._values)
        self._cluster: KafkaCluster | None = None
        self._consumer: Consumer | None = None
        self._topics: dict[str, Topic] = {}
        self._next: dict[_Place, int] = {}
        self._ends: dict[_Place, int] = {}  # The ends at the start, of partitions not read that far.
        self._touched: set[str] = set()  # Topics of records that were read since the last `confirm`.
        self._first: list[Read] = []
        self._follow = False
        self._checked_at = 0.0
        self._record_bytes = 0
        self._calls = threading.Lock()  # A call may continue after its task was cancelled.

    async def open(self, after: Positions, *, follow: bool) -> str:
        self._follow = follow
        return await asyncio.to_thread(self._open, after)

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        if self._first:
            first, self._first = self._first, []
            return first
        if not self._follow and not self._ends:
            return None
        found = await asyncio.to_thread(self._read, max_bytes)
        self._touched |= {each.split.partition("/")[0] for each in found}
        return found

    async def fields(self) -> tuple[TypeField, ...] | None:
        found = None if self._values.fields is None else await asyncio.to_thread(self._values.fields)
        name = self._options.operation
        return (TypeField(name, PlainKind.STRING), *found) if name and found is not None else found

    async def confirm(self) -> None:
        """Check that the topics of the records that were read were not recreated."""
        touched, self._touched = self._touched, set()
        if touched:
            found = await asyncio.to_thread(self._known.topics, touched)
            for name, topic in found.items():
                if topic.id != self._topics[name].id:
                    self._recreated(name, self._topics[name].id, topic.id)

    async def committed(self, positions: Positions) -> None:
        """Do nothing: offsets are not committed to Kafka."""

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        """Return the number of offsets after each position. Some of them may be gaps."""
        return await asyncio.to_thread(self._lag, positions)

    async def retained(self) -> int | None:
        return None

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await asyncio.to_thread(self._close, consumer)

    # -- Blocking parts ------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> KafkaCluster:
        if self._cluster is None:
            self._cluster = KafkaCluster(self._options)
        return self._cluster

    def _close(self, consumer: Any) -> None:
        with self._calls:
            consumer.close()

    def _open(self, after: Positions) -> str:
        identity = f"kafka:{self._known.id()}"
        self._topics, self._next, self._ends, self._first = {}, {}, {}, []
        self._touched.clear()
        try:
            self._consumer = Consumer(client_options(self._options, _PREFETCH, _READ_OPTIONS))
        except (KafkaException, ValueError) as error:
            raise problem_of(error) from error
        self._assign(self._known.topics(), after)
        return identity

    def _assign(self, topics: Mapping[str, Topic], after: Positions) -> None:
        """Start reading new partitions, each from its position on. Raises SourceChanged."""
        is_start = not self._topics
        for name, topic in topics.items():
            kept = self._topics[name].id if name in self._topics else after.get(name)
            if kept is not None and kept != topic.id:
                if not (is_start and self._options.restarts):
                    self._recreated(name, kept, topic.id)
                _log.warning("ingest.topic_recreated", topic=name, before=kept, now=topic.id)
                # Reset all positions together with the id, so that none is mistaken for a position in the new topic.
                old = [split for split in after if split.startswith(f"{name}/")]
                self._first += [Read(split, (), None) for split in old]
                after = {**after, **dict.fromkeys(old)}
            if kept != topic.id:
                self._first.append(Read(name, (), topic.id))
        self._topics = dict(topics)
        new = [
            (name, number)
            for name, topic in topics.items()
            for number in range(topic.partitions)
            if (name, number) not in self._next
        ]
        offsets = self._known.offsets(new)
        at = {place: self._begin(place, offsets[place], after, is_start=is_start) for place in new}
        self._next |= at
        if is_start and not self._follow:
            self._ends = {place: offsets[place].end for place in new if offsets[place].end > at[place]}
        self._start(at)
        self._checked_at = time.monotonic()

    def _begin(self, place: _Place, offsets: Offsets, after: Positions, *, is_start: bool) -> int:
        """Return the first offset of a partition that is to be read."""
        split = _split(place)
        if after.get(split) is None:
            # All records of partitions that are added later are new.
            if self._options.from_end and is_start and place[0] not in after:
                self._first.append(Read(split, (), offsets.end))
                return offsets.end
            return offsets.first
        position = int(after[split])
        deadline = time.monotonic() + _SETTLE_SECONDS
        while position > offsets.end:
            if time.monotonic() > deadline:
                raise SourceChanged(
                    f"{split} was read to offset {position}, and ends at {offsets.end}: Kafka has lost records that "
                    "are in the stream. Give the ingest another name, and begin where the records differ"
                )
            time.sleep(_POLL_SECONDS)
            offsets = self._known.offsets([place])[place]
        if position < offsets.first:
            self._lose(place, position, offsets.first)
            return offsets.first
        return position

    def _lose(self, place: _Place, position: int, first: int) -> None:
        """Record the loss of offsets that were removed before they were read. Raises SourceChanged unless accepted."""
        if not self._options.accepts_loss:
            raise SourceChanged(
                f"{_split(place)} was read to offset {position}, and begins at {first} now: its retention has removed "
                f"{first - position} offsets before they were read. `lost: continue` continues there, and counts them"
            )
        self._first.append(Read(_split(place), (), first, first - position))

    def _start(self, at: Mapping[_Place, int]) -> None:
        try:
            self._reading.incremental_assign([TopicPartition(*place, offset) for place, offset in at.items()])
        except KafkaException as error:
            raise problem_of(error) from error

    @property
    def _reading(self) -> Consumer:
        assert self._consumer is not None
        return self._consumer

    def _read(self, max_bytes: int) -> list[Read]:
        with self._calls:
            return self._read_alone(max_bytes)

    def _read_alone(self, max_bytes: int) -> list[Read]:
        if self._consumer is None:
            return []  # It was closed.
        if self._follow and time.monotonic() - self._checked_at >= self._options.poll_seconds:
            self._assign(self._known.topics(), {})
        count = _FIRST_RECORDS if not self._record_bytes else max_bytes // self._record_bytes
        try:
            records = self._reading.consume(max(1, min(count, _MAX_RECORDS)), _POLL_SECONDS)
        except (KafkaException, RuntimeError) as error:
            raise problem_of(error) from error
        found: dict[_Place, list[Any]] = {}
        for record in records:
            place = record.topic(), record.partition()
            if (problem := record.error()) is None:
                found.setdefault(place, []).append(record)
            elif problem.code() == KafkaError._PARTITION_EOF:
                if record.offset() > self._next[place]:
                    found.setdefault(place, [])
                    self._passed(place, record.offset())
                self._ends.pop(place, None)
            else:
                if found.get(place):
                    self._passed(place, found[place][-1].offset() + 1)
                self._failed(place, problem)
        size = 0
        for place, each in found.items():
            if each:
                size += sum(_RECORD_BYTES + len(record) + len(record.key() or b"") for record in each)
                self._passed(place, each[-1].offset() + 1)
        if size:
            self._record_bytes = max(1, size // len(records))
        first, self._first = self._first, []
        return [
            *first,
            *(Read(_split(place), self._rows_of(place, each), self._next[place]) for place, each in found.items()),
        ]

    def _rows_of(self, place: _Place, records: Sequence[Any]) -> Iterable[SourceRow | Poison]:
        rows = self._rows.rows(*place, records) if records else ()
        return rows if self._values.fields is None else list(rows)  # `fields` needs their schemas first.

    def _passed(self, place: _Place, offset: int) -> None:
        """Record that a partition is read up to an offset."""
        self._next[place] = max(offset, self._next[place])
        if offset >= self._ends.get(place, offset + 1):
            del self._ends[place]

    def _failed(self, place: tuple[Any, Any], error: KafkaError) -> None:
        """Resume a partition whose position retention has removed. Raises any other error of the library."""
        if error.code() == KafkaError._AUTO_OFFSET_RESET and place in self._next:
            offsets, position = self._known.offsets([place])[place], self._next[place]
            if position < offsets.first:
                self._lose(place, position, offsets.first)
                self._next[place] = offsets.first
            self._reading.incremental_unassign([TopicPartition(*place)])
            self._start({place: self._next[place]})
            if position <= offsets.end:
                return
        raise problem_of(KafkaException(error))

    def _recreated(self, name: str, kept: str, now: str) -> None:
        if self._options.restarts:
            raise Unavailable(f"topic {name} was recreated, and is read from its beginning")
        raise SourceChanged(
            f"topic {name} was deleted and created again: its id was {kept}, and is {now}. Its offsets begin again "
            "at 0. `recreated: restart` reads it from its beginning, after the events that are in the stream"
        )

    def _lag(self, positions: Positions) -> dict[str, int]:
        places = [(name, number) for name, topic in self._known.topics().items() for number in range(topic.partitions)]
        return {
            _split(place): max(0, each.end - max(each.first, int(positions.get(_split(place)) or 0)))
            for place, each in self._known.offsets(places).items()
        }


def _split(place: _Place) -> str:
    return f"{place[0]}/{place[1]}"
