"""Statements of an application are refused if they are several, have unknown placeholders or end the transaction."""

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.stores.sql_text import filled, require_statement


def check(text: str) -> None:
    require_statement(text, ["accounts"], reserved=["gazette_checkpoints"], field="statement 1")


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO {accounts} SELECT * FROM {stage} AS s WHERE s.text <> 'a;b{c}''d' -- it's; {d}\n;\n",
        " /* why; */ WITH s AS (SELECT * FROM {stage} AS r) UPDATE {accounts} AS a SET n = 1 FROM s WHERE a.id = s.id",
        "insert or replace into {accounts} select id, replace(name, 'a', 'b') from {stage} as s",
        "INSERT INTO {accounts} SELECT * FROM {stage} AS s ON CONFLICT (id) DO UPDATE SET n = excluded.n",
        "INSERT INTO {accounts} SELECT * FROM {stage} AS s ON DUPLICATE KEY UPDATE n = 1",
        "MERGE INTO {accounts} AS a USING {stage} AS s ON a.id = s.id WHEN MATCHED THEN UPDATE SET n = 1 "
        "WHEN NOT MATCHED THEN INSERT (id) VALUES (s.id)",
        "DELETE FROM {accounts} WHERE id IN (SELECT id FROM {stage} AS s) AND text = $q$ it's; COMMIT $q$",
        'REPLACE INTO {accounts} SELECT s."into", s.x AS `into` FROM {stage} AS s',
        """INSERT INTO {accounts} SELECT 'a \\" b', "it\\'s put into" FROM {stage} AS s""",
        "(SELECT post(s.id) FROM {stage} AS s)",
        "SELECT (REPLACE (s.text, 'a', 'b')), (insert(s.text, 1, 2, 'x')) FROM {stage} AS s FOR UPDATE",
        'UPDATE {accounts} AS "a, b" SET n = (SELECT o.n FROM {stage} AS s JOIN other AS o ON o.id = s.id)',
        "update ignore {accounts} a set n = 1, m = 2; -- all",
        "DELETE FROM {accounts}",
        "DELETE FROM {accounts} `x` WHERE(id = 1) ORDER BY id LIMIT 3",
        "WITH x AS (DELETE FROM ONLY {accounts}) SELECT 1",
        "UPDATE {accounts} SET n = o.n FROM {stage} AS s JOIN other AS o ON o.id = s.id",
        "INSERT INTO {accounts}(id, n) SELECT s.id, s.n FROM {stage} AS s",
    ],
)
def test_one_statement_that_writes_to_its_tables_is_accepted(text):
    check(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("COMMIT", "begins with COMMIT, and may be INSERT"),
        ("  -- why\n ROLLBACK TO x", "begins with ROLLBACK"),
        ("CREATE TABLE x (n INT)", "begins with CREATE"),
        ("SET TRANSACTION READ ONLY", "begins with SET"),
        ("CALL post()", "begins with CALL"),
        ("SELECT 1; COMMIT", "more than one statement"),
        ("SELECT 1 /* /* */ ; COMMIT */", "more than one statement"),
        ("SELECT a$b$ ; COMMIT; SELECT 1 AS c$b$", "more than one statement"),
        ("SELECT 1 -- x\r; COMMIT", "more than one statement"),
        (r"SELECT E'\'; COMMIT; --'", "backslash before a quote"),
        (r"SELECT '\' ; COMMIT; SELECT ''", "backslash before a quote"),
        (r'SELECT "\"" ; COMMIT; SELECT "\""', 'backslash before a quote, .*: write "" for'),
        ("SELECT 'it", "has ' without its other end"),
        ("SELECT /* 1", r"has /\* without its other end"),
        ("SELECT /*! COMMIT */ 1", r"comment /\*!"),
        ("SELECT {accuonts}", r"has the placeholder \{accuonts\}, and there are \{stage\}, \{accounts\}"),
        ("SELECT {0}", r"has the placeholder \{0\}"),
        ('SELECT * FROM "{accounts}"', "quotes the placeholder"),
        ("SELECT * FROM {stage}", r"\{stage\} without a name"),
        ("INSERT INTO other SELECT * FROM {stage} AS s", "writes to other: add the table"),
        ("WITH x AS (UPDATE other SET n = 1 RETURNING n) SELECT * FROM x", "writes to other"),
        ("WITH x AS (DELETE FROM {accounts})UPDATE other SET n = 1", "writes to other: add the table"),
        ("DELETE FROM {stage} AS s", "writes to its own rows"),
        ("SELECT * INTO other FROM {stage} AS s", "has an INTO that is none of INSERT"),
        ('WITH x AS (SELECT 1) SELECT 1 AS "n"INTO TEMP other FROM x', "has an INTO"),
        ("SELECT * INTO {accounts} FROM {stage} AS s", "has an INTO"),
        ("SELECT 1 INTO/**/OUTFILE 'x'", "has an INTO"),
        ('INSERT INTO"other" SELECT * FROM {stage} AS s', "has an INTO"),
        ("INSERT other SELECT * FROM {stage} AS s", "INSERT without a plain target after it: write INSERT INTO"),
        ("INSERT{accounts} SELECT * FROM {stage} AS s", "INSERT without"),
        ("insert ignore`other` SELECT * FROM {stage} AS s", "INSERT without"),
        ("WITH x AS (SELECT 1) REPLACE LOW_PRIORITY other SELECT * FROM x", "REPLACE without"),
        ("DELETE other FROM other JOIN {accounts}", "DELETE without a plain target after it: write DELETE FROM"),
        ('DELETE FROM"other"', "DELETE without"),
        ('UPDATE"other" SET n = 1', "UPDATE without"),
        ("UPDATE (other) SET n = 1", "writes to "),
        ("UPDATE {accounts}, other SET other.n = 1", "has ', other SET other.n = 1' after UPDATE"),
        ("UPDATE {accounts} AS a LEFT JOIN other AS o ON a.id = o.id SET o.n = 1", "after UPDATE {name}, where only"),
        ("UPDATE {accounts} STRAIGHT_JOIN other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} JOIN (other) ON 1 SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} AS `a`, other SET other.n = 1", "after UPDATE"),
        ('UPDATE {accounts} AS "a", other SET other.n = 1', "after UPDATE"),
        ("UPDATE {accounts} PARTITION (p0), other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} USE INDEX (i), other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} # SET\n, other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} SET$x, other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts} SET\xa0x, other SET other.n = 1", "after UPDATE"),
        ("UPDATE {accounts}.other SET n = 1", "after UPDATE"),
        ("WITH x AS (SELECT 1) UPDATE {accounts}", "has nothing after UPDATE"),
        (
            "DELETE FROM {accounts} AS a, other USING {accounts} AS a JOIN other",
            "after DELETE FROM {name}, where only",
        ),
        ("DELETE FROM {accounts}.*, other.* USING {accounts} JOIN other", "after DELETE"),
        ("DELETE FROM {accounts} USING other AS accounts", "after DELETE"),
        ("DELETE FROM {accounts} WHERE$x, other USING {accounts} JOIN other", "after DELETE"),
        ('SELECT * FROM "Gazette_Checkpoints"', "names gazette_checkpoints, which only the consumer"),
    ],
)
def test_other_statements_are_refused_with_the_reason(text, problem):
    with pytest.raises(InvalidInput, match=f"statement 1: .*{problem}"):
        check(text)


def test_placeholders_are_replaced_only_outside_literals_and_comments():
    text = "SELECT '{stage}', \"{stage}\" /* {stage} */ FROM {stage} AS s; -- {stage}"
    assert filled(text, {"stage": "(x)"}) == "SELECT '{stage}', \"{stage}\" /* {stage} */ FROM (x) AS s -- {stage}"
