"""`SyncCluster`: a `Cluster` for blocking programs, on the event loop that all blocking clients share."""

from __future__ import annotations

from collections.abc import Sequence

from coranto.client import SyncJournalClient
from coranto.client.config import DEFAULT_RETRY_TIMEOUT
from coranto.client.loop import Blocking, run_blocking
from coranto.testing.cluster import Cluster
from coranto.testing.generated.wrappers import ClusterWrapper


class SyncCluster(ClusterWrapper, Blocking):
    """Brokers in this process: `with SyncCluster(brokers=3) as cluster:`. See `Cluster` for parameters and methods.

    The brokers listen on free ports of this machine, so that clients may be pickled and sent to other processes.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        zones: Sequence[str] = ("local",),
        lease_seconds: float = 10.0,
        log_level: str = "warning",
    ) -> None:
        self._cluster = Cluster(brokers, zones=zones, lease_seconds=lease_seconds, grpc=True, log_level=log_level)
        self._clients: list[SyncJournalClient] = []

    def __enter__(self) -> SyncCluster:
        run_blocking(self._cluster.__aenter__())
        return self

    def close(self) -> None:
        """End the cluster, as leaving its block does. No effect if it does not run."""
        for client in self._clients:
            client.close()
        run_blocking(self._cluster.close())

    def __repr__(self) -> str:
        return repr(self._cluster).replace("Cluster", "SyncCluster")

    @property
    def _inner(self) -> Cluster:
        return self._cluster

    def client(
        self, *, zone: str = "", retry_timeout: float = DEFAULT_RETRY_TIMEOUT, append_streams: bool = True
    ) -> SyncJournalClient:
        """Return a blocking client, ready for use. It is closed with the cluster, if not earlier."""
        client = SyncJournalClient(self.endpoint, zone=zone, retry_timeout=retry_timeout, append_streams=append_streams)
        self._clients.append(client)
        return client
