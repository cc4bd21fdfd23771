"""Iceberg tables: finding them, creating them from SQLAlchemy definitions, and checking rows against them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table
from pyiceberg.transforms import parse_transform

from coranto.errors import InvalidInput
from coranto_consumers.stores.merge import MergePlan, MergeRule, Quotient, plan_merge

PARTITION_BY: Final = "partition_by"
"""The key of `Table.info` with the columns to partition a new table by, such as `["day", "bucket[16](customer)"]`."""

_TRANSFORMED: Final = re.compile(r"(?P<transform>[a-z]+(\[\d+\])?)\((?P<column>.+)\)")


def find_or_create(catalog: Catalog, name: str, definition: sa.Table | pa.Schema | None) -> Table:
    """Return a table of a catalog. If it is absent, create it from a SQLAlchemy table or an Arrow schema.

    If several processes create the table concurrently, all get the same table. Raises InvalidInput if the table is
    absent and has no definition.
    """
    try:
        return catalog.load_table(name)
    except NoSuchTableError:
        if definition is None:
            raise InvalidInput(
                f"there is no table {name}; create it, or give its schema (for an output of Spark, its definition "
                "instead of its name)",
                field="table",
            ) from None
    schema: pa.Schema = definition
    parts: Sequence[str] = ()
    if isinstance(definition, sa.Table):
        schema = pa.schema([pa.field(each.name, _arrow_type(each), each.nullable) for each in definition.columns])
        parts = definition.info.get(PARTITION_BY, ())
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    try:
        with catalog.create_table_transaction(name, schema) as creation:
            with creation.update_spec() as spec:
                for each in parts:
                    found = _TRANSFORMED.fullmatch(each)
                    column = found["column"] if found else each
                    if column not in schema.names:
                        raise InvalidInput(
                            f"is partitioned by {each!r}, and has no column {column!r}; it has "
                            f"{', '.join(schema.names)}",
                            field=f"table {name}",
                        )
                    spec.add_field(column, parse_transform(found["transform"] if found else "identity"))
    except (TableAlreadyExistsError, CommitFailedException):
        pass  # Another process was first.
    return catalog.load_table(name)


def columns_of(table: Table) -> pa.Schema:
    """Return a table's columns as an Arrow schema."""
    return schema_to_pyarrow(table.schema(), include_field_ids=False)


def plan_for(
    table: Table,
    definition: sa.Table | None,
    columns: Sequence[str],
    keys: Sequence[str],
    rules: Mapping[str, MergeRule],
    delete: str | None = None,
) -> MergePlan:
    """Check an output against its table and return its merge plan. Raises InvalidInput, with the fix."""
    name = ".".join(table.name())
    there = columns_of(table)
    if definition is None:
        # Iceberg has no unique constraints: writers must keep keys unique.
        made = [
            sa.Column(each, sa.types.NullType, primary_key=each in keys, nullable=each not in keys)
            for each in there.names
        ]
        definition = sa.Table(name, sa.MetaData(), *made)
    plan = plan_merge(definition, columns, keys, rules, delete)
    if lacking := [each for each in plan.columns if each not in there.names]:
        raise InvalidInput(f"has no column {lacking[0]!r}; it has {', '.join(there.names)}", field=f"table {name}")
    return plan


def require_target(table: Table, definition: sa.Table | None, plan: MergePlan) -> None:
    """Raise InvalidInput if a plan's rows lack a required column of a table.

    With a definition, also raises InvalidInput for a column whose type is too narrow for the definition's type.
    """
    given = {*plan.columns, *(name for name, rule in plan.rules.items() if isinstance(rule, Quotient))}
    problems = [
        f"column {each.name!r} is required, and gets no value: write it, or make it optional"
        for each in table.schema().fields
        if each.required and each.name not in given
    ]
    there = columns_of(table)
    for name in plan.columns if definition is not None else ():
        try:
            wanted = _arrow_type(plan.table.c[name])
        except InvalidInput:
            continue  # No type in Iceberg corresponds to it, so the user created the table.
        if why := _narrower(there.field(name).type, wanted):
            problems.append(f"column {name!r} is {there.field(name).type}, and {why} as {wanted}: change its type")
    if problems:
        raise InvalidInput(
            f"does not fit its definition in the catalog: {'; '.join(problems)}",
            field=f"table {'.'.join(table.name())}",
        )


def _narrower(found: pa.DataType, wanted: pa.DataType) -> str:
    """Return the reason why the type `found` cannot store all values of `wanted`. "" if it can, or if unknown."""
    kinds = _kind(found), _kind(wanted)
    if "" not in kinds and kinds[0] != kinds[1]:
        return f"{kinds[1]} is written there"
    narrower = "longer values are written there"
    types = pa.types
    if types.is_integer(found):
        return "" if types.is_integer(wanted) and found.bit_width >= wanted.bit_width else narrower
    if types.is_floating(found) and types.is_floating(wanted):
        return narrower if found.bit_width < wanted.bit_width else ""
    if types.is_decimal(found) and types.is_decimal(wanted):
        whole = found.precision - found.scale < wanted.precision - wanted.scale
        return narrower if whole or found.scale < wanted.scale else ""
    return ""


def _kind(kind: pa.DataType) -> str:
    types = pa.types
    kinds = {
        "text": types.is_string(kind) or types.is_large_string(kind),
        "a number": types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind),
        "a truth value": types.is_boolean(kind),
        "a time": types.is_timestamp(kind),
        "a date": types.is_date(kind),
        "bytes": types.is_binary(kind) or types.is_large_binary(kind),
    }
    return next((name for name, holds in kinds.items() if holds), "")


def _arrow_type(column: sa.Column[Any]) -> pa.DataType:
    kind: Any = column.type
    match kind:
        case sa.BigInteger():
            return pa.int64()
        case sa.Integer():
            return pa.int32()
        case sa.Float():
            return pa.float64()
        case sa.Numeric(precision=int(precision), scale=int(scale)):
            return pa.decimal128(precision, scale)
        case sa.Boolean():
            return pa.bool_()
        case sa.DateTime(timezone=timezone):
            return pa.timestamp("us", "UTC" if timezone else None)
        case sa.Date():
            return pa.date32()
        case sa.String():
            return pa.string()
        case sa.LargeBinary():
            return pa.binary()
    raise InvalidInput(
        f"column {column.name!r} is {column.type!r}, which has no exact equivalent in Iceberg: create the table "
        "yourself, and give its name",
        field="table",
    )
