"""`coranto status`: the unhealthy parts of a cluster, lagging consumers, and changes."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.live import Live

from coranto.cli.connect import Endpoint, find_cluster
from coranto.cli.output import Output, note, printable
from coranto.cli.status_screen import plain_lines, screen, summary
from coranto.client.loop import shared_loop
from coranto.errors import ClusterError

if TYPE_CHECKING:
    from coranto.checkup.status.gathering import StatusGatherer, StatusTarget
    from coranto.checkup.status.values import ClusterSnapshot, StatusChange, StatusReport

_KEPT_CHANGES: Final = 100


def status(
    endpoint: Endpoint = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            "--etcd",
            envvar=["CORANTO_ETCD", "CORANTO_BROKER_ETCD"],
            help="etcd as host:port; several with commas. Default: etcd of `coranto up`.",
            show_default=False,
        ),
    ] = None,
    consumers: Annotated[
        list[str],
        typer.Option(
            "--consumer",
            help="A consumer: any process as host:port, or the URL of a store of checkpoints. May be repeated. "
            "Default: $CORANTO_CONSUMER, $CORANTO_STORE_URL, and consumers that are announced in etcd. Lists of "
            "processes show options: use $CORANTO_STORE_URL for passwords.",
            show_default=False,
        ),
    ] = [],  # noqa: B006  It is never changed.
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Timeout for each server and store, in seconds.")
    ] = 5.0,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates of --watch.")] = 5.0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="End --watch after this many updates.", show_default=False)
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the output.")] = Output.TABLE,
) -> None:
    """Show the unhealthy parts of a cluster, consumers that are behind, and changes since the last status.

    Exit code 1 if something is unhealthy; warnings and lag alone give 0. With --watch, the last report decides.
    """
    from coranto.checkup.status.gathering import StatusGatherer
    from coranto.checkup.status.sections import load_sections

    sections, failures = load_sections()
    gatherer = StatusGatherer(_target(endpoint, etcd, consumers, timeout), sections, failures)
    reader = _StatusReader(gatherer)
    last_report = _watch(reader, interval, count, output) if watch else _report_once(reader, output)
    if not last_report.is_healthy:
        raise typer.Exit(1)


def _target(endpoint: str | None, etcd: str | None, consumers: list[str], timeout: float) -> StatusTarget:
    from coranto.checkup.status.gathering import StatusTarget
    from coranto.cluster import locate
    from coranto.cluster.embedded import DEFAULT_PREFIX
    from coranto.cluster.etcd_server import etcd_tls

    config = find_cluster(endpoint)
    try:
        local = None if endpoint else locate()
    except ClusterError:
        local = None
    endpoints = local.endpoints if local is not None else ()
    where = etcd or (local.etcd if local is not None else "")
    own = local.etcd_prefix if local is not None and not etcd else DEFAULT_PREFIX
    prefix = os.environ.get("CORANTO_BROKER_ETCD_PREFIX", own)
    return StatusTarget(config, endpoints, where, etcd_tls(os.environ), prefix, consumers, timeout)


class _StatusReader:
    """Reports the status and its changes. The first report is compared with the last status of this user."""

    def __init__(self, gatherer: StatusGatherer) -> None:
        self._gatherer = gatherer
        self._before: ClusterSnapshot | None = None
        self._changes: deque[StatusChange] = deque(maxlen=_KEPT_CHANGES)

    def take(self) -> StatusReport:
        from coranto.checkup.status import memory
        from coranto.checkup.status.changes import changes_between

        report = shared_loop().run(self._gatherer.report())
        now = report.snapshot
        if now is not None:
            path = memory.memory_file(now.cluster)
            before = self._before or memory.load(path)
            if before is not None:
                self._changes.extendleft(reversed(changes_between(before, now)))
            try:
                memory.save(path, now)
            except OSError as error:
                note(f"the next status cannot show changes: {path}: {error.strerror or error}")
            report = dataclasses.replace(report, compared_with=before.at if before is not None else None)
            self._before = now
        return dataclasses.replace(report, changes=tuple(self._changes))


def _report_once(reader: _StatusReader, output: Output) -> StatusReport:
    report = reader.take()
    console = Console()
    if output is Output.JSON:
        typer.echo(json.dumps(document(report), indent=2))
    elif console.is_terminal:
        console.print(screen(report))
    else:
        for line in plain_lines(report):
            typer.echo(line)
    return report


def _watch(reader: _StatusReader, interval: float, count: int | None, output: Output) -> StatusReport:
    console = Console()
    if output is Output.TABLE and console.is_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            report = reader.take()
            done = 1
            live.update(screen(report, console.height), refresh=True)
            while count is None or done < count:
                time.sleep(interval)
                report = reader.take()
                done += 1
                live.update(screen(report, console.height), refresh=True)
        return report
    done, last = 0, 0.0
    while True:
        report = reader.take()
        if output is Output.JSON:
            typer.echo(json.dumps(document(report)))
        elif not done:
            for line in plain_lines(report):
                typer.echo(line)
        else:
            typer.echo(summary(report))
            for change in report.changes:
                if change.at > last:
                    typer.echo(f"  {printable(change.text)}")
        done, last = done + 1, report.at
        if count is not None and done >= count:
            return report
        time.sleep(interval)


def document(report: StatusReport) -> dict[str, Any]:
    """Return a report as a JSON document. Its snapshot is reduced to the cluster's id and revision."""
    snapshot = report.snapshot
    found = dataclasses.asdict(dataclasses.replace(report, snapshot=None))
    del found["snapshot"]
    return {
        "healthy": report.is_healthy,
        "cluster": snapshot.cluster if snapshot is not None else None,
        "revision": snapshot.revision if snapshot is not None else None,
        **found,
    }
