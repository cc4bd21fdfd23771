"""`coranto journals fork`, `drop-fork` and `forks`: journals that share the fragments of another one."""

from __future__ import annotations

from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.moments import parse_as_of
from coranto.cli.output import print_table
from coranto.client import JournalClient
from coranto.client.moments import moment_at
from coranto.errors import InvalidInput, JournalNotFound
from coranto.forks import Fork, drop_fork, fork_journal, forks_of
from coranto.labels import NAME, label_selector
from coranto.telemetry import progress

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The journal to fork.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="FORK", help="The name of the fork.", show_default=False)]


def fork(
    source: Source,
    name: Name,
    at: Annotated[
        int | None,
        typer.Option("--at", help="The offset where they diverge. Default: the head.", show_default=False),
    ] = None,
    as_of: Annotated[
        str,
        typer.Option(
            "--as-of",
            help="They diverge where the source ended then: a time (Unix seconds, ISO 8601, or how long ago), or a "
            "file of offsets.",
            show_default=False,
        ),
    ] = "",
    same_labels: Annotated[
        bool,
        typer.Option(
            "--same-labels",
            help="The fork has all labels of its source. Selectors by them then find both.",
        ),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Make a journal that has the content of another one up to an offset, and diverges there.

    Stored fragments below the offset are shared, not copied. The source keeps them until the fork is dropped. If the
    command is interrupted, run it again: it continues.
    """
    if at is not None and as_of:
        raise InvalidInput("give an offset or a moment, not both", field="--as-of")
    asked = parse_as_of(as_of)

    async def work(client: JournalClient) -> Fork:
        offset = at
        if isinstance(asked, float):
            listing = await client.list(label_selector(include={NAME: source}))
            if not listing.journals:
                raise JournalNotFound(f"fork of {source}")
            offset = (await moment_at(client, listing.journals, asked)).ends[source]
        elif asked is not None:
            if source not in asked:
                raise InvalidInput(f"has no offset of {source}", field="--as-of")
            offset = asked[source]
        with progress(f"Copying the end of {source}", unit="bytes") as report:
            return await fork_journal(client, source, name, at=offset, same_labels=same_labels, progress=report)

    made = with_client(endpoint, work)
    copied = made.offset - made.shared_end
    typer.echo(
        f"{name}: shares [{made.begin}, {made.shared_end}) of {source}, has {copied} bytes of its own, and diverges at "
        f"{made.offset}"
    )


def drop(name: Name, endpoint: Endpoint = None) -> None:
    """Delete a fork. Its source's retention may then remove content that only the fork kept.

    Files of the fork's own fragments stay in their stores, as for any deleted journal.
    """
    with_client(endpoint, lambda client: drop_fork(client, name))
    typer.echo(f"{name}: dropped")


def forks(source: Source, endpoint: Endpoint = None) -> None:
    """List the forks of a journal."""
    found = with_client(endpoint, lambda client: forks_of(client, source))
    rows = [
        [each.name, str(each.begin), str(each.shared_end), str(each.offset), "forming" if each.forming else "complete"]
        for each in found
    ]
    print_table(["FORK", "BEGIN", "SHARED END", "OFFSET", "STATE"], rows)
