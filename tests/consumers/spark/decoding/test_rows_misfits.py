"""Lines that do not fit an application's messages end the run, become nulls, or become dead letters."""

import base64
import json
import os
import time

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, select

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import DeadLetters, MisfitPolicy, Outputs, SparkConsumer, TableOutput, dead_letter_table
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores import SqlStore

SOURCE, DEAD = "misfits/source", "misfits/dead"
NUMBERS = Table("numbers", MetaData(), Column("at", BigInteger, primary_key=True), Column("n", BigInteger))
LETTERS = dead_letter_table("letters")
FAR = "ffffffff-ffff-1fff-bfff-f351621e4e49"
"""A UUID of the year 5236."""


class Numbers:
    name = "numbers"
    sources = f"name={SOURCE}"
    value_schema = "n BIGINT, c DECIMAL(6, 2), t TIMESTAMP, m MAP<STRING, INT>, s STRING"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(NUMBERS, committed.selectExpr("_offset AS at", "n"))])


def publisher(broker, framing=None) -> SyncPublisher:
    producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
    return SyncPublisher(broker.write, producer=producer, clock=clock, framing=framing or JsonLines())


def raw(line: bytes) -> bytes:
    """Return a line with its own UUID, outside of transactions."""
    sent = []
    lone = SyncPublisher(
        lambda _, content: sent.append(content),
        producer=new_producer_id(os.urandom),
        clock=ProducerClock(time.time_ns),
        framing=JsonLines(),
    )
    lone.publish(SOURCE, {"n": 0})
    lone.flush()
    return b"".join(sent).replace(b'"n":0', line)[:-1]


POISON = {
    "not JSON": lambda: b"nonsense",
    "not UTF-8 at all": lambda: b"\xff\xfe\x00",
    "a bad UUID": lambda: b'{"_meta":{"uuid":"zzz"},"n":1}',
    "a UUID of the far future": lambda: f'{{"_meta":{{"uuid":"{FAR}"}},"n":2}}'.encode(),
    "a text that is not UTF-8": lambda: raw(b'"n":3,"t":"\xff"'),
    "another type": lambda: raw(b'"n":"four"'),
    "a list": lambda: b"[1]",
    "a decimal that pyarrow must not see": lambda: raw(b'"c":1e-2000000000,"t":"never"'),
    "a number of many digits": lambda: raw(b'"t":' + b"9" * 5000),
    "a map that is not closed": lambda: raw(b'"m":{'),
    "deep lists": lambda: raw(b'"s":' + b"[" * 1500 + b"]" * 1500),
}


@pytest.fixture
def journal(broker):
    """Write good messages with all kinds of misfits between them. Return the good numbers and the misfits by offset."""
    broker.create(SOURCE, DEAD)
    good, bad = {}, {}
    for n, make in enumerate(POISON.values()):
        good[broker.head(SOURCE)] = 10 + n
        one = publisher(broker)
        one.publish(SOURCE, {"n": 10 + n})
        one.flush()
        line = make()
        bad[broker.head(SOURCE)] = line
        broker.write(SOURCE, line + b"\n")
    return good, bad


@pytest.fixture
def run(spark, broker, tmp_path):
    def start(**options):
        url = f"sqlite:///{tmp_path}/store.db"
        consumer = SparkConsumer(Numbers(), broker.config, url, spark, ConsumerOptions(**options))
        report = consumer.run_until_caught_up()
        with SqlStore(url).engine.connect() as connection:
            return report, {row.at: row.n for row in connection.execute(select(NUMBERS))}, SqlStore(url)

    return start


def test_dead_letters_are_in_a_table_with_every_byte(journal, run):
    good, bad = journal
    report, rows, store = run(misfits=DeadLetters(table=LETTERS))

    assert rows == good
    with store.engine.connect() as connection:
        letters = connection.execute(select(LETTERS).order_by("offset")).all()
    assert [(row.journal, row.offset, row.line) for row in letters] == [(SOURCE, *each) for each in bad.items()]
    assert (report.messages, report.misfits) == (len(good), len(bad))


def test_dead_letters_are_committed_messages_in_a_journal(journal, run, broker):
    good, bad = journal
    _, rows, _ = run(misfits=DeadLetters(journals=[DEAD]))

    assert rows == good
    envelopes = iter_messages(JsonLines(), DEAD, [broker.content(DEAD)], 0)
    letters = [each.message for each in read_committed(envelopes, Sequencer(), lambda wanted: [])]
    assert {each["offset"]: base64.b64decode(each["line"]) for each in letters} == bad
    assert {each["journal"] for each in letters} == {SOURCE}


def test_with_nulls_an_application_gets_every_message(journal, run):
    good, bad = journal
    report, rows, _ = run(misfits=MisfitPolicy.NULLS)

    assert rows == {**good, **dict.fromkeys(bad)}
    assert report.misfits == len(bad)


@pytest.mark.parametrize("poison", list(POISON)[8:])
def test_a_line_that_breaks_parsers_stops_no_consumer(broker, run, poison):
    """It is the only bad one, because other bad lines may keep pyarrow from parsing it."""
    broker.create(SOURCE)
    one = publisher(broker)
    one.publish(SOURCE, {"n": 1, "c": 1.5, "m": {"a": 1}})
    one.flush()
    broker.write(SOURCE, POISON[poison]() + b"\n")

    report, rows, _ = run(misfits=MisfitPolicy.NULLS)

    assert [*rows.values()] == [1, None]
    assert report.misfits == 1


def test_a_misfit_ends_the_run_before_anything_is_committed(journal, run):
    _, bad = journal
    with pytest.raises(CorruptMessage) as error:
        run()
    assert error.value.offset in bad


def test_rolled_back_misfits_have_no_effect(broker, run):
    broker.create(SOURCE)
    good, bad = publisher(broker), publisher(broker)
    good.add(SOURCE, {"n": 1})
    good.flush()
    bad.add(SOURCE, {"n": 0})
    bad.add(SOURCE, {"n": "none"})
    bad.flush()
    content = broker.content(SOURCE)
    broker.fake.journals[SOURCE].spool[:] = content.replace(b'"n":0', b'"\xff\xfe')
    bad.rollback()
    good.commit()

    report, rows, _ = run()

    assert rows == {0: 1}
    assert (report.messages, report.misfits) == (1, 0)


def test_a_uuid_may_be_in_any_position(broker, run):
    broker.create(SOURCE)
    lines = JsonLines("/header/id")
    good, bad = publisher(broker, lines), publisher(broker, lines)
    good.add(SOURCE, {"n": 1})
    bad.add(SOURCE, {"n": 2})
    bad.flush()
    good.commit()
    bad.rollback()

    _, rows, _ = run(uuid_pointer="/header/id")

    assert list(rows.values()) == [1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"misfits": MisfitPolicy.DEAD_LETTERS}, "say where"),
        ({"uuid_pointer": "id"}, "'id' is not a JSON pointer"),
    ],
)
def test_invalid_settings_are_refused(options, problem):
    with pytest.raises(InvalidInput, match=problem):
        ConsumerOptions(**options)


def test_dead_letter_outputs_are_checked():
    with pytest.raises(InvalidInput, match="either a table or journals"):
        DeadLetters()
    with pytest.raises(InvalidInput, match="either a table or journals"):
        DeadLetters(LETTERS, "a=b")
    with pytest.raises(InvalidInput, match="table numbers has no column 'journal'"):
        DeadLetters(NUMBERS)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_read_has_nulls_for_lines_that_are_not_messages(spark, broker, journal, isolation):
    good, bad = journal
    read = spark.read.format("journal").options(endpoint=broker.endpoint, subscribe=SOURCE, isolation=isolation)
    rows = read.schema(f"{Numbers.value_schema}, _offset BIGINT, _corrupt_record STRING").load().collect()
    assert {row._offset: row.n for row in rows} == {**good, **dict.fromkeys(bad)}
    corrupt = {row._offset: row._corrupt_record for row in rows if row._corrupt_record is not None}
    assert corrupt == {offset: line.decode(errors="replace") for offset, line in bad.items()}

    with pytest.raises(Exception, match="CorruptMessage"):
        read.option("mode", "FAILFAST").schema("n BIGINT, _offset BIGINT").load().collect()


def test_raw_lines_with_any_content_can_be_read(spark, broker, journal):
    good, bad = journal
    read = (
        spark.read.format("journal")
        .options(endpoint=broker.endpoint, subscribe=SOURCE)
        .schema("offset BIGINT, value BINARY")
    )
    with pytest.raises(Exception, match="CorruptMessage"):
        read.load().collect()
    rows = read.option("mode", "PERMISSIVE").load().collect()
    assert {row.offset: bytes(row.value) for row in rows if row.offset in bad} == bad
    assert [json.loads(row.value)["n"] for row in rows if row.offset in good] == list(good.values())
