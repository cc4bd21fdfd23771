"""`coranto journals manifest`: lists the stored fragments with all content of journals in a range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, find_cluster, with_client
from coranto.cli.journals.moments import parse_as_of
from coranto.cli.journals.offsets import load_offsets
from coranto.cli.journals.times import parse_ttl
from coranto.cli.output import Format, note, print_table
from coranto.cli.selectors import selector_of
from coranto.client import JournalClient, Moment
from coranto.errors import InvalidInput
from coranto.lake import Manifest, sign_manifest
from coranto.lake.signing import MANIFEST
from coranto.security.documents import environment_keys
from coranto.telemetry import amount


def manifest(
    selector: Annotated[
        str,
        typer.Argument(
            help="Journals by labels (`name:prefix=shop/, !draft`), by name, or by a path that ends in `/`."
        ),
    ],
    begin: Annotated[
        str,
        typer.Option(
            help="The offset to begin at, or a file of offsets by journal. Default: the first remaining one.",
            show_default=False,
        ),
    ] = "",
    end: Annotated[
        str,
        typer.Option(
            help="The offset to end at, exclusive, or a file of offsets by journal. Default: all.", show_default=False
        ),
    ] = "",
    as_of: Annotated[
        str,
        typer.Option(
            "--as-of",
            help="Content as of a time (Unix seconds, ISO 8601, or how long ago), or a file of offsets.",
            show_default=False,
        ),
    ] = "",
    url_ttl: Annotated[
        str, typer.Option("--url-ttl", help="Sign URLs that are valid for this time (`15m`).", show_default=False)
    ] = "",
    sign: Annotated[
        bool, typer.Option("--sign", help="Print the manifest signed with the first key of $CORANTO_AUTH_KEYS.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="`json` or `table`.")] = Format.JSON,
    endpoint: Endpoint = None,
) -> None:
    """Write a manifest: the stored fragments of journals, for scans and for other programs.

    Acknowledged content that is not stored yet is listed separately. A gap in the content is an error.
    """
    from coranto.lake.listing import ManifestOptions, make_manifest

    if output is Format.YAML:
        raise InvalidInput("manifests are printed as table or json; give -o table or -o json", field="--output")
    if sign and output is not Format.JSON:
        raise InvalidInput("only the document itself can be signed; leave -o out", field="--sign")
    keys = environment_keys(MANIFEST) if sign else None
    asked = parse_as_of(as_of)
    options = ManifestOptions(
        _bound(begin, "--begin"),
        _bound(end, "--end"),
        Moment.offsets(asked) if isinstance(asked, Mapping) else asked,
        parse_ttl(url_ttl, "--url-ttl"),
        find_cluster(endpoint).file_root,
    )
    chosen = selector_of(selector)

    async def work(client: JournalClient) -> Manifest:
        listing = await client.list(chosen)
        if not listing.journals:
            raise InvalidInput(f"no journal matches {chosen!r}; `coranto journals list` shows all", field="SELECTOR")
        cluster = f"{listing.header.etcd.cluster_id:x}"
        return await make_manifest(client, listing.journals, options, selector=chosen, cluster=cluster)

    made = with_client(endpoint, work)
    if output is Format.TABLE:
        _print(made)
    else:
        typer.echo(made.to_json(indent=2) if keys is None else sign_manifest(made, keys))
    if made.unstored:
        note(f"{amount(made.unstored, 'bytes')} are not stored yet, and not in the manifest's fragments")


def _bound(text: str, option: str) -> int | dict[str, int] | None:
    if not text:
        return None
    return int(text) if text.isdecimal() else load_offsets(Path(text), option)


def _print(made: Manifest) -> None:
    columns = ["JOURNAL", "BEGIN", "END", "LENGTH", "FRAGMENTS", "UNSTORED"]
    rows = [
        [
            part.journal,
            str(part.begin),
            str(part.end),
            amount(part.end - part.begin, "bytes"),
            str(len(part.fragments)),
            amount(part.unstored, "bytes"),
        ]
        for part in made.journals
    ]
    print_table(columns, rows)
