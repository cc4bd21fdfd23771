"""Checks of whole columns of texts of JSON objects, as `json_text.is_plain` checks them one by one."""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.errors import InvalidInput
from coranto.messages.arrow_values import data_of, joined, value_offsets
from coranto.messages.columnar import Mask
from coranto.messages.json_text import is_plain

_NEWLINE: Final = pa.scalar(b"\n", pa.binary())
_NOTHING: Final = pa.scalar(b"", pa.binary())


def odd_texts(texts: Any, reserved: str) -> Mask:
    """Return the mask of the texts in an Arrow array, none of them null, that are not plain (see `is_plain`).

    Raises InvalidInput for a text that is not JSON, or not UTF-8.
    """
    content = texts.cast(pa.binary())
    try:
        content.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"a message is not UTF-8: {error}", field="value") from error
    doubtful = _without_braces(content)
    whole = content if not doubtful.any() else content.filter(pa.array(~doubtful))
    found = _with_name(whole, reserved)
    odd: Mask = np.zeros(len(texts), dtype=np.bool_)
    if found is None:
        doubtful[:] = True
    else:
        odd[~doubtful] = found
    for row in np.flatnonzero(doubtful).tolist():
        odd[row] = not is_plain(texts[row].as_py(), reserved)
    return odd


def _without_braces(content: Any) -> Mask:
    """Return the mask of texts that are not `{}`, do not begin with `{"`, or do not end with `}`."""
    ends, characters = value_offsets(content), data_of(content)
    short: Mask = np.diff(ends) < 2
    if short.any():
        return np.ones(len(content), dtype=np.bool_)
    begins, last = ends[:-1], characters[ends[1:] - 1]
    quoted = (characters[begins + 1] == ord('"')) | ((characters[begins + 1] == ord("}")) & (np.diff(ends) == 2))
    sound: Mask = (characters[begins] == ord("{")) & quoted & (last == ord("}"))
    return ~sound


def _with_name(content: Any, reserved: str) -> Mask | None:
    """Return the mask of the objects that have the name `reserved`. None if a text is not one object on one line.

    The texts begin and end with braces. So no object spans two lines: a string cannot contain the newline, and `{`
    cannot follow `}` elsewhere. As many objects as lines therefore means one object per line.
    """
    lines = joined(pc.binary_join_element_wise(content, _NEWLINE, _NOTHING))
    if int((lines == ord("\n")).sum()) != len(content):
        return None
    try:
        objects = _decoder(reserved).decode_lines(lines.data)
    except (msgspec.DecodeError, RecursionError):
        return None
    if len(objects) != len(content):
        return None
    return np.fromiter((each.found is not msgspec.UNSET for each in objects), np.bool_, len(objects))


@functools.cache
def _decoder(name: str) -> msgspec.json.Decoder[Any]:
    """Return a decoder of objects that keeps only the field `name`, as its text."""
    field = ("found", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET)
    return msgspec.json.Decoder(msgspec.defstruct("Object", [field], rename={"found": name}, gc=False))
