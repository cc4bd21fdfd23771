"""The committed messages of journals by DuckDB, which reads the same lines without Coranto's code.

It states the rules of `coranto.messages.sequencer` for rows: a message of a transaction is committed if
it is new, and the next acknowledgement of its producer in its journal has a clock that is not smaller.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb

_LINES = """
CREATE TABLE lines AS
WITH read AS (SELECT journal, number, begin, line, line ->> '$._meta.uuid' AS uuid FROM raw)
SELECT journal, number, begin,
       right(uuid, 12) AS producer,
       ('0x' || substr(uuid, 16, 3) || substr(uuid, 10, 4) || substr(uuid, 1, 8))::BIGINT * 16
           + ((('0x' || substr(uuid, 20, 4))::INTEGER >> 10) & 15) AS clock,
       ('0x' || substr(uuid, 20, 4))::INTEGER & 1023 AS flags,
       (line ->> '$.n')::BIGINT AS n, line ->> '$.k' AS k, (line ->> '$.v')::DOUBLE AS v
FROM read
"""
_COMMITTED = """
CREATE TABLE committed AS
WITH acknowledgements AS (SELECT journal, producer, number, clock FROM lines WHERE flags = 2),
decided AS (
    SELECT each.*, earlier.clock AS decided, earlier.number AS since
    FROM (SELECT * FROM lines WHERE flags = 1) AS each
    ASOF LEFT JOIN acknowledgements AS earlier
        ON each.journal = earlier.journal AND each.producer = earlier.producer AND each.number > earlier.number
),
acknowledged AS (
    SELECT decided.*, later.clock AS acknowledged
    FROM decided
    ASOF LEFT JOIN acknowledgements AS later
        ON decided.journal = later.journal AND decided.producer = later.producer AND decided.number < later.number
),
in_transactions AS (
    SELECT *, max(clock) OVER (
        PARTITION BY journal, producer, since ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS largest
    FROM acknowledged
),
outside AS (
    SELECT *, max(clock) OVER (
        PARTITION BY journal, producer ORDER BY number ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS largest
    FROM lines WHERE flags = 0
)
SELECT journal, begin, n, k, v FROM in_transactions
WHERE clock > coalesce(decided, 0) AND clock > coalesce(largest, 0) AND clock <= acknowledged
UNION ALL SELECT journal, begin, n, k, v FROM outside WHERE clock > coalesce(largest, 0)
UNION ALL SELECT journal, begin, n, k, v FROM lines WHERE producer IS NULL
"""


class Truth:
    """The committed messages of journals, given as files of lines, in the table `committed`."""

    def __init__(self, journals: Mapping[str, Path], spill: Path) -> None:
        self.db = duckdb.connect(config={"temp_directory": str(spill), "preserve_insertion_order": True})
        self.db.execute("CREATE TABLE raw (journal VARCHAR, number BIGINT, begin BIGINT, line VARCHAR)")
        for journal, path in journals.items():
            self.db.execute(
                """
                INSERT INTO raw
                SELECT ?, number, (sum(strlen(line) + 1) OVER (ORDER BY number) - strlen(line) - 1)::BIGINT, line
                FROM (
                    SELECT row_number() OVER () AS number, line
                    FROM read_csv(?, columns = {'line': 'VARCHAR'}, header = false, auto_detect = false,
                                  delim = '\t', quote = '', escape = '', parallel = false)
                )
                """,
                [journal, str(path)],
            )
        self.db.execute(_LINES)
        self.db.execute("DROP TABLE raw")
        self.db.execute(_COMMITTED)

    def __enter__(self) -> "Truth":
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def count(self, what: str) -> int:
        """Return the number of rows of a query's FROM clause."""
        found = self.db.execute(f"SELECT count(*) FROM {what}").fetchone()
        assert found is not None
        return int(found[0])

    def differences(self, found: str, expected: str, columns: Sequence[str]) -> list[tuple[str, int, list[object]]]:
        """Compare two queries' FROM clauses as multisets of rows.

        Return the number of missing and extra rows, and the first of them, or nothing if there are none.
        """
        listed, differences = ", ".join(columns), []
        for what, these, those in (("missing", expected, found), ("too much", found, expected)):
            rest = f"(SELECT {listed} FROM {these} EXCEPT ALL SELECT {listed} FROM {those})"
            if count := self.count(rest):
                differences.append((what, count, self.db.execute(f"SELECT * FROM {rest} LIMIT 5").fetchall()))
        return differences
