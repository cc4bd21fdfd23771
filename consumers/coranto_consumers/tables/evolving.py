"""Comparison of a table in a store with its expected columns, and safe changes of the table.

A change adds nullable columns, or widens types by the rule of message types (`coranto.types.kinds.widens`). No row
changes. If several processes make the same change, one succeeds, and the others find it done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coranto.errors import InvalidInput
from coranto.types.kinds import TypeField, format_kind
from coranto_consumers.tables.columns import TableLayout


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """A column that a table lacks, or that is too narrow."""

    field: TypeField
    problem: str
    """The problem, such as `has no column 'note'`."""
    advice: str
    """The way to make the change by hand, such as a SQL statement."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A table in a store, compared with its layout."""

    exists: bool
    changes: Sequence[ColumnChange] = ()
    """The changes that `evolve` makes."""
    problems: Sequence[str] = ()
    """The differences that no safe change can remove."""


class TargetTable(Protocol):
    """A table in a store."""

    def compare(self) -> TableState:
        """Return the state of the table. Raises SqlStoreError."""
        ...

    def create(self) -> None:
        """Create the table if it does not exist. Raises SqlStoreError, and InvalidInput without the permission."""
        ...

    def change(self, changes: Sequence[ColumnChange]) -> None:
        """Make the changes that another process has not made first. Raises SqlStoreError."""
        ...


def prepare(layout: TableLayout, target: TargetTable) -> Sequence[ColumnChange]:
    """Create the table, or change it if the file says `evolve: true`. Return the changes.

    Raises InvalidInput for a table that cannot take the rows, and SqlStoreError.
    """
    state = target.compare()
    if not state.exists:
        target.create()
        state = target.compare()
    require_no_problems(layout, state)
    if not state.changes:
        return ()
    if not layout.spec.evolves:
        raise not_evolved(layout, state)
    target.change(state.changes)
    left = target.compare()
    require_no_problems(layout, left)
    if left.changes:
        raise InvalidInput(
            f"still {left.changes[0].problem}, although it was changed: another program changes it, too",
            field=f"table {layout.spec.table}",
        )
    return state.changes


def require_no_problems(layout: TableLayout, state: TableState) -> None:
    """Raise InvalidInput for differences that no safe change can remove."""
    if state.problems:
        raise InvalidInput("; ".join(state.problems), field=f"table {layout.spec.table}")


def not_evolved(layout: TableLayout, state: TableState) -> InvalidInput:
    """Return the error for a table that needs changes, if its file does not allow them."""
    found = "; ".join(f"{each.problem} ({each.advice})" for each in state.changes)
    source = f"type {layout.version}" if layout.version is not None else "file"
    names = ", ".join(f"{each.field.name} {format_kind(each.field.kind)}" for each in state.changes)
    leave = "" if layout.version is not None else f", or leave {names} as the table has it"
    return InvalidInput(
        f"{found}, as the {source} has it: add `evolve: true`, or change the table yourself{leave}",
        field=f"table {layout.spec.table}",
    )
