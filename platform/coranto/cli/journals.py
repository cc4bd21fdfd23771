"""`coranto journals …`: journals, their specs and their content."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from coranto import labels
from coranto.cli.connect import Endpoint, connect
from coranto.cli.output import Format, print_json, print_table
from coranto.client import Chunk, JournalInfo, Listing
from coranto.client.committed import committed_messages
from coranto.errors import EtcdTransactionFailed, InvalidInput
from coranto.fragments import Codec
from coranto.journal_tree import parse_tree, render_tree
from coranto.messages.framing import JsonLines
from coranto.telemetry import amount, progress
from coranto.wire import protocol_pb2 as pb

app = typer.Typer(help="Journals: their specs and their content.", no_args_is_help=True)

_PIECE_BYTES = 1 << 20

Selector = Annotated[
    str,
    typer.Option(
        "--selector",
        "-l",
        help="Which journals, such as `name:prefix=flights/` or `content-type in (text/csv), !draft`. Default: all.",
        show_default=False,
    ),
]


@app.command("list")
def list_journals(
    selector: Selector = "",
    output: Annotated[Format, typer.Option("--output", "-o", help="`yaml` is what `apply` reads.")] = Format.TABLE,
    heads: Annotated[bool, typer.Option("--heads", help="Also show write heads (asks for each journal).")] = False,
    endpoint: Endpoint = None,
) -> None:
    """List journals."""
    with connect(endpoint) as client:
        listing = client.list(selector)
        if output is Format.YAML:
            typer.echo(render_tree([(info.spec, info.mod_revision) for info in listing.journals]), nl=False)
        elif output is Format.JSON:
            print_json(_message(listing))
        else:
            columns = ["JOURNAL", "REPLICAS", "PRIMARY", "FRAGMENTS", "STORE", "LABELS"]
            rows = [_row(info) for info in listing.journals]
            if heads:
                columns.append("HEAD")
                for info, row in zip(listing.journals, rows, strict=True):
                    row.append(str(client.head(info.name)))
            print_table(columns, rows)


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


@app.command()
def apply(
    specs: Annotated[str, typer.Option("--specs", help="File with a YAML tree of journal specs, or - for input.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """Create, update and delete journals as a YAML tree says, all or none of them."""
    changes = parse_tree(sys.stdin.read() if specs == "-" else Path(specs).read_text())
    if not changes:
        raise InvalidInput(f"{specs} names no journals", field="--specs")
    with connect(endpoint) as client:
        present = {info.name: info for info in client.list().journals}
        for change in [change for change in changes if _is_done(change, present)]:
            typer.echo(f"unchanged {change.upsert.name}")
            changes.remove(change)
        conflicts = [problem for change in changes if (problem := _conflict(change, present))]
        if conflicts:
            raise EtcdTransactionFailed(f"apply of {specs}", detail="; ".join(conflicts))
        for change in changes:
            typer.echo(("would " if dry_run else "") + _describe(change, present))
        if changes and not dry_run:
            client.apply(changes)


def _name(change: pb.ApplyRequest.Change) -> str:
    return change.delete or change.upsert.name


def _is_done(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> bool:
    info = present.get(change.upsert.name)
    return info is not None and not change.delete and info.spec == change.upsert


def _conflict(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> str:
    """What speaks against a change, or ""."""
    info = present.get(_name(change))
    actual = info.mod_revision if info else 0
    expected = change.expect_mod_revision
    if change.delete and info is None:
        return f"{change.delete} is to be deleted but does not exist"
    if expected in (-1, actual):
        return ""
    if expected == 0:
        return f"{_name(change)} exists already, at revision {actual}: give that as its `revision` to update it"
    return f"{_name(change)} is at revision {actual or 'none'}, not {expected}"


def _describe(change: pb.ApplyRequest.Change, present: dict[str, JournalInfo]) -> str:
    if change.delete:
        return f"delete {change.delete}"
    return f"{'update' if change.upsert.name in present else 'create'} {change.upsert.name}"


@app.command()
def append(
    name: Annotated[str, typer.Argument(metavar="JOURNAL", help="Journal to append to.", show_default=False)] = "",
    journal: Annotated[str, typer.Option("--journal", "-l", help="The same, as an option.", show_default=False)] = "",
    file: Annotated[str, typer.Option("--input", "-i", help="File to append, or - for standard input.")] = "-",
    endpoint: Endpoint = None,
) -> None:
    """Append a file or standard input to a journal, wholly or not at all."""
    if bool(name) == bool(journal):
        raise InvalidInput("name one journal, as an argument or by --journal", field="JOURNAL")
    if file == "-":
        _append(name or journal, sys.stdin.buffer, None, endpoint)
    else:
        with Path(file).open("rb") as source:
            _append(name or journal, source, Path(file).stat().st_size, endpoint)


def _append(journal: str, source: BinaryIO, size: int | None, endpoint: str | None) -> None:
    with connect(endpoint) as client:
        first = source.read(_PIECE_BYTES)
        if len(first) < _PIECE_BYTES:
            # A small append can be given again, so it sits out a broker's absence.
            result = client.append(journal, first)
        else:
            # A barrier is repeated until the journal can be appended to; a stream cannot be.
            client.append(journal, b"")
            with client.appender(journal) as append, progress(f"Appending to {journal}", size, unit="bytes") as report:
                piece = first
                while piece:
                    append.write(piece)
                    report.advance(len(piece))
                    piece = source.read(_PIECE_BYTES)
                result = append.commit()
    typer.echo(f"{journal}: appended {result.end - result.begin} bytes at [{result.begin}, {result.end})")


@app.command()
def read(
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="Journal to read.", show_default=False)],
    offset: Annotated[int, typer.Option("--offset", help="First byte; -1 is the write head.")] = 0,
    end: Annotated[int, typer.Option("--end", help="Stop before this offset; 0 is no bound.")] = 0,
    block: Annotated[bool, typer.Option("--block", help="At the write head, wait for more.")] = False,
    tail: Annotated[
        bool, typer.Option("--tail", help="Read what is written from now on: --offset -1 --block.")
    ] = False,
    committed: Annotated[
        bool, typer.Option("--committed", help="Of a journal of JSON lines, only committed messages, each once.")
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Write a journal's content to standard output."""
    if tail and offset:
        raise InvalidInput("--tail reads from the write head; leave --offset out, or use --block", field="--tail")
    with connect(endpoint) as client:
        begin = client.head(journal) if tail or offset == -1 else offset
        contents: Iterator[bytes]
        if committed:
            found = committed_messages(client, journal, JsonLines(), begin=begin, end=end or None, block=block or tail)
            contents = (envelope.content + b"\n" for envelope in found)
        else:
            contents = _contents(journal, begin, client.read(journal, begin, end_offset=end, block=block or tail))
        for content in contents:
            sys.stdout.buffer.write(content)
            if block or tail:
                sys.stdout.buffer.flush()
        sys.stdout.buffer.flush()


def _contents(journal: str, begin: int, chunks: Iterator[Chunk]) -> Iterator[bytes]:
    expected = begin
    for chunk in chunks:
        if chunk.offset > expected:
            typer.echo(f"coranto: {journal} has no content in [{expected}, {chunk.offset}); going on behind", err=True)
        yield chunk.content
        expected = chunk.end


@app.command()
def fragments(
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="Journal whose fragments to list.")],
    output: Annotated[Format, typer.Option("--output", "-o", help="`table` or `json`.")] = Format.TABLE,
    url_seconds: Annotated[
        int, typer.Option("--url-seconds", min=0, help="Also sign URLs that are good for so many seconds.")
    ] = 0,
    endpoint: Endpoint = None,
) -> None:
    """List a journal's fragments: what is persisted where, and what only brokers hold."""
    if output is Format.YAML:
        raise InvalidInput("fragments are printed as table or json", field="--output")
    with connect(endpoint) as client:
        found = client.fragments(journal, signature_seconds=url_seconds)
        if output is Format.JSON:
            print_json(
                pb.FragmentsResponse(
                    fragments=[
                        pb.FragmentsResponse._Fragment(spec=item.fragment.to_wire(), signed_url=item.signed_url)
                        for item in found
                    ]
                )
            )
            return
        columns = ["BEGIN", "END", "LENGTH", "CODEC", "SHA-1", "STORE", *(["URL"] if url_seconds else [])]
        print_table(
            columns,
            [
                [
                    str(item.fragment.begin),
                    str(item.fragment.end),
                    amount(item.fragment.length, "bytes"),
                    Codec(item.fragment.codec).name.lower(),
                    item.fragment.sum.hex(),
                    item.fragment.backing_store if item.persisted else "brokers only",
                    *([item.signed_url] if url_seconds else []),
                ]
                for item in found
            ],
        )
