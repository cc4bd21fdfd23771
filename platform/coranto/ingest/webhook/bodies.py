"""The rows in bodies of webhooks: an object, an array of objects, or lines of objects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from coranto.errors import InvalidInput
from coranto.ingest.rows import UnparsedRows, parse_object
from coranto.ingest.source import Poison

JSON: Final = "application/json"
LINES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_BOM: Final = b"\xef\xbb\xbf"


class Parts(NamedTuple):
    """The content of each row of a body, and a function that returns a row's place by its number."""

    contents: Sequence[bytes]
    place: Callable[[int], str]


def has_known_type(content_type: str) -> bool:
    return content_type in LINES or content_type == JSON or content_type.endswith("+json")


def parts_of(body: bytes, content_type: str) -> Parts:
    """Return the parts of a body. Raises InvalidInput if the body is not JSON."""
    content = body.removeprefix(_BOM)
    if content_type in LINES:
        lines = content.split(b"\n")
        numbers = [number for number, line in enumerate(lines) if line.strip(b" \t\r")]
        return Parts([lines[number] for number in numbers], lambda at: f"line {numbers[at] + 1}")
    if not content.lstrip(b" \t\r\n").startswith(b"["):
        return Parts([content], lambda at: "the body")
    try:
        return Parts(list(map(bytes, _items(content))), lambda at: f"item {at}")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error


def rows_of(parts: Parts, key: str, meta: bytes) -> UnparsedRows:
    """Return the rows of a body under one routing key. A row's metadata is `meta` followed by its number."""
    contents = parts.contents
    return UnparsedRows(
        [key] * len(contents),
        contents,
        [b"%b%d" % (meta, number) for number in range(len(contents))],
        lambda number, problem: Poison(parts.place(number), problem, None, contents[number]),
    )


def field_of(parts: Parts, name: str) -> str:
    """Return a text field of the only row; empty if there are several rows, or no such field with a text."""
    if len(parts.contents) != 1:
        return ""
    try:
        value = parse_object(parts.contents[0])[0].get(name)
    except InvalidInput:
        return ""
    return value if isinstance(value, str) else ""
