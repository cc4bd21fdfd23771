"""The user's application, which turns committed messages into rows of tables and messages for journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Table

from coranto.errors import InvalidInput
from coranto.messages.mapping import MappingName
from coranto_consumers.outputs.identity import journal_outputs
from coranto_consumers.stores.merge import MergeRule, Replace
from coranto_consumers.stores.staged_sql import StagedSql


@dataclass(frozen=True, slots=True)
class TableOutput:
    """Rows for a table of the store.

    The rows' columns are columns of the table by name. With `keys`, which must be unique in the table, rows are merged
    into the table, and `merge` has a rule for each other column. Without keys, rows are appended. The table is created
    if absent. An existing table of an `IcebergStore` may be given by its name.

    `delete` names a BOOLEAN column of the rows that is not a column of the table. A row with True deletes the table's
    row with the same key. All rules must then be `Replace`.

    `overwrite` is for partitioned tables of an `IcebergStore`, without keys: the rows replace all rows of their
    partitions.
    """

    table: Table | str
    rows: DataFrame
    keys: Sequence[str] = ()
    merge: Mapping[str, MergeRule] = field(default_factory=dict)
    delete: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class JournalOutput:
    """Messages for journals.

    `rows` has a column `value`, which is a struct or the text of a JSON object, and a column `key` (text or binary).
    `mapping` maps the key to one of `journals`, which is a label selector or a list of names. The mapping `random`
    and a single journal need no key. Each message gets a UUID.
    """

    rows: DataFrame
    journals: str | Sequence[str]
    mapping: MappingName = "rendezvous"


@dataclass(frozen=True, slots=True)
class SqlOutput:
    """Rows, with the columns of `sql.rows`, for an application's own SQL statements.

    If there are rows, the statements run once, in the store's transaction, after the rows of `TableOutput`s are merged.
    """

    sql: StagedSql
    rows: DataFrame


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output of one transaction. It becomes visible when the transaction commits."""

    tables: Sequence[TableOutput] = ()
    journals: Sequence[JournalOutput] = ()
    sql: Sequence[SqlOutput] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the tables and journals, as a checkpoint records them."""
        tables = [output.table for output in self.tables] + [table for each in self.sql for table in each.sql.tables]
        written = {f"table {table if isinstance(table, str) else table.fullname}" for table in tables}
        return frozenset(written).union(*(journal_outputs(each.journals) for each in self.journals))


def column_named(name: str) -> Column:
    """Return the column of a frame with exactly this name."""
    return F.col(f"`{name.replace('`', '``')}`")


def checked_outputs(made: object) -> Outputs:
    """Return the result of an application's `outputs`. Raises InvalidInput if it is not `Outputs`."""
    if isinstance(made, Outputs):
        for name, kind in (("tables", TableOutput), ("journals", JournalOutput), ("sql", SqlOutput)):
            given = getattr(made, name)
            if not isinstance(given, list | tuple) or not all(isinstance(each, kind) for each in given):
                raise InvalidInput(
                    f"{name} must be a list of {kind.__name__}: give {name}=[{kind.__name__}(…)]", field="outputs"
                )
        return made
    advice = "return Outputs(tables=[TableOutput(table, rows)]), or Outputs() for nothing"
    found = "nothing (None)" if made is None else f"a {type(made).__name__}"
    raise InvalidInput(f"the function returned {found}: {advice}", field="outputs")


_ORDER: Final = ("_commit_offset", "_offset")
_OWN: Final = ("_journal", "_offset", "_producer", "_clock", "_commit_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upsert:
    """A rule for the rows of a table: keep, for each key, the row of the message that was committed last.

    `key` names columns that are unique in the table. `order` is `commit`: the order of commits in a journal. All
    messages of a key must be in one journal, or in one stream. `delete` names a BOOLEAN column of the rows that is not
    in the table. If it is true in the last message, the table's row with the key is deleted.
    """

    key: Sequence[str]
    order: Literal["commit"] = "commit"
    delete: str | None = None

    def __post_init__(self) -> None:
        if self.order != "commit":
            raise InvalidInput(f"{self.order!r} is not commit, the only order that there is", field="order")
        if isinstance(self.key, str) or not self.key:
            raise InvalidInput(f'{self.key!r} is not a list of columns, such as key=["id"]', field="key")

    def of(self, table: Table | str, rows: DataFrame) -> TableOutput:
        """Return the output of `rows` for a table.

        Each row is a message, with its `_commit_offset` and `_offset`. Its fields are columns of the table. Metadata
        columns, such as `_offset`, are written if the table's definition has them; a table given by name gets none.
        Raises InvalidInput if a column is missing.
        """
        for name in (*self.key, *_ORDER, *filter(None, [self.delete])):
            if name not in rows.columns:
                advice = "; add `_commit_offset BIGINT` to value_schema" if name == _ORDER[0] else ""
                raise InvalidInput(f"the rows have no column {name}{advice}", field="rows")
        known = table.columns.keys() if isinstance(table, Table) else ()
        values = [name for name in rows.columns if name not in self.key and (name not in _OWN or name in known)]
        last = f"_{max(rows.columns, key=len)}"  # No column has this name.
        chosen = F.max_by(F.struct(*map(column_named, values)), F.struct(*_ORDER)) if values else F.lit(None)
        grouped = rows.groupBy(*map(column_named, self.key)).agg(chosen.alias(last))
        found = grouped.select(*map(column_named, self.key), *(column_named(last)[name].alias(name) for name in values))
        merge = {name: Replace() for name in values if name != self.delete}
        return TableOutput(table, found, keys=list(self.key), merge=merge, delete=self.delete)


class SparkApplication(Protocol):
    """A consumer's logic.

    Two further attributes are optional. `message_type` is the registered type of its messages, such as `shop.Order`, or
    a version of the type, such as `shop.Order@3`; by default, the journals' labels name the type. `sql` has the
    statements (`StagedSql`) of its outputs, which the database checks before the consumer takes over.
    """

    @property
    def name(self) -> str:
        """The consumer's name in its store. A new instance with the same name fences off the previous one."""

    @property
    def sources(self) -> str:
        """The label selector of the journals to consume, such as `name:prefix=flights/events/`."""

    @property
    def value_schema(self) -> str:
        """The DDL of the columns that messages are parsed into, such as `carrier STRING, arr_delay DOUBLE`.

        With `_commit_offset BIGINT`, rows also have the offset of the acknowledgement that committed them, or their own
        offset outside of transactions. If the consumer has a registry, `*` at the beginning stands for all fields of
        the message type: `*, _commit_offset BIGINT`.
        """

    def outputs(self, committed: DataFrame) -> Outputs:
        """Return the output for the committed messages of one transaction, each of them exactly once.

        The columns of `committed` are the columns of `value_schema`, and `_journal`, `_offset`, `_producer` and
        `_clock`. Within a journal, messages were committed in the order of (`_commit_offset`, `_offset`), and messages
        of later transactions were committed later. The output may be evaluated several times, even for transactions
        that are abandoned, so it must have no side effects.
        """
