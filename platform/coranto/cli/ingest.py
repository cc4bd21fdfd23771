"""`coranto ingest run|status`: rows of other systems become events of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.copy_status import CopyStatus, SourcePart, print_status
from coranto.cli.output import Output, note
from coranto.errors import InvalidInput, Unavailable
from coranto.process.memory import tune_memory

if TYPE_CHECKING:
    from coranto.client import JournalClient
    from coranto.ingest.progress import IngestProgress
    from coranto.ingest.spec import IngestSpec

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="FILE", help="File of the ingest, in YAML.", show_default=False)]


@app.command("run")
def run(
    file: File,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for more at the end, until Ctrl-C or SIGTERM.")
    ] = False,
    metrics: Annotated[
        str,
        typer.Option("--metrics", help="Serve metrics for Prometheus at this [host:]port.", show_default=False),
    ] = "",
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss",
            help="Continue although the stream's brokers have lost a part of the ingest's progress.",
        ),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Write the rows of a source to its stream, each once, and end when there are no more.

    The stream keeps the progress of the ingest. So it may be interrupted at any time, restarted, and run twice at the
    same time. After Ctrl-C and SIGTERM it commits the rows that it has read, and ends.
    """
    spec = _spec(file)

    async def work(client: JournalClient) -> None:
        from coranto.ingest.opening import open_ingest

        ingest = open_ingest(client, spec, accept_loss=accept_loss)
        tune_memory()
        if metrics:
            _serve(metrics, ingest.metrics.registry)
        loop = asyncio.get_running_loop()
        stopper.append(lambda: loop.call_soon_threadsafe(ingest.stop))
        note(f"{spec.name}: from {spec.kind} to stream {spec.stream}" + (", until it is stopped" if follow else ""))
        report = await ingest.run(follow=follow)
        lost = sum(report.progress.lost.values())
        dead_letters = f", {report.dead_letters} dead letters" if report.dead_letters else ""
        gone = f"; {lost} rows were gone from the source before they were read" if lost else ""
        typer.echo(f"{spec.name}: {report.rows} rows{dead_letters} in {report.batches} transactions{gone}")

    stopper: list[Callable[[], object]] = []
    with _stopped_by_signals(stopper):
        with_client(endpoint, work)


@app.command("status")
def status(
    file: File,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show the progress of an ingest: the position of each split, and the remaining rows or bytes."""
    spec = _spec(file)

    async def work(client: JournalClient) -> tuple[IngestProgress, dict[str, int] | None, str]:
        from coranto.ingest.opening import lag_of
        from coranto.ingest.progress import load
        from coranto.streams.writer.multi_key.batch_writer import BatchWriter

        async with BatchWriter[Any](client, spec.stream) as writer:
            _, progress = await load(writer, spec.name)
        try:
            return progress, dict(await lag_of(spec, progress.splits)), ""
        except Unavailable as error:
            return progress, None, str(error)

    progress, lag, problem = with_client(endpoint, work)
    parts = [
        SourcePart(split, progress.splits.get(split), None if lag is None else lag.get(split, 0))
        for split in sorted({*progress.splits, *(lag or {})})
    ]
    copy = CopyStatus(spec.name, spec.kind, f"stream {spec.stream}", progress.rows, parts, "rows or bytes")
    more = {"source_id": progress.source, "dead_letters": progress.dead_letters, "lost": progress.lost}
    print_status(copy, output, more, f"{progress.dead_letters} dead letters")
    if problem:
        note(f"the rows behind are not known: {problem}")


def _spec(file: Path) -> IngestSpec:
    from coranto.ingest.spec import read_spec

    try:
        return read_spec(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file} is not UTF-8: {error}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{file}: {error}") from error


def _serve(address: str, registry: Any) -> None:
    from prometheus_client import start_http_server

    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise InvalidInput(f"{address!r} is not an address; give [host:]port", field="--metrics")
    start_http_server(int(port), host or "127.0.0.1", registry)


@contextlib.contextmanager
def _stopped_by_signals(stopper: list[Callable[[], object]]) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM stop the ingest, and the next one interrupt the command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        if not stopper:
            signal.default_int_handler(number, frame)
        for call in stopper:
            call()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
