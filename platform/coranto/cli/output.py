"""Input and output of commands: files, aligned tables, and JSON for programs."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coranto.telemetry import escape_control_characters


class Format(enum.StrEnum):
    """The output format of a command."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Output(enum.StrEnum):
    """The output format of a command whose output is not a document."""

    TABLE = "table"
    JSON = "json"


class Panel(enum.StrEnum):
    """The groups of commands in the help of `coranto`."""

    CLUSTER = "Cluster"
    DATA = "Data"
    CONSUMERS = "Consumers"
    REPAIR = "Audit and repair"
    DEMO = "Demo"
    OTHER = "Other"


def printable(text: str) -> str:
    """Return text on one line, without characters that control a terminal.

    Errors quote messages, brokers and stores, so they may contain text from an untrusted source.
    """
    return escape_control_characters(text).replace("\n", "\\n").replace("\t", "\\t")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], console: Console | None = None) -> None:
    """Print rows under headings: fitted to a terminal's width; elsewhere aligned and never cut, one line per row."""
    console = console or Console()
    if console.is_terminal:
        table = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
        return
    lines = [columns, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        typer.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), err=console.stderr
        )


@contextlib.contextmanager
def opened(name: str, mode: Literal["rb", "wb"]) -> Iterator[BinaryIO]:
    """Open a file. `-` is standard input or output, which stays open."""
    if name == "-":
        yield sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
        return
    with Path(name).open(mode) as file:
        yield file


def print_json(message: Message, *, on_one_line: bool = False) -> None:
    """Print a wire message as one JSON document, with the field names of its definition."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    typer.echo(json.dumps(fields, indent=None if on_one_line else 2))


def note(text: str) -> None:
    """Print a remark on standard error, apart from the output."""
    typer.echo(f"coranto: {printable(text)}", err=True)
