"""A streaming query over a stream keeps the order of its keys, and does not need content that it has read."""

import json
import re
from dataclasses import replace

import pytest
from pyspark.sql.types import StructType
from structlog.testing import capture_logs

from coranto.client import SyncJournalClient
from coranto.errors import OffsetJump, StreamTruncated
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.stream import Segment, segment_journal
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.spark.source.planning import plan_read
from coranto_consumers.spark.streaming.reader import JournalStreamReader

STREAM = "shop/orders"
FIRST, LOW, HIGH = (segment_journal(STREAM, number) for number in range(3))
SCHEMA = StructType().add("n", "integer").add("_journal", "string")
LINE = b'{"n":1}\n'


class Stream:
    """A stream of one segment with ten messages, and its split."""

    def __init__(self, broker) -> None:
        self.broker = broker
        self.first = Segment(0, 0, FIRST, KeyRange.FULL)
        broker.set_segment(STREAM, self.first)
        broker.write(FIRST, LINE * 10)

    def split(self) -> None:
        self.first = replace(self.first, sealing=True)
        self.broker.set_segment(STREAM, self.first)
        for number, keys in enumerate(KeyRange.FULL.split(2), 1):
            segment = Segment(number, 1, segment_journal(STREAM, number), keys, frozenset((0,)))
            self.broker.set_segment(STREAM, segment)

    def seal(self) -> None:
        self.first = replace(self.first, sealed_at=self.broker.head(FIRST))
        self.broker.set_segment(STREAM, self.first)


@pytest.fixture
def stream(broker) -> Stream:
    return Stream(broker)


@pytest.fixture
def new_reader(broker):
    made: list[JournalStreamReader] = []

    def make(**options: str) -> JournalStreamReader:
        options = {"endpoint": broker.endpoint, "stream": STREAM, "startingOffsets": "earliest", **options}
        made.append(JournalDataSource(options).streamReader(SCHEMA))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def batch(reader: JournalStreamReader, start):
    """Return the end of the next batch, as Spark keeps it, and the number of its messages by journal."""
    end = json.loads(json.dumps(reader.latestOffset(json.loads(json.dumps(start)), reader.getDefaultReadLimit())))
    rows: dict[str, int] = {}
    for partition in reader.partitions(start, end):
        for found in reader.read(partition):
            for row in found.to_pylist():
                rows[row["_journal"]] = rows.get(row["_journal"], 0) + 1
    return end, rows


def test_a_batch_never_mixes_events_of_a_segment_and_a_predecessor(broker, stream, new_reader):
    reader = new_reader(maxBytesPerTrigger="40")
    at, rows = batch(reader, reader.initialOffset())
    assert rows == {FIRST: 5}
    stream.split()
    broker.write(LOW, LINE)
    at, rows = batch(reader, at)
    assert rows == {FIRST: 5}
    again, rows = batch(reader, at)
    assert (again, rows) == (at, {}), "the end of the first segment is not known yet"
    stream.seal()
    at, rows = batch(new_reader(), at)  # A restarted query continues in the same way.
    assert rows == {LOW: 1}
    assert at.keys() == {FIRST, LOW, HIGH}


def test_an_unfinished_line_ends_a_sealed_segment(broker, stream, new_reader):
    broker.write(FIRST, b'{"n":')
    stream.split()
    stream.seal()
    broker.write(LOW, LINE)
    reader = new_reader()
    at, rows = batch(reader, reader.initialOffset())
    assert rows == {FIRST: 10}
    at, _ = batch(reader, at)
    at, rows = batch(reader, at)
    assert rows == {LOW: 1}


def test_truncation_of_content_that_a_query_has_read_is_not_a_loss(broker, stream, new_reader):
    reader = new_reader()
    at, rows = batch(reader, reader.initialOffset())
    assert rows == {FIRST: 10}
    stream.split()
    stream.seal()
    at, rows = batch(reader, at)
    assert (at.keys(), rows) == ({FIRST, LOW, HIGH}, {}), "the offset records that the first segment is read completely"
    broker.delete(FIRST)
    broker.write(HIGH, LINE)
    for query in (reader, new_reader()):
        end, rows = batch(query, at)
        assert (end.keys(), rows) == ({LOW, HIGH}, {HIGH: 1})


def test_a_segment_truncated_before_it_was_read_is_a_loss(broker, stream, new_reader):
    reader = new_reader(maxBytesPerTrigger="40")
    at, _ = batch(reader, reader.initialOffset())
    stream.split()
    stream.seal()
    broker.delete(FIRST)
    broker.write(HIGH, LINE)
    with pytest.raises(StreamTruncated, match=re.escape(f"segment {FIRST} was read through 40 and is gone")):
        batch(reader, at)
    with capture_logs() as logs:
        end, rows = batch(new_reader(failOnDataLoss="false"), at)
    assert (end.keys(), rows) == ({LOW, HIGH}, {HIGH: 1})
    assert [(each["journal"], each["begin"]) for each in logs if each["event"] == "source.content_lost"] == [
        (FIRST, 40)
    ]


def test_reading_begins_at_the_truncation_of_a_stream(broker, stream, new_reader):
    reader = new_reader(maxBytesPerTrigger="40")
    at, _ = batch(reader, reader.initialOffset())
    stream.first = replace(stream.first, begin=56)
    broker.set_segment(STREAM, stream.first)
    with pytest.raises(OffsetJump):
        batch(reader, at)
    _, rows = batch(new_reader(failOnDataLoss="false"), at)
    assert rows == {FIRST: 3}
    fresh = new_reader()
    _, rows = batch(fresh, fresh.initialOffset())
    assert rows == {FIRST: 3}
    with SyncJournalClient.of(broker.config) as client:
        ranges, _ = plan_read(client, SourceOptions.parse({"endpoint": broker.endpoint, "stream": STREAM}))
    assert [(part.begin, part.end) for part in ranges[FIRST]] == [(56, 80)]


def test_a_query_from_latest_reads_all_content_after_a_concurrent_split(broker, stream, new_reader):
    stream.split()
    broker.write(LOW, LINE)
    reader = new_reader(startingOffsets="latest")
    at = reader.initialOffset()
    assert at.keys() == {FIRST}
    stream.seal()
    _, rows = batch(reader, at)
    assert rows == {LOW: 1}
