"""Parsing of HTTP requests into requests of `protocol.Journal`: path, arguments and Range header. No I/O.

    GET  /<journal>?offset=&block=&end_offset=&begin_mod_time=      or with `Range: bytes=<first>-[<last>]`
    HEAD /<journal>?…                                              the same, without content
    PUT  /<journal>?offset=&check_registers=&union_registers=&subtract_registers=

The `offset` of a read is -1 for the write head, `end_offset` is exclusive, and times are Unix seconds.
`check_registers` is a label selector; the other registers are labels such as `name=value,other=value`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from coranto import labels
from coranto.errors import InvalidInput
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb

_MAX_ARGUMENTS = 16
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False, "": True}
_READ = frozenset({"offset", "block", "end_offset", "begin_mod_time"})
_APPEND = frozenset({"offset", "check_registers", "union_registers", "subtract_registers"})
T = TypeVar("T")


def read_request(target: str, ranges: Sequence[str], *, metadata_only: bool) -> pb.ReadRequest:
    """Return the read for a GET or, with `metadata_only`, a HEAD. Raises InvalidInput.

    `target` is the target of the request line. `ranges` are the values of the Range headers.
    """
    journal, arguments = _split(target, _READ)
    request = pb.ReadRequest(journal=journal, metadata_only=metadata_only)
    request.offset = _value(arguments, "offset", _integer, 0)
    request.end_offset = _value(arguments, "end_offset", _integer, 0)
    request.begin_mod_time = _value(arguments, "begin_mod_time", _integer, 0)
    request.block = _value(arguments, "block", _boolean, False)
    if ranges:
        if arguments.keys() & {"offset", "end_offset"}:
            raise InvalidInput("set the range by a Range header or by offsets, not by both", field="Range")
        request.offset, request.end_offset = _range(ranges)
    validate(request)
    if request.end_offset and request.end_offset <= request.offset:
        raise InvalidInput(
            f"there is nothing from {request.offset} to {request.end_offset}; end_offset must be above offset",
            field="end_offset",
        )
    return request


def append_request(target: str) -> pb.AppendRequest:
    """Return the first message of the append for a PUT. Raises InvalidInput."""
    journal, arguments = _split(target, _APPEND)
    request = pb.AppendRequest(journal=journal, offset=_value(arguments, "offset", _integer, 0))
    if "check_registers" in arguments:
        request.check_registers.CopyFrom(_value(arguments, "check_registers", labels.parse_selector, None))
    if "union_registers" in arguments:
        request.union_registers.CopyFrom(_value(arguments, "union_registers", _label_set, None))
    if "subtract_registers" in arguments:
        request.subtract_registers.CopyFrom(_value(arguments, "subtract_registers", _label_set, None))
    validate(request)
    return request


def journal_of(target: str) -> str:
    """Return the journal that a request's path names, even if the request is malformed."""
    return unquote(target.partition("?")[0][1:])


def _split(target: str, known: frozenset[str]) -> tuple[str, dict[str, str]]:
    path, _, query = target.partition("?")
    if not path.startswith("/"):
        raise InvalidInput(f"{path!r} is not the path of a journal; write /name/of/journal", field="path")
    try:
        journal = unquote(path[1:], errors="strict")
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_ARGUMENTS)
    except ValueError as error:  # For example, for bytes that are not UTF-8.
        raise InvalidInput(f"the address cannot be understood: {error}", field="path") from None
    if not journal:
        raise InvalidInput("the path names no journal; write /name/of/journal", field="path")
    arguments: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            raise InvalidInput(f"there is no argument {name!r}; known are {', '.join(sorted(known))}", field="query")
        if name in arguments:
            raise InvalidInput(f"the argument {name!r} is given twice; give it once", field="query")
        arguments[name] = value
    return journal, arguments


def _value(arguments: dict[str, str], name: str, parse: Callable[[str], T], default: T | None) -> T:
    text = arguments.get(name)
    if text is None:
        assert default is not None
        return default
    try:
        value = parse(text)
    except ValueError as error:  # InvalidInput is a ValueError.
        raise InvalidInput(f"the argument {name}={text!r} cannot be understood: {error}", field=name) from None
    return value


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError("expected a whole number of 64 bits")
    return int(text)


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError("expected true or false")
    return _BOOLEANS[text.lower()]


def _label_set(text: str) -> pb.LabelSet:
    pairs: list[tuple[str, str]] = []
    for part in text.split(",") if text else ():
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(f"{part!r} is not name=value")
        pairs.append((name.strip(), value.strip()))
    return labels.label_set(pairs)


def _range(ranges: Sequence[str]) -> tuple[int, int]:
    """Return the offset and the exclusive end of a Range header. The end is 0 if it has none."""
    found = _RANGE.fullmatch(ranges[0].replace(" ", "")) if len(ranges) == 1 else None
    if found is None or len(found[1]) > 18 or len(found[2]) > 18:
        raise InvalidInput(
            f"the range {', '.join(ranges)!r} is not bytes=<first>-<last> or bytes=<first>-; "
            "for new content at the end of a journal, read from offset=-1",
            field="Range",
        )
    if found[2] and int(found[2]) < int(found[1]):
        raise InvalidInput(f"the range {ranges[0]!r} ends before it begins; write bytes=<first>-<last>", field="Range")
    return int(found[1]), int(found[2]) + 1 if found[2] else 0
