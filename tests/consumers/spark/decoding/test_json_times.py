"""Texts of dates, times and zones that `test_json_values.py` does not compare with Spark's parsers."""

from datetime import UTC, date, datetime, timedelta

import pytest

from coranto_consumers.spark.decoding.json_times import NoZone, days_of, local_micros_of, micros_of, zone_of


def test_a_time_without_a_date_is_one_of_today():
    zone = zone_of("+05:00")
    before = datetime.now(UTC)
    found = micros_of("T10:11:12", zone), micros_of("10:11:12+05:00", None)
    expected = {
        int(now.astimezone(zone).replace(hour=10, minute=11, second=12, microsecond=0).timestamp()) * 1_000_000
        for now in (before, datetime.now(UTC))
    }
    assert set(found) <= expected


def test_days_of_all_months_match_the_calendar():
    first = date(1896, 1, 1)
    for number in range(0, 6000):
        day = first + timedelta(days=number)
        assert days_of(day.isoformat()) == day.toordinal() - date(1970, 1, 1).toordinal()


@pytest.mark.parametrize("text", ["2024-02-29T10:00:00", "10:00"])
def test_a_time_without_a_zone_needs_one(text):
    with pytest.raises(NoZone):
        micros_of(text, None)


@pytest.mark.parametrize("text", ["T10:00", "2024-02-29T10:00:00Z", "2023-02-29", "2024-01-01T1:", ""])
def test_invalid_local_times_are_none(text):
    assert local_micros_of(text) is None


@pytest.mark.parametrize(
    "name", ["", "x", "Nowhere/Else", "../../etc/passwd", "/etc/localtime", "+19:00", "UTC+", "America", "posixrules"]
)
def test_unknown_zone_names_are_none(name):
    assert zone_of(name) is None


def test_offsets_are_zones():
    for name, hours in (("+1", 1), ("-09:30", -9.5), ("UTC+0130", 1.5), ("GMT-18", -18), ("EST", -5), (" Z", 0)):
        zone = zone_of(name)
        assert zone is not None
        assert datetime(2024, 1, 1, tzinfo=zone).utcoffset() == timedelta(hours=hours)


def test_skipped_and_repeated_hours_of_a_zone_are_read_as_by_java():
    zone = zone_of("Europe/Berlin")
    left_out = datetime(2024, 3, 31, 1, 30, tzinfo=UTC)
    twice = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)
    assert micros_of("2024-03-31 02:30:00", zone) == left_out.timestamp() * 1_000_000
    assert micros_of("2024-10-27 02:30:00", zone) == twice.timestamp() * 1_000_000
