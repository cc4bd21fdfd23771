"""Conversion of rows to a table's columns."""

from __future__ import annotations

import pyarrow as pa

from coranto.errors import InvalidInput


def fit(rows: pa.Table, columns: pa.Schema, name: str) -> pa.Table:
    """Return rows with exactly a table's columns. Nullable columns that the rows lack are null.

    Raises InvalidInput for rows that do not fit the table `name`.
    """
    if lacking := [each.name for each in columns if not each.nullable and each.name not in rows.column_names]:
        raise InvalidInput(f"do not fit {name}: they have no column {lacking[0]}", field="rows")
    try:
        arrays = [
            rows.column(field.name).cast(field.type)
            if field.name in rows.column_names
            else pa.nulls(rows.num_rows, field.type)
            for field in columns
        ]
        fitting = pa.table(arrays, schema=columns)
        fitting.validate(full=True)
    except (pa.ArrowException, KeyError, TypeError, OverflowError, UnicodeError) as error:
        raise InvalidInput(f"do not fit {name}: {error}", field="rows") from error
    for field in columns:
        if not field.nullable and fitting.column(field.name).null_count:
            raise InvalidInput(f"{name} needs {field.name}, which is null", field="rows")
    return fitting
