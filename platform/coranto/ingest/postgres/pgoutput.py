"""The messages of `pgoutput`, PostgreSQL's plugin for logical replication (version 1), and positions in the log.

A position in the log (LSN) is a byte offset, which PostgreSQL writes as two hexadecimal numbers (`16/B374D848`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

from coranto.errors import CorruptData
from coranto.ingest.postgres.names import quoted, table_name

Tuple: TypeAlias = "list[bytes | None]"
"""The values of a row as texts."""


class _Unchanged(bytes):
    """A large (TOAST) value that an update did not change, and that the server does not send."""


UNCHANGED: Final = _Unchanged()


class TransactionBegin(NamedTuple):
    """The begin of a transaction. `commit_lsn` is the position of its commit, `microseconds` its time since 2000."""

    commit_lsn: int
    microseconds: int
    xid: int


class TransactionCommit(NamedTuple):
    """The end of a transaction. The log after it begins at `end_lsn`."""

    end_lsn: int


class Column(NamedTuple):
    """A column of a table. `modifier` is the precision and scale of numbers, or -1."""

    name: str
    type: int
    modifier: int
    in_identity: bool


class TableRelation(NamedTuple):
    """A table's definition for the following changes. `identity` is its replica identity: d, n, f or i."""

    oid: int
    schema: str
    table: str
    identity: str
    columns: tuple[Column, ...]

    @property
    def name(self) -> str:
        """The table's name in splits and events."""
        return table_name(self.schema, self.table)

    @property
    def sql(self) -> str:
        """The table's name in a statement."""
        return quoted(self.schema, self.table)


class RowChange(NamedTuple):
    """An insert (no `old`), update or delete (no `new`) of a row. Unless `is_full`, `old` has only the identity."""

    oid: int
    old: Tuple | None
    new: Tuple | None
    is_full: bool
    is_update: bool


class Truncate(NamedTuple):
    """The truncation of tables."""

    oids: tuple[int, ...]


Message: TypeAlias = TransactionBegin | TransactionCommit | TableRelation | RowChange | Truncate

_BEGIN: Final = struct.Struct(">qqi")
_COMMIT: Final = struct.Struct(">Bqqq")
_COLUMN: Final = struct.Struct(">Ii")
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")
_CHANGES: Final = (b"I", b"U", b"D")


def format_lsn(lsn: int) -> str:
    """Return the text of a position in the log."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Parse a position in the log. Raises CorruptData."""
    high, slash, low = text.partition("/")
    try:
        if slash:
            return int(high, 16) << 32 | int(low, 16)
    except ValueError:
        pass
    raise CorruptData(f"{text!r} is not a position in the log of PostgreSQL, such as 16/B374D848")


def parse(payload: bytes) -> Message | None:
    """Parse a message. Returns None for kinds without information about rows, such as a transaction's origin.

    Raises CorruptData.
    """
    try:
        return _parse(payload)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise _unreadable(error) from error


def _parse(payload: bytes) -> Message | None:
    kind = payload[0]
    if kind == 0x49:  # I
        return RowChange(_oid(payload), None, _tuple(payload, 6)[0], False, False)
    if kind == 0x55:  # U
        old, at, which = None, 6, payload[5]
        if which != 0x4E:  # N
            old, at = _tuple(payload, 6)
            at += 1
        return RowChange(_oid(payload), old, _tuple(payload, at)[0], which == 0x4F, True)
    if kind == 0x44:  # D
        return RowChange(_oid(payload), _tuple(payload, 6)[0], None, payload[5] == 0x4F, False)
    if kind == 0x42:  # B
        return TransactionBegin(*_BEGIN.unpack_from(payload, 1))
    if kind == 0x43:  # C
        return TransactionCommit(_COMMIT.unpack_from(payload, 1)[2])
    if kind == 0x52:  # R
        return _relation(payload)
    if kind == 0x54:  # T
        count = _oid(payload)
        return Truncate(struct.unpack_from(f">{count}I", payload, 6))
    if kind in b"OYM":
        return None
    raise ValueError(f"it is of the unknown kind {chr(kind)!r}")


def is_change(payload: bytes) -> bool:
    """Return True for a message that is a RowChange."""
    return payload[:1] in _CHANGES


def table_of(payload: bytes) -> int:
    """Return the OID of the table of a RowChange. Raises CorruptData."""
    try:
        return _oid(payload)
    except struct.error as error:
        raise _unreadable(error) from error


def _oid(payload: bytes) -> int:
    found: int = _U32.unpack_from(payload, 1)[0]
    return found


def _unreadable(error: Exception) -> CorruptData:
    return CorruptData(f"a message of PostgreSQL's pgoutput cannot be read: {error}")


def _tuple(payload: bytes, at: int) -> tuple[Tuple, int]:
    """Return the values at an offset, and the offset after them."""
    [count] = _U16.unpack_from(payload, at)
    at += 2
    found: Tuple = []
    size_at = _U32.unpack_from
    for _ in range(count):
        kind = payload[at]
        at += 1
        if kind == 0x74:  # t
            begin = at + 4
            at = begin + size_at(payload, at)[0]
            found.append(payload[begin:at])
        elif kind == 0x6E:  # n
            found.append(None)
        elif kind == 0x75:  # u
            found.append(UNCHANGED)
        else:
            raise ValueError(f"a value is of the unknown kind {chr(kind)!r}")
    if at > len(payload):
        raise ValueError(f"its last value ends {at - len(payload)} bytes behind it")
    return found, at


def _relation(payload: bytes) -> TableRelation:
    content = payload
    oid = _oid(payload)
    schema, at = _text(content, 5)
    name, at = _text(content, at)
    identity, at = chr(content[at]), at + 1
    [count] = _U16.unpack_from(content, at)
    at += 2
    columns = []
    for _ in range(count):
        flags, at = content[at], at + 1
        column, at = _text(content, at)
        kind, modifier = _COLUMN.unpack_from(content, at)
        at += _COLUMN.size
        columns.append(Column(column, kind, modifier, bool(flags & 1)))
    return TableRelation(oid, schema or "pg_catalog", name, identity, tuple(columns))


def _text(content: bytes, at: int) -> tuple[str, int]:
    end = content.index(b"\0", at)
    return content[at:end].decode(), end + 1
