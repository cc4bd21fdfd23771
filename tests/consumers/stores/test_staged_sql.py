"""An application's SQL over staged rows: its definition, its check by a store, and its effects on tables."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, inspect, select

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.staged_sql import StagedSql
from coranto_consumers.stores.staging import StageWriter

ROWS = Table("changes", MetaData(), Column("id", BigInteger), Column("text", Text))
TEXTS = Table(
    "texts", MetaData(), Column("id", BigInteger, primary_key=True, autoincrement=False), Column("text", Text)
)
PAGE = Path(__file__).parents[3] / "docs" / "spark.md"
COPY = "INSERT INTO {texts} (id, text) SELECT s.id, s.text FROM {stage} AS s WHERE s.text LIKE '%:%%'"


@pytest.mark.parametrize(
    ("rows", "statements", "tables", "problem"),
    [
        (ROWS, COPY, [TEXTS], "give a list of at least one statement"),
        (ROWS, [], [TEXTS], "give a list of at least one statement"),
        (ROWS, [COPY], [TEXTS, TEXTS], r"\{texts\} could mean several tables"),
        (ROWS, [COPY, "COMMIT"], [TEXTS], "SQL over changes, statement 2: begins with COMMIT"),
        (ROWS, ["DELETE FROM {stage}"], [Table("stage", MetaData())], r"\{stage\} could mean several tables"),
        (Table("own", MetaData(), Column("coranto_fence", Text)), [COPY], [TEXTS], "'coranto_fence' is reserved"),
    ],
)
def test_an_invalid_definition_is_refused_on_creation(rows, statements, tables, problem):
    with pytest.raises(InvalidInput, match=problem):
        StagedSql(rows, statements, tables)


def test_rows_need_exactly_the_columns_of_their_definition():
    changes = StagedSql(ROWS, [COPY], [TEXTS])
    with pytest.raises(InvalidInput, match="SQL over changes: the rows have no column 'text'"):
        changes.plan(["id"])
    with pytest.raises(InvalidInput, match="table changes: has no column 'more'"):
        changes.plan(["id", "text", "more"])


def test_each_database_checks_statements_without_running_them(store_url):
    store = SqlStore(store_url)

    for statement in (COPY.replace("s.text FROM", "s.word FROM"), "SELECT * FROM nowhere", "SELECT FROM WHERE"):
        refused = r"SQL over changes, statement 2: .*( does not accept it: |is not understood as)"
        with pytest.raises(InvalidInput, match=refused):
            StagedSql(ROWS, ["INSERT INTO {texts} (id) VALUES (1)", statement], [TEXTS]).prepare(store)

    with store.engine.connect() as connection:
        assert connection.execute(select(TEXTS)).all() == []
        assert not inspect(connection).has_table(ROWS.name)


def test_statements_see_only_the_rows_of_the_given_attempts(store_url):
    store, changes = SqlStore(store_url), StagedSql(ROWS, [COPY], [TEXTS])
    fence, _ = store.raise_fence("shard")
    stage = changes.prepare(store)
    for attempt, id_ in (("won", 1), ("lost", 2)):
        with StageWriter(store.url, stage, "shard", fence, attempt) as writer:
            writer.write([{"id": id_, "text": "100:%"}, {"id": id_ + 10, "text": "none"}])

    with store.engine.begin() as connection:
        changes.run(connection, stage, (), 0)
        changes.run(connection, stage, ["won"], 2)
        assert connection.execute(select(TEXTS)).all() == [(1, "100:%")]
        with pytest.raises(SqlStoreError, match="3 rows were staged but 2 are there"):
            changes.run(connection, stage, ["won"], 3)


def test_the_example_of_the_documentation_moves_money_in_each_database(store_url):
    section = PAGE.read_text().partition("### SQL of your own")[2]
    names: dict[str, Any] = {"DataFrame": object}
    exec(compile(re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0], PAGE, "exec"), names)
    store, [book], accounts = SqlStore(store_url), names["Transfers"].sql, names["ACCOUNTS"]
    stage = book.prepare(store)
    moves = [(1, "ada", "bob", 5), (2, "bob", "eve", 2), (3, "ada", "eve", 0)]
    with StageWriter(store.url, stage, "transfers", 1, "won") as writer:
        writer.write([dict(zip(("number", "payer", "payee", "amount"), each, strict=True)) for each in moves])

    with store.engine.begin() as connection:
        connection.execute(accounts.insert(), [{"id": name, "balance": Decimal(10)} for name in ("ada", "bob", "eve")])
        book.run(connection, stage, ["won"], 3)
        assert connection.execute(select(accounts).order_by("id")).all() == [("ada", 5), ("bob", 13), ("eve", 12)]
        assert connection.execute(select(names["MOVES"]).order_by("number")).all() == [(1, 5), (2, 2)]
