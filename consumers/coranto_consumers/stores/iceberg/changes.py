"""Changes of a table, each one snapshot: append files, replace partitions, merge rows by keys."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import expressions
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import DataScan, FileScanTask, Transaction

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores.iceberg.merge import match_keys, merge
from coranto_consumers.stores.iceberg.rows import fit
from coranto_consumers.stores.iceberg.slices import MAX_BYTES, Parts, slices
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import MergePlan

_E: Any = expressions  # Type checkers do not understand pyiceberg's dynamic constructors.
_MAX_KEYS: Final = 200
"""The maximum number of key values to compare with a file's bounds one by one. More are compared as a range."""


def append(transaction: Transaction, summary: Mapping[str, str], files: Sequence[DataFile], writer: FileWriter) -> None:
    """Add files of a writer. Raises SqlStoreError if the table's partitioning has changed since they were written."""
    require_partitioning(transaction, writer)
    with transaction._append_snapshot_producer(dict(summary)) as added:
        for file in files:
            added.append_data_file(file)


def overwrite_partitions(
    transaction: Transaction, summary: Mapping[str, str], files: Sequence[DataFile], writer: FileWriter
) -> None:
    """Replace all files in the partitions of the new files by the new files.

    Raises InvalidInput if the table has files of another partitioning.
    """
    metadata = transaction.table_metadata
    partitions = {file.partition for file in files}
    replaced = []
    for task in _tasks(transaction, AlwaysTrue()):
        if task.file.spec_id != metadata.default_spec_id:
            raise InvalidInput(
                f"has files of an earlier partitioning, such as {task.file.file_path}, so it is unknown which "
                "partitions they are in now: rewrite them first",
                field=f"table {'.'.join(transaction._table.name())}",
            )
        if task.file.partition in partitions:
            replaced.append(task.file)
    _replace(transaction, summary, replaced, files, writer)


def merge_rows(
    transaction: Transaction, summary: Mapping[str, str], plan: MergePlan, parts: Parts, writer: FileWriter
) -> list[DataFile]:
    """Merge new rows, given in parts, into the table's rows with the same keys. Return the files that were written.

    Only files with one of the keys are rewritten. Memory holds a slice of the new rows, the table's rows with their
    keys, and up to `MAX_BYTES` of the table's files. Raises InvalidInput for rows that do not fit.
    """
    columns = schema_to_pyarrow(transaction.table_metadata.schema(), include_field_ids=False)
    replaced: dict[str, tuple[FileScanTask, pa.Array]] = {}
    held: dict[str, pa.Table] = {}

    def read(task: FileScanTask) -> pa.Table:
        rows = held.get(task.file.file_path)
        return fit(_read(transaction, task), columns, writer.name) if rows is None else rows

    def changed() -> Iterator[pa.RecordBatch]:
        for each in slices(plan, parts):
            new = _typed(plan, each, columns, writer.name)
            met = [columns.empty_table()]
            for task in _tasks(transaction, _may_have(plan, new)):
                rows = read(task)
                same = match_keys(plan, rows, new)
                if same.true_count:
                    met.append(rows.filter(same))
                    _, before = replaced.get(task.file.file_path, (task, same))
                    replaced[task.file.file_path] = task, pc.or_(before, same)
                    if sum(each.nbytes for each in held.values()) + rows.nbytes <= MAX_BYTES:
                        held[task.file.file_path] = rows
            yield from merge(plan, pa.concat_tables(met), new).to_batches()
        for task, gone in replaced.values():
            yield from read(task).filter(pc.invert(gone)).to_batches()

    files = list(writer.write(changed()))
    _replace(transaction, summary, [task.file for task, _ in replaced.values()], files, writer)
    return files


def _typed(plan: MergePlan, new: pa.Table, columns: pa.Schema, name: str) -> pa.Table:
    """Cast the columns of new rows to the types of the table's columns."""
    wanted = pa.schema([columns.field(each).with_nullable(True) for each in plan.columns])
    typed = fit(new, wanted, name)
    return typed.append_column(plan.delete, new.column(plan.delete)) if plan.delete else typed


def _replace(
    transaction: Transaction,
    summary: Mapping[str, str],
    old: Sequence[DataFile],
    new: Sequence[DataFile],
    writer: FileWriter,
) -> None:
    if not old:
        if new:
            append(transaction, summary, new, writer)
        return
    require_partitioning(transaction, writer)
    with transaction.update_snapshot(snapshot_properties=dict(summary)).overwrite() as changed:
        for file in old:
            changed.delete_data_file(file)
        for file in new:
            changed.append_data_file(file)


def require_partitioning(transaction: Transaction, writer: FileWriter) -> None:
    """Raise SqlStoreError if the table's partitioning has changed since a writer was made."""
    if writer.spec_id != transaction.table_metadata.default_spec_id:
        raise SqlStoreError(f"{writer.name}: its partitioning changed while rows were written; run the consumer again")


def _tasks(transaction: Transaction, wanted: BooleanExpression) -> list[FileScanTask]:
    """Return the files of a table that may have wanted rows, according to the manifests."""
    scan = DataScan(transaction.table_metadata, transaction._table.io, row_filter=wanted)
    return list(scan.plan_files())


def _read(transaction: Transaction, task: FileScanTask) -> pa.Table:
    metadata = transaction.table_metadata
    return ArrowScan(metadata, transaction._table.io, metadata.schema(), AlwaysTrue()).to_table([task])


def _may_have(plan: MergePlan, new: pa.Table) -> BooleanExpression:
    """Return a condition that is true for all rows with a key of the new rows, and perhaps for other rows."""
    wanted: BooleanExpression = AlwaysTrue()
    for key in plan.keys:
        values = new.column(key)
        kind = values.type
        is_text = pa.types.is_large_string(kind) or pa.types.is_string(kind)  # pyiceberg returns large strings.
        if not (pa.types.is_integer(kind) or is_text or pa.types.is_date32(kind)) or not new.num_rows:
            continue
        distinct: list[int | str | dt.date] = pc.unique(values.slice(0, 10 * _MAX_KEYS)).to_pylist()
        if len(values) <= 10 * _MAX_KEYS and len(distinct) <= _MAX_KEYS:
            wanted = _E.And(wanted, _E.In(key, distinct))
        else:
            bounds = pc.min_max(values).as_py()
            wanted = _E.And(wanted, _E.GreaterThanOrEqual(key, bounds["min"]), _E.LessThanOrEqual(key, bounds["max"]))
    return wanted
