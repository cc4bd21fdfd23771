"""`coranto streams read`: a stream's events, one a line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.streams.events import JsonEvents, format_of
from coranto.streams.lifecycle import Streams
from coranto.streams.positions import StreamPosition
from coranto.streams.reader import StreamReader


def read(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="Stream to read.")],
    block: Annotated[bool, typer.Option("--block", help="At the end, wait for more.")] = False,
    tail: Annotated[bool, typer.Option("--tail", help="Read what is written from now on, and wait for more.")] = False,
    position: Annotated[
        Path | None,
        typer.Option(
            "--position",
            help="File of the position to go on from, where the one that was reached is kept in the end.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Stop after so many events; 0 is no limit.")] = 0,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write to, or - for standard output.")] = "-",
    endpoint: Endpoint = None,
) -> None:
    """Write the committed events of a stream, each with a newline, those of a routing key in their order."""
    if tail and position is not None:
        raise InvalidInput("reads from now on, so there is no position to go on from", field="--tail")
    begin = StreamPosition.from_json(position.read_bytes()) if position is not None and position.exists() else None

    async def work(client: JournalClient) -> None:
        streams = Streams(client)
        stream = await streams.describe(name)
        is_json = isinstance(format_of(stream.content_type), JsonEvents)
        start: Mapping[int, int] | None = begin
        if tail:
            start = await streams.heads(stream, stream.active()) if not stream.is_sealed else None
        with _opened(output) as target:
            reader: StreamReader[Any] = StreamReader(client, name, begin=start, block=block or tail)
            async with reader:
                count = 0
                try:
                    async for event in reader:
                        target.write((event.envelope.content if is_json else event.data) + b"\n")
                        if block or tail:
                            target.flush()
                        count += 1
                        if count == limit:
                            break
                finally:
                    target.flush()
                    if position is not None:
                        _keep(position, reader.position())

    with_client(endpoint, work)


def _keep(file: Path, position: StreamPosition) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(position.to_json() + "\n")
    partial.replace(file)


@contextlib.contextmanager
def _opened(output: str) -> Iterator[BinaryIO]:
    if output == "-":
        yield sys.stdout.buffer
    else:
        with Path(output).open("wb") as file:
            yield file
