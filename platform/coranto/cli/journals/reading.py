"""`coranto journals read`: prints the content of one or several journals, up to now or continuously."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from coranto.cli.connect import Endpoint, connect, ended_by_sigterm, with_client
from coranto.cli.journals.moments import AskedMoment, find_moment, parse_as_of
from coranto.cli.journals.multiplex import Multiplexer, MultiplexOptions
from coranto.cli.journals.offsets import OffsetsFile, load_offsets
from coranto.cli.journals.selection import Names, Selection, Selector, chosen, select
from coranto.cli.journals.times import parse_time
from coranto.cli.output import note, opened
from coranto.client import JournalClient, Moment
from coranto.client.committed import committed_messages
from coranto.errors import InvalidInput, JournalRecreated
from coranto.messages.framing import JsonLines


def read(
    names: Names = None,
    selector: Selector = None,
    offset: Annotated[int, typer.Option("--offset", min=-1, help="First byte; -1 is the write head.")] = 0,
    end: Annotated[int, typer.Option("--end", min=0, help="Stop before this offset; 0: no bound.")] = 0,
    block: Annotated[bool, typer.Option("--block", help="At the write head, wait for more.")] = False,
    tail: Annotated[bool, typer.Option("--tail", help="Read new content only: --offset -1 --block.")] = False,
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            help="Skip fragments stored before: Unix seconds, ISO 8601, or how long ago (`24h`).",
            show_default=False,
        ),
    ] = "",
    offsets: Annotated[
        Path | None,
        typer.Option("--offsets", help="JSON file of journals and the offsets to begin at.", show_default=False),
    ] = None,
    as_of: Annotated[
        str,
        typer.Option(
            "--as-of",
            help="Read content as of a time (Unix seconds, ISO 8601, or how long ago), or a file of offsets.",
            show_default=False,
        ),
    ] = "",
    offsets_out: Annotated[
        Path | None,
        typer.Option(
            "--offsets-out",
            help="File for the reached offsets. May be the same as --offsets; the old one is kept as .previous.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write to, or - for standard output.")] = "-",
    committed: Annotated[
        bool, typer.Option("--committed", help="Of a journal of JSON lines, only committed messages, each once.")
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Write the content of journals to standard output or a file.

    Several journals are read concurrently, one whole append or line at a time. With --selector and --block, journals
    that appear later are read as well. --offsets-out is written about once a second and at the end, also on Ctrl-C and
    SIGTERM. Its offsets are never beyond the written output. Reading on from it repeats nothing, unless this process
    was killed.

    With --as-of, journals are read from their beginnings to their ends at that moment. Begin later with --offset
    or --offsets. Missing content of that moment is an error.
    """
    selection = chosen(names, selector)
    is_one = len(selection.names) == 1
    if tail and offset:
        raise InvalidInput("--tail reads from the write head; leave --offset out, or use --block", field="--tail")
    if not is_one and (end or offset > 0):
        raise InvalidInput("--offset and --end are for one journal; use --offsets for several", field="--offset")
    reading = MultiplexOptions(-1 if tail else offset, end, block or tail, parse_time(begin, time.time(), "--from"))
    asked = parse_as_of(as_of)
    if asked is not None and (end or block or tail or begin or offset < 0):
        raise InvalidInput("has an end; leave --end, --block, --tail, --from and --offset -1 out", field="--as-of")
    if committed:
        if not is_one or offsets or offsets_out or begin:
            raise InvalidInput("reads one journal, without --offsets, --offsets-out and --from", field="--committed")
        with opened(output, "wb") as file:
            _read_committed(selection, reading, asked, file, endpoint)
        return
    saved = load_offsets(offsets) if offsets else {}
    target = OffsetsFile(offsets_out) if offsets_out else None
    with opened(output, "wb") as file, ended_by_sigterm():

        async def work(client: JournalClient) -> None:
            options = reading
            if asked is not None:
                options = replace(reading, as_of=await find_moment(client, selection, asked, saved, offset))
            reader = Multiplexer(client, file, options, dict(saved), target.save if target else lambda _: None, note)
            try:
                await _read(reader, selection, client)
            except JournalRecreated as error:
                if error.journal not in saved or asked is not None:
                    raise
                raise error.with_advice(
                    f"To read the current journal from its beginning, remove {error.journal} from the file of "
                    "--offsets. If it has the same content up to there, remove its journal_id alone."
                ) from error
            finally:
                reader.finish()

        with_client(endpoint, work)


async def _read(reader: Multiplexer, selection: Selection, client: JournalClient) -> None:
    if len(selection.names) == 1:
        await reader.read_one(selection.names[0])
    elif not reader.reading.block:
        await reader.read_present(await select(client, selection))
    else:
        for attempt in selection.attempts:
            if (await client.list(attempt)).journals:
                break
        else:
            attempt = selection.attempts[0]
            note("no journal matches yet")
        await reader.follow(attempt)


def _read_committed(
    selection: Selection, reading: MultiplexOptions, asked: AskedMoment | None, file: BinaryIO, endpoint: str | None
) -> None:
    journal = selection.names[0]
    if asked is not None:
        found = asked

        async def moment(client: JournalClient) -> Moment:
            return await find_moment(client, selection, found, {}, reading.start)

        then = with_client(endpoint, moment)
        with connect(endpoint) as client:
            for envelope in committed_messages(client, journal, JsonLines(), as_of=then):
                file.write(envelope.content + b"\n")
        return
    with connect(endpoint) as client:
        begin = client.head(journal) if reading.start == -1 else reading.start
        end = reading.end or None
        for envelope in committed_messages(client, journal, JsonLines(), begin=begin, end=end, block=reading.block):
            file.write(envelope.content + b"\n")
            if reading.block:
                file.flush()
        file.flush()
