"""An application's statements are parsed in their database's dialect, and ambiguous ones refused."""

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.stores.sql_dialects import require_dialect
from coranto_consumers.stores.sql_text import require_statement

ALL = ("sqlite", "postgresql", "mysql")


def check(text: str, dialect: str) -> None:
    require_statement(text, ["accounts"], reserved=["gazette_checkpoints"], field="statement 1")
    require_dialect(text, dialect, ["accounts"], field="statement 1")


@pytest.mark.parametrize(
    ("dialects", "text"),
    [
        (ALL, "INSERT INTO {accounts} (id, n) SELECT s.id, s.n FROM {stage} AS s WHERE s.t <> 'a;b''d' -- it's\n;\n"),
        (
            ALL,
            "UPDATE {accounts} SET n = n + COALESCE((SELECT SUM(s.n) FROM {stage} AS s WHERE s.id = {accounts}.id), 0)",
        ),
        (ALL, "DELETE FROM {accounts} WHERE EXISTS (SELECT 1 FROM {stage} AS s WHERE s.id = {accounts}.id)"),
        (ALL, "WITH s AS (SELECT * FROM {stage} AS r) SELECT * FROM s"),
        (ALL, "(SELECT post(s.id) FROM {stage} AS s)"),
        (("sqlite", "mysql"), "REPLACE INTO {accounts} (id, n) SELECT s.id, replace(s.n, 'a', 'b') FROM {stage} AS s"),
        (("sqlite",), "INSERT OR REPLACE INTO {accounts} SELECT * FROM {stage} AS s"),
        (("sqlite",), "UPDATE OR IGNORE {accounts} SET n = 1"),
        (
            ("sqlite", "postgresql"),
            "INSERT INTO {accounts} SELECT * FROM {stage} AS s WHERE 1 ON CONFLICT (id) DO UPDATE SET n = excluded.n",
        ),
        (("mysql",), "INSERT INTO {accounts} SELECT * FROM {stage} AS s ON DUPLICATE KEY UPDATE n = 1"),
        (("mysql",), "update ignore {accounts} a set n = 1, m = 2; -- all"),
        (("mysql",), "DELETE FROM {accounts} WHERE id = 1 ORDER BY id LIMIT 3"),
        (
            ("postgresql",),
            "MERGE INTO {accounts} AS a USING {stage} AS s ON a.id = s.id WHEN MATCHED THEN UPDATE SET n = 1",
        ),
        (("postgresql",), "DELETE FROM {accounts} WHERE t = $q$ it's; COMMIT $q$ AND d #>> '{{a}}' = 'b'"),
    ],
)
def test_valid_statements_of_each_database_are_accepted(dialects, text):
    for dialect in dialects:
        check(text, dialect)


@pytest.mark.parametrize(
    ("dialect", "text", "problem"),
    [
        ("postgresql", "SELECT 1 /* /* */ , 2 */", "within a comment"),
        ("postgresql", "SELECT 1 /* /* */ 'a' */ INTO other /* ' */", "within a comment|INTO"),
        (
            "postgresql",
            "WITH RECURSIVE x AS (SELECT 1 AS n UNION ALL SELECT n FROM x) SEARCH BREADTH FIRST BY n SET o "
            'DELETE FROM"other"',
            "has DELETE with another target",
        ),
        (
            "postgresql",
            "WITH RECURSIVE x AS (SELECT 1 AS n UNION ALL SELECT n FROM x) SEARCH BREADTH FIRST BY n SET o "
            "UPDATE other SET n = 1",
            "has UPDATE with another target|writes to other",
        ),
        ("postgresql", "SELECT `a` FROM {stage} AS s", "backticks"),
        ("mysql", "UPDATE {accounts} SET n = 1 # '\n, m = 2", "has #|has '"),
        ("mysql", "SELECT 1 --1, 2\n FROM {stage} AS s", "-- without a space"),
        ("mysql", "SELECT $q$ FROM {stage} AS s WHERE a = $q$", "dollar signs|without a name"),
        ("sqlite", "SELECT [a'] FROM {stage} AS s WHERE x = 'b'", r"has \[|has '"),
        ("sqlite", "SELECT [a] FROM {stage} AS s", r"has \["),
        ("sqlite", "SELECT 1 -- x\rFROM {stage} AS s", "carriage return"),
        ("postgresql", "SELECT FROM WHERE )(", "is not understood as postgresql"),
        ("mysql", "DELETE FROM {accounts} USING other AS accounts", "after DELETE"),
    ],
)
def test_statements_that_databases_parse_differently_are_refused(dialect, text, problem):
    with pytest.raises(InvalidInput, match=problem):
        check(text, dialect)
