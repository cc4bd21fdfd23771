"""The store of outputs for a URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from coranto_consumers.spark.outputs.stores import OutputStore, SqlOutputs
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import SqlStore


def output_store(store: str | OutputStore[Any], commit: Callable[[Connection], None]) -> OutputStore[Any]:
    """Return `store`, or the store of its URL. `commit` commits the transactions of a database."""
    if isinstance(store, str) and store.startswith(ICEBERG):
        from coranto_consumers.spark.outputs.iceberg import IcebergStore  # Needs the extra `lake`.

        return IcebergStore.at(store)
    return store if isinstance(store, OutputStore) else SqlOutputs(SqlStore(store, commit=commit))
