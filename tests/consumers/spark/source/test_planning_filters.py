"""Filters of queries exclude journals, ranges and fragments without matching rows."""

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from coranto.messages.uuids import clock_from_ns
from coranto.testing.http_store import HttpStore
from coranto_consumers.spark.source.planning import Bounds, FilterBounds

OWN = {"_journal": "journal", "_offset": "offset", "_clock": "clock"}
NAMES = ("sales/north", "sales/south", "stock/north")
SETTING = "spark.sql.python.filterPushdown.enabled"
T0 = 1_700_000_000
HOUR = 3600


def journal(kind, *value):
    return kind(("_journal",), *value)


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        ([], NAMES),
        ([journal(EqualTo, "sales/north")], ("sales/north",)),
        ([Not(journal(EqualTo, "sales/north"))], NAMES[1:]),
        ([journal(In, ("sales/south", "none"))], ("sales/south",)),
        ([journal(StringStartsWith, "sales/"), journal(IsNotNull)], NAMES[:2]),
        ([journal(StringContains, "north"), journal(LessThan, "stock")], ("sales/north",)),
        ([EqualTo(("journal",), "none"), EqualTo(("_journal", "x"), "none"), journal(EqualTo, None)], NAMES),
    ],
)
def test_filters_select_journals(filters, taken):
    filter_bounds = FilterBounds.of(filters, OWN)
    assert tuple(name for name in NAMES if filter_bounds.may_match(name)) == taken


@pytest.mark.parametrize(
    ("filters", "bounds"),
    [
        ([GreaterThan(("_offset",), 5), LessThanOrEqual(("_offset",), 9)], Bounds(6, 9)),
        ([GreaterThanOrEqual(("_offset",), 5), LessThan(("_offset",), 9)], Bounds(5, 8)),
        ([In(("_offset",), (4, 2, 7))], Bounds(2, 7)),
        ([Not(EqualTo(("_offset",), 5)), In(("_offset",), (1, None))], Bounds()),
    ],
)
def test_filters_bound_offsets(filters, bounds):
    assert FilterBounds.of(filters, OWN).offsets == bounds


@pytest.fixture
def stored(broker):
    """Three journals with a message an hour, each stored when it was published."""
    now = [0]
    with HttpStore() as store:
        broker.create(*NAMES)
        for name in NAMES:
            fake = broker.fake.journals[name]
            producer = broker.publisher_at(lambda: now[0] * 1_000_000_000)
            for n in range(6):
                now[0] = T0 + n * HOUR
                producer.publish(name, {"n": n, "long": "x" * 9000})
                producer.flush()
                fake.roll_to(store)
                object.__setattr__(fake.stored[-1].fragment, "mod_time", now[0])
        yield store


@pytest.fixture
def pushed(spark):
    """The session, with filters pushed to sources."""
    before = spark.conf.get(SETTING)
    spark.conf.set(SETTING, "true")
    yield spark
    spark.conf.set(SETTING, before)


def read(spark, broker, condition, **options):
    frame = (
        spark.read.format("journal")
        .options(endpoint=broker.endpoint, selector="name:prefix=s", fragmentCacheBytes="0", **options)
        .schema("n BIGINT, _journal STRING, _offset BIGINT, _clock BIGINT")
        .load()
    )
    return sorted((row["_journal"], row.n) for row in frame.where(condition).collect())


CONDITIONS = [
    ("_journal = 'sales/north'", 6, 6),
    ("_journal IN ('sales/north', 'stock/north') AND n > 2", 12, 12),
    ("_journal LIKE 'sales/%'", 12, 12),
    ("_journal = 'none'", 0, 0),
    # Producers' clocks may be an hour fast. The last byte of the previous fragment shows if a line begins here.
    (f"_clock >= {clock_from_ns((T0 + 5 * HOUR) * 1_000_000_000)}", 9, 9),
    (f"_clock >= {clock_from_ns((T0 + 9 * HOUR) * 1_000_000_000)} AND _journal < 'st'", 0, 0),
    # A line may reach into the next fragment.
    ("_offset < 10", 18, 6),
    ("n = 3", 18, 18),
]


@pytest.mark.parametrize(("condition", "committed", "uncommitted"), CONDITIONS)
def test_filtered_reads_have_the_same_rows_and_fetch_less(pushed, broker, stored, condition, committed, uncommitted):
    spark = pushed
    for isolation, fetches in (("read_committed", committed), ("read_uncommitted", uncommitted)):
        spark.conf.set(SETTING, "false")
        whole = read(spark, broker, condition, isolation=isolation)
        assert len(stored.fetched) == 18
        stored.fetched.clear()
        spark.conf.set(SETTING, "true")
        assert read(spark, broker, condition, isolation=isolation) == whole
        assert len(stored.fetched) == fetches, isolation
        stored.fetched.clear()


def test_a_producer_with_a_fast_clock_loses_no_message(pushed, broker, stored):
    for name in NAMES:
        for each in broker.fake.journals[name].stored:
            object.__setattr__(each.fragment, "mod_time", each.fragment.mod_time - HOUR + 1)
    condition = f"_clock >= {clock_from_ns((T0 + 4 * HOUR) * 1_000_000_000)}"
    for isolation in ("read_committed", "read_uncommitted"):
        found = read(pushed, broker, condition, isolation=isolation)
        assert found == [(name, n) for name in NAMES for n in (4, 5)]
