"""Facts of a SQL table for Dagster: its name, its columns, and its number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_coranto.translation.metadata_set import TableMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy.engine.interfaces import ReflectedColumn


def table_facts(store_url: str, spec: dg.AssetSpec, *, count_rows: bool = True) -> Mapping[str, Any]:
    """Return `dagster/table_name`, `dagster/column_schema` and `dagster/row_count` of an asset's table.

    The table is named by the asset's metadata `dagster/table_name`, or else by the last part of its key. If the store
    has no such table, returns nothing: the application may have given it another name.
    """
    import sqlalchemy as sa

    from coranto_consumers.stores.sql import SqlStore

    named = TableMetadata.extract(spec.metadata).table_name or spec.key.path[-1]
    schema, _, name = named.rpartition(".")
    with SqlStore(store_url).engine.connect() as connection:
        inspector = sa.inspect(connection)
        if not inspector.has_table(name, schema=schema or None):
            return {}
        columns = inspector.get_columns(name, schema=schema or None)
        keys = set(inspector.get_pk_constraint(name, schema=schema or None)["constrained_columns"])
        count = sa.select(sa.func.count()).select_from(sa.table(name, schema=schema or None))
        rows = connection.execute(count).scalar_one() if count_rows else None
    return dict(
        TableMetadata(
            table_name=named,
            row_count=rows,
            column_schema=dg.TableSchema(columns=[_column(column, column["name"] in keys) for column in columns]),
        )
    )


def _column(column: ReflectedColumn, key: bool) -> dg.TableColumn:
    return dg.TableColumn(
        column["name"],
        str(column["type"]),
        constraints=dg.TableColumnConstraints(nullable=column["nullable"], other=["primary key"] if key else []),
    )
