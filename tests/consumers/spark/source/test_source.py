"""`format("journal")` in a real Spark, with a broker that speaks the protocol."""

import json
import os
import time
from uuid import UUID

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from structlog.testing import capture_logs

from coranto.errors import CorruptMessage, InvalidInput, JournalRecreated
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher, TransactionBuilder
from coranto.messages.uuids import Flags, ProducerClock, new_producer_id
from coranto.offsets import JournalOffset, vector_to_json
from coranto_consumers.spark.source.data_source import JournalDataSource

ONE, TWO = "a/topic/one", "a/topic/two"


@pytest.fixture
def topic(broker):
    """Two journals, each with ten committed messages (two of them twice), five rolled back and five pending."""
    broker.create(ONE, TWO)
    sent = {ONE: [], TWO: []}

    def append(journal: str, content: bytes) -> None:
        broker.write(journal, content)
        sent[journal].append(content)

    def publisher() -> SyncPublisher:
        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        return SyncPublisher(append, producer=producer, clock=clock, framing=JsonLines())

    first, second = publisher(), publisher()
    for n in range(10):
        for journal in (ONE, TWO):
            first.add(journal, {"n": n, "text": "é\n"})
    first.commit()
    for n in range(100, 105):
        for journal in (ONE, TWO):
            second.add(journal, {"n": n})
    second.flush()
    second.rollback()
    for journal in (ONE, TWO):
        append(journal, b"".join(sent[journal][0].splitlines(keepends=True)[:2]))
    third = publisher()
    for n in range(200, 205):
        for journal in (ONE, TWO):
            third.add(journal, {"n": n})
    third.flush()
    return broker


def load(spark, broker, **options):
    if not {"assign", "subscribe", "subscribePattern", "selector"} & set(options):
        options["selector"] = "name:prefix=a/topic/"
    return spark.read.format("journal").options(endpoint=broker.endpoint, **options).load()


def test_a_read_yields_committed_messages_once(spark, topic):
    frame = load(spark, topic)

    assert frame.schema.simpleString() == (
        "struct<journal:string,offset:bigint,next_offset:bigint,producer:binary,clock:bigint,flags:int,value:string>"
    )
    rows = frame.collect()
    for journal in (ONE, TWO):
        mine = sorted((row for row in rows if row.journal == journal), key=lambda row: row.offset)
        assert [json.loads(row.value)["n"] for row in mine] == list(range(10))
        assert json.loads(mine[0].value)["text"] == "é\n"
        assert {row.flags for row in mine} == {Flags.CONTINUE_TXN}
        assert len({bytes(row.producer) for row in mine}) == 1
        assert [row.clock for row in mine] == sorted(row.clock for row in mine)
        content = topic.content(journal)
        assert all(content[row.offset : row.next_offset] == row.value.encode() + b"\n" for row in mine)


def test_the_source_has_two_names_and_short_options_for_its_journals(spark, topic):
    rows = sorted(load(spark, topic).collect())
    for options in ({"prefix": "a/topic/"}, {"selector": "name:prefix=a/topic/"}):
        assert sorted(spark.read.format("coranto").options(endpoint=topic.endpoint, **options).load().collect()) == rows
    one = spark.read.format("coranto").options(endpoint=topic.endpoint, journal=ONE).load()
    assert sorted(one.collect()) == [row for row in rows if row.journal == ONE]


def test_an_uncommitted_read_yields_every_line_in_many_tasks(spark, topic):
    frame = load(spark, topic, isolation="read_uncommitted", maxBytesPerPartition="300", assign=json.dumps([ONE]))

    rows = sorted(frame.collect(), key=lambda row: row.offset)

    assert frame.rdd.getNumPartitions() > 5
    assert b"".join(row.value.encode() + b"\n" for row in rows) == topic.content(ONE)
    assert [row.flags for row in rows].count(Flags.ACK_TXN) == 2


@pytest.mark.parametrize(
    ("options", "at_least"),
    [({"minPartitions": "7"}, 7), ({"maxRecordsPerPartition": "3"}, 9), ({"maxBytesPerPartition": "300"}, 5)],
)
def test_a_committed_read_of_one_journal_may_have_many_tasks(spark, topic, options, at_least):
    whole = load(spark, topic, assign=json.dumps([ONE]))
    frame = load(spark, topic, assign=json.dumps([ONE]), **options)

    assert whole.rdd.getNumPartitions() == 1
    assert at_least <= frame.rdd.getNumPartitions() <= 3 * at_least
    assert sorted(frame.collect()) == sorted(whole.collect())


def test_columns_can_be_selected_and_values_can_be_bytes(spark, topic):
    reader = spark.read.format("journal").option("endpoint", topic.endpoint).option("selector", "name:prefix=a/topic/")

    acknowledgement = topic.content(ONE).index(b'"}}\n')  # The first one has no fields after the UUID.
    asked = reader.schema("n INT, _journal STRING, _commit_offset BIGINT").load().where(f"_journal = '{ONE}'").collect()
    assert [(row.n, topic.content(ONE).find(b'"}}\n', row._commit_offset)) for row in asked] == [
        (n, acknowledgement) for n in range(10)
    ]
    with pytest.raises(PySparkException, match="only committed reads know the column commit_offset"):
        reader.option("isolation", "read_uncommitted").schema("_commit_offset BIGINT").load().count()
    reader.option("isolation", "read_committed")
    frame = reader.schema("value BINARY, offset BIGINT").load()
    row = frame.orderBy("offset").first()
    assert isinstance(row.value, (bytes, bytearray))
    assert frame.toArrow().schema.names == ["value", "offset"]
    assert frame.toArrow().schema.field("value").type == pa.binary()


TYPED = "n INT, text STRING, _offset BIGINT, _corrupt_record STRING"


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_lines_are_parsed_into_the_columns_of_a_schema(spark, topic, isolation):
    reader = spark.read.format("journal").options(endpoint=topic.endpoint, subscribe=ONE, isolation=isolation)
    raw = {row.offset: row for row in load(spark, topic, subscribe=ONE, isolation=isolation).collect()}

    rows = reader.schema(TYPED).load().collect()

    assert {row._offset for row in rows} == set(raw)
    for row in rows:
        fields = json.loads(raw[row._offset].value)
        assert (row.n, row.text, row._corrupt_record) == (fields.get("n"), fields.get("text"), None)


def test_fields_of_messages_may_have_the_names_of_the_sources_columns(spark, broker):
    broker.create(ONE)
    broker.write(ONE, b'{"value":1.5,"offset":"here"}\n')

    read = in_process(broker, "value DOUBLE, offset STRING, _value BINARY, _offset BIGINT", parse="json")

    assert read.to_pylist() == [
        {"value": 1.5, "offset": "here", "_value": b'{"value":1.5,"offset":"here"}', "_offset": 0}
    ]


def test_values_that_do_not_fit_are_null_next_to_their_line_or_an_error(spark, broker):
    broker.create(ONE)
    values = [
        b'"n":1,"text":"a"}',
        b'"n":"no","text":"b"}',
        b'"n":3,"text":"c"} ',
        b'"n":4,"text":"\xff"}',
        b'"n":NaN}',
    ]
    lines = [b'{"_meta":{"uuid":"%s"},%s' % (str(UUID(int=0)).encode(), value) for value in values]
    broker.write(ONE, b"".join(line + b"\n" for line in lines))

    read = in_process(broker, TYPED).to_pylist()

    assert [(row["n"], row["text"]) for row in read] == [(1, "a"), (None, "b"), (3, "c"), (None, None), (None, None)]
    misfits = [None if n in (0, 2) else line.decode(errors="replace") for n, line in enumerate(lines)]
    assert [row["_corrupt_record"] for row in read] == misfits
    assert [row["_offset"] for row in read] == [sum(len(line) + 1 for line in lines[:n]) for n in range(5)]
    with pytest.raises(CorruptMessage, match=f"offset {len(lines[0]) + 1}: its value does not fit n int, text string"):
        in_process(broker, TYPED, mode="failfast")


@pytest.mark.parametrize("ddl", ["n INT NOT NULL", "r STRUCT<x: INT NOT NULL>", "l ARRAY<STRUCT<x: INT NOT NULL>>"])
def test_columns_that_must_not_be_null_are_refused(spark, broker, ddl):
    """Spark would end the read at the first null, and every retry too."""
    broker.create(ONE)
    with pytest.raises(InvalidInput, match="or a part of it, is NOT NULL, and messages may lack fields"):
        in_process(broker, ddl)
    assert in_process(broker, "n INT, _offset BIGINT NOT NULL").num_rows == 0


def test_journals_without_content_yield_nothing(spark, broker):
    broker.create(ONE)

    assert load(spark, broker).count() == 0
    assert load(spark, broker, isolation="read_uncommitted").count() == 0


def test_fragments_are_read_from_their_store(spark, topic, tmp_path):
    topic.fake.journals[ONE].roll(tmp_path)
    topic.fake.journals[ONE].stored[0].content = b""  # The broker has no content.

    rows = load(spark, topic, fileRoot=str(tmp_path)).where(f"journal = '{ONE}'").collect()

    assert sorted(json.loads(row.value)["n"] for row in rows) == list(range(10))


def test_journals_are_selected_by_a_pattern_of_full_names(topic):
    topic.create("a/topic/other", content_type="text/csv")

    read = in_process(topic, subscribePattern="a/topic/(one|two)")

    assert set(read["journal"].to_pylist()) == {ONE, TWO}
    with pytest.raises(InvalidInput, match="no journal has a name like 'topic/one'"):
        in_process(topic, subscribePattern="topic/one")
    with pytest.raises(InvalidInput, match="a/topic/other has content-type text/csv"):
        in_process(topic, subscribePattern="a/.*")


def in_process(broker, schema="", **options) -> pa.Table:
    """Read by the source's own classes, in this process and without Spark."""
    if not {"assign", "subscribe", "subscribePattern", "selector"} & set(options):
        options["selector"] = "name:prefix=a/topic/"
    source = JournalDataSource({"endpoint": broker.endpoint, **options})
    reader = source.reader(StructType.fromDDL(schema) if schema else source.schema())
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return pa.Table.from_batches(batches) if batches else pa.table({})


def test_offsets_bound_a_read(topic):
    lines = topic.content(ONE).splitlines(keepends=True)
    second, third = len(lines[0]), len(lines[0] + lines[1])

    def offsets(starting: int, ending: int) -> list[int]:
        bounds = {"startingOffsets": json.dumps({ONE: starting}), "endingOffsets": json.dumps({ONE: ending})}
        read = in_process(topic, isolation="read_uncommitted", subscribe=ONE, **bounds)
        return read["offset"].to_pylist() if read.num_rows else []

    assert offsets(second, third) == [second]
    assert offsets(1, third) == [second]
    assert len(offsets(-2, -1)) == len(lines)
    assert offsets(third, third) == []


def test_offsets_of_an_earlier_journal_are_an_error_or_a_reported_loss(broker):
    broker.fake.has_ids = True

    def create(*numbers: int) -> JournalOffset:
        broker.create(ONE)
        for n in numbers:
            broker.write(ONE, b'{"n": %d}\n' % n)
        made = broker.fake.journals[ONE]
        return JournalOffset(made.head, made.journal_id)

    def read(**options) -> list[bytes]:
        given = {
            name: value if isinstance(value, str) else json.dumps(vector_to_json(value))
            for name, value in options.items()
        }
        read = in_process(broker, isolation="read_uncommitted", subscribe=ONE, **given)
        return read["value"].to_pylist() if read.num_rows else []

    old = {ONE: create(1, 2)}
    new = {ONE: create(*range(10, 20))}
    assert len(read(startingOffsets=new)) == 0
    assert len(read(endingOffsets=new)) == len(read(asOf=new)) == 10
    assert len(read(startingOffsets={ONE: int(old[ONE])})) == 8, "without an id, it applies to any journal"
    for option in ("startingOffsets", "endingOffsets", "asOf"):
        with pytest.raises(JournalRecreated, match=old[ONE].journal_id):
            read(**{option: old})
        with capture_logs() as logs:
            found = read(**{option: old}, failOnDataLoss="false")
        (lost,) = [each for each in logs if each["event"] == "source.content_lost"]
        assert (lost["journal"], lost["journal_id_before"]) == (ONE, old[ONE].journal_id)
        assert lost["journal_id"] == new[ONE].journal_id
        if option == "startingOffsets":
            assert (len(found), lost["begin"], lost["recreated"]) == (10, old[ONE], True)
        else:
            assert (found, lost["begin"], lost["end"]) == ([], 0, old[ONE]), "nothing is read instead of lost content"


def test_an_unfinished_line_at_the_head_is_not_read(broker):
    broker.create(ONE)
    broker.write(ONE, b'{"n":1}\n{"n":2')

    assert in_process(broker)["value"].to_pylist() == ['{"n":1}']


def test_batches_are_bounded(broker):
    broker.create(ONE)
    broker.write(ONE, b'{"n":1}\n' * 100_000)
    reader = JournalDataSource({"endpoint": broker.endpoint, "subscribe": ONE, "isolation": "read_uncommitted"})
    reader = reader.reader(reader.schema())

    sizes = [batch.num_rows for partition in reader.partitions() for batch in reader.read(partition)]

    assert sum(sizes) == 100_000
    assert max(sizes) == 32_768


WIDE = """day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, price DECIMAL(20,4), weights ARRAY<FLOAT>,
    place STRUCT<city: STRING, since: DATE>, counts MAP<STRING, INT>"""
WIDE_LINES = (
    b'{"day":"2024-02-29","at":"2024-03-01T10:00:00","local":"2024-03-01T10:00:00","price":1234567890123456.0001}',
    b'{"weights":[0.1,null],"place":{"city":"Bern","since":"1191-01-01"},"counts":{"a":1,"b":null}}',
    b'{"day":"soon","place":{"city":"Basel","since":7},"counts":{"a":"x"}}',
)


@pytest.mark.parametrize("left_out", ["", ", counts MAP<STRING, INT>"])
def test_dates_decimals_and_nested_columns_match_from_json(spark, broker, left_out):
    broker.create(ONE)
    broker.write(ONE, b"".join(line + b"\n" for line in WIDE_LINES))
    columns = WIDE.removesuffix(left_out) if left_out else WIDE
    options = {"endpoint": broker.endpoint, "subscribe": ONE}

    found = (
        spark.read.format("journal")
        .options(**options, timeZone="Europe/Zurich")
        .schema(f"{columns}, _corrupt_record STRING, _offset BIGINT")
        .load()
        .sort("_offset")
        .drop("_offset")
        .toArrow()
    )

    asked, corrupt = f"{columns}, c STRING", {"columnNameOfCorruptRecord": "c", "timeZone": "Europe/Zurich"}
    raw = spark.read.format("journal").options(**options).load().sort("offset")
    expected = raw.select(F.from_json("value", asked, corrupt).alias("v")).select("v.*").toArrow()
    assert found.to_pylist() == [
        {("_corrupt_record" if name == "c" else name): value for name, value in row.items()}
        for row in expected.to_pylist()
    ]
    assert found["_corrupt_record"].to_pylist() == [None, None, WIDE_LINES[2].decode()]
    with pytest.raises(CorruptMessage, match=f"at offset {len(WIDE_LINES[0] + WIDE_LINES[1]) + 2}: its value does not"):
        in_process(broker, schema=columns, mode="FAILFAST", timeZone="UTC")
    with pytest.raises(InvalidInput, match="option timeZone: a TIMESTAMP of a message names no time zone"):
        in_process(broker, schema=columns)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"isolatoin": "read_committed"}, "did you mean isolation?"),
        ({"selector": "name:prefix=b/"}, "no journal matches 'name:prefix=b/'"),
        ({"assign": '["a/topic/one", "b/none"]'}, "there is no journal b/none"),
        ({"startingOffsets": '{"a/topic/one": 0}'}, "must name exactly the journals that are read"),
        ({"endingOffsets": '{"a/topic/one": 999999, "a/topic/two": 0}'}, "[0, 999999) is not a range of a/topic/one"),
        ({"schema": "_offset STRING", "parse": "json"}, "column '_offset' is bigint, not string"),
        ({"schema": "at INTERVAL DAY"}, "column 'at' has interval day, which lines are not parsed into"),
        ({"timeZone": "Nowhere/Else"}, "option timeZone: 'Nowhere/Else' is not a time zone"),
        ({"schema": "offset INT"}, "column 'offset' is bigint, not int"),
        ({"schema": "value STRING, n BIGINT"}, "'value' is a column of the source, and 'n' a field of messages"),
        ({"schema": "value STRING, coranto_piece BIGINT"}, "'coranto_piece' a field of messages"),
    ],
)
def test_invalid_options_are_reported(spark, topic, options, problem):
    with pytest.raises(InvalidInput) as caught:
        in_process(topic, **options)
    assert problem in str(caught.value)


def test_corrupt_content_is_named_by_journal_and_offset(broker):
    broker.create(ONE)
    broker.write(ONE, b'{"n":1}\nnot json\n')

    with pytest.raises(CorruptMessage, match="journal a/topic/one at offset 8: not a line of JSON"):
        in_process(broker)


def test_text_that_is_not_utf8_can_only_be_read_as_bytes(spark, broker):
    broker.create(ONE)
    builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
    builder.add_outside(ONE, {"text": "x"})
    broker.write(ONE, builder.take(ONE, 1000).replace(b'"x"', b'"\xff"'))

    with pytest.raises(CorruptMessage, match="offset 0: not UTF-8"):
        in_process(broker)
    assert in_process(broker, schema="value BINARY").num_rows == 1


def test_journals_of_other_content_are_refused(broker):
    broker.create(ONE, content_type="text/csv")

    with pytest.raises(InvalidInput, match="journal a/topic/one has content-type text/csv"):
        in_process(broker)


def test_spark_propagates_errors(spark, topic):
    with pytest.raises(PySparkException, match=r"option isolatoin: .*; did you mean isolation\?"):
        load(spark, topic, isolatoin="read_committed")


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_many_small_journals_are_one_task_that_reads_each_once(spark, broker, isolation):
    names = [f"a/topic/{number:03}" for number in range(120)]
    broker.create(*names)
    for number, name in enumerate(names):
        publisher = broker.publisher_at(time.time_ns)
        publisher.add(name, {"n": number})
        publisher.commit()
    frame = load(spark, broker, isolation=isolation)
    assert frame.rdd.getNumPartitions() == 1
    before = broker.fake.count("Read")

    values = [json.loads(row.value) for row in sorted(frame.collect(), key=lambda row: (row.journal, row.offset))]

    assert [value["n"] for value in values if "n" in value] == list(range(120))
    assert broker.fake.count("Read") - before == 120
