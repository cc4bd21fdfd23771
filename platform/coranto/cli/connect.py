"""How commands find a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coranto.client import ClientConfig, SyncJournalClient

PATIENCE = 5.0
"""Seconds for which a command keeps trying brokers that cannot serve, before it says so."""

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        envvar="CORANTO_ENDPOINT",
        help="Broker as host:port. Default: the cluster of `coranto up`, found by $CORANTO_DATA or ./.coranto.",
        show_default=False,
    ),
]


def find_cluster(endpoint: str | None) -> ClientConfig:
    """The cluster at `endpoint`, else the local one. Raises ClusterError when there is none.

    $CORANTO_FILE_ROOT names the folder of `file:///` stores of a cluster given by its endpoint.
    """
    if endpoint:
        root = os.environ.get("CORANTO_FILE_ROOT")
        return ClientConfig(endpoint, Path(root) if root else None, PATIENCE)
    from coranto.cluster import locate

    info = locate()
    return ClientConfig(info.endpoint, info.file_root, PATIENCE)


def connect(endpoint: str | None) -> SyncJournalClient:
    """A client of `find_cluster(endpoint)`."""
    return SyncJournalClient.of(find_cluster(endpoint))
