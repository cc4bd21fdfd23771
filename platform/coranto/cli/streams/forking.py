"""`coranto streams fork`: a stream that has the events of another one up to a cut."""

from __future__ import annotations

from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.moments import parse_as_of
from coranto.cli.output import print_table
from coranto.client import JournalClient
from coranto.client.moments import moment_at
from coranto.streams.control.forking import ForkedStream, fork_stream
from coranto.streams.model.stream import segments_selector
from coranto.telemetry import progress


def fork(
    source: Annotated[str, typer.Argument(metavar="STREAM", help="The stream to fork.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NEW", help="The name of the fork.", show_default=False)],
    as_of: Annotated[
        str,
        typer.Option(
            "--as-of",
            help="They diverge at that moment: a time (Unix seconds, ISO 8601, or how long ago), or a file of offsets "
            "by segment journal. The stream is read to find a place that divides no transaction. Default: the present.",
            show_default=False,
        ),
    ] = "",
    endpoint: Endpoint = None,
) -> None:
    """Make a stream that has the events of another one up to a cut, and diverges there.

    Each transaction is in it as a whole or not at all, and keys are in order. Stored fragments are shared, not copied.
    Writers start over. If the command is interrupted, run it again: it continues. `coranto streams delete` drops it.
    """
    asked = parse_as_of(as_of)

    async def work(client: JournalClient) -> ForkedStream:
        ends = asked
        if isinstance(ends, float):
            listing = await client.list(segments_selector(source))
            ends = (await moment_at(client, listing.journals, ends)).ends if listing.journals else {}
        with progress(f"Forking {source}", unit="bytes") as report:
            return await fork_stream(client, source, name, ends=ends, progress=report)

    made = with_client(endpoint, work)
    rows = [
        [str(number), str(segment.range), str(made.cut[number]), "sealed" if segment.sealing else "active"]
        for number, segment in made.stream.segments.items()
        if number in made.cut
    ]
    print_table(["SEGMENT", "KEYS", "DIVERGES AT", "STATE"], rows)
