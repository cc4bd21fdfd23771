"""The values of JSON lines as columns of a schema, and the lines that do not fit it."""

from __future__ import annotations

import enum

import numpy as np
import pyarrow as pa

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.arrow_values import data_of, value_offsets
from coranto.messages.batches import UNREADABLE, parse_lines
from coranto.messages.columnar import Mask


class ScanMisfits(enum.StrEnum):
    """The handling of messages that do not fit a scan's schema."""

    ERROR = "error"
    """The first of them ends the scan with CorruptMessage, which names journal and offset."""
    NULLS = "nulls"
    """All fields of such a message, and of content that is not a message, are null."""


class FieldParser:
    """Parses lines of JSON objects into the columns of a schema. A field that a line lacks is null."""

    def __init__(self, schema: pa.Schema, misfits: ScanMisfits) -> None:
        self._schema = schema
        self._misfits = misfits

    def parse(self, lines: pa.RecordBatch) -> pa.Table:
        """Return a table with a row for each line. Raises CorruptMessage for a misfit, unless misfits become nulls."""
        usual = _one_object_each(lines)
        if UNREADABLE in lines.schema.names:
            usual &= ~lines.column(UNREADABLE).to_numpy(zero_copy_only=False)
        return self._parse(lines, usual).combine_chunks()

    def _parse(self, lines: pa.RecordBatch, usual: Mask) -> pa.Table:
        count = lines.num_rows
        if count == 1 and UNREADABLE in lines.schema.names and lines.column(UNREADABLE)[0].as_py():
            return self._misfit(lines, "its UUID cannot be read")
        if count == 1 or usual.all():
            try:
                table = parse_lines(lines, self._schema)
            except InvalidInput as error:
                problem = error.message
            else:
                if table.num_rows == count and (usual.all() or _is_text(lines)):
                    return table
                problem = "it is not one JSON object in UTF-8"
            if count == 1:
                return self._misfit(lines, problem)
        half = count // 2
        return pa.concat_tables(
            [self._parse(lines.slice(0, half), usual[:half]), self._parse(lines.slice(half), usual[half:])]
        )

    def _misfit(self, line: pa.RecordBatch, problem: str) -> pa.Table:
        if self._misfits is ScanMisfits.NULLS:
            return pa.Table.from_arrays([pa.nulls(1, field.type) for field in self._schema], schema=self._schema)
        fields = ", ".join(f"{field.name} {field.type}" for field in self._schema)
        raise CorruptMessage(
            line.column("journal")[0].as_py(),
            line.column("offset")[0].as_py(),
            f"does not fit {fields}: {problem}. Widen the schema, or have misfits='nulls'",
        )


def _one_object_each(lines: pa.RecordBatch) -> Mask:
    """Return the mask of lines that begin with `{` and end with `}`; all false unless all lines are UTF-8.

    No JSON object extends from one such line into the next: `{` would have to follow `}`, or a string contain a
    newline. So if the parser finds as many objects as lines, each line has one.
    """
    content = lines.column("content")
    ends, characters = value_offsets(content).astype(np.int64), data_of(content)
    whole: Mask = np.diff(ends) > 2
    starts, lasts = ends[:-1][whole], ends[1:][whole] - 2
    whole[whole] = (characters[starts] == ord("{")) & (characters[lasts] == ord("}"))
    if not _is_text(lines):
        whole[:] = False
    return whole


def _is_text(lines: pa.RecordBatch) -> bool:
    try:
        lines.column("content").cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True
