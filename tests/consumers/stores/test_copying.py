"""Rows copied from Arrow columns to PostgreSQL equal rows written one by one."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    delete,
    select,
)
from sqlalchemy.dialects import postgresql

from coranto_consumers.stores import SqlStore, staging
from coranto_consumers.stores.copying import can_copy
from coranto_consumers.stores.merge import plan_merge
from coranto_consumers.stores.staging import StageWriter, stage_of

DIALECT = postgresql.psycopg.dialect()

TABLE = Table(
    "copied",
    MetaData(),
    Column("number", Integer),
    Column("s", Text),
    Column("i", Integer),
    Column("l", BigInteger),
    Column("d", Double),
    Column("n", Numeric(38, 18)),
    Column("b", Boolean),
    Column("day", Date),
    Column("at", DateTime(timezone=True)),
    Column("local", DateTime),
    Column("t", Text),
)
SCHEMA = pa.schema(
    [
        ("number", pa.int32()),
        ("s", pa.string()),
        ("i", pa.int32()),
        ("l", pa.int64()),
        ("d", pa.float64()),
        ("n", pa.decimal128(38, 18)),
        ("b", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("t", pa.string()),
    ]
)
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.sampled_from([r"\N", "\\", "\\.", "\t", "\n", "\r", "\r\n", "\\n", "\\\t", ""]),
)
times = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))
rows = st.fixed_dictionaries(
    {
        "s": st.none() | texts,
        "i": st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
        "l": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "d": st.none() | st.floats(),
        "n": st.none() | st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(f"{n}e-18")),
        "b": st.none() | st.booleans(),
        "day": st.none() | st.dates(),
        "at": st.none() | times.map(lambda at: at.replace(tzinfo=dt.UTC)),
        "local": st.none() | times,
        "t": st.none() | texts,
    }
)


@pytest.fixture(scope="module")
def store(postgres) -> SqlStore:
    return SqlStore(postgres.new_database())


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rows, max_size=20), st.sampled_from(["shard", "a\tb\\c\nd"]))
def test_copied_rows_equal_rows_written_one_by_one(store, rows, shard):
    rows = [{"number": number, **row} for number, row in enumerate(rows)]
    stage = stage_of(store, plan_merge(TABLE, TABLE.columns.keys(), (), {}))
    with StageWriter(store.url, stage, shard, 7, "copied") as writer:
        assert writer.write_batch(pa.RecordBatch.from_pylist(rows, SCHEMA)) == len(rows)
    with StageWriter(store.url, stage, shard, 7, "written") as writer:
        assert writer.write(rows) == len(rows)

    columns = [stage.c[name] for name in TABLE.columns.keys()]  # noqa: SIM118 - a table's columns by name
    found = {}
    with store.engine.begin() as connection:
        for attempt in ("copied", "written"):
            mine = select(*columns).where(stage.c.coranto_attempt == attempt, stage.c.coranto_shard == shard)
            found[attempt] = [tuple(row) for row in connection.execute(mine.order_by(stage.c.number))]
        connection.execute(delete(stage))
    assert list(map(repr, found["copied"])) == list(map(repr, found["written"]))
    assert [row[:4] for row in found["copied"]] == [(n, row["s"], row["i"], row["l"]) for n, row in enumerate(rows)]


def test_other_types_are_written_one_by_one(store):
    table = Table("others", MetaData(), Column("raw", LargeBinary), Column("number_as_text", Text))
    stage = stage_of(store, plan_merge(table, ("raw", "number_as_text"), (), {}))
    batch = pa.record_batch({"raw": [b"\x00\xff", None], "number_as_text": ["1", None]})

    assert not can_copy(pa.binary(), table.c.raw, DIALECT)
    assert not can_copy(pa.float64(), table.c.number_as_text, DIALECT)
    assert can_copy(pa.string(), table.c.number_as_text, DIALECT)
    with StageWriter(store.url, stage, "shard", 1, "attempt") as writer:
        assert writer.write_batch(batch) == 2
    with store.engine.begin() as connection:
        found = connection.execute(select(stage.c.raw, stage.c.number_as_text)).all()
    assert {(bytes(raw) if raw is not None else None, text) for raw, text in found} == {
        (b"\x00\xff", "1"),
        (None, None),
    }


def test_large_batches_are_written_in_parts(store, monkeypatch):
    monkeypatch.setattr(staging, "_TEXT_BYTES", 1000)
    table = Table("large", MetaData(), Column("text", Text))
    stage = stage_of(store, plan_merge(table, ("text",), (), {}))
    texts = [str(n) * 100 for n in range(100)] + ["x" * 5000]

    with StageWriter(store.url, stage, "shard", 1, "attempt") as writer:
        assert writer.write_batch(pa.record_batch({"text": texts})) == 101
    with store.engine.begin() as connection:
        assert sorted(connection.execute(select(stage.c.text)).scalars()) == sorted(texts)
