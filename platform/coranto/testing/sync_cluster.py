"""`SyncCluster`: a `Cluster` for programs that block, on the event loop that all blocking clients share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coranto.client import SyncJournalClient
from coranto.client.config import DEFAULT_PATIENCE
from coranto.client.loop import Blocking, run_blocking
from coranto.fragments import Fragment
from coranto.testing.cluster import Cluster
from coranto.wire import protocol_pb2 as pb


class SyncCluster(Blocking):
    """Brokers in this process: `with SyncCluster(brokers=3) as cluster:`. See `Cluster` for what all of it means.

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
        """End the cluster, as leaving its block does. Nothing if it does not run."""
        for client in self._clients:
            client.close()
        run_blocking(self._cluster.close())

    def __repr__(self) -> str:
        return repr(self._cluster).replace("Cluster", "SyncCluster")

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._cluster.endpoints

    @property
    def endpoint(self) -> str:
        return self._cluster.endpoint

    def client(self, *, zone: str = "", patience: float = DEFAULT_PATIENCE) -> SyncJournalClient:
        """A blocking client, ready for use. It is closed with the cluster, unless before."""
        client = SyncJournalClient(self.endpoint, zone=zone, patience=patience)
        self._clients.append(client)
        return client

    def create(
        self,
        journal: str | pb.JournalSpec,
        *,
        replication: int = 0,
        labels: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        work = self._cluster.create(journal, replication=replication, labels=labels, timeout=timeout)
        run_blocking(work)

    def ready(self, *journals: str, timeout: float = 30.0) -> None:
        run_blocking(self._cluster.ready(*journals, timeout=timeout))

    def kill(self, number: int, *, expire: bool = False) -> None:
        run_blocking(self._cluster.kill(number, expire=expire))

    def stop(self, number: int) -> None:
        run_blocking(self._cluster.stop(number))

    def start(self, number: int) -> None:
        run_blocking(self._cluster.start(number))

    def is_up(self, number: int) -> bool:
        return self._cluster.is_up(number)

    def cut(self, one: int | str, other: int | str, *, one_way: bool = False) -> None:
        _on_loop(lambda: self._cluster.cut(one, other, one_way=one_way))

    def heal(self) -> None:
        _on_loop(self._cluster.heal)

    def fragments(self, journal: str) -> dict[Fragment, bytes]:
        return self._cluster.fragments(journal)


def _on_loop(function: Callable[[], Any]) -> None:
    async def call() -> None:
        function()

    run_blocking(call())
