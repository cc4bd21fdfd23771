"""Command `python -m airflow_coranto.flights`: the demo's cluster, and Airflow with the flights' DAGs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from airflow_coranto.flights.standalone import AirflowStandalone
from coranto.cluster import EmbeddedCluster
from coranto.telemetry import configure_logging


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def serve(
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Folder of the demo's cluster.")] = Path(".coranto/demo"),
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="How many brokers to run.")] = 1,
    port: Annotated[int, typer.Option("--port", help="Port of Airflow, on this machine.")] = 8080,
) -> None:
    """Run the demo's cluster, and Airflow with the flights' DAGs over it, until Ctrl-C."""
    configure_logging("warning")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    try:
        with EmbeddedCluster(data_dir.absolute(), brokers=brokers, progress=console.print) as cluster:
            console.print(f"[bold]Cluster[/] is up at {cluster.info.endpoint}; starting Airflow …", highlight=False)
            with AirflowStandalone(data_dir, port=port) as airflow:
                console.print(
                    f"[bold]Airflow[/] is at {airflow.url}/dags/flights   (Ctrl-C stops it, and the cluster)",
                    highlight=False,
                    soft_wrap=True,
                )
                never = threading.Event()
                while not never.wait(0.5):
                    airflow.watch()
    except KeyboardInterrupt:
        console.print("\nStopped.")


if __name__ == "__main__":
    typer.run(serve)
