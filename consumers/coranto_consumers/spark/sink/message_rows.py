"""Rows that wait for their UUIDs: columns, or texts of JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import StructField

from coranto.errors import InvalidInput
from coranto.messages.columnar import Int64s
from coranto.messages.columnar_json import object_texts, stamped_columns
from coranto.messages.columnar_stamps import stamped_lines
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerId


class Rows(Protocol):
    """Rows of one batch, each a message."""

    def __len__(self) -> int: ...

    def take(self, rows: Int64s) -> Rows: ...

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        """Return an Arrow binary array with the line of each row (see `stamped_lines`). Raises InvalidInput."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectTextRows:
    """Rows that are texts of JSON objects, in an Arrow array."""

    texts: Any

    def __post_init__(self) -> None:
        _require_values(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Int64s) -> ObjectTextRows:
        return ObjectTextRows(self.texts.take(pa.array(rows)))

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        return stamped_lines(self.texts, framing, producer, first_clock, flags)


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """Rows that are columns, of types that `require_encodable` lets pass."""

    fields: tuple[StructField, ...]
    columns: tuple[Any, ...]
    count: int

    @classmethod
    def of_structs(cls, fields: Sequence[StructField], column: Any) -> ColumnRows:
        """Return the rows that are the structs of a column. Raises InvalidInput for a null."""
        _require_values(column)
        return cls.of(fields, [column.field(at) for at in range(len(fields))], len(column))

    @classmethod
    def of(cls, fields: Sequence[StructField], columns: Sequence[Any], count: int) -> ColumnRows:
        """Return the rows of columns, which may come in chunks."""
        whole = (each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in columns)
        return cls(tuple(fields), tuple(whole), count)

    def __len__(self) -> int:
        return self.count

    def take(self, rows: Int64s) -> ColumnRows:
        chosen = pa.array(rows)
        return ColumnRows(self.fields, tuple(column.take(chosen) for column in self.columns), len(rows))

    def lines(self, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags) -> Any:
        names = [field.name for field in self.fields]
        if framing.path and framing.path[0] in names:
            # The UUID comes into the value of this column.
            texts = object_texts(names, self.columns, self.count).cast(pa.string())
            return stamped_lines(texts, framing, producer, first_clock, flags)
        return stamped_columns(names, self.columns, self.count, framing, producer, first_clock, flags)


def _require_values(column: Any) -> None:
    if column.null_count:
        raise InvalidInput("a row has no value; filter such rows out", field="column value")
