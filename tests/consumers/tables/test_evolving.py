"""Comparison, creation and changes of tables, and errors with advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coranto.errors import InvalidInput
from coranto.types.kinds import PlainKind, TypeField
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import layout_of
from coranto_consumers.tables.evolving import ColumnChange, TableState, prepare

LAYOUT = layout_of(
    read_table(
        """
name: shop-orders
input: {stream: shop/orders}
columns: id BIGINT, note STRING
store: sqlite:////s.db
table: orders
"""
    )
)
EVOLVES = replace(LAYOUT, spec=replace(LAYOUT.spec, evolves=True))
NOTE = ColumnChange(TypeField("note", PlainKind.STRING), "has no column 'note'", "ADD note")


class Target:
    """A table that returns the given states in order."""

    def __init__(self, *states: TableState) -> None:
        self.states = list(states)
        self.done: list[str] = []

    def compare(self) -> TableState:
        return self.states.pop(0)

    def create(self) -> None:
        self.done.append("created")

    def change(self, changes: Sequence[ColumnChange]) -> None:
        self.done += [each.advice for each in changes]


def test_a_missing_table_is_created_and_a_matching_one_is_used() -> None:
    target = Target(TableState(False), TableState(True))
    assert prepare(LAYOUT, target) == ()
    assert target.done == ["created"]
    assert prepare(LAYOUT, Target(TableState(True))) == ()


def test_changes_are_made_only_with_evolve() -> None:
    with pytest.raises(InvalidInput) as refused:
        prepare(LAYOUT, Target(TableState(True, [NOTE])))
    assert str(refused.value) == (
        "table orders: has no column 'note' (ADD note), as the file has it: add `evolve: true`, or change the table "
        "yourself, or leave note STRING as the table has it"
    )
    target = Target(TableState(True, [NOTE]), TableState(True))
    assert prepare(EVOLVES, target) == [NOTE]
    assert target.done == ["ADD note"]


def test_remaining_differences_are_errors() -> None:
    with pytest.raises(InvalidInput, match="one; two"):
        prepare(EVOLVES, Target(TableState(True, [NOTE], ["one", "two"])))
    with pytest.raises(InvalidInput, match="still has no column 'note', although it was changed"):
        prepare(EVOLVES, Target(TableState(True, [NOTE]), TableState(True, [NOTE])))
