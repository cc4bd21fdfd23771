"""Journals whose messages are not lines of JSON: any lines, rows of CSV, and fixed frames."""

import os
import time
from base64 import b64encode

import pytest
from google.protobuf import descriptor_pb2, message_factory
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.csv_rows import CsvRows, TextRows
from coranto.messages.fixed_frame import FixedFrame
from coranto.messages.payloads import ProtobufPayload
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark.options import SourceOptions
from coranto_consumers.spark.source import JournalDataSource
from coranto_consumers.spark.streaming.options import StreamOptions

JOURNAL = "a/topic/one"
ROWS = CsvRows(TextRows(2), uuid_column=1)


def _descriptors() -> descriptor_pb2.FileDescriptorSet:
    found = descriptor_pb2.FileDescriptorSet()
    file = found.file.add(name="shop.proto", package="shop", syntax="proto3")
    order = file.message_type.add(name="Order")
    field = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate([("uuid", field.TYPE_BYTES), ("n", field.TYPE_INT64)], 1):
        order.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    return found


ORDER = message_factory.GetMessages(_descriptors().file)["shop.Order"]
PROTOBUF = {
    "framing": "fixed",
    "descriptorSet": b64encode(_descriptors().SerializeToString()).decode(),
    "messageType": "shop.Order",
}


def write(broker, framing, messages) -> list[int]:
    """Publish two of three transactions, an append twice, and leave one open. Returns the committed messages."""
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
    # From a row on, up to one that begins before the end: both are offsets within the journal.
    begin, end = rows[3]["offset"], rows[5]["offset"] + 1
    span = {"startingOffsets": f'{{"{JOURNAL}": {begin}}}', "endingOffsets": f'{{"{JOURNAL}": {end}}}'}
    csv = {"framing": "csv", "csvColumns": "3", "csvUuidColumn": "1"}
    assert [row["value"] for row in rows_of(broker, **csv, **span, isolation="read_uncommitted")] == [
        row["value"] for row in rows[3:6]
    ]
    with pytest.raises(CorruptMessage, match="a row of 4 columns was expected"):
        rows_of(broker, framing="csv", csvColumns="4")


@pytest.mark.integration
def test_frames_of_protobuf_are_read_by_spark_as_committed(spark, broker):
    codec = ProtobufPayload(ORDER)
    committed = write(broker, FixedFrame(codec), lambda n: ORDER(n=n))
    source = spark.read.format("journal").options(endpoint=broker.endpoint, subscribe=JOURNAL, **PROTOBUF)

    frame = source.load()

    assert frame.schema["value"].dataType == BinaryType()
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    assert [codec.decode(bytes(row.value)).n for row in rows] == committed


def test_frames_of_unknown_payloads_are_all_committed(broker):
    write(broker, FixedFrame(ProtobufPayload(ORDER, None)), lambda n: ORDER(n=n))

    assert len(rows_of(broker, framing="fixed")) == len(rows_of(broker, framing="fixed", isolation="read_uncommitted"))
    assert len(rows_of(broker, framing="fixed")) == 80


def test_lines_of_any_kind_are_read_as_they_are(broker):
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
        ({"framing": "fixed", "messageType": "shop.Order"}, "messageType: goes together with descriptorSet"),
        ({**PROTOBUF, "descriptorSet": "%"}, "option descriptorSet: not base64"),
        ({**PROTOBUF, "descriptorSet": b64encode(b"none").decode()}, "not a set of file descriptors"),
        ({**PROTOBUF, "messageType": "shop.None"}, "no shop.None in the descriptorSet; there are shop.Order"),
        ({**PROTOBUF, "uuidField": "n"}, "has no field n of bytes or a string"),
        ({"includeHeaders": "true"}, "option includeHeaders: no framing has headers"),
    ],
)
def test_options_that_fit_no_framing_are_refused(options, problem):
    with pytest.raises(InvalidInput, match=problem):
        SourceOptions.parse({"endpoint": "localhost:8080", "subscribe": JOURNAL, **options})


def test_what_needs_lines_says_so(broker):
    csv = {"framing": "csv", "csvColumns": "3"}
    write(broker, ROWS, lambda n: [str(n), ""])
    source = JournalDataSource({"endpoint": broker.endpoint, "subscribe": JOURNAL, **csv})
    with pytest.raises(InvalidInput, match=r"read the column value instead\. They need lines, and not framing=csv"):
        source.reader(StructType([StructField("n", IntegerType())]))
    with pytest.raises(InvalidInput, match="option minPartitions: several tasks can read a journal of lines only"):
        rows_of(broker, **csv, minPartitions="2")
    with pytest.raises(InvalidInput, match="streaming queries read lines, and not framing=csv"):
        StreamOptions.parse({"endpoint": broker.endpoint, "subscribe": JOURNAL, **csv})
