"""`coranto streams write`: writes lines of an input as events."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from typing import Annotated, Any

import structlog
import typer

from coranto.cli.connect import RETRY_TIMEOUT, Endpoint, connect, ended_by_sigterm
from coranto.cli.journals.records import RecordFraming, read_records
from coranto.cli.output import note, opened
from coranto.cli.streams.event_feed import EventFeed
from coranto.client import JournalClient
from coranto.client.loop import shared_loop
from coranto.errors import CommitUnknown, InvalidInput, WriterExpired
from coranto.streams.blocking.lifecycle import SyncStreams
from coranto.streams.blocking.writer import SyncStreamWriter
from coranto.streams.model.events import JsonEvents, format_of
from coranto.streams.writer.stream_writer import CLOSE_SECONDS, DEFAULT_RETRY_TIMEOUT, StreamWriter
from coranto.telemetry import ProgressReport, configure_logging, progress


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
        bool, typer.Option("--transaction", "-t", help="Write all events, of one --key, in one transaction.")
    ] = False,
    expected_offset: Annotated[
        int | None,
        typer.Option(
            "--expected-offset",
            min=0,
            help="Commit the transaction only if the key's segment ends there.",
            show_default=False,
        ),
    ] = None,
    writer_id: Annotated[
        str | None,
        typer.Option(
            "--writer-id",
            help="Writing the same input under the same id again, after a failure, writes its missing part.",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Continue under a --writer-id that the stream has forgotten, as a new writer."),
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Write each line as an event: a JSON object or bytes, in the stream's format. Return when all are durable.

    Events are appended as they arrive, and keep their order by routing key. If the input has an error, or the
    command is interrupted, the events before that are written, and the command reports how many of them are durable.
    """
    if (key is not None) + (key_field is not None) + tabs != 1:
        raise InvalidInput("choose the routing keys: with one of --key, --key-field and --tabs", field="--key")
    if transaction and key is None:
        raise InvalidInput("a transaction is of one routing key: give it with --key", field="--transaction")
    if expected_offset is not None and not transaction:
        raise InvalidInput("is a condition of a transaction: give --transaction, too", field="--expected-offset")
    if fresh and writer_id is None:
        raise InvalidInput("is for writers with an id: give --writer-id, too", field="--fresh")
    with ended_by_sigterm(), _advised(), connect(endpoint) as client:
        with SyncStreams(client) as streams:
            format: Any = format_of(streams.describe(name).content_type)
        parse = _parser(key, key_field, is_json=isinstance(format, JsonEvents))
        feed: EventFeed | None = None
        try:
            with opened(file, "rb") as source, progress(f"Writing to {name}", unit="events") as report:
                pairs = (
                    parse(line[:-1], number) for number, line in enumerate(read_records(source, RecordFraming.LINES), 1)
                )
                if transaction:
                    assert key is not None
                    events = [event for _, event in pairs]
                    with SyncStreamWriter(client, name, format=format, writer_id=writer_id, fresh=fresh) as committer:
                        text = _commit(committer, name, key, events, 1 if writer_id else None, expected_offset, report)
                else:
                    own = JournalClient.of(client.config)
                    writer: StreamWriter[Any] = StreamWriter(own, name, format=format, writer_id=writer_id, fresh=fresh)
                    feed = EventFeed(writer, stall_timeout=RETRY_TIMEOUT, late=lambda: _report_stall(name, report))
                    text = _write(own, writer, pairs, feed, report, numbered=writer_id is not None)
        except BaseException:
            if feed is not None and feed.given:
                note(f"{name}: of {_events(feed.given)} that were read, {feed.durable} are durable")
            raise
    typer.echo(f"{name}: {text}")


@contextlib.contextmanager
def _advised() -> Iterator[None]:
    """Add advice to errors, in terms of the command's options."""
    try:
        yield
    except WriterExpired as error:
        raise WriterExpired(
            f"{error}. See which events the stream has (`coranto streams read`), and if that is settled, add --fresh",
            error.outcome,
        ) from error
    except CommitUnknown as error:
        raise CommitUnknown(
            f"{error}. With a --writer-id, the same command writes the missing events; without, read the stream"
        ) from error


def _commit(
    writer: SyncStreamWriter[Any],
    name: str,
    key: str,
    events: list[Any],
    sequence: int | None,
    expected_offset: int | None,
    report: ProgressReport,
) -> str:
    """Write events as one transaction, and return the result."""
    if not events:
        return "the input is empty, so there is nothing to commit"
    if not structlog.get_logger().is_enabled_for(logging.DEBUG):
        configure_logging("error")  # The command itself shows the error.
    committing = writer.write_events(key, events, sequence=sequence, expected_offset=expected_offset)
    if not wait([committing], RETRY_TIMEOUT).done:
        _report_stall(name, report)
    result = committing.result()
    report.advance(len(events))
    how = "found" if result.deduplicated else "committed"
    return f"{how} {_events(len(events))} in segment {result.segment} at [{result.begin}, {result.end})"


def _write(
    client: JournalClient,
    writer: StreamWriter[Any],
    pairs: Iterable[tuple[str, Any]],
    feed: EventFeed,
    report: ProgressReport,
    *,
    numbered: bool,
) -> str:
    """Write events one by one, and return the result."""
    loop, deadline = shared_loop(), CLOSE_SECONDS
    try:
        loop.run(writer.open())
        for number, (place, event) in enumerate(pairs, 1):
            feed.add(place, event, number if numbered else None)
            report.advance()
        feed.finish()
    except KeyboardInterrupt:
        deadline = RETRY_TIMEOUT
        raise
    finally:
        loop.run(writer.close(deadline))
        loop.run(client.close())
    known = f", {feed.repeated} of them already stored" if feed.repeated else ""
    return f"{_events(feed.durable)} {'is' if feed.durable == 1 else 'are'} durable{known}"


def _report_stall(stream: str, report: ProgressReport) -> None:
    notify = report.note if sys.stderr.isatty() else note  # On a terminal, the progress bar shows it.
    notify(f"{stream} takes no events at the moment; trying for {DEFAULT_RETRY_TIMEOUT:g} s, unless interrupted")


def _parser(key: str | None, key_field: str | None, *, is_json: bool) -> Callable[[bytes, int], tuple[str, Any]]:
    """Return a function that turns a line and its number into a routing key and an event."""
    if key_field is not None and not is_json:
        raise InvalidInput(
            "the stream's events are bytes, which have no members; give keys with --key or --tabs", field="--key-field"
        )

    def parse(line: bytes, number: int) -> tuple[str, Any]:
        place = key
        if key is None and key_field is None:
            head, tab, line = line.partition(b"\t")
            if not tab:
                raise InvalidInput(
                    f"line {number} has no tab after its routing key; write KEY, a tab and the event", field="--tabs"
                )
            place = head.decode(errors="surrogateescape")
        event: Any = _object(line, number) if is_json else line
        if key_field is not None:
            value = event.get(key_field)
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise InvalidInput(
                    f"line {number} has no text or number {key_field!r}, which --key-field names; add it",
                    field="--key-field",
                )
            place = str(value)
        assert place is not None
        return place, event

    return parse


def _object(line: bytes, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"line {number} is not JSON: {error}; give one object a line") from error
    if not isinstance(event, dict):
        raise InvalidInput(f"line {number} is not a JSON object, as events of this stream are")
    return event


def _events(count: int) -> str:
    return f"{count} event{'' if count == 1 else 's'}"
