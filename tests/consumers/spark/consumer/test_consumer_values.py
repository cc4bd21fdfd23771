"""Consumers get the values of Spark's JSON reader, for all types, in the session's time zone."""

import random

import pytest
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Date, DateTime, Float, LargeBinary, MetaData, Numeric, Table, Text, select

from coranto.errors import CorruptMessage, InvalidInput
from coranto_consumers.spark import DeadLetters, MisfitPolicy, Outputs, SparkConsumer, TableOutput, dead_letter_table
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer import transaction_inputs
from coranto_consumers.spark.inputs import strategies
from coranto_consumers.spark.outputs.staging import EXACT
from coranto_consumers.stores import SqlStore
from tests.consumers.spark.decoding.test_json_values import MAPS, WIDE, common_line
from tests.sampling import examples, sampled

JOURNAL = "values/source"
LINES = examples(1500)
COLUMNS = f"{WIDE}, {MAPS.partition(', d')[0]}, q ARRAY<MAP<STRING, DOUBLE>>, b BOOLEAN, y TINYINT, l BIGINT, Y INT"
NAMES = [*"dtncefagrsvmoqbylY"]
BERLIN, KOLKATA = "Europe/Berlin", "Asia/Kolkata"
TEXTS = Table(
    "texts", MetaData(), Column("at", BigInteger, primary_key=True, autoincrement=False), Column("text", Text)
)
LETTERS = dead_letter_table("letters")
TYPED = Table(
    "typed",
    MetaData(),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("d", Date),
    Column("t", DateTime(timezone=True)),
    Column("n", DateTime),
    Column("c", Numeric(6, 2)),
    Column("f", Float),
    Column("s", Text),
    Column("v", LargeBinary),
)


class Texts:
    """Write all values of each message as a text."""

    name = "values"
    sources = f"name={JOURNAL}"
    value_schema = COLUMNS

    def outputs(self, committed):
        assert all(field.nullable for field in committed.select(*NAMES).schema)
        return Outputs(tables=[TableOutput(TEXTS, committed.select(F.col("_offset").alias("at"), text_of()))])


class Typed:
    """Write values unchanged in columns of their types."""

    name = "typed"
    sources = f"name={JOURNAL}"
    value_schema = "d DATE, t TIMESTAMP, n TIMESTAMP_NTZ, c DECIMAL(6,2), f FLOAT, s STRING, v BINARY"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(TYPED, committed.select(F.col("_offset").alias("at"), *"dtncfsv"))])


def text_of():
    return F.to_json(F.struct(*NAMES), EXACT).alias("text")


@pytest.fixture(params=sampled([KOLKATA, BERLIN], 2))
def session(spark, request):
    """A session with its own time zone and case-sensitive names."""
    kept = {name: spark.conf.get(name) for name in ("spark.sql.session.timeZone", "spark.sql.caseSensitive")}
    spark.conf.set("spark.sql.session.timeZone", request.param)
    spark.conf.set("spark.sql.caseSensitive", "true")
    yield spark
    for name, value in kept.items():
        spark.conf.set(name, value)


@pytest.fixture(params=["driver", "tasks"])
def read_by(request, monkeypatch):
    """Read small inputs by the driver, and others by tasks."""
    if request.param == "tasks":
        monkeypatch.setattr(transaction_inputs, "WORTHWHILE_BYTES", 0)
        monkeypatch.setattr(strategies, "WORTHWHILE_BYTES", 0)
    return request.param


def written(broker, lines: list[str]) -> list[int]:
    """Write lines, and return the offset of each."""
    broker.create(JOURNAL)
    content = [line.encode() + b"\n" for line in lines]
    broker.write(JOURNAL, b"".join(content))
    return [sum(map(len, content[:number])) for number in range(len(content))]


def by_spark(spark, path, lines: list[str], columns: str):
    """Return the lines as Spark's reader of JSON files reads them, with the column `corrupt`."""
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    columns = f"{columns.replace(' NOT NULL', '')}, corrupt STRING"
    read = spark.read.schema(columns).options(columnNameOfCorruptRecord="corrupt", lineSep="\n")
    return read.json(str(path)).cache()


def rows_in(url: str, table: Table) -> dict[int, tuple[object, ...]]:
    with SqlStore(url).engine.connect() as connection:
        return {row[0]: tuple(row[1:]) for row in connection.execute(select(table))}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, new_store):
    return new_store(request.param)


def test_values_of_all_types_match_sparks_reader(session, broker, tmp_path, url, read_by):
    rng = random.Random(5)
    # Numbers that Spark cannot write as JSON are omitted, because they are compared as JSON.
    lines = [common_line(rng, NAMES) for _ in range(LINES)]
    at = written(broker, lines)
    expected = by_spark(session, tmp_path / "lines", lines, COLUMNS).select(text_of(), "corrupt").collect()
    fits = [row.corrupt is None for row in expected]
    assert 0.2 < sum(fits) / LINES < 0.9

    report = SparkConsumer(
        Texts(), broker.config, url, session, ConsumerOptions(misfits=DeadLetters(table=LETTERS))
    ).run_until_caught_up()

    found = rows_in(url, TEXTS)
    assert {offset: text for offset, (text,) in found.items()} == {
        offset: row.text for offset, row, fit in zip(at, expected, fits, strict=True) if fit
    }
    with SqlStore(url).engine.connect() as connection:
        letters = {row.offset: row.line for row in connection.execute(select(LETTERS))}
    assert letters == {offset: line.encode() for offset, line, fit in zip(at, lines, fits, strict=True) if not fit}
    assert (report.messages, report.misfits) == (sum(fits), LINES - sum(fits))


def test_policies_treat_misfits_as_the_reader_does(session, broker, tmp_path, read_by):
    rng = random.Random(6)
    lines = [common_line(rng, NAMES) for _ in range(300)]
    at = written(broker, lines)
    expected = by_spark(session, tmp_path / "lines", lines, COLUMNS).select(text_of(), "corrupt").collect()
    misfits = [offset for offset, row in zip(at, expected, strict=True) if row.corrupt is not None]

    with pytest.raises(CorruptMessage, match="does not fit") as failed:
        SparkConsumer(Texts(), broker.config, f"sqlite:///{tmp_path}/failed.db", session).run_until_caught_up()
    assert (failed.value.journal, failed.value.offset) == (JOURNAL, misfits[0])

    url = f"sqlite:///{tmp_path}/nulls.db"
    report = SparkConsumer(
        Texts(), broker.config, url, session, ConsumerOptions(misfits=MisfitPolicy.NULLS)
    ).run_until_caught_up()
    assert rows_in(url, TEXTS) == {offset: (row.text,) for offset, row in zip(at, expected, strict=True)}
    assert report.misfits == len(misfits)


def test_typed_columns_hold_the_same_in_all_stores(session, broker, tmp_path, url, read_by):
    zones = ["", "Z", "+02:00", " Europe/Paris"]
    lines = [
        f'{{"d":"2024-0{1 + n % 9}-2{n % 9}",'
        f'"t":"20{n % 60:02}-0{1 + n % 9}-2{n % 9} 0{n % 5}:3{n % 9}:07.5{zones[n % 4]}",'
        f'"n":"1999-12-31T23:59:59.{n}","c":{n}.{n % 7}5,"f":{n / 7},"s":"{n}\\t\\n\\\\é","v":"aGkh"}}'
        for n in range(250)
    ]
    lines += ["{}", '{"t":1700000000,"c":"1,000.5","s":{"a":1.50},"v":""}', '{"t":"2024-02-29 2:5:6","d":"2024-2-29"}']
    at = written(broker, lines)
    columns = Typed.value_schema
    micros = F.expr("unix_micros(t)").alias("t")
    expected = by_spark(session, tmp_path / "lines", lines, columns).select("d", micros, *"ncfsv", "corrupt").collect()
    assert all(row.corrupt is None for row in expected)

    SparkConsumer(Typed(), broker.config, url, session).run_until_caught_up()

    found = rows_in(url, TYPED)
    assert found.keys() == set(at)
    for offset, row in zip(at, expected, strict=True):
        day, time, local, *others = found[offset]
        assert (day, local, *others) == (row.d, row.n, row.c, row.f, row.s, row.v and bytes(row.v))
        assert micros_of(time) == row.t


def micros_of(time):
    """Return the microseconds since 1970 UTC of a time. SQLite has no zones and stores UTC."""
    import datetime as dt

    if time is None:
        return None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
    return (aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


@pytest.mark.parametrize("kind", ["VARIANT", "INTERVAL DAY TO SECOND", "MAP<INT, INT>", "STRING COLLATE UTF8_LCASE"])
def test_types_that_workers_cannot_read_are_refused_before_any_read(spark, broker, tmp_path, kind):
    written(broker, ["{}"])

    class Odd(Texts):
        value_schema = f"x {kind}"

    with pytest.raises(InvalidInput, match=r"column 'x' has .*Declare STRING"):
        SparkConsumer(Odd(), broker.config, f"sqlite:///{tmp_path}/s.db", spark).run_until_caught_up()
