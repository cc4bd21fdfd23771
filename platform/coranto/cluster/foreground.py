"""`coranto up`: a cluster in the foreground, for interactive use."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from coranto.cluster.embedded import EmbeddedCluster
from coranto.cluster.info import DATA_VARIABLE, DEFAULT_DATA_DIR, ClusterInfo

_CHECK_SECONDS = 0.5


def run_foreground(data_dir: Path, brokers: int = 1, *, console: Console | None = None) -> None:
    """Run a cluster until Ctrl-C or SIGTERM, then stop it in order. Call from the main thread.

    A second Ctrl-C, while the cluster stops, ends the wait for brokers. Raises ClusterError when the cluster cannot be
    started, or dies.
    """
    console = console if console is not None else Console(highlight=False, soft_wrap=True)
    stop = threading.Event()
    serving = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not serving or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with console.status("starting") as status:
            cluster = EmbeddedCluster(data_dir, brokers, progress=_progress(console, status))
            cluster.start()
            serving = True
        try:
            _describe(cluster.info, console)
            while not stop.wait(_CHECK_SECONDS):
                cluster.check()
        finally:
            stop.set()
            with console.status("stopping"):
                cluster.close()
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    console.print("stopped")


def _progress(console: Console, status: Status) -> Callable[[str], None]:
    """Return a function that shows progress: as one changing line on a terminal, as separate lines elsewhere."""
    return status.update if console.is_terminal else console.print


def _describe(info: ClusterInfo, console: Console) -> None:
    rows = {
        "brokers": ", ".join(info.endpoints) or "none",
        "etcd": f"{info.etcd}  (keys below {info.etcd_prefix})",
        "data": str(info.data_dir),
        "fragments": f"{info.file_root}  (file:/// stores are rooted here)",
        "logs": str(info.data_dir / "logs"),
    }
    console.print("[bold green]ready[/]")
    for name, value in rows.items():
        console.print(f"  [dim]{name:<10}[/] {escape(value)}")
    if info.data_dir != DEFAULT_DATA_DIR.absolute():
        console.print(f"In other terminals: [bold]export {DATA_VARIABLE}={escape(str(info.data_dir))}[/]")
    console.print("Ctrl-C stops it; the data stays, and the next start continues with it.")
