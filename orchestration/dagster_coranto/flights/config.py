"""Settings of a run over the flights, and the URL of its store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import dagster as dg
from pydantic import Field

from coranto_flights.names import TABLE
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.sql_store import STORE_VARIABLE, SqlStoreResource

TRANSACTION_BYTES: Final = 64 << 20


class FlightsConfig(dg.ConfigurableResource):  # type: ignore[type-arg]  # its value is itself
    """Settings of one run. The `prefix` of the resource `journals` chooses its journals."""

    table: str = Field(default=TABLE, description="SQL table of the carriers' delays; created when absent.")
    limit: int = Field(default=0, ge=0, description="Number of flights; 0 takes all.")
    max_transaction_bytes: int = Field(
        default=TRANSACTION_BYTES, gt=0, description="Maximum bytes of journal content per consumer transaction."
    )
    store_url: str = Field(
        default="", description="SQL store. Empty: $CORANTO_STORE_URL, otherwise SQLite in the cluster's data folder."
    )


class FlightsStore(SqlStoreResource):
    """The demo's SQL store, looked up at each use."""

    def url_with_password(self) -> str:
        return store_url(JournalResource().located_data_dir())


def store_url(data_dir: Path) -> str:
    """Return the SQL store's URL for the cluster in `data_dir`: $CORANTO_STORE_URL, else SQLite in `data_dir`."""
    return os.environ.get(STORE_VARIABLE) or f"sqlite:///{data_dir.absolute() / 'store.db'}"
