"""Offset vectors that are too large for metadata, stored in the SQL store of their consumer."""

from __future__ import annotations

from collections.abc import Mapping

from dagster_coranto.translation.metadata import SHOWN_JOURNALS


def store_vector(
    store_url: str, consumer: str, ends: Mapping[str, int], begins: Mapping[str, int] | None = None
) -> None:
    """Store a consumer's offsets if they are too many for metadata, so that `AsOf` finds them. Raises SqlStoreError."""
    if len(ends) <= SHOWN_JOURNALS:
        return
    from coranto_consumers.stores.sql import SqlStore
    from coranto_consumers.stores.vectors import OffsetVector, VectorLog

    VectorLog(SqlStore(store_url)).save(consumer, OffsetVector(ends, begins or {}))
