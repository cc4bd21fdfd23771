"""Facts of an Iceberg table for Dagster: its name, columns and number of rows, and their snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_coranto.translation.metadata_set import TableMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coranto_consumers.spark.outputs.iceberg import IcebergStore
    from coranto_consumers.stores.iceberg.urls import IcebergHome


def iceberg_facts(store: IcebergStore | IcebergHome, spec: dg.AssetSpec) -> Mapping[str, Any]:
    """Return `dagster/table_name`, `dagster/column_schema`, `dagster/row_count` and `iceberg/snapshot` of a table.

    The table is named by the asset's metadata `dagster/table_name`, or else by the last part of its key. A name without
    a namespace is in the store's namespace. If there is no such table, returns nothing. Reads no data file.
    """
    table = store.load(TableMetadata.extract(spec.metadata).table_name or spec.key.path[-1])
    if table is None:
        return {}
    keys = set(table.schema().identifier_field_names())
    columns = [
        dg.TableColumn(
            each.name,
            str(each.field_type),
            constraints=dg.TableColumnConstraints(
                nullable=not each.required, other=["identifier"] if each.name in keys else []
            ),
        )
        for each in table.schema().fields
    ]
    snapshot = table.current_snapshot()
    summary = snapshot.summary.additional_properties if snapshot is not None and snapshot.summary is not None else {}
    facts = TableMetadata(
        table_name=".".join(table.name()),
        row_count=int(summary.get("total-records", 0)),
        column_schema=dg.TableSchema(columns=columns),
    )
    return {**dict(facts), **({"iceberg/snapshot": str(snapshot.snapshot_id)} if snapshot is not None else {})}
