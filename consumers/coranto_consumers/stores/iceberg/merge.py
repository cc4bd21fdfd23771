"""Merging rows into a table by their keys, in Arrow. The rules are the same as in SQL stores (`stores/merge.py`)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from coranto.errors import InvalidInput
from coranto_consumers.stores.merge import Add, Max, MergePlan, Min, Quotient, Replace

_INDEX = "coranto_index"
_REAL = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)


def check_keys(plan: MergePlan, new: pa.Table) -> None:
    """Raise InvalidInput for new rows that a plan cannot merge: with a null key, or several that replace one row."""
    where = f"table {plan.table.name}"
    for key in plan.keys:
        if new.column(key).null_count:
            raise InvalidInput(f"key {key!r} is null in a row; leave such rows out", field=where)
    if not plan.delete and not any(isinstance(rule, Replace) for rule in plan.rules.values()):
        return
    counts = new.group_by(list(plan.keys)).aggregate([([], "count_all")])
    repeated = counts.filter(pc.greater(counts["count_all"], 1))
    if repeated.num_rows:
        found = tuple(repeated[name][0].as_py() for name in plan.keys)
        raise InvalidInput(
            f"key {found!r} was staged more than once, and Replace() cannot choose between the rows; aggregate the "
            "rows by key first",
            field=where,
        )


def match_keys(plan: MergePlan, old: pa.Table, new: pa.Table) -> pa.Array:
    """Return a boolean array: True for each row of `old` whose key is in `new`."""
    keys = list(plan.keys)
    numbered = old.select(keys).append_column(_INDEX, pa.array(range(old.num_rows), pa.int64()))
    wanted = new.select(keys).cast(numbered.select(keys).schema)
    met = numbered.join(wanted.group_by(keys).aggregate([]), keys, join_type="left semi")[_INDEX].combine_chunks()
    return pc.is_in(pa.array(range(old.num_rows), pa.int64()), value_set=met)


def merge(plan: MergePlan, old: pa.Table, new: pa.Table) -> pa.Table:
    """Merge new rows into the old rows with the same keys. Return the merged rows, with the columns of `old`.

    Raises InvalidInput if a merged value does not fit its column.
    """
    if plan.delete:
        gone = pc.fill_null(new.column(plan.delete), False)
        old = old.filter(pc.invert(match_keys(plan, old, new.filter(gone))))
        new = new.filter(pc.invert(gone))
    columns = old.schema
    given = [
        new.column(field.name).cast(field.type) if field.name in plan.columns else pa.nulls(new.num_rows, field.type)
        for field in columns
    ]
    nullable = pa.schema([field.with_nullable(True) for field in columns])
    both = pa.concat_tables([old.cast(nullable), pa.table(given, schema=nullable)])
    if not both.num_rows:
        return old.slice(0, 0)
    sums: dict[str, str] = {}
    work = both.select(list(plan.keys)).append_column(_INDEX, pa.array(range(both.num_rows), pa.int64()))
    for name, rule in plan.rules.items():
        if isinstance(rule, Add | Max | Min):
            sums[name] = {Add: "sum", Max: "max", Min: "min"}[type(rule)]
            work = work.append_column(
                f"v_{name}", _wide(both.column(name)) if sums[name] == "sum" else both.column(name)
            )
    grouped = work.group_by(list(plan.keys)).aggregate(
        [(_INDEX, "min"), (_INDEX, "max"), *((f"v_{name}", kind, _REAL) for name, kind in sums.items())]
    )
    made: dict[str, pa.ChunkedArray] = {}
    try:
        for field in columns:
            if field.name in sums:
                made[field.name] = grouped.column(f"v_{field.name}_{sums[field.name]}").cast(field.type)
            else:
                # New rows come last, so the maximum index is a new row if the key has one. Columns that the new rows
                # lack keep the old value.
                index = f"{_INDEX}_{'max' if field.name in plan.columns else 'min'}"
                made[field.name] = both.column(field.name).take(grouped.column(index))
    except pa.ArrowInvalid as error:
        raise InvalidInput(
            f"{field.name!r} no longer fits its column: {error}", field=f"table {plan.table.name}"
        ) from error
    for name, rule in plan.rules.items():
        if isinstance(rule, Quotient):
            over = pc.cast(made[rule.denominator], pa.float64())
            over = pc.if_else(pc.equal(over, 0.0), pa.scalar(None, pa.float64()), over)
            made[name] = pc.divide(pc.cast(made[rule.numerator], pa.float64()), over).cast(columns.field(name).type)
    return pa.table(made, schema=columns)  # The writer checks columns that must not be null.


def _wide(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast integers to decimals, so that a sum that is too large is detected instead of wrapping around."""
    return column.cast(pa.decimal128(38, 0)) if pa.types.is_integer(column.type) else column
