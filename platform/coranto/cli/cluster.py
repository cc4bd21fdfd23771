"""`coranto up`: a cluster on this machine, in the foreground."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from coranto.telemetry import configure_logging


def up(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", envvar="CORANTO_DATA", help="Folder of everything the cluster keeps.")
    ] = Path(".coranto"),
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="How many brokers to run.")] = 1,
) -> None:
    """Run an embedded cluster (etcd and brokers) in the foreground, until Ctrl-C.

    All of it lives below one folder, and is there again when it is started again.
    """
    from coranto.cluster import EmbeddedCluster

    configure_logging("info")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with EmbeddedCluster(data_dir, brokers=brokers) as cluster:
        typer.echo(f"ready: brokers at {cluster.info.endpoint}, data in {data_dir.resolve()}")
        typer.echo(f"export CORANTO_DATA={data_dir.resolve()}")
        # Waits in steps, because only between waits does Python run signal handlers on every platform.
        while not stopped.wait(timeout=0.5):
            cluster.check()
    typer.echo("stopped")
