"""`coranto streams create|list|describe|scale|seal|truncate|delete|resume`."""

from __future__ import annotations

import enum
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from coranto.cli.connect import Endpoint, with_client
from coranto.cli.output import Output, note, print_table
from coranto.client import JournalClient
from coranto.errors import CorruptData, InvalidInput
from coranto.fragments.fragment import Codec
from coranto.labels import FIXED_FRAMES, JSON_LINES
from coranto.messages.fixed_frame import MAGIC
from coranto.specs.validation import validate_journal_spec
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Change, Merge, ScalingPolicy, Split, parse_policy
from coranto.streams.model.pictures import COLUMNS, key_map, segment_row
from coranto.streams.model.stream import Stream, segment_journal, validate_stream
from coranto.wire import protocol_pb2 as pb

_MAP_EPOCHS = 16

Name = Annotated[str, typer.Argument(metavar="STREAM", help="Name of the stream.")]


class EventFormatName(enum.StrEnum):
    """The format of events."""

    JSON = "json"
    BYTES = "bytes"


class DescribeFormat(enum.StrEnum):
    """The output format of `describe`."""

    TABLE = "table"
    JSON = "json"
    MAP = "map"


def create(
    name: Name,
    segments: Annotated[int, typer.Option("--segments", "-s", min=1, help="Segments to begin with.")] = 1,
    format: Annotated[
        EventFormatName, typer.Option("--format", "-f", help="Events are JSON objects, or bytes.")
    ] = EventFormatName.JSON,
    replication: Annotated[
        int, typer.Option("--replication", "-r", min=1, help="Number of brokers that hold a segment.")
    ] = 1,
    stores: Annotated[
        list[str] | None, typer.Option("--store", help="Fragment store, such as s3://bucket/path/. May be repeated.")
    ] = None,
    length: Annotated[int, typer.Option("--fragment-bytes", help="Content of a fragment.")] = 1 << 26,
    codec: Annotated[str, typer.Option("--codec", help="NONE, GZIP, SNAPPY or ZSTANDARD.")] = "ZSTANDARD",
    policy: Annotated[
        str,
        typer.Option(
            "--scale",
            help="Policy for `autoscale`: bytes/RATE or events/RATE per segment and second, and perhaps "
            "/FACTOR/MIN_SEGMENTS/MAX_SEGMENTS.",
            show_default=False,
        ),
    ] = "",
    max_writers: Annotated[
        int | None,
        typer.Option("--max-writers", min=1, help="Number of writers that a segment remembers.", show_default=False),
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Create a stream whose segments share the routing keys evenly."""
    template = default_template(replication=replication, stores=stores or ["file:///"])
    template.fragment.length = length
    template.name = segment_journal(validate_stream(name), 0)
    if codec.upper() not in Codec.__members__:
        raise InvalidInput(f"{codec!r} is not one of {', '.join(Codec.__members__)}", field="--codec")
    template.fragment.compression_codec = pb.CompressionCodec.ValueType(Codec[codec.upper()])
    template.fragment.refresh_interval.CopyFrom(Duration(seconds=30))
    content_type = JSON_LINES if format is EventFormatName.JSON else FIXED_FRAMES
    scaling = policy_of(policy, "--scale")
    _check(template)

    async def work(client: JournalClient) -> None:
        stream = await Streams(client).create(
            name, segments, template=template, content_type=content_type, policy=scaling, max_writers=max_writers
        )
        typer.echo(f"created {name} with {_segments(len(stream.segments))}")

    with_client(endpoint, work)


def list_streams(
    output: Annotated[Output, typer.Option("--output", "-o", help="What to print.")] = Output.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """List streams."""

    async def work(client: JournalClient) -> None:
        invalid: dict[str, CorruptData] = {}
        found = await Streams(client).list(invalid)
        for name, error in invalid.items():
            note(f"stream {name} is left out: {error}")
        if output is Output.JSON:
            for stream in found:
                typer.echo(json.dumps(_as_json(stream, None)))
            return
        rows = [
            (
                stream.name,
                f"{len(stream.active())} of {len(stream.segments)}",
                str(stream.epoch),
                stream.content_type,
                stream.scaling or "-",
                _state(stream),
            )
            for stream in found
        ]
        print_table(("STREAM", "ACTIVE", "EPOCH", "CONTENT-TYPE", "SCALING", "STATE"), rows)

    with_client(endpoint, work)


def describe(
    name: Name,
    heads: Annotated[bool, typer.Option("--heads", help="Also ask where active segments end.")] = False,
    output: Annotated[
        DescribeFormat,
        typer.Option("--output", "-o", help="What to print; a map shows which segment had which keys in each epoch."),
    ] = DescribeFormat.TABLE,
    endpoint: Endpoint = None,
) -> None:
    """Show a stream's segments: their share of the routing keys, their ends, and their predecessors."""
    if heads and output is DescribeFormat.MAP:
        raise InvalidInput("a map has no place for the ends of segments; leave out one of the two", field="--heads")

    async def work(client: JournalClient) -> None:
        streams = Streams(client)
        stream = await streams.describe(name)
        if output is DescribeFormat.MAP:
            _print_map(stream)
            return
        ends = await streams.heads(stream, stream.active()) if heads else {}
        if output is DescribeFormat.JSON:
            typer.echo(json.dumps(_as_json(stream, ends), indent=2))
        else:
            _print(stream, ends)

    with_client(endpoint, work)


def scale(
    name: Name,
    split: Annotated[
        list[str] | None,
        typer.Option("--split", metavar="SEGMENT[:PARTS]", help="Split a segment, by default in two. May be repeated."),
    ] = None,
    merge: Annotated[
        list[str] | None,
        typer.Option("--merge", metavar="SEGMENT,SEGMENT…", help="Merge adjacent segments. May be repeated."),
    ] = None,
    endpoint: Endpoint = None,
) -> None:
    """Split and merge segments, all in one change. Events keep their order by routing key."""
    changes: list[Change] = [_split(text) for text in split or ()]
    changes += [Merge(tuple(_number(part, "--merge") for part in text.split(","))) for text in merge or ()]
    _change(name, endpoint, lambda streams: streams.scale(name, changes))


def seal(name: Name, endpoint: Endpoint = None) -> None:
    """Seal a stream: it accepts no more events."""
    _change(name, endpoint, lambda streams: streams.seal(name))


def resume(name: Name, endpoint: Endpoint = None) -> None:
    """Finish the work of a process that died while it was scaling or sealing the stream."""
    _change(name, endpoint, lambda streams: streams.resume(name))


def truncate(
    name: Name,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="SEGMENT=OFFSET",
            help="Where readers begin. Repeat it for segments that together cover all routing keys.",
            show_default=False,
        ),
    ] = None,
    to_end: Annotated[bool, typer.Option("--to-end", help="Readers begin with new events.")] = False,
    endpoint: Endpoint = None,
) -> None:
    """Truncate a stream: readers begin at later offsets. Segments that are wholly before them are deleted."""
    if bool(at) == to_end:
        raise InvalidInput("say where: with --at for each segment, or with --to-end", field="--at")

    given = dict(pairs := [_at(text) for text in at or ()])
    if len(given) < len(pairs):
        raise InvalidInput(f"names a segment twice: {', '.join(at or ())}; give one offset for each", field="--at")

    async def work(client: JournalClient) -> None:
        streams = Streams(client)
        stream = await streams.describe(name)
        cut = given if not to_end else await streams.heads(stream, stream.last())
        if given:
            await _check_offsets(client, streams, stream, given)
        _print(await streams.truncate(name, cut), {})

    with_client(endpoint, work)


async def _check_offsets(client: JournalClient, streams: Streams, stream: Stream, cut: Mapping[int, int]) -> None:
    """Refuse offsets within events: readers could not decode the content from there on."""
    segments = [stream.segments[number] for number in cut if number in stream.segments]
    for number, head in (await streams.heads(stream, segments)).items():
        segment, offset = stream.segments[number], cut[number]
        if not segment.begin < offset < head:
            continue
        if stream.content_type == FIXED_FRAMES:
            begins = await client.read_all(segment.journal, offset, min(offset + len(MAGIC), head)) == MAGIC
        else:
            begins = await client.read_all(segment.journal, offset - 1, offset) == b"\n"
        if not begins:
            raise InvalidInput(
                f"{number}={offset}: no event begins there in {segment.journal}; give an offset that a reader's "
                "position or a writer's result named",
                field="--at",
            )


def delete(
    name: Name,
    sure: Annotated[
        bool, typer.Option("--yes", help="Confirm that the stream and all its events are deleted.")
    ] = False,
    endpoint: Endpoint = None,
) -> None:
    """Delete a stream's journals. Their fragments in fragment stores stay there."""
    if not sure:
        raise InvalidInput(f"this deletes the stream {name} with all its events; confirm with --yes", field="--yes")

    async def work(client: JournalClient) -> None:
        await Streams(client).delete(name)
        typer.echo(f"deleted {name}")

    with_client(endpoint, work)


# ----------------------------------------------------------------------------------------------------------------------


def _change(name: str, endpoint: str | None, change: Callable[[Streams], Awaitable[Stream]]) -> None:
    async def work(client: JournalClient) -> None:
        _print(await change(Streams(client)), {})

    with_client(endpoint, work)


def policy_of(text: str, option: str) -> ScalingPolicy | None:
    try:
        return parse_policy(text) if text else None
    except InvalidInput as error:
        which = "" if repr(text) in error.message else f"{text!r}: "
        raise InvalidInput(f"{which}{error.message}", field=option) from None


_OPTIONS = {"fragment.stores": "--store", "fragment.length": "--fragment-bytes", "replication": "--replication"}


def _check(template: pb.JournalSpec) -> None:
    """Refuse specs that brokers would refuse, with errors in terms of the command's options."""
    try:
        validate_journal_spec(template)
    except InvalidInput as error:
        field = error.field.removeprefix("JournalSpec.").partition("[")[0]
        raise InvalidInput(error.message, field=_OPTIONS.get(field, field)) from None


def _split(text: str) -> Split:
    segment, _, parts = text.partition(":")
    return Split(_number(segment, "--split"), _number(parts, "--split") if parts else 2)


def _at(text: str) -> tuple[int, int]:
    segment, equals, offset = text.partition("=")
    if not equals:
        raise InvalidInput(f"{text!r} has no offset; write SEGMENT=OFFSET", field="--at")
    return _number(segment, "--at"), _number(offset, "--at")


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"{text!r} is not a number; write SEGMENT=OFFSET, such as 0=1024", field=field)
    return int(text)


def _segments(count: int) -> str:
    return f"{count} segment{'' if count == 1 else 's'}"


def _state(stream: Stream) -> str:
    if stream.unfinished():
        return "changing"
    return "sealed" if stream.is_sealed else "open"


def _print(stream: Stream, heads: Mapping[int, int]) -> None:
    print_table(COLUMNS, [segment_row(stream, segment, heads) for segment in stream.segments.values()])


def _print_map(stream: Stream) -> None:
    found = key_map(stream, epochs=_MAP_EPOCHS)
    if found.epochs[0] > min(each.epoch for each in stream.segments.values()):
        note(f"these are the last {_MAP_EPOCHS} epochs of the stream")
    columns = ["KEYS", *(f"EPOCH {epoch}" if n == 0 else str(epoch) for n, epoch in enumerate(found.epochs))]
    rows = [[str(keys), *("-" if each is None else str(each) for each in held)] for keys, held in found.rows]
    print_table(columns, rows)


def _as_json(stream: Stream, heads: Mapping[int, int] | None) -> dict[str, object]:
    return {
        "stream": stream.name,
        "epoch": stream.epoch,
        "sealed": stream.is_sealed,
        "content_type": stream.content_type,
        "scaling": stream.scaling,
        "segments": [
            {
                "number": each.number,
                "epoch": each.epoch,
                "journal": each.journal,
                "key_begin": each.range.begin,
                "key_end": each.range.end,
                "predecessors": sorted(each.predecessors),
                "active": not each.sealing,
                "begin": each.begin,
                "sealed_at": each.sealed_at,
                **({"head": heads[each.number]} if heads and each.number in heads else {}),
            }
            for each in stream.segments.values()
        ],
    }
