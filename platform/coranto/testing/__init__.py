"""Helpers for tests of programs that use Coranto, and for Coranto's own tests.

`Cluster` and `SyncCluster` run brokers in the process of the caller, with their whole environment in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coranto.testing.cluster import Cluster
    from coranto.testing.sync_cluster import SyncCluster

__all__ = ["Cluster", "SyncCluster"]


def __getattr__(name: str) -> object:
    # Most modules of this package need no cluster, and should not wait for its imports.
    if name == "Cluster":
        from coranto.testing.cluster import Cluster

        return Cluster
    if name == "SyncCluster":
        from coranto.testing.sync_cluster import SyncCluster

        return SyncCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
