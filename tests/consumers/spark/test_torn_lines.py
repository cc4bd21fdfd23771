"""Spark reads the messages after torn lines, and never loses an acknowledgement to one."""

import os
import time

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.client.committed import committed_messages
from coranto.client.sync import SyncJournalClient
from coranto.errors import CorruptMessage, TornMessage
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import DeadLetters, Outputs, SparkConsumer, TableOutput, dead_letter_table
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.stores import SqlStore

J = "torn/source"
NUMBERS = Table("numbers", MetaData(), Column("at", BigInteger, primary_key=True), Column("n", BigInteger))
LETTERS = dead_letter_table("letters")
WHOLE = b'{"n":1000}'
CUT = b'{"n":20'
COPY = b'{"_meta":{"uuid":"00000009-0000-1000-8000-010203040506"},"n":3'


class Numbers:
    name = "numbers"
    sources = f"name={J}"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(NUMBERS, committed.selectExpr("_offset AS at", "n"))])


@pytest.fixture(params=[WHOLE, CUT, COPY], ids=["whole", "cut", "copy"])
def torn(request, broker):
    """A torn piece before the first message, between messages, and before the acknowledgement.

    Return the piece, its offsets, and the offsets of the committed numbers.
    """
    broker.create(J)
    piece, at, numbers = request.param, [], {}
    publisher = SyncPublisher(
        broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=JsonLines()
    )
    for n in range(30):
        if n in (0, 17):
            at.append(broker.head(J))
            broker.write(J, piece)
        numbers[broker.head(J)] = n
        publisher.add(J, {"n": n})
        publisher.flush()
    at.append(broker.head(J))
    broker.write(J, piece)
    publisher.commit()
    return piece, at, numbers


def read(broker, schema="", **options) -> list[dict]:
    source = JournalDataSource({"endpoint": broker.endpoint, "subscribe": J, **options})
    reader = source.reader(StructType.fromDDL(schema) if schema else source.schema())
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return sorted(pa.Table.from_batches(batches).to_pylist(), key=lambda row: row.get("offset", row.get("_offset")))


@pytest.mark.parametrize("split", [{}, {"maxBytesPerPartition": "150"}, {"maxBytesPerPartition": "37"}])
def test_all_reads_of_a_journal_agree(spark, torn, broker, split):
    piece, at, numbers = torn
    content = broker.content(J)

    raw = read(broker, isolation="read_uncommitted", mode="permissive", **split)
    assert "".join(row["value"] for row in raw).encode() == content.replace(b"\n", b"")
    assert [row["offset"] for row in raw if row["value"] == piece.decode()] == at
    assert [row["next_offset"] for row in raw if row["value"] == piece.decode()] == [each + len(piece) for each in at]
    assert {row["offset"] for row in raw} >= set(numbers)

    typed = read(broker, "n BIGINT, _offset BIGINT, _corrupt_record STRING", **split)
    expected = dict(numbers)
    expected.update(dict.fromkeys(at, 1000 if piece == WHOLE else None))
    assert {row["_offset"]: row["n"] for row in typed} == expected
    misfits = [row["_offset"] for row in typed if row["_corrupt_record"] is not None]
    assert misfits == ([] if piece == WHOLE else at)

    errors = []
    with SyncJournalClient(broker.endpoint) as client:
        found = {
            each.begin: each.message["n"]
            for each in committed_messages(client, J, JsonLines(), on_corrupt=errors.append)
        }
    assert found == {offset: n for offset, n in expected.items() if n is not None}
    assert sorted({error.offset for error in errors}) == misfits

    if piece != WHOLE:
        with pytest.raises(TornMessage, match=f"offset {at[0]}: .* next one begins at offset {at[0] + len(piece)}"):
            read(broker, "n BIGINT, _offset BIGINT", mode="failfast", **split)


def test_a_consumer_gets_all_messages_and_keeps_the_pieces(torn, broker, spark, tmp_path):
    piece, at, numbers = torn
    url = f"sqlite:///{tmp_path}/store.db"
    report = SparkConsumer(
        Numbers(), broker.config, url, spark, ConsumerOptions(misfits=DeadLetters(table=LETTERS))
    ).run_until_caught_up()
    with SqlStore(url).engine.connect() as connection:
        rows = {row.at: row.n for row in connection.execute(select(NUMBERS))}
        if piece == WHOLE:
            assert rows == {**numbers, **dict.fromkeys(at, 1000)}
        else:
            letters = [(row.offset, row.line) for row in connection.execute(select(LETTERS).order_by("offset"))]
            assert (rows, letters) == (numbers, [(each, piece) for each in at])
    assert (report.messages, report.misfits) == (len(rows), 0 if piece == WHOLE else len(at))


def test_a_consumer_without_a_policy_names_the_piece_and_the_remedy(broker, spark, tmp_path):
    broker.create(J)
    broker.write(J, CUT)
    publisher = SyncPublisher(
        broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=JsonLines()
    )
    publisher.publish(J, {"n": 1})
    publisher.flush()
    with pytest.raises(CorruptMessage, match=r"torn/source at offset 0: a message is cut off.*policy for misfits"):
        SparkConsumer(Numbers(), broker.config, f"sqlite:///{tmp_path}/store.db", spark).run_until_caught_up()
