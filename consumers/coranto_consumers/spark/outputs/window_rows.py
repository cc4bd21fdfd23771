"""The rows of one window of offsets in a SQL database. Each commit replaces the earlier rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from pyspark.sql import functions as F
from sqlalchemy import Connection, Table, delete

from coranto.errors import InvalidInput
from coranto.fragments.windows import Window
from coranto.messages.checkpoints import Checkpoint, Identity
from coranto_consumers.spark.application.outputs import Outputs, TableOutput
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.outputs.staging import Staged, table_of
from coranto_consumers.spark.outputs.stores import SqlOutputs
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.windows import WINDOW_COLUMN, WindowLog


class WindowRows(SqlOutputs):
    """The store of one window's outputs. Rows have the number of the window in the column `coranto_window`.

    `recorded` is the consumer's identity in its log of windows. `letters` is the table of dead letters.
    """

    writes_optimistically = False

    def __init__(
        self, store: SqlStore, window: Window, log: WindowLog, recorded: Identity, letters: Table | None
    ) -> None:
        super().__init__(store)
        self._window = window
        self._log = log
        self._recorded = recorded
        self._letters = letters

    def write_all(
        self, made: Sequence[Outputs], shard: str, fence: int, expected: ExpectedRows | None = None
    ) -> list[Staged]:
        if any(outputs.journals for outputs in made):
            raise InvalidInput(
                "an application that runs by windows cannot publish: messages in journals cannot be replaced; "
                "let it return tables only",
                field="outputs",
            )
        if any(outputs.sql for outputs in made):
            raise InvalidInput(
                "an application that runs by windows cannot write by SQL of its own: the rows to replace would be "
                "unknown; let it return tables only",
                field="outputs",
            )
        tables = [_of_window(output, self._window) for outputs in made for output in outputs.tables]
        return [self.write(output, shard, fence) for output in tables]

    def _begin(self, connection: Connection, checkpoint: Checkpoint) -> Checkpoint:
        after = replace(checkpoint, identity=Identity())  # The log has it, for all windows.
        self._log.record(connection, checkpoint.identity, self._recorded)
        self._log.claim(connection, self._window, after, time.time())
        return after

    def _merge(self, connection: Connection, written: Sequence[Staged]) -> None:
        tables: dict[str, Table] = {each.plan.table.fullname: each.plan.table for each in written}
        if self._letters is not None:
            tables[self._letters.fullname] = self._letters  # Delete old letters even if there are none now.
        for table in tables.values():
            numbers = table.c[WINDOW_COLUMN]
            connection.execute(delete(table).where(numbers.between(self._window.first, self._window.last)))
        super()._merge(connection, written)


def _of_window(output: TableOutput, window: Window) -> TableOutput:
    """Add the column with the window's number to an output. Raises InvalidInput for a table without the column."""
    table = table_of(output)
    where = f"table {table.name}"
    if WINDOW_COLUMN not in table.c:
        raise InvalidInput(
            f"has no column {WINDOW_COLUMN}, which identifies a window's rows to replace; add "
            f'Column("{WINDOW_COLUMN}", BigInteger, nullable=False), and to its keys if it has any',
            field=where,
        )
    if WINDOW_COLUMN in output.rows.columns:
        raise InvalidInput(f"the rows have a column {WINDOW_COLUMN}; leave it out, it is filled in", field=where)
    rows = output.rows.withColumn(WINDOW_COLUMN, F.lit(window.first).cast("bigint"))
    return replace(output, rows=rows, keys=(*output.keys, WINDOW_COLUMN) if output.keys else ())
