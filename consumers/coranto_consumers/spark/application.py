"""What a user writes: an application, which turns committed messages into rows of tables and messages for journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pyspark.sql import DataFrame
from sqlalchemy import Table

from coranto_consumers.stores.merge import MergeRule

MappingName = Literal["rendezvous", "modulo", "random"]


@dataclass(frozen=True, slots=True)
class TableOutput:
    """Rows for a table of the store.

    The rows' columns are those of the table by name. With `keys`, which the table must hold unique, rows are merged
    into it: `merge` says for each other column how. Without, they are appended. The table is created when absent.
    """

    table: Table
    rows: DataFrame
    keys: Sequence[str] = ()
    merge: Mapping[str, MergeRule] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournalOutput:
    """Messages for journals.

    `rows` has a column `value`, a struct or the text of a JSON object, and a column `key` (text or binary), which
    `mapping` maps to one of the journals: a label selector or a list of names. `random` needs no key. The message gets
    its UUID on the way.
    """

    rows: DataFrame
    journals: str | Sequence[str]
    mapping: MappingName = "rendezvous"


@dataclass(frozen=True, slots=True)
class Outputs:
    """All that one transaction writes. It becomes visible together with the transaction, or never."""

    tables: Sequence[TableOutput] = ()
    journals: Sequence[JournalOutput] = ()


class Application(Protocol):
    """A consumer's logic."""

    @property
    def name(self) -> str:
        """Identifies the consumer in its store. A new instance of the same name fences off the one before."""
        ...

    @property
    def sources(self) -> str:
        """Label selector of the journals to consume, such as `name:prefix=flights/events/`."""
        ...

    @property
    def value_schema(self) -> str:
        """DDL of the columns that messages are parsed into: `carrier STRING, arr_delay DOUBLE`."""
        ...

    def outputs(self, committed: DataFrame) -> Outputs:
        """What to write for the committed messages of one transaction, each of which is there exactly once.

        The columns of `committed` are those of `value_schema`, and `_journal`, `_offset`, `_producer` and `_clock`.
        It may be evaluated several times, also for transactions that are then abandoned: no effects of its own.
        """
        ...
