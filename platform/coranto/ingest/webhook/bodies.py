"""The rows in bodies of webhooks: an object, an array of objects, or lines of objects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from coranto.errors import InvalidInput
from coranto.ingest.rows import parse_object

JSON: Final = "application/json"
LINES: Final = ("application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines")
_items: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_BOM: Final = b"\xef\xbb\xbf"


def has_known_type(content_type: str) -> bool:
    return content_type in LINES or content_type == JSON or content_type.endswith("+json")


def parts_of(body: bytes, content_type: str) -> list[tuple[str, bytes]]:
    """Return the content of each row of a body behind its place. Raises InvalidInput if the body is not JSON."""
    content = body.removeprefix(_BOM)
    if content_type in LINES:
        lines = enumerate(content.split(b"\n"), 1)
        return [(f"line {number}", line) for number, line in lines if line.strip(b" \t\r")]
    if not content.lstrip(b" \t\r\n").startswith(b"["):
        return [("the body", content)]
    try:
        return [(f"item {number}", bytes(item)) for number, item in enumerate(_items(content))]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}") from error


def field_of(parts: Sequence[tuple[str, bytes]], name: str) -> str:
    """Return a text of the only row; empty if there are more rows, or no such text."""
    if len(parts) != 1:
        return ""
    try:
        value = parse_object(parts[0][1])[0].get(name)
    except InvalidInput:
        return ""
    return value if isinstance(value, str) else ""
