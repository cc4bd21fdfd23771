"""The rules for names of journals, zones, processes and shards: their characters and their lengths.

Lengths are counted in UTF-8 bytes. Names are made of letters and numbers of any script and a few symbols. No name
holds a byte at or below `#` (0x23): `#` separates the parts of a key in the coordination service and must sort below
all of them.

A journal's name in a read or append may carry *metadata* after its first `;`, which is dropped when the journal is
looked up. With it, a process can distinguish its concurrent reads of one journal.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

TOKEN_SYMBOLS: Final = "-_+/."
"""Symbols of tokens: label names, zones, process suffixes, shard ids."""
PATH_SYMBOLS: Final = TOKEN_SYMBOLS + "=%"
"""Symbols of path components: journal names, label values, path postfixes."""

MIN_JOURNAL_BYTES: Final = 4
MAX_JOURNAL_BYTES: Final = 512
MIN_ZONE_BYTES: Final = 1
MAX_ZONE_BYTES: Final = 32
MIN_SUFFIX_BYTES: Final = 4
MAX_SUFFIX_BYTES: Final = 128

_ASCII = {
    TOKEN_SYMBOLS: re.compile(r"[0-9A-Za-z\-_+/.]*"),
    PATH_SYMBOLS: re.compile(r"[0-9A-Za-z\-_+/.=%]*"),
}
_SYMBOLS_IN_WORDS = {TOKEN_SYMBOLS: "- _ + / .", PATH_SYMBOLS: "- _ + / . = %"}


def validate_token(
    kind: str, value: str, min_bytes: int, max_bytes: int, *, symbols: str = TOKEN_SYMBOLS, allow_empty: bool = False
) -> str:
    """Return `value` if it consists of letters, numbers and `symbols`, and has `min_bytes` to `max_bytes` (inclusive).

    `kind` is the error's field. `allow_empty` also accepts the empty string.
    Raises InvalidInput.
    """
    if not value and allow_empty:
        return value
    if value.isascii():
        length = len(value)
        fits = _ASCII[symbols].fullmatch(value) is not None
    else:
        try:
            length = len(value.encode())
        except UnicodeEncodeError as err:
            raise InvalidInput(f"{value!r} is not valid Unicode text", field=kind) from err
        fits = all(char in symbols or unicodedata.category(char)[0] in "LN" for char in value)
    if not min_bytes <= length <= max_bytes:
        raise InvalidInput(
            f"{shown(value)} has {length} bytes; it must have {min_bytes} to {max_bytes} (UTF-8)", field=kind
        )
    if not fits:
        bad = next(char for char in value if char not in symbols and unicodedata.category(char)[0] not in "LN")
        raise InvalidInput(
            f"{shown(value)} has the character {bad!r}; use letters, numbers and {_SYMBOLS_IN_WORDS[symbols]}",
            field=kind,
        )
    return value


def is_clean_path(path: str) -> bool:
    """Return True if a slash-separated path is in its shortest form: no empty, `.` or `..` part, no trailing slash.

    One leading slash is allowed. A caller that needs a relative path has to check for it.
    """
    parts = path.removeprefix("/").split("/")
    return not any(part in ("", ".", "..") for part in parts)


def validate_path(kind: str, value: str, min_bytes: int, max_bytes: int, *, allow_empty: bool = False) -> str:
    """Return `value` if it is a clean, relative path of path symbols. Raises InvalidInput.

    Gazette accepts leading `..` parts; Coranto doesn't, because they would point outside a store.
    """
    validate_token(kind, value, min_bytes, max_bytes, symbols=PATH_SYMBOLS, allow_empty=allow_empty)
    if value.startswith("/"):
        raise InvalidInput(f"{shown(value)} begins with '/'; use a relative path", field=kind)
    if value and not is_clean_path(value):
        raise InvalidInput(
            f"{shown(value)} is not a clean path; remove empty, '.' and '..' parts and a trailing '/'", field=kind
        )
    return value


def strip_metadata(name: str) -> str:
    """Return the journal's own name, without metadata."""
    return name.partition(";")[0]


@lru_cache(maxsize=4096)
def validate_journal(name: str, allow_metadata: bool = False, *, kind: str = "journal") -> str:
    """Return `name` if it is a valid journal name: a clean relative path of 4 to 512 bytes.

    With `allow_metadata`, metadata of 1 to 512 bytes may follow a `;`. A bare trailing `;` is refused.
    Raises InvalidInput.
    """
    journal, separator, metadata = name.partition(";")
    if separator:
        if not allow_metadata:
            raise InvalidInput(f"{shown(name)} carries metadata after ';', which is not allowed here", field=kind)
        validate_path(f"{kind} metadata", metadata, 1, MAX_JOURNAL_BYTES)
    validate_path(kind, journal, MIN_JOURNAL_BYTES, MAX_JOURNAL_BYTES)
    return name


def names_above(name: str) -> Iterator[str]:
    """Yield the parent paths of a journal's name, the shortest first: for `a/b/c`, `a` and `a/b`.

    In a fragment store, the folder of a journal with such a name contains the folder of `name`.
    """
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


def nests(one: str, other: str) -> bool:
    """Return True if one of two names is a parent path of the other, as `a/b` is of `a/b/c`."""
    return one.startswith(f"{other}/") or other.startswith(f"{one}/")


def validate_zone(zone: str, *, kind: str = "zone") -> str:
    """Return `zone` if it is a valid name of a failure zone: a token of 1 to 32 bytes. Raises InvalidInput."""
    return validate_token(kind, zone, MIN_ZONE_BYTES, MAX_ZONE_BYTES)


def validate_suffix(suffix: str, *, kind: str = "suffix") -> str:
    """Return `suffix` if it is a valid process name within a zone: a token of 4 to 128 bytes. Raises InvalidInput."""
    return validate_token(kind, suffix, MIN_SUFFIX_BYTES, MAX_SUFFIX_BYTES)


def validate_process_id(process_id: pb.ProcessSpec.ID) -> pb.ProcessSpec.ID:
    """Return `process_id` if its zone and suffix are valid. Raises InvalidInput."""
    validate_zone(process_id.zone)
    validate_suffix(process_id.suffix)
    return process_id


def validate_shard_id(shard_id: str, *, kind: str = "shard id") -> str:
    """Return `shard_id` if it is a valid id of a consumer shard: a token of 4 to 512 bytes. Raises InvalidInput."""
    return validate_token(kind, shard_id, MIN_JOURNAL_BYTES, MAX_JOURNAL_BYTES)


def shown(value: str) -> str:
    """Return the value quoted for an error message, and shortened when it is very long."""
    return repr(value) if len(value) <= 120 else repr(value[:100]) + "…"


def check_prefix(prefix: str) -> str:
    """Return a valid prefix of journal names: empty, or ending with a slash. Raises InvalidInput for others."""
    if prefix and not prefix.endswith("/"):
        raise InvalidInput(f"{prefix!r} must end with a slash, such as {prefix + '/'!r}", field="prefix")
    return prefix
