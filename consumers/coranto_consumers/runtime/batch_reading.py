"""Decoding of committed lines into batches for an application, and of lines that do not fit."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.batches import POSITION, UNREADABLE
from coranto.messages.column_parser import LineParser, is_text
from coranto.messages.columnar import Mask
from coranto_consumers.outputs.dead_letters import DeadLetters, MisfitPolicy
from coranto_consumers.runtime.column_intake import CommittedRows
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.rejections import Treatments

_ESCAPED: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
"""Escaped characters of JSON: surrogate pairs, lone surrogates (the group), and others."""
_POSITIONS = [name for name in POSITION.names if name != "journal"]


class Misfit(NamedTuple):
    """A message that does not fit the columns."""

    journal: str
    offset: int
    line: bytes
    """Without its newline."""


class BatchReader:
    """Decodes the committed lines of one source."""

    def __init__(self, columns: Columns, treatments: Treatments | None = None) -> None:
        """`treatments` has the messages whose rows the store rejects."""
        self._columns = columns
        self._treatments: Treatments = {} if treatments is None else treatments
        self._schema = pa.schema([field.with_nullable(True) for field in columns.schema])
        self._required = [field.name for field in columns.schema if not field.nullable]
        self._parser = LineParser(self._schema)

    def read(self, committed: CommittedRows) -> tuple[MessageBatch, list[Misfit]]:
        """Return the batch of messages that fit, and the misfits. Raises CorruptMessage if misfits are an error."""
        rows = committed.rows
        table, doubtful = self._parser.parse(rows.column("content"))
        for name in self._required:
            doubtful |= table.column(name).is_null().to_numpy()
        unreadable = self._unreadable(rows)
        if unreadable is not None:
            doubtful |= unreadable
        misfits: list[Misfit] = []
        if doubtful.any():
            rows, table, misfits = self._decided(committed.journal, rows, table, doubtful, unreadable)
        if self._treatments:
            rows, table = self._treated(committed.journal, rows, table, misfits)
        columns = [table.column(name).combine_chunks() for name in self._columns.schema.names]
        whole = pa.RecordBatch.from_arrays(columns, schema=self._columns.schema)
        return MessageBatch(committed.journal, whole, rows.select(_POSITIONS)), misfits

    def _treated(self, journal: str, rows: Any, table: Any, misfits: list[Misfit]) -> tuple[Any, Any]:
        """Apply the treatments: move messages to `misfits`, or set columns to null. Return the rows and their table."""
        kept: Mask = np.ones(rows.num_rows, dtype=np.bool_)
        for row, offset in enumerate(rows.column("offset").to_pylist()):
            if (journal, offset) not in self._treatments:
                continue
            nulls = self._treatments[journal, offset]
            if nulls is None:
                kept[row] = False
                misfits.append(Misfit(journal, offset, rows.column("content")[row].as_py()[:-1]))
                continue
            for name in nulls:
                at, others = table.schema.get_field_index(name), np.arange(rows.num_rows) != row
                column = table.column(name).combine_chunks()
                place = pa.array(np.arange(rows.num_rows), mask=~others)
                table = table.set_column(at, table.schema.field(at), column.take(place))
        chosen = pa.array(kept)
        return rows.filter(chosen), table.filter(chosen)

    def _decided(
        self, journal: str, rows: pa.RecordBatch, table: Any, doubtful: Mask, unreadable: Mask | None
    ) -> tuple[pa.RecordBatch, Any, list[Misfit]]:
        """Decide about doubtful lines one by one. Return the rows that fit, their table, and the misfits."""
        found: list[Any] = []
        misfits: list[Misfit] = []
        kept: Mask = np.ones(len(doubtful), dtype=np.bool_)
        place = np.arange(len(doubtful))
        for row in np.flatnonzero(doubtful).tolist():
            line = rows.column("content")[row].as_py()[:-1]
            offset = int(rows.column("offset")[row].as_py())
            readable = unreadable is None or not unreadable[row]
            text = _without_halves(line)
            parsed = self._parsed(text) if readable else None
            if parsed is None and self._columns.misfits is MisfitPolicy.NULLS:
                parsed = self._parts(text if readable else b"{}")
            if parsed is None:
                if not isinstance(self._columns.misfits, DeadLetters):
                    wanted = ", ".join(f"{each.name} {each.type}" for each in self._columns.schema)
                    raise CorruptMessage(journal, offset, f"it does not fit the columns {wanted}")
                misfits.append(Misfit(journal, offset, line))
                kept[row] = False
                continue
            place[row] = len(doubtful) + len(found)
            found.append(parsed)
        together = pa.concat_tables([table, *found]).take(pa.array(place[kept]))
        return rows.filter(pa.array(kept)), together, misfits

    def _parsed(self, line: bytes) -> Any | None:
        """Return a table of one line's values, or None if they do not fit."""
        try:
            self._columns.lines.unmarshal(line)
        except InvalidInput:
            return None
        parsed = self._parser.parse_one(line) if is_text(line) else None
        return None if parsed is None or self._lacks(parsed) else parsed

    def _lacks(self, parsed: Any) -> bool:
        """Return True if a line's table has no value in a column that must not be null."""
        return any(parsed.column(name).null_count for name in self._required)

    def _parts(self, line: bytes) -> Any | None:
        """Return a table of the values of a line that fit, with nulls for others. None if a column must not be null."""
        values = []
        for each in self._schema:
            alone = LineParser(pa.schema([each])).parse_one(line) if self._is_object(line) else None
            values.append(pa.nulls(1, each.type) if alone is None else alone.column(0))
        parts = pa.table(values, schema=self._schema)
        return None if self._lacks(parts) else parts

    def _is_object(self, line: bytes) -> bool:
        try:
            self._columns.lines.unmarshal(line)
        except InvalidInput:
            return False
        return is_text(line)

    def _unreadable(self, rows: pa.RecordBatch) -> Mask | None:
        if UNREADABLE not in rows.schema.names:
            return None
        mask: Mask = rows.column(UNREADABLE).to_numpy(zero_copy_only=False)
        return mask if mask.any() else None


def _without_halves(line: bytes) -> bytes:
    """Return a line with question marks for lone surrogates, which Arrow does not parse.

    Other paths into a store replace them in the same way (`binding.replace_surrogates`, Spark's JSON reader).
    """
    if b"\\ud" not in line.lower():
        return line
    return _ESCAPED.sub(lambda found: b"?" if found[1] is not None else found[0], line)
