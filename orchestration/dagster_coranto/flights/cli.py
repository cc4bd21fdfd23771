"""`coranto demo …`: the main job, on real flights."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from coranto.process.dirlock import DirectoryLock
from coranto.telemetry import configure_logging

app = typer.Typer(no_args_is_help=True)

DataDir = Annotated[Path, typer.Option("--data-dir", help="Folder of all files of the demo.")]
Brokers = Annotated[int, typer.Option("--brokers", min=1, help="How many brokers to run.")]
_DATA = Path(".coranto/demo")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@app.command()
def run(
    data_dir: DataDir = _DATA,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Number of flights; 0 takes all.")] = 0,
    brokers: Brokers = 1,
    lake: Annotated[bool, typer.Option("--lake", help="Also copy every flight into an Iceberg table.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove the files of earlier runs, and start over.")] = False,
) -> None:
    """Start a cluster, publish the flights, consume them exactly once, kill the consumer, prove the result.

    The exit code is 0 if all claims hold, otherwise 1.
    """
    from dagster_coranto.flights.materialize import drop_recorded_data
    from dagster_coranto.flights.run import Demo, print_report

    configure_logging("warning")
    # SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    data_dir = data_dir.absolute()
    if fresh and data_dir.exists():
        with DirectoryLock(data_dir):
            drop_recorded_data(data_dir)
        shutil.rmtree(data_dir)
    try:
        outcome = Demo(data_dir, limit=limit, brokers=brokers, lake=lake, console=console).run()
    except KeyboardInterrupt:
        console.print("\nStopped, with everything that was started. Run it again to continue.")
        raise typer.Exit(130) from None
    print_report(outcome, data_dir, console)
    raise typer.Exit(0 if outcome.holds else 1)


@app.command()
def ui(
    data_dir: DataDir = _DATA,
    brokers: Brokers = 1,
    port: Annotated[int, typer.Option("--port", help="Port of the UI, on this machine.")] = 3000,
) -> None:
    """Open the demo's cluster in Dagster's UI, until Ctrl-C."""
    from dagster_coranto.flights.ui import serve

    configure_logging("warning")
    signal.signal(signal.SIGTERM, _interrupt)
    serve(data_dir.absolute(), brokers=brokers, port=port, console=Console())
