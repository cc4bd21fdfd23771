"""JSON messages as texts whose values are never decoded: numbers of any size and precision stay as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import JSONDecoder
from typing import Final
from uuid import UUID

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines, JsonLinesDecoder

_SPACE: Final = " \t\r\n"


class Number(str):
    """The text of a number, or of a constant such as `NaN`."""

    __slots__ = ()


DECODER: Final = JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=Number)
"""Decodes JSON, but leaves numbers as their texts."""


def fields_of(text: str) -> Iterator[tuple[str, object, str]]:
    """Yield an object's names and values, each value with its exact text. Raises ValueError if it is not an object.

    Numbers are texts (`Number`). A name that occurs twice is yielded twice.
    """
    at = _first(text, "{", "}")
    while at is not None:
        at = _expect(text, at, '"')
        name, at = DECODER.raw_decode(text, at - 1)
        begin = _skip(text, _expect(text, at, ":"))
        value, at = DECODER.raw_decode(text, begin)
        yield name, value, text[begin:at]
        at = _next(text, at, "}")


def elements_of(text: str) -> Iterator[tuple[object, str]]:
    """Yield a list's values, each with its exact text. Raises ValueError if it is not a list. Numbers are texts."""
    at = _first(text, "[", "]")
    while at is not None:
        begin = _skip(text, at)
        value, at = DECODER.raw_decode(text, begin)
        yield value, text[begin:at]
        at = _next(text, at, "]")


class JsonTexts:
    """The `Framing` of `JsonLines` for messages that are texts of JSON objects.

    Values are written exactly as they are given; only newlines between them become spaces.
    """

    def __init__(self, lines: JsonLines | None = None) -> None:
        self._lines = lines or JsonLines()
        self.content_type = self._lines.content_type

    def marshal(self, message: str, uuid: str | UUID) -> bytes:
        """Return the line of a message with `uuid`. Raises InvalidInput."""
        try:
            decoded = _STRICT.decode(message)
            if not isinstance(decoded, dict):
                raise InvalidInput(f"{message[:200]!r} is not a JSON object; pass one")
            text = message.strip(_SPACE).replace("\n", " ")  # JSON strings contain no newline.
            if path := self._lines.path:
                inner = text[1:].lstrip(_SPACE)
                if path[0] in decoded:
                    text = _placed(text, path, f"{uuid}")
                else:
                    head = self._lines.acknowledgement(uuid)[:-2].decode()
                    text = f"{head}{inner}" if inner == "}" else f"{head},{inner}"
            return text.encode() + b"\n"
        except InvalidInput:
            raise
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{message[:200]!r} is not JSON: {error}") from error

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        return self._lines.acknowledgement(uuid)

    def unmarshal(self, content: bytes) -> str:
        try:
            return content.decode()
        except ValueError as error:
            raise InvalidInput(f"not a line of JSON: {error}") from error

    def decoder(self, journal: str, offset: int) -> JsonLinesDecoder[str]:
        return JsonLinesDecoder(self, self._lines, journal, offset)


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is not JSON")


_QUICK: Final = JSONDecoder(parse_constant=_no_number)
_STRICT: Final = JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=_no_number)


def is_plain(text: str, reserved: str) -> bool:
    """Return True if a text is a JSON object on one line, without spaces around it and without the name `reserved`.

    Raises InvalidInput for a text that is not JSON.
    """
    try:
        try:
            decoded = _QUICK.decode(text)
        except ValueError:  # Possibly a number with thousands of digits.
            decoded = _STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{text[:200]!r} is not JSON: {error}") from error
    return (
        isinstance(decoded, dict)
        and (bool(decoded) or text == "{}")
        and text[0] == "{"
        and text[-1] == "}"
        and "\n" not in text
        and reserved not in decoded
    )


def _placed(text: str, path: tuple[str, ...], uuid: str) -> str:
    """Return an object with the UUID at `path`. The keys of the path come first. Raises ValueError."""
    token, rest = path[0], path[1:]
    fields = list(fields_of(text))
    child = json.dumps(uuid)
    if rest:
        below = next((found for name, _, found in reversed(fields) if name == token), "null")
        child = _placed("{}" if below == "null" else below, rest, uuid)
    others = [(name, found) for name, _, found in fields if name != token]
    return "{" + ",".join(f"{json.dumps(name)}:{found}" for name, found in [(token, child), *others]) + "}"


def _first(text: str, opening: str, closing: str) -> int | None:
    """Return the position of the first entry, or None if there are no entries."""
    at = _expect(text, 0, opening)
    if not text.startswith(closing, _skip(text, at)):
        return at
    _end(text, _expect(text, at, closing))
    return None


def _next(text: str, at: int, closing: str) -> int | None:
    """Return the position of the entry after the entry that ends at `at`, or None after the last entry."""
    at = _skip(text, at)
    if not text.startswith(closing, at):
        return _expect(text, at, ",")
    _end(text, at + 1)
    return None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, character: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != character:
        raise json.JSONDecodeError(f"expected {character}", text, at)
    return at + 1


def _end(text: str, at: int) -> None:
    if _skip(text, at) != len(text):
        raise json.JSONDecodeError("text after the value", text, at)
