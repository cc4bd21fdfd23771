"""The reader of streaming queries with a broker that speaks the protocol, called as Spark does."""

import json
import os
import re
import time
from collections.abc import Callable

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType
from structlog.testing import capture_logs

from coranto.errors import CorruptData, InvalidInput, JournalRecreated, OffsetJump
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.spark.streaming.reader import JournalStreamReader

ONE, TWO = "a/topic/one", "a/topic/two"


@pytest.fixture
def publisher(broker) -> Callable[[], SyncPublisher]:
    def make() -> SyncPublisher:
        return SyncPublisher(
            broker.write,
            producer=new_producer_id(os.urandom),
            clock=ProducerClock(time.time_ns),
            framing=JsonLines(),
        )

    return make


@pytest.fixture
def new_reader(broker):
    made: list[JournalStreamReader] = []

    def make(**options: str) -> JournalStreamReader:
        options = {"endpoint": broker.endpoint, "selector": "name:prefix=a/topic/", **options}
        source = JournalDataSource(options)
        schema = StructType().add("n", "integer").add("_journal", "string")
        made.append(source.streamReader(schema))
        return made[-1]

    yield make
    for reader in made:
        reader.stop()


def as_kept(offset):
    """Return an offset as Spark returns it to the source."""
    return json.loads(json.dumps(offset))


def read(reader: JournalStreamReader, start, end) -> list[tuple[str, int]]:
    return sorted(
        (row["_journal"], row["n"])
        for partition in reader.partitions(as_kept(start), as_kept(end))
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    )


def next_batch(reader: JournalStreamReader, start):
    """Return the end of the next batch, and its rows."""
    end = reader.latestOffset(as_kept(start), reader.getDefaultReadLimit())
    return end, read(reader, start, end)


def test_batches_follow_commits_and_include_new_journals(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    reader, open_for_long, other = new_reader(startingOffsets="earliest"), publisher(), publisher()
    open_for_long.add(ONE, {"n": 1})
    open_for_long.flush()
    other.publish(ONE, {"n": 2})
    other.flush()

    first, rows = next_batch(reader, reader.initialOffset())
    assert rows == [(ONE, 2)]
    again, rows = next_batch(reader, first)
    assert (again, rows) == (first, [])

    open_for_long.commit()
    broker.create("a/topic/zero")
    other.publish("a/topic/zero", {"n": 3})
    other.flush()
    second, rows = next_batch(reader, first)
    assert rows == [(ONE, 1), ("a/topic/zero", 3)]
    assert set(second) == {ONE, TWO, "a/topic/zero"}

    # A restarted process plans the same batches from the checkpoint.
    assert read(new_reader(startingOffsets="earliest"), reader.initialOffset(), first) == [(ONE, 2)]
    assert read(new_reader(startingOffsets="earliest"), first, second) == rows


def test_content_written_between_starts_of_a_query_from_latest_is_not_lost(broker, publisher, new_reader):
    broker.create(ONE)
    one = publisher()
    one.publish(ONE, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="latest")
    start = reader.initialOffset()
    one.publish(ONE, {"n": 2})
    one.flush()
    end, rows = next_batch(reader, start)
    assert rows == [(ONE, 2)]

    # The query dies before the batch is committed. Spark keeps only its end, and requests the initial offset again.
    restarted = new_reader(startingOffsets="latest")
    later = restarted.initialOffset()
    assert later != start
    assert read(restarted, later, end) == [(ONE, 2)]


def test_byte_and_message_limits_hold_and_once_reads_everything(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    one = publisher()
    for n in range(10):
        one.publish(ONE, {"n": n})
        one.publish(TWO, {"n": n})
    one.flush()

    reader = new_reader(startingOffsets="earliest", maxOffsetsPerTrigger="4")
    offset, batches = reader.initialOffset(), []
    while True:
        offset, rows = next_batch(reader, offset)
        if not rows:
            break
        batches.append(rows)
    assert [len(rows) for rows in batches] == [4] * 5
    assert sorted(row for rows in batches for row in rows) == sorted(
        (journal, n) for journal in (ONE, TWO) for n in range(10)
    )

    reader = new_reader(startingOffsets="earliest", maxBytesPerTrigger="100")
    start = reader.initialOffset()
    assert next_batch(reader, start)[1] == [(ONE, 0), (TWO, 0)]
    assert len(read(reader, start, reader.latestOffset(as_kept(start), ReadAllAvailable()))) == 20


def test_a_transaction_larger_than_a_batch_is_delivered_in_parts_over_restarts(broker, publisher, new_reader):
    broker.create(ONE)
    open_for_long, other = publisher(), publisher()
    for n in range(40):
        open_for_long.add(ONE, {"n": n})
        open_for_long.flush()
        if n == 20:
            other.publish(ONE, {"n": 100})
            other.flush()
    open_for_long.commit()
    other.publish(ONE, {"n": 101})
    other.flush()
    options = {"maxBytesPerTrigger": "1000", "startingOffsets": "earliest"}
    reader, batches = new_reader(**options), []
    reader.prepareForTriggerAvailableNow()
    at = reader.initialOffset()
    while True:
        end, rows = next_batch(reader, at)
        if as_kept(end) == as_kept(at):
            break
        assert read(new_reader(**options), at, end) == rows, "as after a restart"
        batches.append([n for _, n in rows])
        at = end

    delivered = [n for batch in batches for n in batch]
    assert sorted(delivered) == [*range(40), 100, 101]
    assert [n for n in delivered if n < 100] == list(range(40))
    assert max(len(batch) for batch in batches) < 20


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_batch_waits_for_enough_messages_only_for_a_limited_time(broker, publisher, new_reader, isolation):
    broker.create(ONE)
    options = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "3", "isolation": isolation}
    patient, hasty = new_reader(**options), new_reader(**options, maxTriggerDelay="0s")
    one = publisher()
    for n in range(2):
        one.publish(ONE, {"n": n})
    one.flush()

    start = patient.initialOffset()
    assert patient.latestOffset(as_kept(start), patient.getDefaultReadLimit()) == start
    assert len(next_batch(hasty, start)[1]) == 2

    one.publish(ONE, {"n": 2})
    one.flush()
    assert len(next_batch(patient, start)[1]) == 3


def test_available_now_ends_at_its_initial_heads_without_waiting(broker, publisher, new_reader):
    broker.create(ONE)
    one = publisher()
    one.publish(ONE, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="earliest", minOffsetsPerTrigger="100")
    reader.prepareForTriggerAvailableNow()
    one.publish(ONE, {"n": 2})
    one.flush()
    broker.create(TWO)

    end, rows = next_batch(reader, reader.initialOffset())
    assert (rows, set(end)) == ([(ONE, 1)], {ONE})
    assert next_batch(reader, end) == (end, [])


def test_progress_reports_the_heads(broker, publisher, new_reader):
    broker.create(ONE)
    one = publisher()
    one.publish(ONE, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="latest")

    assert reader.reportLatestOffset() is None
    assert reader.initialOffset() == {ONE: broker.head(ONE)} == reader.reportLatestOffset()


def test_a_deleted_or_recreated_or_truncated_journal_is_an_error(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    one = publisher()
    one.publish(ONE, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="earliest")
    end, _ = next_batch(reader, reader.initialOffset())

    made = broker.fake.journals.pop(ONE)
    with pytest.raises(
        CorruptData, match=f"journal {ONE} was read through {made.head}, but was deleted or is not selected any more"
    ):
        next_batch(reader, end)
    broker.create(ONE)
    broker.write(ONE, made.content * 2)
    with pytest.raises(CorruptData, match="it was deleted and created again"):
        next_batch(reader, end)
    broker.fake.journals[ONE] = made
    assert next_batch(reader, end) == (end, [])
    made.roll()
    broker.write(ONE, made.content)
    made.roll()
    made.drop_before(made.head)
    made.stored = []
    with pytest.raises(OffsetJump, match=f"journal {ONE} has no content in"):
        next_batch(reader, end)


def test_unknown_journals_in_starting_offsets_are_refused(broker, new_reader):
    broker.create(ONE)

    with pytest.raises(InvalidInput, match="startingOffsets: names a/topic/won"):
        new_reader(startingOffsets='{"a/topic/won": 5}').initialOffset()
    assert new_reader(startingOffsets='{"a/topic/one": 0}').initialOffset() == {ONE: 0}


def lost(logs) -> list[tuple[str, int, int, bool]]:
    return [
        (each["journal"], each["begin"], each["end"], each["recreated"])
        for each in logs
        if each["event"] == "source.content_lost"
    ]


def test_a_query_may_skip_content_removed_by_retention_and_reports_it_once(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    one, fake = publisher(), broker.fake.journals[ONE]
    for n in (1, 2, 3):
        one.publish(ONE, {"n": n})
        one.flush()
        fake.roll()
    reader = new_reader(startingOffsets="earliest", maxOffsetsPerTrigger="1", failOnDataLoss="false")
    first, rows = next_batch(reader, reader.initialOffset())
    assert rows == [(ONE, 1)]
    begin, end = fake.stored[0].fragment.end, fake.stored[1].fragment.end

    fake.drop_before(end)
    with capture_logs() as logs:
        second, rows = next_batch(reader, first)
        # The query dies before this batch is committed, and plans it again.
        restarted = new_reader(startingOffsets="earliest", failOnDataLoss="false")
        assert read(restarted, first, second) == rows == [(ONE, 3)]
        assert next_batch(reader, second) == (second, [])
    assert lost(logs) == [(ONE, begin, end, False)]

    one.publish(ONE, {"n": 4})
    one.flush()
    for each in (reader, restarted):
        assert next_batch(each, second)[1] == [(ONE, 4)]


def test_a_planned_batch_that_lost_content_delivers_the_rest(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    one, fake = publisher(), broker.fake.journals[ONE]
    for n in (1, 2):
        one.publish(ONE, {"n": n})
        one.publish(TWO, {"n": n})
        one.flush()
        fake.roll()
    reader = new_reader(startingOffsets="earliest", failOnDataLoss="false")
    start = reader.initialOffset()
    end, _ = next_batch(reader, start)

    fake.drop_before(fake.stored[0].fragment.end)
    assert read(new_reader(failOnDataLoss="false"), start, end) == [(ONE, 2), (TWO, 1), (TWO, 2)]
    with pytest.raises(OffsetJump):
        read(new_reader(), start, end)
    fake.stored = []
    assert read(new_reader(failOnDataLoss="false"), start, end) == [(TWO, 1), (TWO, 2)]


def test_a_query_may_continue_with_a_recreated_journal_and_without_a_deleted_one(broker, publisher, new_reader):
    broker.create(ONE, TWO)
    one = publisher()
    for journal in (ONE, TWO):
        one.publish(journal, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="earliest", failOnDataLoss="false")
    first, _ = next_batch(reader, reader.initialOffset())

    del broker.fake.journals[TWO]
    broker.create(ONE)
    publisher().publish(ONE, {"n": 2})
    again = publisher()
    again.publish(ONE, {"n": 3})
    again.flush()
    with capture_logs() as logs:
        second, rows = next_batch(reader, first)
    assert rows == [(ONE, 3)]
    assert [(journal, recreated) for journal, _, _, recreated in lost(logs)] == [(ONE, True)]
    assert read(new_reader(failOnDataLoss="false"), first, second) == rows
    assert second[TWO] == first[TWO]
    assert next_batch(reader, second) == (second, [])


def test_a_journal_is_known_by_its_id_not_by_the_etcd_revision_that_created_it(broker, publisher, new_reader):
    broker.fake.has_ids = True
    broker.create(ONE)
    one = publisher()
    one.publish(ONE, {"n": 1})
    one.flush()
    reader = new_reader(startingOffsets="earliest")
    first, _ = next_batch(reader, reader.initialOffset())
    made = broker.fake.journals[ONE]
    assert first[ONE]["journal_id"] == made.journal_id

    made.create_revision += 7  # It was recreated by an apply after etcd was restored.
    one.publish(ONE, {"n": 2})
    one.flush()
    second, rows = next_batch(new_reader(startingOffsets="earliest"), first)
    assert rows == [(ONE, 2)]
    assert read(new_reader(), first, second) == rows

    broker.create(ONE)
    again = broker.fake.journals[ONE]
    again.create_revision = made.create_revision
    other = publisher()
    for n in range(10, 20):
        other.publish(ONE, {"n": n})
    other.flush()
    with pytest.raises(JournalRecreated, match="new checkpoint"):
        next_batch(new_reader(startingOffsets="earliest"), second)
    with pytest.raises(JournalRecreated):
        read(new_reader(), first, second)
    with capture_logs() as logs:
        third, rows = next_batch(new_reader(failOnDataLoss="false"), second)
    assert rows == [(ONE, n) for n in range(10, 20)]
    assert third[ONE]["journal_id"] == again.journal_id
    assert lost(logs) == [(ONE, second[ONE]["offset"], again.head, True)]


def test_a_query_stops_at_lost_content_and_may_continue_at_the_lower_head(broker, publisher, new_reader):
    broker.fake.has_ids = True
    broker.create(ONE)
    made, one = broker.fake.journals[ONE], publisher()

    def publish(*numbers: int) -> int:
        for n in numbers:
            one.publish(ONE, {"n": n})
        one.flush()
        return made.head

    publish(1)
    reader = new_reader(startingOffsets="earliest")
    first, _ = next_batch(reader, reader.initialOffset())
    kept = publish(2)
    publish(3, 4)
    second, rows = next_batch(reader, first)
    assert rows == [(ONE, 2), (ONE, 3), (ONE, 4)]
    made.fall(kept)
    head = publish(*range(10, 20))
    assert head > second[ONE]["offset"]

    for start, end in ((first, second), (second, None)):
        with pytest.raises(JournalRecreated, match=f"lost its content from offset {kept} on"):
            read(new_reader(), start, end) if end else next_batch(new_reader(), start)
    with capture_logs() as logs:
        again = new_reader(failOnDataLoss="false")
        assert read(again, first, second) == [(ONE, 2)], "the rest of a batch that Spark repeats"
        third, rows = next_batch(again, second)
    assert rows == [(ONE, n) for n in range(10, 20)]
    assert read(new_reader(failOnDataLoss="false"), second, third) == rows
    assert lost(logs) == [(ONE, second[ONE]["offset"], head, True)]
    assert third[ONE]["journal_id"] == made.journal_id
    publish(20)
    assert next_batch(new_reader(), third)[1] == [(ONE, 20)]
    _, rows = next_batch(new_reader(startingOffsets="earliest"), first)
    assert [n for _, n in rows] == [2, *range(10, 21)], "a position before the loss stays valid"


def test_a_query_continues_in_a_journal_with_the_same_content_as_advised(broker, publisher, new_reader):
    broker.fake.has_ids = True
    broker.create(ONE)
    one = publisher()
    for n in (1, 2):
        one.publish(ONE, {"n": n})
    one.flush()
    reader = new_reader(startingOffsets="earliest")
    start = reader.initialOffset()
    first, _ = next_batch(reader, start)
    made = broker.fake.journals[ONE]
    content = made.content
    one.publish(ONE, {"n": 3})
    one.flush()
    second, rows = next_batch(reader, first)  # Spark has recorded the batch, and the query ends before it is done.
    content += made.content[len(content) :]
    broker.create(ONE)
    broker.write(ONE, content)
    two = publisher()
    two.publish(ONE, {"n": 4})
    two.flush()
    with pytest.raises(JournalRecreated) as error:
        next_batch(new_reader(), second)
    (option, value) = re.search(r"set the option (\w+)=(\S+) of the source", str(error.value)).groups()
    with pytest.raises(JournalRecreated):
        next_batch(new_reader(**{option: f"other, {value}x"}), second)
    again = new_reader(**{option: value})
    assert read(again, first, second) == rows == [(ONE, 3)]
    third, rows = next_batch(again, second)
    assert rows == [(ONE, 4)]
    assert third[ONE]["journal_id"] == broker.fake.journals[ONE].journal_id
    assert next_batch(new_reader(), third) == (third, []), "the checkpoint has the current id"
    _, rows = next_batch(new_reader(**{option: value}), second)
    assert rows == [(ONE, 4)]


def test_a_query_that_has_read_nothing_detects_a_recreated_journal(broker, publisher, new_reader):
    broker.fake.has_ids = True

    def create(*numbers):
        broker.create(ONE)
        one = publisher()
        for n in numbers:
            one.publish(ONE, {"n": n})
        one.flush()
        return broker.fake.journals[ONE]

    before = create(1, 2)
    latest = new_reader(startingOffsets="latest")
    start = latest.initialOffset()
    given = {ONE: {"offset": before.head, "journal_id": before.journal_id}}
    assert start == given == latest.reportLatestOffset()
    create(*range(10, 20))
    for options in ({"startingOffsets": "latest"}, {"startingOffsets": json.dumps(given)}):
        with pytest.raises(JournalRecreated, match="failOnDataLoss=false"):
            next_batch(new_reader(**options), start)
        with capture_logs() as logs:
            _, rows = next_batch(new_reader(**options, failOnDataLoss="false"), start)
        assert rows == [(ONE, n) for n in range(10, 20)]
        assert lost(logs) == [(ONE, before.head, broker.fake.journals[ONE].head, True)]
    assert new_reader(startingOffsets=json.dumps(given)).initialOffset() == given


def test_a_query_delivers_the_rest_of_a_transaction_partly_removed_by_retention(
    broker, publisher, new_reader, tmp_path
):
    broker.create(ONE)
    slow, fake = publisher(), broker.fake.journals[ONE]
    for n in (1, 2):
        slow.add(ONE, {"n": n})
        slow.flush()
        fake.roll(tmp_path)  # Reads continue only at stored content.
    reader = new_reader(startingOffsets="earliest", failOnDataLoss="false")
    first, rows = next_batch(reader, reader.initialOffset())
    assert rows == []

    fake.drop_before(fake.stored[0].fragment.end)
    slow.commit()
    with pytest.raises(OffsetJump):
        next_batch(new_reader(startingOffsets="earliest"), first)
    with capture_logs() as logs:
        second, rows = next_batch(reader, first)
    assert rows == [(ONE, 2)]
    assert read(new_reader(failOnDataLoss="false"), first, second) == rows
    assert "source.transaction_lost_in_part" in [each["event"] for each in logs]
