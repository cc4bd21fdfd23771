"""`coranto journals fragments`: lists persisted fragments with their stores, and fragments that only brokers hold."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.selection import Names, Selection, Selector, chosen, select
from coranto.cli.journals.times import parse_time, parse_ttl
from coranto.cli.output import Format, print_json, print_table
from coranto.client import FragmentInfo, JournalClient
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec
from coranto.telemetry import amount
from coranto.wire import protocol_pb2 as pb

_TIMES = "as Unix seconds, ISO 8601, or how long ago (`24h`)"


def fragments(
    names: Names = None,
    selector: Selector = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="`table` or `json`.")] = Format.TABLE,
    begin: Annotated[str, typer.Option("--from", help=f"Only those stored since, {_TIMES}.", show_default=False)] = "",
    end: Annotated[
        str,
        typer.Option(
            "--to", help=f"Only those stored before, {_TIMES}; none that only brokers hold.", show_default=False
        ),
    ] = "",
    url_ttl: Annotated[
        str, typer.Option("--url-ttl", help="Also sign URLs that are valid for this time (`15m`).", show_default=False)
    ] = "",
    url_seconds: Annotated[
        int, typer.Option("--url-seconds", min=0, help="As --url-ttl, in seconds.", show_default=False)
    ] = 0,
    endpoint: Endpoint = None,
) -> None:
    """List fragments of journals: the stores of persisted ones, and fragments that only brokers hold."""
    if output is Format.YAML:
        raise InvalidInput("fragments are printed as table or json; give -o table or -o json", field="--output")
    selection = chosen(names, selector)
    now = time.time()
    first, last = parse_time(begin, now, "--from"), parse_time(end, now, "--to")
    seconds = parse_ttl(url_ttl, "--url-ttl") or url_seconds

    async def work(client: JournalClient) -> list[FragmentInfo]:
        found: list[FragmentInfo] = []
        for journal in await _journals(client, selection):
            found += await client.fragments(journal, begin_mod_time=first, end_mod_time=last, signature_seconds=seconds)
        return found

    found = with_client(endpoint, work)
    if output is Format.JSON:
        print_json(
            pb.FragmentsResponse(
                fragments=[
                    pb.FragmentsResponse._Fragment(spec=item.fragment.to_wire(), signed_url=item.signed_url)
                    for item in found
                ]
            )
        )
    else:
        _print(found, with_names=len(selection.names) != 1, with_urls=seconds > 0)


async def _journals(client: JournalClient, selection: Selection) -> list[str]:
    if len(selection.names) == 1:
        return list(selection.names)
    # No broker serves a fully suspended journal, so none could answer.
    return [info.name for info in await select(client, selection) if not info.is_asleep]


def _print(found: list[FragmentInfo], *, with_names: bool, with_urls: bool) -> None:
    columns = ["BEGIN", "END", "LENGTH", "CODEC", "SHA-1", "STORE"]
    rows = [
        [
            str(item.fragment.begin),
            str(item.fragment.end),
            amount(item.fragment.length, "bytes"),
            Codec(item.fragment.codec).name.lower(),
            item.fragment.sum.hex(),
            item.fragment.backing_store if item.persisted else "brokers only",
        ]
        for item in found
    ]
    if with_names:
        columns = ["JOURNAL", *columns]
        rows = [[item.fragment.journal, *row] for item, row in zip(found, rows, strict=True)]
    if with_urls:
        columns = [*columns, "URL"]
        rows = [[*row, item.signed_url] for item, row in zip(found, rows, strict=True)]
    print_table(columns, rows)
