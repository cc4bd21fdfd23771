"""`coranto journals append`: appends an input as a whole, or each of its records to a journal chosen by a mapping.

An input that is appended as a whole must also consist of whole records if the journal's labels define a framing.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from coranto.cli.connect import Endpoint, connect
from coranto.cli.journals.records import RecordFraming, read_records, with_keys
from coranto.cli.journals.selection import Selection, Selector, select_now
from coranto.cli.output import opened
from coranto.client import Appended, SyncJournalClient
from coranto.client.config import DEFAULT_RETRY_TIMEOUT
from coranto.errors import InvalidInput, PermissionDenied
from coranto.labels import CONTENT_TYPE, FIXED_FRAMES, NAME, label_selector, takes_whole_lines, value_of
from coranto.messages.mapping import Mapping, ModuloMapping, RandomMapping, RendezvousMapping
from coranto.telemetry import progress

_PIECE_BYTES = 1 << 20


class KeyMapping(enum.StrEnum):
    """The rule that chooses one of the selected journals for a record."""

    RANDOM = "random"
    MODULO = "modulo"
    RENDEZVOUS = "rendezvous"
    DIRECT = "direct"


def append(
    name: Annotated[str, typer.Argument(metavar="JOURNAL", help="Journal to append to.", show_default=False)] = "",
    selector: Selector = None,
    journal: Annotated[str, typer.Option("--journal", help="A journal, as an option.", show_default=False)] = "",
    file: Annotated[str, typer.Option("--input", "-i", help="File to append, or - for standard input.")] = "-",
    framing: Annotated[
        RecordFraming | None,
        typer.Option(
            "--framing",
            "-f",
            help="`none`: all input is one append. `lines`, `fixed`: each line or fixed frame is a record. By default, "
            "all input is one append, of whole records of the framing that the journal's labels name.",
            show_default=False,
        ),
    ] = None,
    mapping: Annotated[
        KeyMapping,
        typer.Option(
            "--mapping",
            "-m",
            help="Which of the selected journals a record goes to. Except for `random`, each record comes after its "
            "key, in the same framing; for `direct`, the key is a journal's name.",
        ),
    ] = KeyMapping.RANDOM,
    is_base64: Annotated[bool, typer.Option("--base64", help="Keys that are lines are in base64.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """Append a file or standard input: wholly or not at all, or record by record.

    Records keep their order within each journal. The journals are selected once, at the start.
    """
    named = [each for each in (name, journal) if each]
    if len(named) + (selector is not None) != 1:
        raise InvalidInput("name one journal, or select journals with --selector", field="JOURNAL")
    if framing in (None, RecordFraming.NONE) and mapping is not KeyMapping.RANDOM:
        raise InvalidInput(f"{mapping.value} needs records: give --framing lines or fixed", field="--mapping")
    if is_base64 and (framing is not RecordFraming.LINES or mapping is KeyMapping.RANDOM):
        raise InvalidInput(
            "only keys that are lines can be in base64; leave --base64 out, or give --framing lines", field="--base64"
        )
    with connect(endpoint) as client, opened(file, "rb") as source:
        size = Path(file).stat().st_size if file != "-" and Path(file).is_file() else None
        # A named journal needs no listing.
        journals = named or [info.name for info in select_now(client, Selection((), selector or ""))]
        if framing in (None, RecordFraming.NONE):
            journal = random.choice(journals)
            found = framing or _framing_of(client, journal)
            pieces = iter(lambda: source.read(_PIECE_BYTES), b"")
            records = pieces if found is RecordFraming.NONE else _joined(read_records(source, found))
            _append(client, journal, records, size)
        else:
            pairs = _pairs(source, framing, mapping, is_base64=is_base64)
            _append_records(client, pairs, _mapping(mapping, journals))


def _framing_of(client: SyncJournalClient, journal: str) -> RecordFraming:
    """Return the framing in a journal's labels; NONE if the client may not list the journal."""
    try:
        listed = client.list(label_selector(include=[(NAME, journal)])).journals
    except PermissionDenied:
        listed = ()
    for info in listed:
        if takes_whole_lines(info.spec.labels):
            return RecordFraming.LINES
        if value_of(info.spec.labels, CONTENT_TYPE) == FIXED_FRAMES:
            return RecordFraming.FIXED
    return RecordFraming.NONE


def _joined(records: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the records in pieces of at least `_PIECE_BYTES`, except for the last one."""
    held: list[bytes] = []
    size = 0
    for record in records:
        held.append(record)
        size += len(record)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _append(client: SyncJournalClient, journal: str, pieces: Iterator[bytes], size: int | None) -> None:
    first = next(pieces, b"")
    if len(first) < _PIECE_BYTES:
        # A small append can be retried until the lease of a lost broker expires.
        result = client.append(journal, first, retry_timeout=DEFAULT_RETRY_TIMEOUT)
    else:
        # A barrier is retried until the journal accepts appends; a streamed append cannot be retried.
        client.append(journal, b"", retry_timeout=DEFAULT_RETRY_TIMEOUT)
        with client.appender(journal) as append, progress(f"Appending to {journal}", size, unit="bytes") as report:
            for piece in itertools.chain([first], pieces):
                append.write(piece)
                report.advance(len(piece))
            result = append.commit()
    survives = f", {result.durability}" if result.durability is not None else ""  # Gazette's brokers report none.
    typer.echo(f"{journal}: appended {result.end - result.begin} bytes at [{result.begin}, {result.end}){survives}")


def _pairs(
    source: BinaryIO, framing: RecordFraming, mapping: KeyMapping, *, is_base64: bool
) -> Iterator[tuple[bytes, bytes]]:
    records = read_records(source, framing)
    if mapping is KeyMapping.RANDOM:
        return ((b"", record) for record in records)
    return with_keys(records, framing, is_base64=is_base64)


def _mapping(mapping: KeyMapping, journals: list[str]) -> Mapping:
    if mapping is KeyMapping.RANDOM:
        return RandomMapping(journals, random.Random())
    if mapping is KeyMapping.MODULO:
        return ModuloMapping(journals)
    if mapping is KeyMapping.RENDEZVOUS:
        return RendezvousMapping(journals)
    known = frozenset(journals)

    def direct(key: bytes) -> str:
        name = key.decode(errors="replace")
        if name not in known:
            raise InvalidInput(f"the key {name!r} is not one of the {len(known)} selected journals", field="--mapping")
        return name

    return direct


def _append_records(client: SyncJournalClient, pairs: Iterator[tuple[bytes, bytes]], mapping: Mapping) -> None:
    """Append each record to its journal, in batches. Stop at the first failure: no record follows a lost one."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    last: dict[str, Future[Appended]] = {}
    try:
        # An append whose outcome is unknown is not retried: records may have no UUIDs that would reveal duplicates.
        with (
            progress("Appending records", unit="records") as report,
            client.append_service(retry_unknown=False, retry_timeout=DEFAULT_RETRY_TIMEOUT) as service,
        ):
            try:
                for key, record in pairs:
                    journal = mapping(key)
                    before = last.get(journal)
                    if before is not None and before.done():
                        before.result()
                    last[journal] = service.append(journal, record)
                    counts[journal] += 1
                    sizes[journal] += len(record)
                    report.advance()
            except InvalidInput:
                # The records before a malformed one are valid, so append them.
                service.flush()
                raise
    finally:
        for journal in sorted(counts):
            done = last[journal]
            if done.done() and not done.cancelled() and done.exception() is None:
                typer.echo(f"{journal}: appended {counts[journal]} records, {sizes[journal]} bytes")
