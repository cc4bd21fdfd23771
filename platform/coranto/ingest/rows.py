"""Encoding of rows as events with routing keys, and of poison rows as dead letters."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains
from typing import Any, Final, NamedTuple

import msgspec

from coranto.errors import InvalidInput
from coranto.ingest.source import Poison, SourceRow
from coranto.messages.json_codec import encode_json
from coranto.streams.model.events import JsonEvents
from coranto.types.kinds import TypeField
from coranto.types.writing import require_message

MAX_ROW_BYTES: Final = 16 << 20
"""The maximum bytes of an event."""
META: Final = "_meta"
_EVENTS: Final = JsonEvents()
_BLANK: Final = _EVENTS.encode({})[: -len(b"}}\n")]  # {"_meta":{"uuid":"0…0"
_LF: Final = 0x0A
_CR: Final = 0x0D
_decode: Final = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class UnparsedRows:
    """Rows as texts, with the routing key and the `meta` of each.

    `poison` takes the number of a row whose text is not a JSON object, and the problem. It returns the row's Poison.
    """

    keys: Sequence[str]
    texts: Sequence[bytes]
    metas: Sequence[bytes]
    poison: Callable[[int, str], Poison]

    def __iter__(self) -> Iterator[SourceRow | Poison]:
        for number, (key, content, meta) in enumerate(zip(self.keys, self.texts, self.metas, strict=True)):
            try:
                fields, text = parse_object(content)
            except InvalidInput as error:
                yield self.poison(number, error.message)
            else:
                yield SourceRow(key, fields, text, meta)


class EncodedRows(NamedTuple):
    """Events with their routing keys, and rows that cannot be events."""

    keys: Sequence[str]
    events: Sequence[bytes]
    poison: Sequence[Poison]


class RowEncoder:
    """Encodes rows. `key_field` is the field with the routing key; empty to use the source's key."""

    def __init__(self, key_field: str = "", fields: Sequence[TypeField] | None = None, type_name: str = "") -> None:
        self._key_field = key_field
        self._fields = fields
        self._type_name = type_name

    def encode(self, row: SourceRow) -> tuple[str, bytes]:
        """Return a row's routing key and its event. Raises InvalidInput for a row that cannot be an event."""
        key, fields, text, meta, is_deletion = row
        if self._fields is not None and not is_deletion:
            try:
                require_message(fields, self._fields, (META, "uuid"))
            except InvalidInput as error:
                raise InvalidInput(f"does not fit {self._type_name}: {error.message}") from error
        if self._key_field:
            key = self._key_of(fields)
        if META in fields:
            line = _merged(fields, meta)
        else:
            if text is None:
                text = _text(fields)
            line = b"".join((_BLANK, b"," if meta else b"", meta, b"}," if fields else b"}", text[1:], b"\n"))
        if len(line) > MAX_ROW_BYTES:
            raise InvalidInput(f"is an event of {len(line)} bytes; it may have {MAX_ROW_BYTES}")
        return key, line

    def encode_texts(self, rows: UnparsedRows) -> tuple[Sequence[str], list[bytes]] | None:
        """Return the keys and events of all rows, like `encode`, but faster. Returns None unless all rows are plain.

        The text of a plain row is one line: an object with fields, but without its own metadata.
        """
        keys = rows.keys
        try:
            parsed = list(map(_decode, rows.texts))
            if set(map(type, parsed)) != {dict} or not all(parsed) or any(map(contains, parsed, repeat(META))):
                return None
            if self._fields is not None:
                for each in parsed:
                    require_message(each, self._fields, (META, "uuid"))
        except (InvalidInput, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if self._key_field:
            keys = [each.get(self._key_field) for each in parsed]
            if set(map(type, keys)) != {str}:
                return None
        texts = list(map(bytes.strip, rows.texts))
        whole, has_meta = b"".join(texts), any(rows.metas)
        if _LF in whole or _CR in whole or has_meta != all(rows.metas):
            return None
        head = _BLANK + b"," if has_meta else _BLANK
        parts = zip(rows.metas, texts, strict=True)
        events = [b"".join((head, meta, b"},", text[1:], b"\n")) for meta, text in parts]
        return None if max(map(len, events)) > MAX_ROW_BYTES else (keys, events)

    def _key_of(self, fields: Mapping[str, Any]) -> str:
        value = fields.get(self._key_field)
        if isinstance(value, str):
            return value
        if value is None:
            raise InvalidInput(f"has no field {self._key_field!r}, which is the key of the stream")
        return encode_json(value).decode()


def encode_rows(
    encoder: RowEncoder,
    rows: Iterable[SourceRow | Poison],
    poison_of: Callable[[SourceRow, int, InvalidInput], Poison],
    *,
    keeps_poison: bool,
) -> EncodedRows:
    """Encode rows. `poison_of` makes the Poison of a row that cannot be an event, from the row, its number and error.

    Ends at the first Poison, unless `keeps_poison`.
    """
    if isinstance(rows, UnparsedRows) and (found := encoder.encode_texts(rows)) is not None:
        return EncodedRows(*found, [])
    keys, events, poison = list[str](), list[bytes](), list[Poison]()
    for number, row in enumerate(rows):
        if not isinstance(row, Poison):
            try:
                key, event = encoder.encode(row)
            except InvalidInput as error:
                row = poison_of(row, number, error)
            else:
                keys.append(key)
                events.append(event)
                continue
        poison.append(row)
        if not keeps_poison:
            break
    return EncodedRows(keys, events, poison)


def _merged(fields: Mapping[str, Any], meta: bytes) -> bytes:
    """Return the event of a row with its own metadata."""
    theirs = fields[META]
    if not isinstance(theirs, dict):
        raise InvalidInput(f"has a field {META} that is not an object; this field is reserved for metadata")
    return _EVENTS.encode({**fields, META: {**theirs, **_decode(b"{%b}" % meta)}})


def _text(fields: Mapping[str, Any]) -> bytes:
    try:
        return encode_json(fields)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"cannot be written as JSON: {error}") from error


def parse_object(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Parse a JSON object. Returns it, and its text on one line, where numbers keep their digits. Raises InvalidInput.

    The text must conform to RFC 8259: UTF-8, and without NaN, infinities and lone surrogates.
    """
    try:
        fields = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"is not JSON: {error}") from error
    if type(fields) is not dict:
        raise InvalidInput(f"is JSON, but {type(fields).__name__} and not an object")
    text = content.strip(b" \t\r\n")
    return fields, text if _LF not in text and _CR not in text else msgspec.json.format(text, indent=-1)


def plain(value: Any) -> Any:
    """Convert a value to JSON, in the form of message types. Raises InvalidInput if JSON cannot express the value."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if value != value else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, dt.datetime):
        text = value.astimezone(dt.UTC).replace(tzinfo=None) if value.tzinfo else value
        return text.isoformat() + ("Z" if value.tzinfo else "")
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    raise InvalidInput(f"has a value of {type(value).__name__}, which JSON cannot express")


def dead_letter_of(source: str, split: str, poison: Poison) -> dict[str, object]:
    """Return the dead letter of a poison row: its place, the problem, and its key and value in base64."""
    letter: dict[str, object] = {
        "ingest": source,
        "split": split,
        "place": poison.place,
        "problem": poison.problem,
    }
    for name, content in (("key", poison.key), ("value", poison.value)):
        if content is not None and len(content) <= MAX_ROW_BYTES:
            letter[name] = base64.b64encode(content).decode()
    return letter
