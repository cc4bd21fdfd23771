"""Conversion of table rows and their changes to rows of an ingest."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from coranto.errors import CorruptData
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.pgoutput import (
    UNCHANGED,
    Column,
    RowChange,
    TableRelation,
    TransactionBegin,
    Tuple,
    format_lsn,
    parse,
)
from coranto.ingest.postgres.tables import Table
from coranto.ingest.postgres.values import ColumnTypes, Convert
from coranto.ingest.seen_fields import SeenFields
from coranto.ingest.source import Poison, SourceRow
from coranto.messages.json_codec import encode_json
from coranto.types.kinds import PlainKind, TypeField

_EPOCH: Final = dt.datetime(2000, 1, 1)
_encode: Final = msgspec.json.Encoder().encode
"""Encodes values of columns like `encode_json`, without its check."""


class Shape(NamedTuple):
    """A table with the columns and converters of its rows, until its definition changes."""

    table: str
    sql: str
    """The table's name in a statement."""
    json: bytes
    """The table's name in metadata, as JSON."""
    columns: tuple[Column, ...]
    names: tuple[str, ...]
    converters: tuple[Convert, ...]
    key: tuple[int, ...]
    """The indexes of the key's columns."""


Subject: TypeAlias = "Shape | tuple[str, ...]"
"""The subject of a message: the table of a changed row, or the names of truncated tables."""


class _Commit(NamedTuple):
    """The transaction of a change, and its part of the metadata."""

    begin: TransactionBegin
    meta: bytes


class TableRows:
    """Makes rows of an ingest. `load` looks up types of columns in the database."""

    def __init__(self, options: PostgresOptions, types: ColumnTypes, load: Callable[[Sequence[int]], None]) -> None:
        self._options = options
        self._types = types
        self._load = load
        self._fields = SeenFields()
        self._shapes: dict[tuple[str, tuple[Column, ...]], Shape] = {}

    def shape(self, of: TableRelation | Table, columns: Sequence[Column], key: Sequence[str]) -> Shape:
        """Return the shape of a table. Raises CorruptData if columns of its key are missing."""
        self._load([each.type for each in columns])
        names = tuple(each.name for each in columns)
        lacking = [each for each in key if each not in names]
        if lacking or not key:
            raise CorruptData(
                f"the changes of table {of.name} have the columns {', '.join(names)}, and not "
                f"{', '.join(lacking) or 'a key'}"
            )
        converters = tuple(self._types.converter(each.type) for each in columns)
        places = tuple(names.index(each) for each in key)
        shape = Shape(of.name, of.sql, encode_json(of.name), tuple(columns), names, converters, places)
        self._shapes[shape.table, shape.columns] = shape
        return shape

    def fields(self) -> tuple[TypeField, ...]:
        """Return fields for all rows so far. Raises InvalidInput for tables whose columns conflict."""
        return self._fields.of(
            list(self._shapes), lambda each: self._fields_of(each[1]), lambda each: f"table {each[0]}"
        )

    def _fields_of(self, columns: Sequence[Column]) -> tuple[TypeField, ...]:
        found = [self._types.field(each.name, each.type, each.modifier) for each in columns]
        operation = self._options.operation
        return tuple([TypeField(operation, PlainKind.STRING)] if operation else []) + tuple(found)

    def read(self, shape: Shape, values: Tuple, lsn: int) -> SourceRow:
        """Return a row of a snapshot."""
        meta = b'"table":%b,"op":"read","lsn":%d' % (shape.json, lsn)
        return self._row(shape, "read", values, meta)

    def changed(
        self, begin: TransactionBegin, first: int, subjects: Sequence[Subject], payloads: Sequence[bytes]
    ) -> Iterator[SourceRow | Poison]:
        """Yield the rows for a transaction's messages, which have the numbers from `first` on. Raises CorruptData."""
        at = (_EPOCH + dt.timedelta(microseconds=begin.microseconds)).isoformat(timespec="microseconds")
        commit = _Commit(begin, b',"xid":%d,"committed":"%bZ"' % (begin.xid & 0xFFFFFFFF, at.encode()))
        for seq, (subject, payload) in enumerate(zip(subjects, payloads, strict=True), first):
            if isinstance(subject, Shape):
                change = parse(payload)
                assert isinstance(change, RowChange)
                yield from self._changed(subject, change, commit, seq)
            else:
                for table in subject:
                    yield self._truncated(table, commit, seq)

    def _truncated(self, table: str, commit: _Commit, seq: int) -> SourceRow | Poison:
        if self._options.truncate == "fail":
            return Poison(
                _place(commit.begin, seq, table),
                "is a TRUNCATE, and a copy by key would keep the rows: `truncate: event` writes an event of the table, "
                "and `truncate: skip` leaves it out",
            )
        fields = {self._options.operation: "truncate"} if self._options.operation else {}
        return SourceRow(table, fields, None, _meta(encode_json(table), "truncate", commit, seq), True)

    def _changed(self, shape: Shape, change: RowChange, commit: _Commit, seq: int) -> list[SourceRow | Poison]:
        """Return the rows for a change: one, or two if its key changes."""
        old, new = change.old, change.new
        if new is None:
            assert old is not None
            names = None if change.is_full else [each.in_identity for each in shape.columns]
            return [self._row(shape, "delete", old, _meta(shape.json, "delete", commit, seq), given=names)]
        if not change.is_update:
            return [self._row(shape, "insert", new, _meta(shape.json, "insert", commit, seq))]
        moved = False
        if old is not None:
            for at, value in enumerate(new):
                if value is UNCHANGED and (change.is_full or shape.columns[at].in_identity):
                    new[at] = old[at]
            moved = any(old[at] != new[at] for at in shape.key)
        unchanged = [shape.names[at] for at, value in enumerate(new) if value is UNCHANGED]
        if unchanged and not self._options.omits_toast:
            return [
                Poison(
                    _place(commit.begin, seq, shape.table),
                    f"lacks {', '.join(unchanged)}: the update left these large values as they are, and the database "
                    f"does not give them. Run ALTER TABLE {shape.sql} REPLICA IDENTITY FULL for later changes; `toast: "
                    "omit` leaves the fields out",
                    _key(shape, new).encode(),
                )
            ]
        before = None if old is None or not change.is_full else _encode(_values(shape, old))
        if not moved:
            return [self._row(shape, "update", new, _meta(shape.json, "update", commit, seq, before, unchanged))]
        assert old is not None
        names = None if change.is_full else [each.in_identity for each in shape.columns]
        gone = _meta(shape.json, "delete", commit, seq, moved=True)
        inserted_meta = _meta(shape.json, "insert", commit, seq, before, unchanged, moved=True)
        return [self._row(shape, "delete", old, gone, given=names), self._row(shape, "insert", new, inserted_meta)]

    def _row(
        self, shape: Shape, operation: str, values: Tuple, meta: bytes, given: Sequence[bool] | None = None
    ) -> SourceRow:
        fields = _values(shape, values, given)
        if self._options.operation:
            fields = {self._options.operation: operation, **fields}
        return SourceRow(_key(shape, values), fields, _encode(fields), meta, operation == "delete")


def _values(shape: Shape, values: Tuple, given: Sequence[bool] | None = None) -> dict[str, Any]:
    every = zip(shape.names, shape.converters, values, strict=True)
    columns = every if given is None else compress(every, given)
    return {
        name: None if value is None else convert(value) for name, convert, value in columns if value is not UNCHANGED
    }


def _meta(
    table: bytes,
    operation: str,
    commit: _Commit,
    seq: int,
    before: bytes | None = None,
    unchanged: Sequence[str] = (),
    *,
    moved: bool = False,
) -> bytes:
    found = b'"table":%b,"op":"%b","lsn":%d,"seq":%d%b' % (
        *(table, operation.encode(), commit.begin.commit_lsn, seq, commit.meta),
    )
    if operation == "delete":
        found += b',"deleted":true'
    if before is not None:
        found += b',"before":' + before
    if unchanged:
        found += b',"unchanged":' + _encode(unchanged)
    return found + b',"key_changed":true' if moved else found


def _key(shape: Shape, values: Tuple) -> str:
    """Return the routing key of a row."""
    return "/".join([shape.table, *[(values[at] or b"").decode() for at in shape.key]])


def _place(begin: TransactionBegin, seq: int, table: str) -> str:
    transaction = f"the transaction at {format_lsn(begin.commit_lsn)} (xid {begin.xid & 0xFFFFFFFF})"
    return f"change {seq} of {transaction}, table {table}"
