"""Errors of databases that reject rows because of their values, described without the values.

Databases quote values of rows in their messages. So this module writes its own text: the kind of error, and the names
of the table, column and constraint. The database's message is added only if the store's URL has `show_row_values=true`.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from typing import Any, Final, TypeGuard

from pymysql.err import DataError as MySQLDataError
from pymysql.err import IntegrityError as MySQLIntegrityError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from coranto.errors import RejectedRow
from coranto_consumers.stores import mysql

SHOW_VALUES: Final = "show_row_values"
"""The option of a store's URL that lets errors quote the database's text, including values of rows."""

_KINDS: Final = {
    "22001": "a text is too long for its column",
    "22003": "a number is out of its column's range",
    "22007": "a text is not a date or time",
    "22008": "a date or time is out of range",
    "22021": "a text has a character that the database does not keep, such as NUL",
    "22P02": "a value is not of its column's type",
    "22P05": "a text has a character that the database does not keep, such as NUL",
    "23502": "a column that must not be null has no value",
    "23503": "a foreign key refers to no row",
    "23505": "another row has the same unique key",
    "23514": "a check constraint does not hold",
    "23P01": "an exclusion constraint does not hold",
    "44000": "a row is outside of its view",
    "54000": "a row is too large for the database",
    "P0001": "a trigger or function refused it",
}
"""Errors by their SQLSTATE."""
_ROW_CLASSES: Final = ("22", "23")
_MYSQL: Final = {
    1048: "23502",
    1062: "23505",
    1216: "23503",
    1217: "23503",
    1264: "22003",
    1265: "22P02",
    1292: "22007",
    1300: "22021",
    1364: "23502",
    1366: "22P02",
    1406: "22001",
    1451: "23503",
    1452: "23503",
    1586: "23505",
    1644: "P0001",
    1690: "22003",
    3819: "23514",
    3988: "22P05",
    4025: "23514",
}
"""Maps errors of MariaDB and MySQL to PostgreSQL's SQLSTATEs. 1366 also means an unsupported character."""
_IDENTIFIER: Final = re.compile(r'"((?:[^"]|"")+)"')
_BEFORE_NAME: Final = r"[^:0-9]{0,200}[0-9]{1,20}(?:[^:]{0,30}[\s,])?"
_AFTER_NAME: Final = r"(?: \w{1,30})?\s?(?::|$)"
_MYSQL_NAMES: Final = re.compile(
    r"for key '([^']+)'|(?:for column|Column|Field) (?:[`\w]*\.)*[`']?([^`'\s]+)[`']?|CONSTRAINT `([^`]+)`"
)
_BOUND: Final = (ArithmeticError, LookupError, TypeError, ValueError)
"""Errors that SQLAlchemy's types raise for a value that they cannot bind."""


def rejection_of(error: BaseException, *, shows_values: bool = False) -> RejectedRow | None:
    """Return the details if `error` means that a database rejected a row because of its values, else None.

    The details have no values of the row, unless `shows_values` is set.
    """
    if isinstance(error, RejectedRow):
        return error
    original = error.orig if isinstance(error, StatementError) else error
    problem = _problem(error, original)
    if problem is None:
        return None
    return RejectedRow(f"{problem}: {_one_line(original)}" if shows_values else problem)


def described(error: SQLAlchemyError, *, shows_values: bool = False) -> str:
    """Return the database's message in one line. It has no values of rows, unless `shows_values` is set."""
    original = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    if shows_values:
        return _one_line(original) or type(original).__name__
    if (rejected := rejection_of(error)) is not None:
        return rejected.problem
    if _is_postgresql(original) and original.diag.message_primary:
        # The rest (DETAIL, CONTEXT) may quote values.
        return " ".join(original.diag.message_primary.split())
    return _one_line(original) or type(original).__name__


def _problem(error: BaseException, original: BaseException | None) -> str | None:
    if _is_postgresql(original):
        return _of_postgresql(original, getattr(error, "statement", None) or "")
    match original:
        case sqlite3.IntegrityError():
            # For example `UNIQUE constraint failed: orders.id`. A trigger's RAISE may have any text.
            text = _one_line(original)
            return text if " constraint failed" in text else _KINDS["P0001"]
        case sqlite3.DataError():
            return _KINDS["54000"]
        case OverflowError() if isinstance(error, DBAPIError):
            return _KINDS["22003"]
        case MySQLDataError() | MySQLIntegrityError():
            return _of_mysql(original)
    if (state := _MYSQL.get(mysql.code_of(original))) is not None and mysql.is_error(original):
        return _of_mysql(original, state)
    if isinstance(error, StatementError) and not isinstance(error, DBAPIError) and isinstance(original, _BOUND):
        return f"a column's type does not take a value ({type(original).__name__})"
    return None


def _is_postgresql(error: BaseException | None) -> TypeGuard[Any]:
    driver = sys.modules.get("psycopg")  # Importing it is slow, and errors exist only if it is imported.
    return driver is not None and isinstance(error, driver.Error)


def _of_postgresql(error: Any, statement: str) -> str | None:
    state = error.sqlstate or ""
    if not state and isinstance(error, sys.modules["psycopg"].DataError):
        return _KINDS["22021"]  # The driver itself rejects NUL.
    if state not in _KINDS and not state.startswith(_ROW_CLASSES):
        return None
    names = [
        f"{what} {name}"
        for what, name in (
            ("table", error.diag.table_name),
            ("column", error.diag.column_name or _copied_column(error.diag.context or "", statement)),
            ("constraint", error.diag.constraint_name),
        )
        if name
    ]
    return f"{_KINDS.get(state, type(error).__name__)} ({', '.join([*names, f'SQLSTATE {state}'])})"


def _copied_column(context: str, statement: str) -> str | None:
    """Return the column of a value that COPY could not convert. None if the error's context names no column.

    The context is `COPY t, line 1, column a: "value"` in the server's language. So this searches it for the column
    names in the statement, up to the first colon outside of a name. The value follows the colon.
    """
    if not statement.startswith("COPY "):
        return None
    names: list[str] = [each.replace('""', '"') for each in _IDENTIFIER.findall(statement)]
    for table in names[:2]:
        _, _, place = context.partition(table)
        for name in sorted(names, key=len, reverse=True):
            if re.match(_BEFORE_NAME + re.escape(name) + _AFTER_NAME, place):
                return name
    return None


def _of_mysql(error: Any, state: str = "") -> str:
    code = mysql.code_of(error)
    kind = _KINDS[state or _MYSQL.get(code, "22P02")]
    named = list(_MYSQL_NAMES.finditer(str(error.args[-1])))
    # Values, which may look like names, come first. So the last match is really a name.
    name = next((each for each in named[-1].groups() if each), "") if named else ""
    return f"{kind} ({name}, error {code})" if name else f"{kind} (error {code})"


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
