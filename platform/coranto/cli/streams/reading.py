"""`coranto streams read`: prints a stream's events, one per line."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from coranto.cli.connect import Endpoint, ended_by_sigterm, with_client
from coranto.cli.output import note
from coranto.cli.sink import Sink, opened_sink
from coranto.client import JournalClient
from coranto.errors import CorruptData, InvalidInput
from coranto.streams.control.lifecycle import Streams
from coranto.streams.groups.group_reader import GroupReader
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.model.events import JsonEvents, format_of
from coranto.streams.model.positions import StreamPosition
from coranto.streams.reader.delivery import Event
from coranto.streams.reader.stream_reader import StreamReader

_KEEP_SECONDS: Final = 1.0


def read(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="Stream to read.")],
    block: Annotated[bool, typer.Option("--block", help="At the end, wait for more.")] = False,
    tail: Annotated[bool, typer.Option("--tail", help="Read new events only, and wait for more.")] = False,
    position: Annotated[
        Path | None,
        typer.Option(
            "--position",
            help="File of the position to continue from. The reached one is kept in it about once a second, and "
            "in the end.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            "-g",
            help="Share the stream with all readers of this group: each event goes to one of them, and the group's "
            "position is remembered. Waits for more.",
            show_default=False,
        ),
    ] = None,
    skip_truncated: Annotated[
        bool, typer.Option("--skip-truncated", help="If events are gone, continue after them.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Stop after this many events; 0: no limit.")] = 0,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write to, or - for standard output.")] = "-",
    endpoint: Endpoint = None,
) -> None:
    """Write the committed events of a stream, each with a newline. Events of a routing key keep their order.

    After Ctrl-C and SIGTERM, reading on from the position, or with the group, repeats nothing.
    """
    if tail and position is not None:
        raise InvalidInput("reads only new events, so it has no position to continue from", field="--tail")
    if group is not None and (tail or position is not None):
        raise InvalidInput("a group knows its position by itself; leave --tail and --position out", field="--group")
    begin = None if position is None else _kept(position)

    async def work(client: JournalClient) -> None:
        streams = Streams(client)
        stream = await streams.describe(name)
        is_json = isinstance(format_of(stream.content_type), JsonEvents)
        if group is not None:
            members = ReaderGroup(client, name, group)
            if await members.create():
                note(f"{name} has a new group {group}, which begins where the stream does")
            member: GroupReader[Any] = members.reader(skip_truncated=skip_truncated)
            with opened_sink(output) as sink:
                async with member:
                    await _print_events(member, sink, limit, is_json=is_json, flushes_each=True, position=None)
            return
        start: Mapping[int, int] | None = begin
        if tail:
            start = await streams.heads(stream, stream.last())
        reader: StreamReader[Any] = StreamReader(
            client, name, begin=start, block=block or tail, skip_truncated=skip_truncated
        )
        with opened_sink(output) as sink:
            async with reader:
                kept = None if position is None else _PositionFile(position, reader)
                await _print_events(reader, sink, limit, is_json=is_json, flushes_each=block or tail, position=kept)

    with ended_by_sigterm():
        with_client(endpoint, work)


class _PositionFile:
    """A file with a reader's position, which is never ahead of the written output."""

    def __init__(self, file: Path, reader: StreamReader[Any]) -> None:
        self._file = file
        self._reader = reader
        self._due = 0.0

    def is_due(self) -> bool:
        return asyncio.get_running_loop().time() >= self._due

    def keep(self) -> None:
        partial = self._file.with_name(f".{self._file.name}.partial")
        partial.write_text(self._reader.position().to_json() + "\n")
        partial.replace(self._file)
        self._due = asyncio.get_running_loop().time() + _KEEP_SECONDS


async def _print_events(
    events: AsyncIterator[Event[Any]],
    sink: Sink,
    limit: int,
    *,
    is_json: bool,
    flushes_each: bool,
    position: _PositionFile | None,
) -> None:
    count = 0
    is_whole = True  # True if all events handed out are written or buffered.
    try:
        while limit == 0 or count < limit:
            event = await anext(events, None)
            if event is None:
                break
            is_whole = False
            await sink.write((event.envelope.content if is_json else event.data) + b"\n")
            is_due = position is not None and position.is_due()
            if flushes_each or is_due:
                await sink.flush()
            is_whole = True
            count += 1
            if position is not None and is_due:
                position.keep()
        await sink.flush()
    except BaseException:
        # Buffered events count as written if the output has room for them. If not, the last saved position stays.
        if is_whole:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_SECONDS):
                    await sink.flush()
                if position is not None:
                    position.keep()
        raise
    if position is not None:
        position.keep()


def _kept(file: Path) -> StreamPosition | None:
    """Return the position in a file; None without a file. Raises InvalidInput if it or its folder is not usable."""
    if not file.parent.is_dir():
        raise InvalidInput(f"the folder {file.parent} for the position does not exist; create it", field="--position")
    if not file.exists():
        return None
    try:
        return StreamPosition.from_json(file.read_bytes())
    except CorruptData as error:
        raise InvalidInput(f"{file}: {error}. Delete the file to begin at the beginning", field="--position") from None
