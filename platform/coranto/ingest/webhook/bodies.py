"""The bodies of webhooks as rows: an object, an array of objects, or lines of objects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from coranto.errors import InvalidInput
from coranto.ingest.rows import parse_object
from coranto.ingest.source import Poison, SourceRow

JSON: Final = "application/json"
LINES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_objects: Final = msgspec.json.Decoder(list[dict[str, Any]]).decode
_BOM: Final = b"\xef\xbb\xbf"


def has_known_type(content_type: str) -> bool:
    return content_type in LINES or content_type == JSON or content_type.endswith("+json")


def rows_of(body: bytes, content_type: str) -> list[tuple[str, SourceRow | Poison]]:
    """Return the rows of a body with their places, without keys. A line or an item that is not an object is poison.

    Raises InvalidInput if the body as a whole is not JSON.
    """
    content = body.removeprefix(_BOM)
    if content_type in LINES:
        lines = enumerate(content.split(b"\n"), 1)
        parts = [(f"line {number}", line) for number, line in lines if line.strip(b" \t\r")]
    elif content.lstrip(b" \t\r\n").startswith(b"["):
        try:
            items = list(map(bytes, _items(content)))
            if b"\n" not in content and b"\r" not in content and (objects := _objects_of(content)) is not None:
                pairs = enumerate(zip(objects, items, strict=True))
                return [(f"item {number}", SourceRow("", *pair)) for number, pair in pairs]
            parts = [(f"item {number}", item) for number, item in enumerate(items)]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the body is not JSON: {error}") from error
    else:
        parts = [("the body", content)]
    return [(place, _row(place, part)) for place, part in parts]


def _objects_of(content: bytes) -> list[dict[str, Any]] | None:
    """Decode an array in one call, which is faster than item by item. None if an item is not an object."""
    try:
        return _objects(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _row(place: str, content: bytes) -> SourceRow | Poison:
    try:
        return SourceRow("", *parse_object(content))
    except InvalidInput as error:
        return Poison(place, error.message, None, content)


def field_of(rows: Sequence[tuple[str, SourceRow | Poison]], name: str) -> str:
    """Return a text of the only row; empty if there are more rows, or no such text."""
    row = rows[0][1] if len(rows) == 1 else None
    value = row.fields.get(name) if isinstance(row, SourceRow) else None
    return value if isinstance(value, str) else ""
