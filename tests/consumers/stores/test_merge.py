"""Merges of staged rows equal folding them one by one, for any distribution over attempts."""

import datetime as dt
from decimal import Decimal

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
    String,
    Table,
    Text,
    UniqueConstraint,
    delete,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores import Add, Max, Min, Quotient, Replace, SqlStore
from coranto_consumers.stores.merge import STAGE_COLUMNS, MergePlan, merge_staged, plan_merge
from coranto_consumers.stores.staging import PREFIX, StageWriter, delete_staged, stage_name, stage_of
from tests.sampling import examples

DELAYS = Table(
    "carrier_delays",
    MetaData(),
    Column("carrier", String(20), primary_key=True),
    Column("month", Integer, primary_key=True),
    Column("flights", BigInteger),
    Column("total", Double),
    Column("shortest", Double),
    Column("longest", Double),
    Column("mean", Double),
)
COLUMNS = ("carrier", "month", "flights", "total", "shortest", "longest")
RULES = {"flights": Add(), "total": Add(), "shortest": Min(), "longest": Max(), "mean": Quotient("total", "flights")}
KEYS = ("carrier", "month")
EVENTS = Table("events", MetaData(), Column("id", Integer, primary_key=True), Column("what", Text))


def stage_and_merge(store: SqlStore, plan: MergePlan, attempts: dict[str, list[dict]], fence: int) -> None:
    stage = stage_of(store, plan)
    for attempt, rows in attempts.items():
        with StageWriter(store.url, stage, "shard", fence, attempt) as writer:
            for start in range(0, len(rows), 3):
                assert writer.write(rows[start : start + 3]) == len(rows[start : start + 3])
    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, list(attempts), sum(map(len, attempts.values())))
        delete_staged(connection, stage, "shard", below_fence=fence + 1)


def contents(store: SqlStore, table: Table) -> list[dict]:
    with store.engine.connect() as connection:
        return [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]


def fold(rows: list[dict]) -> list[dict]:
    """Compute the expected result of a merge row by row."""
    table: dict[tuple, dict] = {}
    for row in rows:
        cell = table.setdefault((row["carrier"], row["month"]), dict.fromkeys(COLUMNS) | {k: row[k] for k in KEYS})
        for name, combine in {"flights": sum, "total": sum, "shortest": min, "longest": max}.items():
            values = [value for value in (cell[name], row[name]) if value is not None]
            cell[name] = combine(values) if values else None
    for cell in table.values():
        total, flights = cell["total"], cell["flights"]
        cell["mean"] = None if total is None or not flights else total / flights
    return [table[key] for key in sorted(table)]


whole = st.one_of(st.none(), st.integers(-1000, 1000))
wholes = whole.map(lambda value: None if value is None else float(value))
rows = st.fixed_dictionaries(
    {
        "carrier": st.sampled_from(["AA", "B6", "ü'\"\\", "a\tb\nc"]),
        "month": st.integers(1, 2),
        "flights": whole,
        "total": wholes,
        "shortest": wholes,
        "longest": wholes,
    }
)


@given(
    transactions=st.lists(st.dictionaries(st.sampled_from(["t1", "t2", "t3"]), st.lists(rows, max_size=5)), max_size=3)
)
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_merging_equals_folding_rows_one_by_one(store_url, transactions):
    store = SqlStore(store_url)
    plan = plan_merge(DELAYS, COLUMNS, KEYS, RULES)
    store.create_tables(DELAYS)
    with store.engine.begin() as connection:
        connection.execute(delete(DELAYS))

    for attempts in transactions:
        stage_and_merge(store, plan, attempts, 1)

    everything = [row for attempts in transactions for staged in attempts.values() for row in staged]
    assert contents(store, DELAYS) == fold(everything)


def test_only_winning_attempts_are_merged_and_staged_rows_are_deleted(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), (), {})
    stage = stage_of(store, plan)
    for attempt, row in {"lost": 1, "won": 2}.items():
        with StageWriter(store_url, stage, "shard", 3, attempt) as writer:
            writer.write([{"id": row, "what": attempt}])
    with StageWriter(store_url, stage, "another", 1, "busy") as writer:
        writer.write([{"id": 9, "what": "another's"}])

    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, ["won"], 1)
        delete_staged(connection, stage, "shard", below_fence=4)

    assert contents(store, EVENTS) == [{"id": 2, "what": "won"}]
    with store.engine.connect() as connection:
        assert connection.execute(select(stage.c[STAGE_COLUMNS[0]])).scalars().all() == ["another"]


def test_staged_rows_of_dead_owners_are_deleted_and_others_kept(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), (), {})
    stage = stage_of(store, plan)
    for fence in (1, 2, 3):
        with StageWriter(store_url, stage, "shard", fence, f"a{fence}") as writer:
            writer.write([{"id": fence, "what": None}])

    with store.engine.begin() as connection:
        delete_staged(connection, stage, "shard", below_fence=3)
        assert connection.execute(select(stage.c.id)).scalars().all() == [3]


def test_missing_staged_rows_are_detected(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), (), {})
    stage = stage_of(store, plan)

    with store.engine.begin() as connection, pytest.raises(SqlStoreError, match="5 rows were staged but 0 are there"):
        merge_staged(connection, plan, stage, ["a"], 5)


def test_a_failed_attempt_stages_no_rows_for_a_merge(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), (), {})
    stage = stage_of(store, plan)

    def fail_halfway() -> None:
        with StageWriter(store_url, stage, "shard", 1, "a") as writer:
            writer.write([{"id": 1, "what": "x"}])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, [], 0)
    assert contents(store, EVENTS) == []


def test_replacing_uses_the_staged_value_including_null(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), ("id",), {"what": Replace()})
    stage_and_merge(store, plan, {"a": [{"id": 1, "what": "old"}, {"id": 2, "what": "old"}]}, 1)
    stage_and_merge(store, plan, {"b": [{"id": 1, "what": "new"}], "c": [{"id": 2, "what": None}]}, 1)

    assert contents(store, EVENTS) == [{"id": 1, "what": "new"}, {"id": 2, "what": None}]


def test_replacing_one_key_by_two_rows_is_refused(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), ("id",), {"what": Replace()})

    with pytest.raises(InvalidInput, match=r"table events: a key \(id\) was staged more than once"):
        stage_and_merge(store, plan, {"a": [{"id": 1, "what": "x"}], "b": [{"id": 1, "what": "y"}]}, 1)
    assert contents(store, EVENTS) == []


def test_new_and_known_keys_are_replaced_together(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(EVENTS, ("id", "what"), ("id",), {"what": Replace()})
    stage_and_merge(store, plan, {"a": [{"id": 2, "what": "old"}]}, 1)
    stage_and_merge(store, plan, {"b": [{"id": 3, "what": "new"}, {"id": 1, "what": "new"}]}, 1)
    stage_and_merge(store, plan, {"c": [{"id": 4, "what": "newer"}, {"id": 2, "what": "newer"}]}, 1)

    assert contents(store, EVENTS) == [
        {"id": 1, "what": "new"},
        {"id": 2, "what": "newer"},
        {"id": 3, "what": "new"},
        {"id": 4, "what": "newer"},
    ]


@pytest.mark.integration
def test_a_table_without_a_constraint_on_the_keys_refuses_merges(new_store):
    # Nothing would refuse two rows with one key, in one transaction or in two concurrent ones.
    store = SqlStore(new_store("postgresql"))
    store.create_tables(Table("events", MetaData(), Column("id", Integer, nullable=False), Column("what", Text)))
    plan = plan_merge(EVENTS, ("id", "what"), ("id",), {"what": Replace()})

    with pytest.raises(DBAPIError, match="no unique or exclusion constraint"):
        stage_and_merge(store, plan, {"a": [{"id": 1, "what": "x"}], "b": [{"id": 1, "what": "y"}]}, 1)
    assert contents(store, EVENTS) == []


@pytest.mark.integration
def test_columns_with_unusual_names_are_replaced(new_store):
    store = SqlStore(new_store("postgresql"))
    odd = Table("odd %s", MetaData(), Column("a %(k)s", Integer, primary_key=True), Column('50 % "of" :it', Text))
    names = tuple(odd.c.keys())
    plan = plan_merge(odd, names, names[:1], {names[1]: Replace()})
    for value in ("old", "new"):
        stage_and_merge(store, plan, {"a": [dict(zip(names, (1, value), strict=True))]}, 1)
    assert contents(store, odd) == [dict(zip(names, (1, "new"), strict=True))]


@pytest.mark.integration
def test_a_key_inserted_after_the_comparison_of_keys_is_replaced(new_store):
    store = SqlStore(new_store("postgresql"))
    plan = plan_merge(EVENTS, ("id", "what"), ("id",), {"what": Replace()})
    stage_of(store, plan)
    seen: list[str] = []

    def insert_before(_connection, _cursor, statement, *_others):
        if statement.startswith("INSERT INTO events"):
            if not seen:
                with other.begin() as connection:
                    connection.execute(EVENTS.insert(), [{"id": 2, "what": "theirs"}])
            seen.append(statement)

    other = SqlStore(store.url).engine
    event.listen(store.engine, "before_cursor_execute", insert_before)
    stage_and_merge(store, plan, {"a": [{"id": 1, "what": "ours"}, {"id": 2, "what": "ours"}]}, 1)

    assert ["ON CONFLICT" in statement for statement in seen] == [False, True]
    assert contents(store, EVENTS) == [{"id": 1, "what": "ours"}, {"id": 2, "what": "ours"}]


def test_rows_with_only_keys_form_a_set(store_url):
    store = SqlStore(store_url)
    seen = Table("seen", MetaData(), Column("id", Integer, primary_key=True))
    plan = plan_merge(seen, ("id",), ("id",), {})
    stage_and_merge(store, plan, {"a": [{"id": 1}, {"id": 1}, {"id": 2}]}, 1)
    stage_and_merge(store, plan, {"b": [{"id": 2}, {"id": 3}]}, 1)

    assert [row["id"] for row in contents(store, seen)] == [1, 2, 3]


def test_values_of_many_types_are_unchanged(store_url):
    store = SqlStore(store_url)
    table = Table(
        "many_types",
        MetaData(),
        Column("id", BigInteger, primary_key=True),
        Column("flag", Boolean),
        Column("day", Date),
        Column("at", DateTime),
        Column("amount", Numeric(12, 2)),
        Column("raw", LargeBinary),
        Column("text", Text),
        Column("real", Double),
    )
    row = {
        "id": 2**53 + 1,
        "flag": True,
        "day": dt.date(2013, 1, 2),
        "at": dt.datetime(2013, 1, 2, 3, 4, 5, 678),
        "amount": Decimal("1234.56"),
        "raw": b"\x00\xff\n\\",
        "text": "\\N\té\n",
        "real": 0.1,
    }
    empty = dict.fromkeys(row) | {"id": 1}
    plan = plan_merge(table, tuple(row), (), {})
    stage_and_merge(store, plan, {"a": [row, empty]}, 1)

    assert contents(store, table) == [empty, row]


def test_another_layout_has_another_stage_table(store_url):
    store = SqlStore(store_url)
    wider = Table("events", MetaData(), Column("id", BigInteger, primary_key=True), Column("what", Text))
    names = {stage_name(plan_merge(table, ("id", "what"), (), {})) for table in (EVENTS, wider)}

    assert len(names) == 2
    assert all(name.startswith(PREFIX) and len(name) < 60 for name in names)
    plan = plan_merge(EVENTS, ("id", "what"), (), {})
    stage = stage_of(store, plan).name
    assert stage_of(store, plan).name == stage
    with store.engine.connect() as connection:
        assert store.table_names(connection, PREFIX) == [stage]
        assert inspect(connection).has_table("events")
        assert connection.execute(select(func.count()).select_from(EVENTS)).scalar_one() == 0


LOOSE = Table("loose", MetaData(), Column("k", Integer), Column("v", Integer))
KEYED = Table("keyed", MetaData(), Column("k", Integer, nullable=False), Column("v", Integer), UniqueConstraint("k"))


@pytest.mark.parametrize(
    ("table", "columns", "keys", "rules", "problem"),
    [
        (EVENTS, ("id", "colour"), (), {}, "has no column 'colour'; it has id, what"),
        (EVENTS, ("id", "id"), (), {}, "a column twice"),
        (EVENTS, ("id",), (), {"what": Add()}, "merge rules need keys"),
        (EVENTS, ("what",), ("id",), {"what": Replace()}, "key 'id' is not among the rows' columns"),
        (EVENTS, ("id", "what"), ("id",), {}, "say how 'what' merges"),
        (EVENTS, ("id", "what"), ("id",), {"id": Add(), "what": Add()}, "'id' is a key"),
        (EVENTS, ("id",), ("id",), {"what": Add()}, "'what' has a merge rule but"),
        (LOOSE, ("k", "v"), ("k",), {"v": Add()}, "key 'k' must be NOT NULL"),
        (KEYED, ("k", "v"), ("k",), {"v": Quotient("v", "k")}, "'v' divides 'v'"),
        (DELAYS, ("carrier", "month"), ("carrier",), {"month": Add()}, "unique constraint on exactly"),
        (DELAYS, COLUMNS, KEYS, {**RULES, "mean": Quotient("total", "carrier")}, "'mean' divides 'carrier'"),
        (DELAYS, (*COLUMNS, "mean"), KEYS, RULES, "'mean' is computed"),
    ],
)
def test_an_output_that_does_not_fit_its_table_is_refused(table, columns, keys, rules, problem):
    with pytest.raises(InvalidInput, match=problem) as caught:
        plan_merge(table, columns, keys, rules)
    assert caught.value.field == f"table {table.name}"


def test_a_unique_constraint_is_sufficient_as_a_key(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(KEYED, ("k", "v"), ("k",), {"v": Add()})
    stage_and_merge(store, plan, {"a": [{"k": 1, "v": 2}, {"k": 1, "v": 3}]}, 1)

    with store.engine.connect() as connection:
        assert connection.execute(select(KEYED.c.v)).scalars().all() == [5]
