"""Merging staged rows into a table: one SQL statement per table, built from a rule per column.

Several tasks may stage rows with the same key, in any order. A rule combines the staged values of a column with each
other, and with the value in the table. Rules that do not depend on order (`Add`, `Max`, `Min`) accept several staged
rows per key. With `Replace`, staging a key twice is an error, because the result would be arbitrary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    MetaData,
    Table,
    UniqueConstraint,
    and_,
    case,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql import ColumnElement

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores import deleting, replacing
from coranto_consumers.stores.mysql import NAME

if TYPE_CHECKING:
    import pyarrow as pa

STAGE_COLUMNS = ("coranto_shard", "coranto_fence", "coranto_attempt")
"""Columns of a stage table that identify a row's writer. Output columns must not have these names."""


@dataclass(frozen=True, slots=True)
class Add:
    """The sum of all values. A null adds nothing."""


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value. Nulls are ignored."""


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value. Nulls are ignored."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The staged value, even if it is null. A key may be staged only once per transaction."""


@dataclass(frozen=True, slots=True)
class Quotient:
    """The column `numerator` divided by the column `denominator`, after their merge. Null if the denominator is zero.

    Rows do not contain the quotient's column. An example is a mean that stays exact while more rows are merged.
    """

    numerator: str
    denominator: str


MergeRule = Add | Max | Min | Replace | Quotient


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The plan to merge rows with `columns` into `table`. Without keys, rows are appended."""

    table: Table
    keys: tuple[str, ...]
    rules: Mapping[str, MergeRule]
    columns: tuple[str, ...]
    delete: str | None = None
    """An additional column of the rows: if it is true, the table's row with the same key is deleted."""


def plan_merge(
    table: Table,
    columns: Sequence[str],
    keys: Sequence[str],
    rules: Mapping[str, MergeRule],
    delete: str | None = None,
) -> MergePlan:
    """Check an output against its table, and return its merge plan. Raises InvalidInput, with the fix."""
    where = f"table {table.name}"
    if delete:
        others = {name for name, rule in rules.items() if not isinstance(rule, Replace)}
        deleting.require_column(table, delete, columns, keys, others)
        if delete in STAGE_COLUMNS:
            raise InvalidInput(f"column name {delete!r} is reserved; give yours another name", field=where)
        plan = plan_merge(table, [name for name in columns if name != delete], keys, rules)
        return replace(plan, delete=delete)
    unknown = [name for name in [*columns, *keys, *rules] if name not in table.c]
    if unknown:
        raise InvalidInput(f"has no column {unknown[0]!r}; it has {', '.join(table.c.keys())}", field=where)
    if reserved := sorted(set(STAGE_COLUMNS) & set(columns)):
        raise InvalidInput(f"column name {reserved[0]!r} is reserved; give yours another name", field=where)
    if len(set(columns)) != len(columns):
        raise InvalidInput("the rows have a column twice; rename one", field=where)
    if not keys:
        if rules:
            raise InvalidInput("merge rules need keys; leave both out to append rows", field=where)
        return MergePlan(table, (), {}, tuple(columns))
    _check_keys(table, columns, keys, where)
    for name, rule in rules.items():
        if name in keys:
            raise InvalidInput(f"{name!r} is a key and cannot have a merge rule; leave the rule out", field=where)
        if isinstance(rule, Quotient):
            for part in (rule.numerator, rule.denominator):
                if part not in rules or isinstance(rules[part], Quotient):
                    raise InvalidInput(
                        f"{name!r} divides {part!r}, which has no merge rule of its own; add one", field=where
                    )
            if name in columns:
                raise InvalidInput(
                    f"{name!r} is computed, so it must not be among the rows' columns; drop it", field=where
                )
        elif name not in columns:
            raise InvalidInput(
                f"{name!r} has a merge rule but the rows have no such column; add the column, or leave the rule out",
                field=where,
            )
    for name in columns:
        if name not in keys and name not in rules:
            raise InvalidInput(f"say how {name!r} merges: Add(), Max(), Min() or Replace()", field=where)
    return MergePlan(table, tuple(keys), dict(rules), tuple(columns))


def _check_keys(table: Table, columns: Sequence[str], keys: Sequence[str], where: str) -> None:
    for name in keys:
        if name not in columns:
            raise InvalidInput(
                f"key {name!r} is not among the rows' columns; add it, or leave it out of the keys", field=where
            )
        if table.c[name].nullable:
            raise InvalidInput(
                f"key {name!r} must be NOT NULL: nulls are never equal, so they would pile up", field=where
            )
    if set(keys) not in _uniques(table):
        raise InvalidInput(f"needs a primary key or unique constraint on exactly ({', '.join(keys)})", field=where)


def stage_table(plan: MergePlan, name: str, *, prefixes: Sequence[str] = (), on_commit: str | None = None) -> Table:
    """Return the stage table for a plan's rows: the plan's columns without constraints, and `STAGE_COLUMNS`.

    `prefixes` are keywords between CREATE and TABLE. PostgreSQL empties an UNLOGGED table when the server crashes;
    `merge_staged` detects the missing rows. `on_commit` is PostgreSQL's ON COMMIT action for a temporary table, which
    needs no index, because it has the rows of one attempt.
    """
    shard, fence, attempt = STAGE_COLUMNS
    indexes = [] if on_commit else [Index(f"{name}_attempt", attempt)]
    return Table(
        name,
        MetaData(),
        Column(shard, NAME, nullable=False),
        Column(fence, BigInteger, nullable=False),
        Column(attempt, NAME, nullable=False),
        *(Column(column, plan.table.c[column].type, nullable=True) for column in plan.columns),
        *([Column(plan.delete, Boolean, nullable=True)] if plan.delete else []),
        *indexes,
        prefixes=list(prefixes),
        postgresql_on_commit=on_commit,
    )


def merge_staged(connection: Connection, plan: MergePlan, stage: Table, attempts: Sequence[str], expected: int) -> None:
    """Merge the rows that `attempts` staged into the plan's table.

    Raises SqlStoreError unless exactly `expected` rows are staged, and InvalidInput when a key was staged twice in a
    plan with a `Replace` rule or deletes.
    """
    if not attempts:
        return
    chosen: ColumnElement[bool] = stage.c[STAGE_COLUMNS[2]].in_(attempts)
    if not plan.keys:
        columns = list(plan.columns)
        rows = select(*(stage.c[name] for name in columns)).where(chosen)
        # The number of inserted rows makes another query unnecessary.
        merged = connection.execute(
            plan.table.insert().from_select(columns, rows), execution_options={"preserve_rowcount": True}
        )
        _require_rows(plan.table, merged.rowcount, expected)
        return
    require_staged(connection, plan.table, stage, attempts, expected)
    if _is_replacement(plan) and connection.dialect.name == "postgresql":
        replacing.replace_by_key(connection, plan.table, plan.columns, plan.keys, stage, chosen)
        return
    if plan.delete or any(isinstance(rule, Replace) for rule in plan.rules.values()):
        replacing.refuse_repeated_keys(connection, plan.table, plan.keys, stage, chosen)
    if plan.delete:
        deleting.delete_by_key(connection, plan.table, plan.keys, stage, plan.delete, chosen)
        chosen = and_(chosen, deleting.not_deleting(stage, plan.delete))
    _upsert(connection, plan, stage, chosen)


def require_staged(connection: Connection, table: Table, stage: Table, attempts: Sequence[str], expected: int) -> None:
    """Raise SqlStoreError unless `attempts` staged exactly `expected` rows for a table."""
    chosen = stage.c[STAGE_COLUMNS[2]].in_(attempts)
    found = connection.execute(select(func.count()).select_from(stage).where(chosen)).scalar_one()
    _require_rows(table, found, expected)


def _require_rows(table: Table, found: int, expected: int) -> None:
    if found != expected:
        raise SqlStoreError(
            f"table {table.name}: {expected} rows were staged but {found} are there: the database lost them, "
            "as it does with unlogged tables when it crashes. Run the consumer again."
        )


def _is_replacement(plan: MergePlan) -> bool:
    """Return True if a plan only replaces rows by key."""
    return not plan.delete and bool(plan.rules) and all(isinstance(rule, Replace) for rule in plan.rules.values())


def _upsert(connection: Connection, plan: MergePlan, stage: Table, chosen: ColumnElement[bool]) -> None:
    """Group staged rows by key and insert the results. A result whose key exists is combined with the table's row."""
    dialect = connection.dialect.name
    staged = {
        name: _grouped(rule, stage.c[name], dialect)
        for name, rule in plan.rules.items()
        if not isinstance(rule, Quotient)
    }
    inserted = {**{key: stage.c[key] for key in plan.keys}, **staged}
    for name, rule in plan.rules.items():
        if isinstance(rule, Quotient):
            inserted[name] = _quotient(staged[rule.numerator], staged[rule.denominator])
    keys = [stage.c[key] for key in plan.keys]
    # In key order, so that two consumers that merge into one table cannot deadlock.
    rows = (
        select(*(value.label(name) for name, value in inserted.items())).where(chosen).group_by(*keys).order_by(*keys)
    )

    if connection.dialect.name == "mysql":
        _refuse_other_keys(plan, set(inserted))
        update = mysql.insert(plan.table).from_select(list(inserted), rows)
        # SQLAlchemy's own `inserted` escapes a percent sign in a name twice.
        new = {name: func.values(column(name), type_=plan.table.c[name].type) for name in inserted}
        merged = _merged(plan, new)
        # Assignments run from left to right and see the results of earlier ones. So quotients come first, while the
        # other columns still have their old values.
        ordered = sorted(merged.items(), key=lambda item: not isinstance(plan.rules[item[0]], Quotient))
        same = [(key, new[key]) for key in plan.keys]
        connection.execute(update.on_duplicate_key_update(ordered or same))
        return
    insert: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(plan.table)
    insert = insert.from_select(list(inserted), rows)
    if merged := _merged(plan, insert.excluded):
        statement = insert.on_conflict_do_update(index_elements=list(plan.keys), set_=merged)
    else:
        statement = insert.on_conflict_do_nothing(index_elements=list(plan.keys))
    connection.execute(statement)


def _merged(plan: MergePlan, new: Any) -> dict[str, ColumnElement[Any]]:
    """Return the new values of an existing row. `new` has the columns of the row that is merged into it."""
    merged = {
        name: _combined(rule, plan.table.c[name], new[name])
        for name, rule in plan.rules.items()
        if not isinstance(rule, Quotient)
    }
    for name, rule in plan.rules.items():
        if isinstance(rule, Quotient):
            merged[name] = _quotient(merged[rule.numerator], merged[rule.denominator])
    return merged


def _refuse_other_keys(plan: MergePlan, inserted: set[str]) -> None:
    """Raise InvalidInput for a table with another unique key: MariaDB and MySQL would merge rows with any equal key."""
    for unique in _uniques(plan.table):
        if unique >= set(plan.keys) or not inserted & unique:
            continue
        raise InvalidInput(
            f"has another unique key ({', '.join(sorted(unique))}), and MariaDB and MySQL would merge a row into "
            "whichever row shares either: merge into a table whose only key is the rows' key",
            field=f"table {plan.table.name}",
        )


def _uniques(table: Table) -> list[set[str]]:
    found = [{column.name for column in table.primary_key.columns}]
    found += [{c.name for c in each.columns} for each in table.constraints if isinstance(each, UniqueConstraint)]
    return [*found, *({c.name for c in index.columns} for index in table.indexes if index.unique)]


def _grouped(rule: Add | Max | Min | Replace, staged: ColumnElement[Any], dialect: str) -> ColumnElement[Any]:
    """Return the combined value of a group of staged rows with one key."""
    match rule:
        case Add():
            return func.sum(staged)
        case Max():
            return func.max(staged)
        case Min():
            return func.min(staged)
        case Replace():
            # The group has one row, which was checked before. PostgreSQL has no max() of BOOLEAN or JSON.
            if dialect == "postgresql":
                return func.array_agg(staged, type_=postgresql.ARRAY(staged.type))[1]
            return func.max(staged)


def _combined(rule: Add | Max | Min | Replace, old: ColumnElement[Any], new: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the value of an existing row after the merge of a group's value."""
    if isinstance(rule, Replace):
        return new
    match rule:
        case Add():
            both = old + new
        case Max():
            both = case((new > old, new), else_=old)
        case Min():
            both = case((new < old, new), else_=old)
    return case((old.is_(None), new), (new.is_(None), old), else_=both)


def _quotient(numerator: ColumnElement[Any], denominator: ColumnElement[Any]) -> ColumnElement[Any]:
    return cast(numerator, Double) / func.nullif(cast(denominator, Double), 0.0)


def last_of_keys(plan: MergePlan, rows: pa.Table) -> pa.Table:
    """Return the last row of each key, sorted by key, if all columns have the rule `Replace`; else all rows."""
    if not all(isinstance(rule, Replace) for rule in plan.rules.values()):
        return rows
    import pyarrow as pa

    index, keys = "coranto_index", list(plan.keys)
    numbered = rows.select(keys).append_column(index, pa.array(range(rows.num_rows), pa.int64()))
    last = numbered.group_by(keys).aggregate([(index, "max")]).sort_by([(key, "ascending") for key in keys])
    return rows.take(last.column(f"{index}_max").combine_chunks())
