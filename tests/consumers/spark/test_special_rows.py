"""Blank lines and byte order marks in CSV: every read has the rows of Spark's reader of CSV files."""

import csv
import io

import pytest
from pyspark.sql.types import IntegerType, StringType, StructType
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto.client import SyncJournalClient
from coranto.messages.csv_rows import CsvRows, TextRows
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.uuids import Flags, ProducerId, format_uuid
from coranto_consumers.spark import CsvRecords, Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.windows import WindowConsumer
from coranto_consumers.spark.source.data_source import JournalDataSource
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.window_growth import grow

MARK = b"\xef\xbb\xbf"
FILES = [
    MARK + b"1,a\n2,b\n",
    MARK + b'"3","c"\n\n4,d\n',
    b"5,e\n  \n\t\n \t \r\n\r\n\0\n\x1f \x0b\x0c\n6,f\r\n",
    MARK + b"\n7,g\n",
    MARK + b"  \n8,h\n",
    MARK + MARK + b"9,i\n",
    b"10,\xc2\xa0\n11,\xef\xbb\xbfk\n12,l \xef\xbb\xbf\n",
    MARK,
]
"""Files that are appended one after the other. Spark reads each as lines."""
QUOTED = [MARK + b'20,"u\n\n  \n' + MARK + b'v"\n21,w\n', MARK + b'"22","x\ny"\n']
"""Files with rows of several lines, which Spark reads with `multiLine`."""
ALL = [*FILES, *QUOTED, b"\n \n", MARK + b"\n"]
SCHEMA = StructType().add("n", IntegerType()).add("text", StringType())
ROWS = [
    *((number, letter) for number, letter in enumerate("abcdefghi", 1)),
    (10, "\xa0"),
    (11, "\ufeffk"),
    (12, "l \ufeff"),
    (20, "u\n\n  \n\ufeffv"),
    (21, "w"),
    (22, "x\ny"),
]
OUT = Table("special_rows", MetaData(), Column("n", BigInteger), Column("text", String(20)))


class Copy:
    name = "special-rows"
    sources = "name=a/rows"
    value_schema = "n INT, text STRING"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(OUT, committed.select("n", "text"))])


def publish(broker, folder) -> None:
    """Append the files to the journal, so that fragments also begin in the middle of the content."""
    broker.create("a/rows")
    for number, content in enumerate(ALL):
        broker.write("a/rows", content)
        if number % 2:
            broker.fake.journals["a/rows"].roll(folder)


def test_sparks_reader_and_a_consumer_have_these_rows(spark, broker, tmp_path):
    found = []
    for number, content in enumerate(ALL):
        (tmp_path / f"{number}.csv").write_bytes(content)
        reader = spark.read.schema(SCHEMA).option("multiLine", content in QUOTED)
        found += [tuple(row) for row in reader.csv(str(tmp_path / f"{number}.csv")).collect()]
    assert found == ROWS

    publish(broker, tmp_path / "fragments")
    url = f"sqlite:///{tmp_path}/store.db"
    SparkConsumer(Copy(), broker.config, url, spark, ConsumerOptions(framing=CsvRecords(2, None))).run_until_caught_up()
    with SqlStore(url).engine.connect() as connection:
        assert sorted(tuple(row) for row in connection.execute(select(OUT))) == ROWS


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("mode", ["PERMISSIVE", "FAILFAST"])
def test_every_read_has_the_rows_of_sparks_reader(broker, tmp_path, isolation, mode):
    publish(broker, tmp_path / "fragments")
    options = {"endpoint": broker.endpoint, "subscribe": "a/rows", "isolation": isolation}
    options |= {"framing": "csv", "csvColumns": "2", "csvUuidColumn": "none"}

    def read(source: JournalDataSource, schema: StructType) -> list:
        reader = source.reader(schema)
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [tuple(row.values()) for batch in batches for row in batch.select(schema.names).to_pylist()]

    assert read(JournalDataSource({**options, "mode": mode}), SCHEMA) == ROWS
    raw = read(JournalDataSource(options), StructType().add("value", StringType()))
    assert [(int(n), text) for (value,) in raw for n, text in csv.reader(io.StringIO(value, newline=""))] == ROWS


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_every_reader_without_spark_has_the_rows_of_sparks_reader(size):
    content = b"".join(ALL)
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    framing = CsvRows(TextRows(2), uuid_column=None)
    found = [each.message for each in iter_messages(framing, "j", chunks, 0)]
    assert [(int(n), text) for n, text in found] == ROWS


def test_marks_and_blank_lines_next_to_uuids_have_no_effect():
    framing = CsvRows(TextRows(1))
    uuids = [format_uuid(ProducerId(b"\x01AAAAA"), 160 * number, Flags.OUTSIDE_TXN) for number in range(1, 4)]
    content = MARK + b" \n" + b"".join(MARK + f'{uuid},"x"\n \n'.encode() for uuid in uuids)
    found = list(iter_messages(framing, "j", [content], 100))
    assert [(each.clock, list(each.message)) for each in found] == [(160, ["x"]), (320, ["x"]), (480, ["x"])]
    assert [content[each.begin - 100 :].startswith(MARK) for each in found] == [True] * 3
    assert [content[each.end - 101 :][:1] for each in found] == [b"\n"] * 3


@pytest.mark.parametrize("text", ["\ufeffa", "\ufeff", " ", "\t", "\0", "\x1f \x0b", "", "\xa0"])
def test_a_published_row_that_looks_blank_or_marked_is_read_back(text):
    for framing, row in (
        (CsvRows(TextRows(1), uuid_column=None), [text]),
        (CsvRows(TextRows(1), uuid_column=1), [text]),
    ):
        written = framing.marshal(row, format_uuid(ProducerId(b"\x01AAAAA"), 160, Flags.OUTSIDE_TXN))
        (found,) = iter_messages(framing, "j", [written], 0)
        assert list(found.message) == [text]


BY_WINDOW = Table(
    "special_rows_by_window",
    MetaData(),
    Column("coranto_window", BigInteger, nullable=False),
    Column("n", BigInteger),
    Column("text", String(20)),
)
ENDS = [b"\n", b" \t\n\r\n", MARK + b"\n", b"\n" * 5_000]
"""Content after the last message of a journal that is not a message."""
KINDS = {
    "csv": (CsvRecords(2, None), lambda n: f"{n},a\n".encode()),
    "json": (JsonLines(None), lambda n: f'{{"n":{n},"text":"a"}}\n'.encode()),
}


@pytest.mark.parametrize("end", ENDS, ids=["line", "white space", "mark", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_catches_up_with_a_journal_that_does_not_end_in_a_message(spark, broker, tmp_path, kind, end):
    framing, message = KINDS[kind]
    broker.create("a/rows")
    options = ConsumerOptions(framing=framing)
    consumer = SparkConsumer(Copy(), broker.config, f"sqlite:///{tmp_path}/store.db", spark, options)
    for n in (1, 2):  # The second run begins after blank content.
        broker.write("a/rows", message(n) + end)
        report = consumer.run_until_caught_up()
        assert (report.offsets, report.lag_bytes) == ({"a/rows": broker.head("a/rows")}, 0)
    broker.write("a/rows", end)
    assert consumer.run_until_caught_up().lag_bytes == 0
    with SqlStore(f"sqlite:///{tmp_path}/store.db").engine.connect() as connection:
        assert sorted(tuple(row) for row in connection.execute(select(OUT))) == [(1, "a"), (2, "a")]


@pytest.mark.parametrize("end", ENDS, ids=["line", "white space", "mark", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_need_not_end_in_a_message(spark, broker, tmp_path, kind, end):
    framing, message = KINDS[kind]

    class ByWindow(Copy):
        def outputs(self, committed):
            return Outputs(tables=[TableOutput(BY_WINDOW, committed.select("n", "text"))])

    broker.create("a/rows")
    store = f"sqlite:///{tmp_path}/store.db"
    made = WindowConsumer(ByWindow(), broker.config, store, spark, ConsumerOptions(framing=framing), name="by-window")
    for content in (message(1) + end, end, message(2) + message(3) + end):
        broker.write("a/rows", content)
        broker.fake.journals["a/rows"].roll(tmp_path / "fragments")
        with SyncJournalClient.of(broker.config) as client:
            grow(made.log, client, [Copy.sources], partial=True)
    names = [each.window.name for each in made.log.load()]
    assert len(names) == 3
    assert made.materialize(names[2]).messages == 2, "the windows before it are read for their producers"
    assert [made.materialize(name).messages for name in names] == [1, 0, 2]
    with SqlStore(store).engine.connect() as connection:
        found = connection.execute(select(BY_WINDOW.c.n, BY_WINDOW.c.text))
        assert sorted(tuple(row) for row in found) == [(1, "a"), (2, "a"), (3, "a")]
