"""The status of an asset that Dagster's UI shows as "Unsynced"."""

from __future__ import annotations

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest


def status(
    instance: dg.DagsterInstance, definitions: dg.Definitions, key: dg.AssetKey, partition: str | None = None
) -> str:
    """Return FRESH, STALE or MISSING."""
    resolver = CachingStaleStatusResolver(
        instance, definitions.resolve_asset_graph(), loading_context=LoadingContextForTest(instance)
    )
    return resolver.get_status(key, partition).value
