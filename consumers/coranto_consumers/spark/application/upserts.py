"""`Upsert`: the last message of each key replaces the key's row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Table

from coranto.errors import InvalidInput
from coranto_consumers.spark.application.outputs import TableOutput, column_named
from coranto_consumers.stores.merge import Replace

_ORDER: Final = ("_commit_offset", "_offset")
_OWN: Final = ("_journal", "_offset", "_producer", "_clock", "_commit_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upsert:
    """A rule for the rows of a table: of each key, the row of the message that was committed last.

    `key` names columns that are unique in the table. `order` is `commit`: the order of commits in a journal. All
    messages of a key must be in one journal, or in one stream. `delete` names a BOOLEAN column of the rows that is not
    in the table. If it is true in the last message, the row of the key is deleted.
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

        Each row is a message, with its `_commit_offset` and `_offset`. Its fields are columns of the table. The table
        gets a column of the source, such as `_offset`, if it has that column and is not given by name. Raises
        InvalidInput if a column is missing.
        """
        for name in (*self.key, *_ORDER, *filter(None, [self.delete])):
            if name not in rows.columns:
                advice = "; add `_commit_offset BIGINT` to value_schema" if name == _ORDER[0] else ""
                raise InvalidInput(f"the rows have no column {name}{advice}", field="rows")
        known = table.columns.keys() if isinstance(table, Table) else ()
        values = [name for name in rows.columns if name not in self.key and (name not in _OWN or name in known)]
        last = f"_{max(rows.columns, key=len)}"  # The name of no column.
        chosen = F.max_by(F.struct(*map(column_named, values)), F.struct(*_ORDER)) if values else F.lit(None)
        grouped = rows.groupBy(*map(column_named, self.key)).agg(chosen.alias(last))
        found = grouped.select(*map(column_named, self.key), *(column_named(last)[name].alias(name) for name in values))
        merge = {name: Replace() for name in values if name != self.delete}
        return TableOutput(table, found, keys=list(self.key), merge=merge, delete=self.delete)
