"""`coranto journals list`: prints journals as a table, a tree of specs, or JSON; once, or after every change."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

import typer
from rich.console import Console

from coranto import labels
from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import Format, print_json, print_table
from coranto.client import JournalClient, JournalInfo, Listing
from coranto.errors import CorantoError, StatusError
from coranto.specs.journal_tree import render_tree
from coranto.telemetry import amount
from coranto.wire import protocol_pb2 as pb

_ROUTES_SECONDS = 2.0
"""Seconds between queries for routes. Brokers announce changes of specs immediately, but not changes of routes."""

_CONCURRENCY = 16


def list_journals(
    selector: Annotated[
        str,
        typer.Option(
            "--selector",
            "-l",
            help="Which journals, such as `name:prefix=flights/` or `content-type in (text/csv), !draft`. "
            "Default: all.",
            show_default=False,
        ),
    ] = "",
    output: Annotated[Format, typer.Option("--output", "-o", help="`yaml` is what `apply` reads.")] = Format.TABLE,
    heads: Annotated[bool, typer.Option("--heads", help="Also show write heads (asks for each journal).")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show them again whenever something changes, until Ctrl-C.")
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """List journals."""
    with_heads = heads and output is Format.TABLE

    async def work(client: JournalClient) -> None:
        async def show(listing: Listing) -> None:
            found = await _heads(client, listing) if with_heads else None
            _print(listing, output, found, again=watch)

        if not watch:
            await show(await client.list(selector))
            return
        shown: tuple[JournalInfo, ...] | None = None
        async with contextlib.aclosing(client.watch(selector)) as snapshots:
            coming = asyncio.ensure_future(anext(snapshots))
            try:
                while True:
                    await asyncio.wait({coming}, timeout=None if shown is None else _ROUTES_SECONDS)
                    if coming.done():
                        listing = coming.result()
                        coming = asyncio.ensure_future(anext(snapshots))
                    else:
                        try:
                            listing = await client.list(selector)
                        except CorantoError as error:
                            if not error.retriable:
                                raise
                            continue
                    if listing.journals != shown:
                        shown = listing.journals
                        await show(listing)
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    with_client(endpoint, work)


async def _heads(client: JournalClient, listing: Listing) -> list[str]:
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def head(info: JournalInfo) -> str:
        if info.is_asleep:
            return str(info.spec.suspend.offset)
        async with limit:
            try:
                return str(await client.head(info.name))
            except StatusError as error:
                return pb.Status.Name(error.status)

    return await asyncio.gather(*map(head, listing.journals))


def _print(listing: Listing, output: Format, heads: list[str] | None, *, again: bool) -> None:
    """Print a listing. With `again`, it replaces the last one on a terminal, or follows a separator."""
    console = Console()
    if again and console.is_terminal:
        console.clear()
    if output is Format.YAML:
        typer.echo(render_tree([(info.spec, info.mod_revision) for info in listing.journals]), nl=False)
        if again:
            typer.echo("---")
    elif output is Format.JSON:
        print_json(_message(listing), on_one_line=again)
    else:
        columns = ["JOURNAL", "REPLICAS", "PRIMARY", "FRAGMENTS", "STORE", "LABELS"]
        rows = [_row(info) for info in listing.journals]
        if heads is not None:
            columns.append("HEAD")
            rows = [[*row, head] for row, head in zip(rows, heads, strict=True)]
        print_table(columns, rows, console)
        if again and not console.is_terminal:
            typer.echo()


def _message(listing: Listing) -> pb.ListResponse:
    return pb.ListResponse(
        header=listing.header,
        journals=[
            pb.ListResponse.Journal(
                spec=info.spec,
                mod_revision=info.mod_revision,
                create_revision=info.create_revision,
                route=info.route,
            )
            for info in listing.journals
        ],
    )


def _row(info: JournalInfo) -> list[str]:
    spec, route = info.spec, info.route
    primary = route.members[route.primary].suffix if route.primary >= 0 else "none"
    codec = pb.CompressionCodec.Name(spec.fragment.compression_codec).lower()
    suspended = f" <{pb.JournalSpec.Suspend.Level.Name(spec.suspend.level)}>" if spec.suspend.level else ""
    return [
        spec.name + suspended,
        f"{len(route.members)}/{spec.replication}",
        primary,
        f"{amount(spec.fragment.length, 'bytes')} {codec}",
        spec.fragment.stores[0] if spec.fragment.stores else "none",
        ", ".join(f"{name}={value}" for name, value in labels.as_pairs(spec.labels)),
    ]
