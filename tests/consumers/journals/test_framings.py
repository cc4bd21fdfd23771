"""Journals whose messages are not lines of JSON: any lines, rows of CSV, and fixed frames."""

import json
import os
import time
from base64 import b64encode

import pytest
from pyspark.sql.types import StructType
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.csv_rows import CsvRows, TextRows
from coranto.messages.fixed_frame import FixedFrame, encode_frame
from coranto.messages.payloads import ProtobufPayload
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.journals.framings import CsvRecords, FixedRecords, chosen_framing
from coranto_consumers.spark import DeadLetters, Outputs, SparkConsumer, TableOutput, dead_letter_table
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.stores import SqlStore
from tests.consumers.spark.shop_protobuf import ORDER, descriptors

JOURNAL = "a/topic/one"
ROWS = CsvRows(TextRows(2), uuid_column=1)


PROTOBUF = {
    "framing": "fixed",
    "descriptorSet": b64encode(descriptors().SerializeToString()).decode(),
    "messageType": "shop.Order",
}


def write(broker, framing, messages) -> list[int]:
    """Publish two of three transactions, with a repeated append, leave one open, and return the committed messages."""
    broker.create(JOURNAL)
    committed = []
    for turn in range(4):
        begin = broker.head(JOURNAL)
        publisher = SyncPublisher(
            broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=framing
        )
        numbers = range(turn * 10, turn * 10 + 10)
        for n in numbers:
            publisher.add(JOURNAL, messages(n))
        publisher.flush()
        broker.write(JOURNAL, broker.content(JOURNAL)[begin:])
        if turn == 1:
            publisher.rollback()
        elif turn < 3:
            publisher.commit()
            committed += numbers
    return committed


def rows_of(broker, **options) -> list[dict]:
    source = JournalDataSource({"endpoint": broker.endpoint, "subscribe": JOURNAL, **options})
    reader = source.reader(source.schema())
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_rows_of_csv_are_read_as_committed_with_newlines_in_their_fields(broker):
    committed = write(broker, ROWS, lambda n: [str(n), f'a\n"{n}", b'])

    rows = rows_of(broker, framing="csv", csvColumns="3", csvUuidColumn="1")

    assert [ROWS.unmarshal(row["value"].encode()) for row in rows] == [[str(n), f'a\n"{n}", b'] for n in committed]
    content = broker.content(JOURNAL)
    assert all(content[row["offset"] : row["next_offset"]] == row["value"].encode() + b"\n" for row in rows)
    # From the begin of a row up to a row that begins before the end. Both offsets are within the journal.
    begin, end = rows[3]["offset"], rows[5]["offset"] + 1
    span = {"startingOffsets": f'{{"{JOURNAL}": {begin}}}', "endingOffsets": f'{{"{JOURNAL}": {end}}}'}
    csv = {"framing": "csv", "csvColumns": "3", "csvUuidColumn": "1"}
    assert [row["value"] for row in rows_of(broker, **csv, **span, isolation="read_uncommitted")] == [
        row["value"] for row in rows[3:6]
    ]
    with pytest.raises(CorruptMessage, match="a row of 4 columns was expected"):
        rows_of(broker, framing="csv", csvColumns="4")


def test_frames_of_protobuf_are_read_as_committed(broker):
    codec = ProtobufPayload(ORDER)
    committed = write(broker, FixedFrame(codec), lambda n: ORDER(n=n))

    assert [codec.decode(row["value"]).n for row in rows_of(broker, **PROTOBUF)] == committed


def test_all_frames_of_unknown_payloads_are_committed(broker):
    write(broker, FixedFrame(ProtobufPayload(ORDER, None)), lambda n: ORDER(n=n))

    assert len(rows_of(broker, framing="fixed")) == len(rows_of(broker, framing="fixed", isolation="read_uncommitted"))
    assert len(rows_of(broker, framing="fixed")) == 80


def test_lines_of_any_kind_are_read_unchanged(broker):
    broker.create(JOURNAL)
    broker.write(JOURNAL, b"one\n\n{two\nunfinished")

    assert [row["value"] for row in rows_of(broker, framing="lines", minPartitions="3")] == ["one", "", "{two"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"framing": "xml"}, "option framing: 'xml' is not one of json, lines, csv, fixed"),
        ({"framing": "csv"}, "option csvColumns: '' is not the number of columns"),
        ({"framing": "csv", "csvColumns": "2", "csvUuidColumn": "2"}, "neither none nor a column from 0 to 1"),
        ({"framing": "csv", "csvColumns": "2", "uuidPointer": "/id"}, "uuidPointer: is for framing=json, not for csv"),
        (
            {"framing": "fixed", "messageType": "shop.Order"},
            "messageType: goes together with descriptorFile or",
        ),
        ({**PROTOBUF, "descriptorSet": "%"}, "option descriptorSet: not base64"),
        ({**PROTOBUF, "descriptorSet": b64encode(b"none").decode()}, "not a set of file descriptors"),
        ({**PROTOBUF, "messageType": "shop.None"}, "no shop.None among the descriptors; there are .*shop.Order"),
        ({**PROTOBUF, "uuidField": "n"}, "has no field n of bytes or a string"),
        ({**PROTOBUF, "descriptorFile": "x.pb"}, "option descriptorFile: descriptorSet is given, too"),
        ({"framing": "fixed", "descriptorFile": "/none.pb", "messageType": "a.B"}, "/none.pb cannot be read: No such"),
        ({"framing": "fixed", "uuidField": "id"}, "option uuidField: is a field of the messageType"),
    ],
)
def test_options_that_do_not_match_the_framing_are_refused(options, problem):
    with pytest.raises(InvalidInput, match=problem):
        SourceOptions.parse({"endpoint": "localhost:8080", "subscribe": JOURNAL, **options})


CSV = {"framing": "csv", "csvColumns": "3", "csvUuidColumn": "1"}
KINDS = {
    "csv": (ROWS, CSV, lambda n: [str(n), f'a\n"{n}", b'], "n BIGINT, text STRING"),
    "protobuf": (
        FixedFrame(ProtobufPayload(ORDER)),
        PROTOBUF,
        lambda n: ORDER(n=n, text=f"a\n{n}"),
        "text STRING, n BIGINT",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_reads_records_as_committed_in_many_tasks_and_over_restarts(spark, broker, kind):
    framing, options, message, schema = KINDS[kind]
    committed = write(broker, framing, message)
    given = {"endpoint": broker.endpoint, "subscribe": JOURNAL, **options, "startingOffsets": "earliest"}

    def new_reader(**more):
        source = JournalDataSource({**given, **more})
        return source.streamReader(StructType.fromDDL(schema))

    reader = new_reader(maxOffsetsPerTrigger="17", maxBytesPerPartition="200")
    start, found, tasks = reader.initialOffset(), [], 0
    while True:
        end = json.loads(json.dumps(reader.latestOffset(start, reader.getDefaultReadLimit())))
        if end == start:
            break
        restarted = new_reader(maxBytesPerPartition="300")
        rows = [read_partitions(each, start, end) for each in (reader, restarted)]
        assert rows[0] == rows[1]
        restarted.stop()
        found += rows[0]
        tasks = max(tasks, max(len(part.parts) for part in reader.partitions(start, end)))
        start = end
    reader.stop()
    assert sorted(found) == [(n, f'a\n"{n}", b' if kind == "csv" else f"a\n{n}") for n in committed]
    assert tasks > 1
    every = new_reader(isolation="read_uncommitted")
    start = every.initialOffset()
    end = every.latestOffset(start, every.getDefaultReadLimit())
    assert end[JOURNAL]["offset"] == broker.head(JOURNAL)
    assert {n for n, _ in read_partitions(every, start, end)} >= set(range(40))
    every.stop()


def read_partitions(reader, start, end) -> list[tuple[int, str]]:
    parts = reader.partitions(start, end)
    rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
    return [(row["n"], row["text"]) for row in rows]


def write_misfits(broker, kind) -> tuple[dict[int, tuple[int, str]], dict[int, bytes]]:
    """Write good messages with bad ones between them. Return the values and the bad payloads, both by offset."""
    framing, _, message, _ = KINDS[kind]
    broker.create(JOURNAL)
    bad = {
        "csv": [b'7,,"a"b', b"8,,c,d", b"x,,e", b"9,zzz,f", b'10,,"\xff"'],
        "protobuf": [b"\xff\xff", b"\x0a\x03zzz", b"\x1a\x01\xff"],
    }[kind]
    good, found = {}, {}
    for n, payload in enumerate(bad):
        publisher = SyncPublisher(
            broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=framing
        )
        good[broker.head(JOURNAL)] = n
        publisher.publish(JOURNAL, message(n))
        publisher.flush()
        found[broker.head(JOURNAL)] = payload
        broker.write(JOURNAL, encode_frame(payload) if kind == "protobuf" else payload + b"\n")
    if kind == "protobuf":
        found[broker.head(JOURNAL)] = b"no frame at all"
        broker.write(JOURNAL, b"no frame at all" + encode_frame(ORDER(n=99).SerializeToString()))
        good[broker.head(JOURNAL) - len(encode_frame(ORDER(n=99).SerializeToString()))] = 99
    return good, found


@pytest.mark.parametrize("kind", KINDS)
def test_records_that_do_not_fit_follow_the_mode(spark, broker, kind):
    good, bad = write_misfits(broker, kind)
    options = {"endpoint": broker.endpoint, "subscribe": JOURNAL, **KINDS[kind][1]}
    corrupt = "_corrupt_record BINARY" if kind == "protobuf" else "_corrupt_record STRING"
    schema = StructType.fromDDL(f"{KINDS[kind][3]}, _offset BIGINT, {corrupt}")

    reader = JournalDataSource(options).reader(schema)
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]

    assert {row["_offset"]: row["n"] for row in rows if row["_corrupt_record"] is None} == good
    unfit = {row["_offset"]: row["_corrupt_record"] for row in rows if row["_corrupt_record"] is not None}
    assert unfit == {at: each if kind == "protobuf" else each.decode(errors="replace") for at, each in bad.items()}
    strict = JournalDataSource({**options, "mode": "FAILFAST"}).reader(schema)
    with pytest.raises(CorruptMessage) as error:
        list(strict.read(strict.partitions()[0]))
    assert error.value.offset == min(bad)


@pytest.mark.parametrize("kind", KINDS)
def test_consumers_process_records_and_their_dead_letters(spark, broker, tmp_path, kind):
    good, bad = write_misfits(broker, kind)
    numbers = Table("numbers", MetaData(), Column("at", BigInteger, primary_key=True), Column("n", BigInteger))
    letters = dead_letter_table("letters")

    class Numbers:
        name = "numbers"
        sources = f"name={JOURNAL}"
        value_schema = KINDS[kind][3]

        def outputs(self, committed):
            return Outputs(tables=[TableOutput(numbers, committed.selectExpr("_offset AS at", "CAST(n AS BIGINT) n"))])

    path = tmp_path / "shop.pb"
    path.write_bytes(descriptors().SerializeToString())
    framing = CsvRecords(3, uuid_column=1) if kind == "csv" else FixedRecords.from_file(path, "shop.Order")
    url = f"sqlite:///{tmp_path}/store.db"
    options = ConsumerOptions(framing=framing, misfits=DeadLetters(table=letters))
    consumer = SparkConsumer(Numbers(), broker.config, url, spark, options)
    report = consumer.run_until_caught_up()

    with SqlStore(url).engine.connect() as connection:
        assert {row.at: row.n for row in connection.execute(select(numbers))} == good
        assert {row.offset: row.line for row in connection.execute(select(letters))} == bad
    assert (report.messages, report.misfits) == (len(good), len(bad))


def test_options_that_need_lines_are_refused_for_other_framings(broker):
    csv = {"framing": "csv", "csvColumns": "3"}
    write(broker, ROWS, lambda n: [str(n), ""])
    with pytest.raises(InvalidInput, match="option minPartitions: only journals of lines can be read by several tasks"):
        rows_of(broker, **csv, minPartitions="2")
    with pytest.raises(InvalidInput, match="uuid_pointer: is for lines of JSON without the parameter framing"):
        chosen_framing(CsvRecords(3), "/id")
    with pytest.raises(InvalidInput, match="option parse: 'json' is not csv, the framing"):
        rows_of(broker, **csv, parse="json")
