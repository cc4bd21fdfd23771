"""Evidence in an Iceberg store: checkpoints in the properties of its home table, and queries on its tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import duckdb
import pyarrow as pa
from pyiceberg.table import Table

from coranto.errors import CorantoError, CorruptData
from coranto.messages import Checkpoint
from coranto_consumers.audit.evidence import Evidence, Row
from coranto_consumers.stores.iceberg.catalogs import FAILURES
from coranto_consumers.stores.iceberg.state import SnapshotId, key_of, names_in, state_of
from coranto_consumers.stores.iceberg.urls import IcebergHome


class IcebergEvidence:
    """Evidence in a home table and its consumers' tables, as of one commit. Queried tables are loaded into memory."""

    def __init__(self, home: IcebergHome) -> None:
        self._home = home

    @property
    def name(self) -> str:
        return self._home.name

    def names(self, prefix: str) -> list[str]:
        """Return the names of checkpoints that start with `prefix`, sorted. Raises SqlStoreError."""
        return list(self._home.names(prefix))

    def read(self, shards: Sequence[str], queries: Sequence[str]) -> Evidence:
        home = self._home.load()
        there = names_in(home)
        rows: dict[str, Row] = {}
        tables: dict[str, SnapshotId] = {}
        for shard in shards:
            if shard not in there:
                continue
            value = home.properties[key_of(shard)]
            try:
                state = state_of(home, shard)
            except CorruptData as error:
                rows[shard] = Row(_fence_in(value), value.encode(), Checkpoint(), str(error))
                continue
            rows[shard] = Row(state.fence, value.encode(), state.checkpoint)
            committed = {**state.tables, self._home.table: SnapshotId(state.snapshot, state.sequence)}
            for name, snapshot in committed.items():
                tables[name] = max(snapshot, tables.get(name, snapshot), key=lambda each: each.sequence)
        return Evidence(rows, values=[self._value(query, home, tables) for query in queries])

    def _value(self, query: str, home: Table, tables: Mapping[str, SnapshotId]) -> object:
        """Return the single value of a DuckDB query, or an error. Tables have the snapshots that the state records."""
        with duckdb.connect(config={"enable_external_access": "false"}) as connection:
            try:
                for number, name in enumerate({self._home.table, *tables}):
                    namespace, _, table = name.rpartition(".")
                    if table.casefold() not in query.casefold():
                        continue
                    connection.register(f"rows_{number}", self._rows(name, home, tables))
                    connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{namespace}"')
                    connection.execute(f'CREATE VIEW "{namespace}"."{table}" AS FROM rows_{number}')
                rows = connection.execute(query).fetchmany(2)
            except (duckdb.Error, CorantoError, pa.ArrowException, ValueError, *FAILURES) as error:
                return ValueError(" ".join(f"{type(error).__name__}: {error}".split()))
        if len(rows) != 1 or len(rows[0]) != 1:
            return ValueError("it does not return exactly one row of one column")
        value: object = rows[0][0]
        return value

    def _rows(self, name: str, home: Table, tables: Mapping[str, SnapshotId]) -> pa.Table:
        table = home if name == self._home.table else self._home.load(name)
        if name not in tables:  # The home table, if no shard has a state.
            return table.scan().to_arrow()
        known = tables[name].snapshot
        return table.scan(snapshot_id=known).to_arrow() if known else table.schema().as_arrow().empty_table()


def _fence_in(value: str) -> int:
    """Return the fence in a damaged state, or 0 if the fence is unreadable, too."""
    try:
        return int(json.loads(value)["fence"])
    except (ValueError, KeyError, TypeError):
        return 0
