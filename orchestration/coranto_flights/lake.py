"""The flights' second consumer, which copies every flight into an Iceberg table, and the check of this table.

This module imports Spark and pyiceberg. Import it when a consumer runs, not when definitions are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pandas as pd
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from sqlalchemy import Column, Integer, MetaData, String, Table

from coranto.client.groups import JournalGroup
from coranto_consumers.spark.application.outputs import Outputs, TableOutput
from coranto_consumers.spark.outputs.iceberg import IcebergStore
from coranto_flights.names import NAMESPACE, lake_consumer_name, lake_table
from coranto_flights.proof import CheckedClaim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NUMBERS: Final = ("year", "month", "day", "flight", "sched_dep_time", "dep_time", "arr_delay")
_TEXTS: Final = ("carrier", "tailnum", "origin", "dest")


def lake_catalog(data_dir: Path) -> SqlCatalog:
    """Return the catalog of the demo's warehouse, both in a folder next to the cluster's data."""
    folder = data_dir.absolute() / "lake"
    folder.mkdir(parents=True, exist_ok=True)
    return SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")


def flights_table(name: str) -> Table:
    """Return the definition of the Iceberg table of flights, partitioned by month."""
    return Table(
        name,
        MetaData(),
        *(Column(each, Integer) for each in _NUMBERS),
        *(Column(each, String) for each in _TEXTS),
        schema=NAMESPACE,
        info={"partition_by": ["month"]},
    )


class FlightsIntoLake:
    """The application for the flights below `prefix`: each becomes a row. `table` is the corresponding SQL table."""

    value_schema = ", ".join([*(f"{each} INT" for each in _NUMBERS), *(f"{each} STRING" for each in _TEXTS)])

    def __init__(self, prefix: str, table: str) -> None:
        self.table = flights_table(lake_table(table))
        self._sources = JournalGroup("flights/events").under(prefix).selector_text
        self._name = lake_consumer_name(prefix)

    @property
    def name(self) -> str:
        return self._name

    @property
    def sources(self) -> str:
        return self._sources

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(tables=[TableOutput(self.table, committed.select(*_NUMBERS, *_TEXTS))])


def lake_store(data_dir: Path, table: str) -> IcebergStore:
    """Return the store of a consumer into the lake. `table` is the corresponding SQL table."""
    return IcebergStore(lake_catalog(data_dir), flights_table(lake_table(table)), namespace=NAMESPACE)


def prove_lake(data_dir: Path, table: str, flights: pd.DataFrame) -> CheckedClaim:
    """Check that the Iceberg table has each flight once. DuckDB reads the table's data files."""
    name = f"{NAMESPACE}.{lake_table(table)}"
    claim = f"the Iceberg table {name} has every flight once, as DuckDB reads its files"
    try:
        tasks = list(lake_catalog(data_dir).load_table(name).scan().plan_files())
    except NoSuchTableError:
        return CheckedClaim(claim, False, "the table does not exist")
    files = [task.file.file_path.removeprefix("file://") for task in tasks]
    if not files:
        return CheckedClaim(claim, flights.empty, "the table has no rows")
    names = ", ".join((*_NUMBERS, *_TEXTS))
    with duckdb.connect() as connection:
        connection.register("expected", flights[[*_NUMBERS, *_TEXTS]].convert_dtypes())
        connection.execute("CREATE TABLE found AS FROM read_parquet(?, hive_partitioning = false)", [files])
        missing, surplus, rows = (
            connection.execute(f"SELECT count(*) FROM ({query})").fetchall()[0][0]
            for query in (
                f"SELECT {names} FROM expected EXCEPT ALL SELECT {names} FROM found",
                f"SELECT {names} FROM found EXCEPT ALL SELECT {names} FROM expected",
                "FROM found",
            )
        )
    if missing or surplus:
        return CheckedClaim(claim, False, f"{missing} rows are missing, {surplus} should not be there")
    return CheckedClaim(claim, True, f"{rows:,} rows in {len(files)} files")
