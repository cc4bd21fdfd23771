"""`coranto attach-uuids`: turns lines of text into messages, so that readers can detect duplicates."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from coranto.errors import InvalidInput
from coranto.messages.uuids import Flags, ProducerClock, format_uuid, new_producer_id

_UUID, _LINE = "{uuid}", "{line}"


def attach_uuids(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Files of lines. Default: standard input.")
    ] = None,
    template: Annotated[
        str,
        typer.Option("--template", help="What each line becomes; {uuid} and {line} stand for the UUID and the line."),
    ] = "{uuid},{line}",
    skip_header: Annotated[bool, typer.Option("--skip-header", help="Leave out the first line of each file.")] = False,
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Maximum bytes of a line.")] = 4 << 20,
) -> None:
    """Attach a UUID to each line, and write them to standard output.

    The lines are then messages: however often the output is appended to a journal, its readers take each one once. Keep
    the output to append it again; another run attaches other UUIDs.
    """
    if _UUID not in template:
        raise InvalidInput(f"{template!r} has no {_UUID}; write it where the UUID belongs", field="--template")
    producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
    out = sys.stdout.buffer
    for name, line in _lines(files or [], skip_header, max_length):
        if _LINE in template:
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise InvalidInput(f"{name} has a line that is not UTF-8: {error}") from error
        else:
            text = ""
        uuid = format_uuid(producer, clock.tick(), Flags.OUTSIDE_TXN)
        # Replace the line last: it may contain braces itself.
        out.write(template.replace(_UUID, uuid).replace(_LINE, text).encode() + b"\n")
    out.flush()


def _lines(files: list[Path], skip_header: bool, max_length: int) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of all files, without line ends, each with the name of its file."""
    with ExitStack() as stack:
        opened: list[tuple[str, BinaryIO]] = [(str(path), stack.enter_context(path.open("rb"))) for path in files]
        for name, file in opened or [("standard input", sys.stdin.buffer)]:
            number = 0
            while line := file.readline(max_length + 2):
                number += 1
                if len(line.rstrip(b"\r\n")) > max_length:
                    raise InvalidInput(
                        f"{name}: line {number} is longer than {max_length} bytes; split it, or raise --max-length",
                        field="--max-length",
                    )
                if skip_header and number == 1:
                    continue
                yield name, line.rstrip(b"\r\n")
