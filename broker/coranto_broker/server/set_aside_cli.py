"""The commands `coranto broker set-aside …`: list content that brokers have set aside, compare it, and export it."""

from __future__ import annotations

import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import note, print_table
from coranto.client import JournalClient
from coranto.effects import LocalDisk
from coranto.errors import CorantoError
from coranto_broker.recovery import set_aside
from coranto_broker.recovery.set_aside import ComparedSpan, SetAsideFragment

app = typer.Typer(no_args_is_help=True, help="Inspect content that this broker keeps outside its journals.")

Content = Annotated[Path, typer.Argument(metavar="FILE", help="A content file, as printed by `list`.")]


@app.command("list")
def list_(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", envvar="CORANTO_BROKER_DATA_DIR", help="The broker's data directory.")
    ] = Path(".coranto/broker-0"),
) -> None:
    """List set-aside content: its journal and offsets, the end of its committed part, and the part with a valid SHA-1.

    Spools of deleted journals are listed too. The broker may be running.
    """
    found = set_aside.find(data_dir, LocalDisk())
    if not found:
        note(f"nothing is set aside below {data_dir}")
        return
    rows = [
        (
            kept.journal or "?",
            str(kept.begin),
            str(kept.end),
            str(kept.committed_end),
            _soundness(kept),
            "the journal was deleted" if kept.deleted else "set aside",
            str(kept.path),
        )
        for kept in found
    ]
    print_table(("JOURNAL", "BEGIN", "END", "COMMITTED TO", "SOUND", "WHY", "FILE"), rows)


def _soundness(kept: SetAsideFragment) -> str:
    if not kept.size:
        return "no content"
    if not kept.journal:
        return "unknown: no log"
    if kept.sound_end >= min(kept.committed_end, kept.end):
        return "all" if kept.sound_end >= kept.committed_end else f"up to {kept.sound_end}"
    return f"up to {kept.sound_end}" if kept.sound_end > kept.begin else "nothing"


@app.command()
def compare(
    file: Content,
    journal: Annotated[str, typer.Option(help="The journal's name, if no log has it any more.")] = "",
    endpoint: Endpoint = None,
) -> None:
    """Compare a file with the journal's current content at the same offsets: the same, other bytes, or nothing.

    The exit code is 0 if the journal has all of the file's content, else 1.
    """
    kept = set_aside.at(file, LocalDisk())
    name = journal or kept.journal
    if not name:
        raise typer.BadParameter(f"no log names the journal of {file}; give it by --journal")

    async def work(client: JournalClient) -> list[ComparedSpan]:
        head = await client.head(name)
        if head <= kept.begin:
            return [ComparedSpan(kept.begin, kept.end, "nothing")] if kept.size else []
        chunks = client.read(name, kept.begin, end_offset=max(min(kept.end, head), kept.begin + 1))
        async with aclosing(chunks):
            return await set_aside.compare(kept, LocalDisk(), chunks)

    spans = with_client(endpoint, work)
    for span in spans:
        typer.echo(f"[{span.begin}, {span.end}): {_TEXTS[span.found]}")
    sys.exit(0 if all(span.found == "same" for span in spans) else 1)


_TEXTS = {
    "same": "the journal has the same bytes",
    "other": "the journal has other bytes",
    "nothing": "the journal has nothing here",
}


@app.command()
def export(
    file: Content,
    begin: Annotated[int | None, typer.Option(help="From this offset of the journal on.", show_default=False)] = None,
    end: Annotated[
        int | None, typer.Option(help="Up to this offset; default: the end of the sound content.", show_default=False)
    ] = None,
) -> None:
    """Write content to standard output: by default the committed part, verified by its SHA-1.

    It is not restored automatically: `coranto journals append` can append it to the journal again.
    """
    disk = LocalDisk()
    kept = set_aside.at(file, disk)
    first = kept.begin if begin is None else begin
    last = max(kept.sound_end, first) if end is None else end
    if last > kept.sound_end:
        note(f"bytes beyond {kept.sound_end} are not known to have committed")
    try:
        for piece in set_aside.read(kept, disk, first, last):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    except CorantoError as error:
        raise typer.BadParameter(str(error)) from error
