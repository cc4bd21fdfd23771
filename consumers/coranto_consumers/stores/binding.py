"""Conversion of rows' values by SQLAlchemy's types: the same for every path into a table.

Rows are Arrow batches or mappings. They are written by INSERT, where SQLAlchemy calls the bind processors of types, or
by COPY into PostgreSQL, where `bound_rows` calls them. Only columns whose types have no bind processor are copied as
text, without a Python object for each value (`copying.py`).

Functions that need Arrow import it themselves, because the import takes half a second.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Date,
    DateTime,
    Dialect,
    LargeBinary,
    Numeric,
    String,
    Table,
    TypeDecorator,
    null,
)

from coranto.errors import InvalidInput, RejectedRow

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]

_PER_DAY: Final = {"day": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
"""The number of time units in a day."""
_EPOCH: Final = dt.date(1970, 1, 1)
_FIRST_DAY: Final = (dt.date.min - _EPOCH).days
_AFTER_LAST_DAY: Final = (dt.date.max - _EPOCH).days + 1


def is_plain(column: Column[Any], dialect: Dialect) -> bool:
    """Return True if a column's type binds values unchanged, in Python and in SQL."""
    kind = column.type.dialect_impl(dialect)
    if isinstance(column.type, TypeDecorator) or kind._has_bind_expression:
        return False
    return isinstance(kind, Boolean) or kind.bind_processor(dialect) is None


def can_bind(kind: Any, column: Column[Any], dialect: Dialect) -> bool:
    """Return True if COPY of bound values of an Arrow type has the same result as INSERT, in a column.

    INSERT casts values to the column's type. COPY does not, so the types must match.
    """
    import pyarrow as pa

    if column.type.dialect_impl(dialect)._has_bind_expression:
        return False
    own = column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type
    try:
        stored = own.python_type
    except NotImplementedError:
        return False
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind):
        return stored is str
    if types.is_integer(kind):
        return stored in (int, float, Decimal)
    if types.is_floating(kind):
        return stored is float
    if types.is_nested(kind):
        return _is_json(column, dialect) or (types.is_list(kind) and stored is list)
    alike: tuple[tuple[bool, type], ...] = (
        (types.is_boolean(kind), bool),
        (types.is_decimal(kind), Decimal),
        (types.is_timestamp(kind), dt.datetime),
        (types.is_date(kind), dt.date),
        (types.is_binary(kind) or types.is_large_binary(kind), bytes),
    )
    return any(found and stored is wanted for found, wanted in alike)


def require_kinds(batch: pa.RecordBatch, table: Table, dialect: Dialect) -> None:
    """Raise InvalidInput for a nested value in a column that cannot store it."""
    import pyarrow as pa

    for field in batch.schema:
        column = table.c[field.name]
        if not pa.types.is_nested(field.type) or isinstance(column.type, TypeDecorator):
            continue
        if isinstance(column.type.dialect_impl(dialect), String | Numeric | LargeBinary | Boolean | Date | DateTime):
            raise InvalidInput(
                f"column {column.name!r} is {column.type!r}, and the rows have {field.type} there: give the column the "
                "type JSON, or the rows a text (to_json)",
                field=f"table {table.name}",
            )


def require_times(batch: pa.RecordBatch, table: Table) -> None:
    """Raise RejectedRow for a time outside of Python's range: drivers could not read it back."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for field, array in zip(batch.schema, batch.columns, strict=True):
        if not (pa.types.is_timestamp(field.type) or pa.types.is_date(field.type)):
            continue
        found = pc.min_max(array)
        per_day = _PER_DAY[getattr(field.type, "unit", "day" if pa.types.is_date32(field.type) else "ms")]
        if not found["min"].is_valid:
            continue
        if found["min"].value < _FIRST_DAY * per_day or found["max"].value >= _AFTER_LAST_DAY * per_day:
            raise RejectedRow(f"table {table.name}: column {field.name!r} has a time outside of the years 1 to 9999")


def replace_surrogates(value: Any) -> Any:
    """Return a string or JSON value with question marks instead of unpaired surrogates.

    JSON can contain unpaired surrogates, but no database can store them. Spark's JSON reader does the same.
    """
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return value.encode("utf-8", "replace").decode()
        case dict():
            return {replace_surrogates(key): replace_surrogates(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(replace_surrogates(each) for each in value) if type(value) in (list, tuple) else value
    return value


def replace_row_surrogates(row: Row) -> Row:
    """Return a row without unpaired surrogates (`replace_surrogates`), so that a database can store it."""
    for value in row.values():
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                break
        elif isinstance(value, dict | list | tuple):
            break
    else:
        return row
    return {name: replace_surrogates(value) for name, value in row.items()}


def rows_of(batch: pa.RecordBatch, table: Table, dialect: Dialect) -> list[dict[str, Any]]:
    """Convert the rows of an Arrow batch to Python values for the columns of a table.

    In JSON columns, maps and structs become objects, times become strings in ISO 8601, decimals become strings, and
    bytes become strings in base64. A null is an SQL null in JSON columns, too. Raises InvalidInput for nested values in
    a column that cannot store them, and RejectedRow for a time outside of the years 1 to 9999.
    """
    require_kinds(batch, table, dialect)
    require_times(batch, table)
    columns = []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        values, in_json = array.to_pylist(), _is_json(table.c[field.name], dialect)
        if (convert := _converter(field.type, in_json=in_json)) is not None:
            values = [None if value is None else convert(value) for value in values]
        if in_json:
            values = [null() if value is None else value for value in values]
        columns.append(values)
    names = batch.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def bound_rows(rows: Sequence[Row], columns: Sequence[Column[Any]], dialect: Dialect) -> Iterator[tuple[Any, ...]]:
    """Yield rows, given by column name, as tuples for a driver: each value is bound by its column's type.

    Raises RejectedRow for a value that a type cannot bind.
    """
    binds = [(each, None if is_plain(each, dialect) else _processor(each, dialect)) for each in columns]
    for row in rows:
        values = []
        for column, bind in binds:
            value = row[column.key]
            if bind is not None:
                try:
                    value = bind(value)
                except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                    raise RejectedRow(
                        f"table {column.table.name}: column {column.name!r} does not take a value: its type "
                        f"{type(column.type).__name__} raised {type(error).__name__}"
                    ) from None
            values.append(value)
        yield tuple(values)


def _processor(column: Column[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    return column.type.dialect_impl(dialect).bind_processor(dialect)


def _is_json(column: Column[Any], dialect: Dialect) -> bool:
    return isinstance(column.type.dialect_impl(dialect), JSON)


def _converter(kind: Any, *, in_json: bool) -> Callable[[Any], Any] | None:
    """Return the function that converts Arrow's Python value to the column's value. None if no conversion is needed."""
    import pyarrow as pa

    types = pa.types
    if types.is_map(kind):
        item = _or_same(_converter(kind.item_type, in_json=in_json))
        name = str if in_json else _same
        return lambda value: {name(key): item(each) for key, each in value}
    if types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        converters = {each.name: _or_same(_converter(each.type, in_json=in_json)) for each in fields}
        return lambda value: {name: converters[name](each) for name, each in value.items()}
    if types.is_list(kind) or types.is_large_list(kind):
        element = _converter(kind.value_type, in_json=in_json)
        return None if element is None else lambda value: [_or_same(element)(each) for each in value]
    if in_json and (types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind)):
        return lambda value: value.isoformat()
    if in_json and types.is_decimal(kind):
        return str
    if in_json and (types.is_binary(kind) or types.is_large_binary(kind)):
        return lambda value: base64.b64encode(value).decode()
    return None


def _or_same(convert: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return _same if convert is None else lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value
