"""How commands find a cluster, and work with it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.client.loop import shared_loop

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds for which a command keeps trying brokers that cannot serve, before it says so."""

_CLEAN_UP_SECONDS = 10.0
_INTERRUPTED = 130

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

    $CORANTO_FILE_ROOT names the folder of `file:///` stores of a cluster given by its endpoint. Tokens and certificates
    come from the environment (`ClientConfig.from_environment`), so that they show in no list of processes.
    """
    if endpoint:
        root = os.environ.get("CORANTO_FILE_ROOT")
        return ClientConfig.from_environment(endpoint, Path(root) if root else None, PATIENCE)
    from coranto.cluster import locate

    info = locate()
    return ClientConfig.from_environment(info.endpoint, info.file_root, PATIENCE)


def connect(endpoint: str | None) -> SyncJournalClient:
    """A client of `find_cluster(endpoint)`."""
    return SyncJournalClient.of(find_cluster(endpoint))


def with_client(endpoint: str | None, work: Callable[[JournalClient], Awaitable[T]]) -> T:
    """Do `work` with an asynchronous client of `find_cluster(endpoint)`.

    When the command is interrupted the work is cancelled, and has a while to leave things in order.
    """
    config = find_cluster(endpoint)
    ended = threading.Event()

    async def run() -> T:
        try:
            async with JournalClient.of(config) as client:
                return await work(client)
        finally:
            ended.set()

    try:
        return shared_loop().run(run())
    except KeyboardInterrupt:
        if not ended.wait(_CLEAN_UP_SECONDS):
            # It is held up where nothing can be cancelled, as in writing to a pager that has stopped reading: there
            # the ordinary way out would wait for ever, too.
            os._exit(_INTERRUPTED)
        raise


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, so that it leaves things in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
