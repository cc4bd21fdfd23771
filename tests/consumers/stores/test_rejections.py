"""Errors of databases show no values of rows (`test_row_paths.py` tests real errors of each database)."""

import sqlite3

import pymysql
import pytest
from sqlalchemy import Column, Integer, MetaData, Numeric, Table, insert
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, StatementError

from coranto.errors import InvalidInput, RejectedRow
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.rejections import _copied_column, described, rejection_of


def of_mysql(kind, code, message):
    error = getattr(pymysql.err, kind)(code, message)
    return DataError("INSERT", None, error, hide_parameters=True)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            of_mysql("IntegrityError", 1062, "Duplicate entry 'SECRET-1' for key 'PRIMARY'"),
            "unique key (PRIMARY, error 1062)",
        ),
        (
            of_mysql("IntegrityError", 1048, "Column 'id' cannot be null"),
            "must not be null has no value (id, error 1048)",
        ),
        (
            of_mysql("DataError", 1406, "Data too long for column 'name' at row 1"),
            "too long for its column (name, error 1406)",
        ),
        (of_mysql("DataError", 1264, "Out of range value for column 'price' at row 1"), "range (price, error 1264)"),
        (
            of_mysql("DataError", 1366, "Incorrect integer value: 'SECRET' for column `db`.`t`.`n` at row 1"),
            "not of its column's type (n, error 1366)",
        ),
        (
            of_mysql("OperationalError", 4025, "CONSTRAINT `low` failed for `db`.`t`"),
            "check constraint does not hold (low,",
        ),
        (
            IntegrityError("", None, sqlite3.IntegrityError("UNIQUE constraint failed: t.id")),
            "UNIQUE constraint failed: t.id",
        ),
        (IntegrityError("", None, sqlite3.IntegrityError("SECRET is too low")), "a trigger or function refused it"),
        (DataError("", None, OverflowError("Python int too large")), "a number is out of its column's range"),
        (
            StatementError("SECRET", "", None, ValueError("SECRET")),
            "a column's type does not take a value (ValueError)",
        ),
    ],
)
def test_a_rejection_has_the_kind_and_names(error, problem):
    rejected = rejection_of(error)
    assert rejected is not None
    assert problem in rejected.problem
    assert "SECRET" not in rejected.problem + described(error)
    shown = rejection_of(error, shows_values=True)
    assert shown is not None
    assert str(error.orig).split()[-1] in shown.problem


def test_other_errors_are_not_rejections_and_keep_their_text():
    away = OperationalError("", None, sqlite3.OperationalError("database is  locked"))
    assert rejection_of(away) is None
    assert described(away) == "database is locked"
    assert rejection_of(ValueError("SECRET")) is None
    problem = RejectedRow("too long")
    assert rejection_of(problem) is problem
    assert (problem.at("a/b", 7).offset, str(problem.at("a/b", 7))) == (7, "journal a/b at offset 7: too long")
    assert not problem.retriable


def test_a_number_beyond_sqlites_range_is_an_error_of_the_store(tmp_path):
    store = SqlStore(f"sqlite:///{tmp_path}/s.db")
    table = Table("numbers", MetaData(), Column("n", Integer), Column("d", Numeric))
    store.create_tables(table)
    with pytest.raises(DataError) as caught, store.engine.begin() as connection:
        connection.execute(insert(table).values(n=1 << 70))
    assert rejection_of(caught.value) is not None


def test_the_option_to_show_values_is_true_or_absent(tmp_path):
    assert SqlStore(f"sqlite:///{tmp_path}/s.db?show_row_values=true").shows_values
    with pytest.raises(InvalidInput, match="show_row_values is not 'true'"):
        SqlStore(f"sqlite:///{tmp_path}/s.db?show_row_values=yes")


@pytest.mark.parametrize(
    "context",
    [
        'COPY {table}, line 12, column {column}: "{value}"',
        "COPY {table}, Zeile 12, Spalte {column}: »{value}«",
        "COPY {table}, ligne 12, colonne {column} : « {value} »",
        'COPY {table}, строка 12, столбец {column}: "{value}"',
        '{table}のCOPY、行 12、列 {column}: "{value}"',
        '{table} 복사, 12번째 줄, {column} 열: "{value}"',
        'COPY {table}, 行 12, 列 {column}: "{value}"',
    ],
)
@pytest.mark.parametrize("column", ["a", "od d", "x, column y: z", "z", 'q"r'])
@pytest.mark.parametrize("value", ["SECRET", "1 a: z: a", " z:", "od d: a"])
def test_the_column_that_could_not_be_copied_is_named_in_any_language(context, column, value):
    statement = 'COPY "s"."t_1" ("a", "od d", "x, column y: z", "z", "q""r") FROM STDIN'
    assert _copied_column(context.format(table="t_1", column=column, value=value), statement) == column


@pytest.mark.parametrize(
    "context", ["", 'COPY t_1, line 12: "a: z"', "COPY t_1, Zeile 12", 'COPY other, line 1, z: "a"']
)
def test_a_value_is_never_named_as_a_column(context):
    assert _copied_column(context, 'COPY "s"."t_1" ("a", "z") FROM STDIN') is None
