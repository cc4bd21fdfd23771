"""An application's own SQL over staged rows, for changes beyond appending, merging and deleting.

Tasks stage the rows as for other outputs. The driver runs the statements in the transaction that commits the
checkpoint, after it has merged the rows of other outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coranto.errors import InvalidInput
from coranto_consumers.stores.engines import READS_ONLY, is_transient
from coranto_consumers.stores.merge import STAGE_COLUMNS, MergePlan, plan_merge, require_staged
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from coranto_consumers.stores.sql_dialects import require_dialect
from coranto_consumers.stores.sql_text import STAGE, filled, require_statement
from coranto_consumers.stores.staging import PREFIX, stage_of

_NO_PARAMETERS: Final = {"no_parameters": True}
"""The execution option that makes a driver treat `%` and `:` in a statement literally."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedSql:
    """Statements of SQL that write staged rows into tables.

    `rows` defines the columns of the rows and their types in the database. This table is not created. In the
    statements, `{stage}` stands for the rows, and needs an alias: `FROM {stage} AS s`. The placeholder of each table in
    `tables` is its name, such as `{accounts}`. These tables are created if absent. Statements may write only to them,
    and may read any table.

    A statement is one INSERT, UPDATE, DELETE, MERGE, REPLACE or SELECT, possibly after WITH, in the SQL dialect of the
    store's database. The constructor raises InvalidInput for other statements: the consumer itself begins and commits
    the transaction.
    """

    rows: Table
    statements: Sequence[str]
    tables: Sequence[Table]

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        if isinstance(self.statements, str) or not self.statements:
            raise InvalidInput("give a list of at least one statement", field=self._where())
        if repeated := sorted({name for name in names if names.count(name) > 1 or name == STAGE}):
            raise InvalidInput(
                f"{{{repeated[0]}}} could mean several tables: give each a name of its own, other than {STAGE}",
                field=self._where(),
            )
        plan_merge(self.rows, self.rows.c.keys(), (), {})
        for number, statement in enumerate(self.statements, 1):
            reserved = (CHECKPOINTS.name, PREFIX, *STAGE_COLUMNS)
            require_statement(statement, names, reserved=reserved, field=self._where(number))

    def plan(self, columns: Sequence[str]) -> MergePlan:
        """Return the plan for staging rows with `columns`. Raises InvalidInput for missing or unknown columns."""
        wanted = self.rows.c.keys()
        if missing := sorted(set(wanted) - set(columns)):
            raise InvalidInput(f"the rows have no column {missing[0]!r}; add it", field=self._where())
        plan_merge(self.rows, columns, (), {})
        return MergePlan(self.rows, (), {}, tuple(wanted))

    def prepare(self, store: SqlStore) -> Table:
        """Create tables, and let the database check the statements. Return the stage table.

        Raises InvalidInput for a statement that the database rejects, and SqlStoreError.
        """
        names = [table.name for table in self.tables]
        for number, statement in enumerate(self.statements, 1):
            require_dialect(statement, store.engine.dialect.name, names, field=self._where(number))
        stage = stage_of(store, self.plan(self.rows.c.keys()), self.tables)
        options = {**_NO_PARAMETERS, READS_ONLY: True}
        try:
            with store.engine.connect().execution_options(**options) as connection:
                for number, statement in enumerate(self._filled(connection.dialect, stage, ()), 1):
                    self._explain(store, connection, number, statement)
        except SQLAlchemyError as error:
            raise store.failure(f"the statements of {self._where()} could not be checked", error) from error
        return stage

    def run(self, connection: Connection, stage: Table, attempts: Sequence[str], expected: int) -> None:
        """Run the statements on the rows that `attempts` staged, if there are attempts, as part of a transaction.

        Raises SqlStoreError unless exactly `expected` rows are staged, and the database's errors as SQLAlchemy does.
        """
        if not attempts:
            return
        require_staged(connection, self.rows, stage, attempts, expected)
        for statement in self._filled(connection.dialect, stage, attempts):
            connection.exec_driver_sql(statement, execution_options=_NO_PARAMETERS)

    def _explain(self, store: SqlStore, connection: Connection, number: int, statement: str) -> None:
        try:
            connection.exec_driver_sql(f"EXPLAIN {statement}").close()
        except DBAPIError as error:
            if is_transient(error):
                raise
            raise InvalidInput(
                f"{store.name} does not accept it: {' '.join(str(error.orig).split())}", field=self._where(number)
            ) from error

    def _filled(self, dialect: Dialect, stage: Table, attempts: Sequence[str]) -> list[str]:
        """Return the statements with their placeholders filled in. Ids of attempts have no special characters."""
        prepare: Any = dialect.preparer(dialect)
        prepare._double_percents = False  # The driver gets the statement as it is.
        columns = ", ".join(prepare.quote(name) for name in self.rows.c.keys())  # noqa: SIM118
        chosen = ", ".join(f"'{attempt}'" for attempt in attempts) or "''"
        place, attempt = prepare.format_table(stage), prepare.quote(STAGE_COLUMNS[2])
        values = {table.name: prepare.format_table(table) for table in self.tables}
        values[STAGE] = f"(SELECT {columns} FROM {place} WHERE {attempt} IN ({chosen}))"
        return [filled(statement, values) for statement in self.statements]

    def _where(self, number: int | None = None) -> str:
        return f"SQL over {self.rows.name}" + (f", statement {number}" if number else "")
