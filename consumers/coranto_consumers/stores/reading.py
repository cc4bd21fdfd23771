"""Checkpoints in stores of any kind, read by their URLs without raising a fence."""

from __future__ import annotations

from typing import Final

from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.sql import SqlStore

ICEBERG: Final = "iceberg://"


def read_checkpoint(store: str, consumer: str) -> Restored | None:
    """Return the fence and checkpoint of a consumer in the store of a URL. None if it never started there.

    Raises InvalidInput for a URL of no store, and SqlStoreError.
    """
    if store.startswith(ICEBERG):
        from coranto_consumers.stores.iceberg.urls import IcebergHome  # Needs the extra `lake`.

        return IcebergHome.at(store).read(consumer)
    return SqlStore(store).read(consumer)
