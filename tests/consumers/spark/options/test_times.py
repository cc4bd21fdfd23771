"""Reads that begin and end at times."""

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from coranto.client import SyncJournalClient
from coranto.errors import ContentGone, InvalidInput
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.spark.source.planning import plan_read
from coranto_consumers.spark.streaming.reader import JournalStreamReader
from coranto_consumers.spark.streaming.stream_options import StreamOptions

ONE, TWO = "times/one", "times/two"
T0 = 1_700_000_000_000
HOUR = 3_600_000


@pytest.fixture
def journals(broker, tmp_path):
    """Two journals with a message an hour, in fragments of two, each stored at the time of its last message."""
    broker.create(ONE, TWO)
    now = [T0]
    for journal in (ONE, TWO):
        fake = broker.fake.journals[journal]
        producer = broker.publisher_at(lambda: now[0] * 1_000_000)
        for n in range(6):
            now[0] = T0 + n * HOUR
            producer.publish(journal, {"n": n})
            producer.flush()
            if n in (1, 3):
                fake.roll(tmp_path)
                stored = fake.stored[-1].fragment
                object.__setattr__(stored, "mod_time", now[0] // 1000)
        broker.write(journal, b'{"n":99}\n')
    return broker


def read(broker, **options) -> dict[str, list[int]]:
    given = {"endpoint": broker.endpoint, "selector": "name:prefix=times/", **options}
    source = JournalDataSource(given)
    reader = source.reader(source.schema())
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    found = {ONE: [], TWO: []}
    for row in pa.Table.from_batches(batches).to_pylist() if batches else []:
        found[row["journal"]].append(json.loads(row["value"])["n"])
    return {journal: sorted(numbers) for journal, numbers in found.items()}


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4, 5]),
        (T0, T0 + 6 * HOUR, [0, 1, 2, 3, 4, 5]),
        (T0 + 1, None, [1, 2, 3, 4, 5]),
        (T0 + 3 * HOUR, None, [3, 4, 5]),
        (None, T0 + 3 * HOUR, [0, 1, 2]),
        (T0 + 2 * HOUR, T0 + 5 * HOUR, [2, 3, 4]),
        (T0 + 9 * HOUR, None, []),
    ],
)
def test_a_time_range_selects_messages(journals, isolation, begin, end, expected):
    options = {"startingTimestamp": begin, "endingTimestamp": end}
    found = read(journals, isolation=isolation, **{name: str(at) for name, at in options.items() if at is not None})
    assert found == {ONE: [*expected, 99], TWO: [*expected, 99]}, "a message without a UUID has no time"


@pytest.mark.parametrize(
    ("as_of", "expected"),
    [
        (T0 - 1, []),
        (T0 + 2 * HOUR + 1, [0, 1, 2]),
        (T0 + 3 * HOUR - 1, [0, 1, 2]),
        (T0 + 9 * HOUR, [0, 1, 2, 3, 4, 5, 99]),
    ],
)
def test_a_point_in_time_equals_an_end_time_and_offsets(journals, as_of, expected):
    found = read(journals, asOf=str(as_of))
    assert found == {ONE: expected, TWO: expected}
    written = datetime.fromtimestamp(as_of / 1000, UTC)
    assert read(journals, asOf=written.isoformat()) == found
    with SyncJournalClient(journals.endpoint) as client:
        ends = client.moment("name:prefix=times/", as_of / 1000).ends
    assert read(journals, asOf=json.dumps(dict(ends))) == found


def test_lost_content_of_a_point_in_time_is_an_error_unless_allowed(journals):
    moment = {"asOf": str(T0 + 4 * HOUR + 1)}
    first = journals.fake.journals[ONE].stored[0].fragment.end
    journals.fake.journals[ONE].drop_before(first)
    with pytest.raises(ContentGone, match=rf"{ONE} \[0, {first}\)"):
        read(journals, **moment)
    assert read(journals, **moment, failOnDataLoss="false") == {ONE: [2, 3, 4], TWO: [0, 1, 2, 3, 4]}
    rest = read(journals, **moment, startingOffsets=json.dumps({ONE: first, TWO: 0}))
    assert rest == {ONE: [2, 3, 4], TWO: [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"asOf": "yesterday"}, "is not a time"),
        ({"asOf": "{"}, "nor JSON"),
        ({"asOf": json.dumps({ONE: -1})}, "is not an offset"),
        ({"asOf": json.dumps({"x": 1})}, "names x, which is not read"),
        ({"asOf": "5", "endingTimestamp": "5"}, "endingTimestamp is given, too"),
    ],
)
def test_invalid_points_in_time_are_refused(journals, options, problem):
    with pytest.raises(InvalidInput, match=problem):
        read(journals, **options)
    for name in ("asOf", "timestampAsOf"):
        with pytest.raises(InvalidInput, match="a streaming query has no end"):
            StreamOptions.parse({"endpoint": "a:1", "subscribe": ONE, name: "5"})


def test_times_may_be_given_by_journal(journals):
    found = read(
        journals,
        startingOffsetsByTimestamp=json.dumps({ONE: T0 + 4 * HOUR, TWO: T0}),
        endingOffsetsByTimestamp=json.dumps({ONE: T0 + 9 * HOUR, TWO: T0 + HOUR}),
    )
    assert found == {ONE: [4, 5, 99], TWO: [0, 99]}


def test_fragments_stored_before_the_time_are_not_read(journals):
    options = {"endpoint": journals.endpoint, "subscribe": ONE, "startingTimestamp": str(T0 + 3 * HOUR)}
    with SyncJournalClient.of(journals.config) as client:
        ranges, _ = plan_read(client, SourceOptions.parse(options))
    [part] = ranges[ONE]
    fragments = journals.fake.journals[ONE].stored
    assert part.begin == fragments[1].fragment.begin > 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"startingTimestamp": "yesterday"}, "neither a time in milliseconds nor JSON"),
        ({"startingTimestamp": "-1"}, "-1 is not a time"),
        ({"endingTimestamp": '{"times/one": 1}'}, "is not a time"),
        ({"startingOffsetsByTimestamp": '{"times/one": "x"}'}, "'x' is not a time"),
        ({"startingTimestamp": "1", "startingOffsets": "earliest"}, "startingOffsets is given, too"),
        ({"endingTimestamp": "1", "endingOffsetsByTimestamp": "{}"}, "endingOffsetsByTimestamp is given, too"),
        ({"startingOffsetsByTimestamp": '{"times/one": 1}'}, "has no time of times/two"),
    ],
)
def test_other_times_are_refused(journals, options, problem):
    with pytest.raises(InvalidInput, match=problem):
        read(journals, **options)


def stream(broker, **options) -> JournalStreamReader:
    source = JournalDataSource({"endpoint": broker.endpoint, "selector": "name:prefix=times/", **options})
    return source.streamReader(source.schema())


def batch(reader: JournalStreamReader, start) -> tuple[dict, dict[str, list[int]]]:
    """Return the end of a query's next batch, and its rows."""
    end = reader.latestOffset(json.loads(json.dumps(start)), reader.getDefaultReadLimit())
    found: dict[str, list[int]] = {}
    for part in reader.partitions(start, json.loads(json.dumps(end))):
        for rows in reader.read(part):
            for row in rows.to_pylist():
                found.setdefault(row["journal"], []).append(json.loads(row["value"])["n"])
    return end, {journal: sorted(numbers) for journal, numbers in sorted(found.items())}


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_query_begins_at_a_time_and_reads_later_journals_completely(journals, isolation):
    by_journal = {"startingOffsetsByTimestamp": json.dumps({ONE: T0 + 3 * HOUR, TWO: T0 + 5 * HOUR})}
    reader = stream(journals, isolation=isolation, **by_journal)
    try:
        begun = reader.initialOffset()
        assert begun[ONE] == journals.fake.journals[ONE].stored[1].fragment.begin > 0, "it fetches no older fragments"
        end, found = batch(reader, begun)
        assert found == {ONE: [3, 4, 5, 99], TWO: [5, 99]}
        journals.create("times/three")
        journals.write("times/three", b'{"n":7}\n')
        assert batch(reader, end)[1] == {"times/three": [7]}
    finally:
        reader.stop()


def test_a_query_begins_at_one_time_or_offset_and_has_no_end():
    given = {"endpoint": "127.0.0.1:1", "subscribe": ONE}
    with pytest.raises(InvalidInput, match="endingTimestamp: a streaming query has no end"):
        StreamOptions.parse({**given, "endingTimestamp": "1"})
    with pytest.raises(InvalidInput, match="startingOffsets: cannot be used with a starting time"):
        StreamOptions.parse({**given, "startingTimestamp": "1", "startingOffsets": "earliest"})
