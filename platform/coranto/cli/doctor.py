"""`coranto doctor`: reports problems of this environment, with remedies."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coranto.cli.output import Output, print_table, printable
from coranto.client.loop import shared_loop
from coranto.errors import ClusterError, InvalidInput
from coranto.telemetry import progress

if TYPE_CHECKING:
    from coranto.checkup import Examination


def doctor(
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", envvar="CORANTO_ENDPOINT", help="Broker as host:port. Default: the broker of `coranto up`."
        ),
    ] = None,
    etcd: Annotated[
        str | None,
        typer.Option(
            "--etcd",
            envvar=["CORANTO_ETCD", "CORANTO_BROKER_ETCD"],
            help="etcd as host:port; several with commas. Default: etcd of `coranto up`.",
        ),
    ] = None,
    stores: Annotated[
        list[str], typer.Option("--store", help="A fragment store to write to, read, and remove from. May be repeated.")
    ] = [],  # noqa: B006  It is never changed.
    file_root: Annotated[
        Path | None, typer.Option("--file-root", envvar="CORANTO_FILE_ROOT", help="Folder of file:/// stores.")
    ] = None,
    ports: Annotated[
        list[int],
        typer.Option("--port", min=1, max=65535, help="A port that a broker is to listen on. May be repeated."),
    ] = [],  # noqa: B006
    data_dirs: Annotated[
        list[Path], typer.Option("--data-dir", help="A folder for a broker's data. May be repeated.")
    ] = [],  # noqa: B006
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the output.")] = Output.TABLE,
) -> None:
    """Examine Python, Java, ports, etcd, stores, brokers and clocks, and say what to do. Exit code 1 if there is a
    problem; warnings alone give 0.
    """
    from coranto.checkup import Condition

    with progress("Examining") as bar:  # An unresponsive store or server takes a minute.
        results = _examine(endpoint, etcd, stores, file_root, ports, data_dirs, bar.note)
    _show(results, output)
    if any(each.condition is Condition.PROBLEM for each in results):
        raise typer.Exit(1)


def _examine(
    endpoint: str | None,
    etcd: str | None,
    stores: Sequence[str],
    file_root: Path | None,
    ports: Sequence[int],
    data_dirs: Sequence[Path],
    note: Callable[[str], object],
) -> list[Examination]:
    from coranto.checkup import brokers, machine
    from coranto.checkup import etcd as etcd_checks
    from coranto.checkup.results import absent, problem
    from coranto.checkup.stores import store
    from coranto.cli.connect import find_cluster
    from coranto.cluster import locate
    from coranto.cluster.etcd_server import etcd_tls

    note("Python, Java, ports and folders")
    results: list[Examination] = [machine.python(), *machine.parts(), machine.java(needed=machine.has_spark())]
    results.append(etcd_checks.program())
    results += machine.ports(ports)
    results += [machine.data_directory(path) for path in data_dirs]
    local = None
    if not endpoint or not etcd:
        try:
            local = locate()
        except ClusterError as error:
            if os.environ.get("CORANTO_DATA"):
                results.append(problem("cluster", str(error), "start it, or correct $CORANTO_DATA"))
    if where := etcd or (local.etcd if local is not None and not endpoint else ""):
        note(f"etcd {where}")
        results += etcd_checks.etcd(where, etcd_tls(os.environ))
    else:
        results.append(absent("etcd", "not named", "give --etcd host:port to examine it"))
    if endpoint or local is not None:
        note("brokers")
        try:
            results += shared_loop().run(brokers.brokers(find_cluster(endpoint)))
        except (InvalidInput, ClusterError) as error:
            results.append(problem("brokers", str(error), "correct the setting that the error names"))
    else:
        results.append(absent("brokers", "no cluster is named", "give --endpoint host:port, or set $CORANTO_DATA"))
    root = file_root or (local.file_root if local is not None else None)
    for url in stores:
        note(f"store {url}")
        results.append(shared_loop().run(store(url, root)))
    if not stores:
        results.append(absent("stores", "none is named", "give --store s3://bucket/prefix/ to examine one"))
    return results


def _show(results: list[Examination], output: Output) -> None:
    if output is Output.JSON:
        typer.echo(json.dumps([dataclasses.asdict(each) for each in results], indent=2))
        return
    if Console().is_terminal:
        rows = [(each.condition.value, each.subject, each.found, each.advice) for each in results]
        print_table(("", "what", "found", "what to do"), rows)
        return
    for each in results:
        typer.echo(f"{each.condition.value}: {printable(each.subject)}: {printable(each.found)}")
        if each.advice:
            typer.echo(f"    {printable(each.advice)}")
