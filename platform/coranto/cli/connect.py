"""Functions for commands: find a cluster and connect to it."""

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

RETRY_TIMEOUT = 5.0
"""Retry timeout of a command in seconds, before it reports a failure."""

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
    """Return the configuration for the cluster at `endpoint`, else the local one. Raises ClusterError if there is none.

    For a cluster given by its endpoint, $CORANTO_FILE_ROOT names the folder of its `file:///` stores. Tokens and
    certificates come from the environment (`ClientConfig.from_environment`), so that lists of processes do not show
    them.
    """
    if endpoint:
        root = os.environ.get("CORANTO_FILE_ROOT")
        return ClientConfig.from_environment(endpoint, Path(root) if root else None, RETRY_TIMEOUT)
    from coranto.cluster import locate

    info = locate()
    return ClientConfig.from_environment(info.endpoint, info.file_root, RETRY_TIMEOUT)


def connect(endpoint: str | None) -> SyncJournalClient:
    """Return a client of `find_cluster(endpoint)`."""
    return SyncJournalClient.of(find_cluster(endpoint))


def with_client(endpoint: str | None, work: Callable[[JournalClient], Awaitable[T]]) -> T:
    """Run `work` with an asynchronous client of `find_cluster(endpoint)`, and return its result.

    When the command is interrupted, the work is cancelled and has some seconds to clean up.
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
            # The work is blocked where it cannot be cancelled, for example in a write to a pager that has stopped
            # reading. An ordinary exit would wait forever too.
            os._exit(_INTERRUPTED)
        raise


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end the command like Ctrl-C, so that the command cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
