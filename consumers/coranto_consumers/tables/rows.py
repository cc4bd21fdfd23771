"""Rows of a transaction without Spark: the last row of each key, in commit order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from coranto_consumers.stores.merge import MergePlan, last_of_keys
from coranto_consumers.tables.inputs import several_journals
from coranto_consumers.tables.spec import DELETED, OperationColumn, TableSpec


class JournalRows(NamedTuple):
    """Rows of one journal, in commit order."""

    journal: str
    rows: pa.RecordBatch


def table_rows(batch: pa.RecordBatch, names: Sequence[str], operation: OperationColumn | None) -> pa.RecordBatch:
    """Return the rows with the columns of a table. An operation adds the column that marks rows to delete."""
    columns = [batch.column(name) for name in names]
    if operation is None:
        return pa.RecordBatch.from_arrays(columns, list(names))
    column = batch.column(operation.column)
    if operation.deletes:
        column = pc.is_in(column, value_set=pa.array(operation.deletes, pa.string()))
    return pa.RecordBatch.from_arrays([*columns, pc.fill_null(column, False)], [*names, DELETED])


def last_rows(spec: TableSpec, plan: MergePlan, parts: Sequence[JournalRows]) -> pa.Table:
    """Return the last row of each key. Raises InvalidInput for a key in several journals."""
    _require_one_journal(spec, parts)
    return last_of_keys(plan, pa.Table.from_batches([part.rows for part in parts])).combine_chunks()


def _require_one_journal(spec: TableSpec, parts: Sequence[JournalRows]) -> None:
    journals = sorted({part.journal for part in parts})
    if len(journals) < 2:
        return
    keys = list(spec.key)
    found = []
    for number, journal in enumerate(journals):
        rows = pa.Table.from_batches([part.rows.select(keys) for part in parts if part.journal == journal])
        own = rows.group_by(keys).aggregate([])
        found.append(own.append_column("coranto_journal", pa.array([number] * own.num_rows, pa.int32())))
    counted = pa.concat_tables(found).group_by(keys).aggregate([("coranto_journal", "min"), ("coranto_journal", "max")])
    met = counted.filter(pc.not_equal(counted["coranto_journal_min"], counted["coranto_journal_max"]))
    if met.num_rows:
        first, second = (journals[met[f"coranto_journal_{end}"][0].as_py()] for end in ("min", "max"))
        raise several_journals(spec, f"{first} and {second}")
