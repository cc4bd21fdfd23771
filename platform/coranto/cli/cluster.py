"""`coranto up`: a cluster on this machine, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coranto.telemetry import configure_logging


def up(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", envvar="CORANTO_DATA", help="Folder for all data of the cluster.")
    ] = Path(".coranto"),
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="How many brokers to run.")] = 1,
) -> None:
    """Run an embedded cluster (etcd and brokers) in the foreground, until Ctrl-C.

    All data lives below one folder. The next start continues with it.
    """
    from coranto.cluster import run_foreground

    configure_logging("warning")
    run_foreground(data_dir, brokers)
