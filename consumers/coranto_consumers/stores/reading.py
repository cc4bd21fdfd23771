"""Reading of checkpoints in any kind of store, by the store's URL, without raising a fence.

Importing this module does not import SQLAlchemy: Dagster definitions refer to stores, and are loaded often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from coranto_consumers.stores.fencing import Restored

ICEBERG: Final = "iceberg://"


def consumer_names(store: str) -> Sequence[str]:
    """Return the names of all consumers with a checkpoint in the store at a URL, sorted.

    Raises InvalidInput for an invalid URL, and SqlStoreError.
    """
    if store.startswith(ICEBERG):
        from coranto_consumers.stores.iceberg.urls import IcebergHome  # Needs the extra `lake`.

        return IcebergHome.at(store).names("")
    from coranto_consumers.stores.sql import SqlStore

    return SqlStore(store).names()


def display_name(store: str) -> str:
    """Return a store's URL without its secrets. Raises InvalidInput for an invalid URL."""
    from coranto_consumers.stores.urls import display_url, parse_store_url

    return store if store.startswith(ICEBERG) else display_url(parse_store_url(store))


def read_checkpoint(store: str, consumer: str) -> Restored | None:
    """Return the fence and checkpoint of a consumer in the store at a URL. None if the consumer never started there.

    Raises InvalidInput for an invalid URL, and SqlStoreError.
    """
    if store.startswith(ICEBERG):
        from coranto_consumers.stores.iceberg.urls import IcebergHome  # Needs the extra `lake`.

        return IcebergHome.at(store).read(consumer)
    from coranto_consumers.stores.sql import SqlStore

    return SqlStore(store).read(consumer)
