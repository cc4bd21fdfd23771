"""`coranto streams write`: lines of an input as events."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.journals.records import RecordFraming, read_records
from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.streams.events import JsonEvents, format_of
from coranto.streams.lifecycle import Streams
from coranto.streams.writer import StreamWriter
from coranto.telemetry import progress


def write(
    name: Annotated[str, typer.Argument(metavar="STREAM", help="Stream to write to.")],
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Routing key of all events.", show_default=False)
    ] = None,
    key_field: Annotated[
        str | None,
        typer.Option("--key-field", help="Member of the JSON objects that is their routing key.", show_default=False),
    ] = None,
    tabs: Annotated[bool, typer.Option("--tabs", help="Lines are routing key, tab, event.")] = False,
    file: Annotated[str, typer.Option("--input", "-i", help="File to read, or - for standard input.")] = "-",
    transaction: Annotated[
        bool, typer.Option("--transaction", "-t", help="All events, of one --key, are one transaction.")
    ] = False,
    writer_id: Annotated[
        str | None,
        typer.Option(
            "--writer-id",
            help="Writing the same input under the same id again, after a failure, writes what is missing of it.",
            show_default=False,
        ),
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Write each line as an event: a JSON object, or bytes, as the stream has it. Returns when all are durable.

    Events of a routing key keep their order.
    """
    if (key is not None) + (key_field is not None) + tabs != 1:
        raise InvalidInput("say what routing keys are: with one of --key, --key-field and --tabs", field="--key")
    if transaction and key is None:
        raise InvalidInput("a transaction is of one routing key: give it with --key", field="--transaction")

    async def work(client: JournalClient) -> None:
        stream = await Streams(client).describe(name)
        format: Any = format_of(stream.content_type)
        parse = _parser(key, key_field, is_json=isinstance(format, JsonEvents))
        with _opened(file) as source, progress(f"Writing to {name}", unit="events") as report:
            pairs = (
                parse(line[:-1], number) for number, line in enumerate(read_records(source, RecordFraming.LINES), 1)
            )
            async with StreamWriter(client, name, format=format, writer_id=writer_id) as writer:
                written = repeated = 0
                if transaction:
                    assert key is not None
                    events = [event for _, event in pairs]
                    sequence = 1 if writer_id is not None else None
                    result = await writer.write_events(key, events, sequence=sequence)
                    typer.echo(
                        f"{name}: {'found' if result.deduplicated else 'committed'} {len(events)} events in segment "
                        f"{result.segment} at [{result.begin}, {result.end})"
                    )
                    return
                futures = []
                for number, (place, event) in enumerate(pairs, 1):
                    sequence = number if writer_id is not None else None
                    futures.append(writer.write_event(place, event, sequence=sequence))
                    report.advance()
                    if len(futures) >= _TOGETHER:
                        await writer.drain()
                        for done in futures:
                            repeated += (await done).deduplicated
                            written += 1
                        futures.clear()
                await writer.flush()
                for done in futures:
                    repeated += (await done).deduplicated
                    written += 1
        known = f", {repeated} of which it had already" if repeated else ""
        typer.echo(f"{name}: {written} events are durable{known}")

    with_client(endpoint, work)


_TOGETHER = 4096
"""Events that are under way at once."""


def _parser(key: str | None, key_field: str | None, *, is_json: bool) -> Callable[[bytes, int], tuple[str, Any]]:
    """What turns a line and its number into a routing key and an event."""
    if key_field is not None and not is_json:
        raise InvalidInput("the stream's events are bytes, which have no members", field="--key-field")

    def parse(line: bytes, number: int) -> tuple[str, Any]:
        place = key
        if key is None and key_field is None:
            head, tab, line = line.partition(b"\t")
            if not tab:
                raise InvalidInput(f"line {number} has no tab behind its routing key", field="--tabs")
            place = head.decode(errors="surrogateescape")
        event: Any = _object(line, number) if is_json else line
        if key_field is not None:
            value = event.get(key_field)
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise InvalidInput(f"line {number} has no text or number {key_field!r}", field="--key-field")
            place = str(value)
        assert place is not None
        return place, event

    return parse


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"line {number} is not JSON: {error}") from error
    if not isinstance(event, dict):
        raise InvalidInput(f"line {number} is not a JSON object")
    return event


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
    else:
        with Path(file).open("rb") as source:
            yield source
