"""Tables whose changes cannot be read exactly are an error that contains the statement to run."""

from __future__ import annotations

from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import InvalidInput, PoisonRow, SourceChanged
from coranto.ingest.postgres.source import PostgresSource
from coranto.ingest.postgres.tables import Table, TableColumn, must_be_read_again, position_of
from tests.platform.ingest.lists import events
from tests.platform.ingest.postgres.database import ORDERS, Copies, Database

TABLE_ONLY = "CREATE TABLE orders (id int PRIMARY KEY);"
PLAIN = "CREATE TABLE orders (id int PRIMARY KEY, cents bigint); CREATE PUBLICATION shop FOR TABLE orders;"


async def opened(database: Database, **changes: Any) -> None:
    source = PostgresSource(database.options(**changes), "loads")
    try:
        await source.open({}, follow=False)
    finally:
        await source.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "problem", "remedy"),
    [
        (TABLE_ONLY, "there is no publication shop", "CREATE PUBLICATION shop FOR TABLE orders"),
        (TABLE_ONLY + "CREATE PUBLICATION shop", "has no tables", "ALTER PUBLICATION shop ADD TABLE orders"),
        (
            TABLE_ONLY + "CREATE PUBLICATION shop FOR TABLE orders WITH (publish = 'insert')",
            "leaves changes out",
            "ALTER PUBLICATION shop SET (publish = 'insert, update, delete, truncate')",
        ),
        (
            "CREATE TABLE orders (id int); CREATE PUBLICATION shop FOR TABLE orders",
            "has no primary key",
            "ALTER TABLE public.orders ADD PRIMARY KEY (id)",
        ),
        (
            "CREATE TABLE orders (id int NOT NULL); CREATE UNIQUE INDEX one ON orders (id);"
            "CREATE PUBLICATION shop FOR TABLE orders",
            "has no primary key",
            "ALTER TABLE public.orders REPLICA IDENTITY USING INDEX one",
        ),
        (
            PLAIN + "ALTER TABLE orders REPLICA IDENTITY NOTHING",
            "has the replica identity NOTHING",
            "ALTER TABLE public.orders REPLICA IDENTITY FULL",
        ),
        (
            PLAIN + "ALTER TABLE orders ADD note text",
            "does not give large values",
            "ALTER TABLE public.orders REPLICA IDENTITY FULL",
        ),
        (
            "CREATE TABLE orders (id int PRIMARY KEY, n int); CREATE PUBLICATION shop FOR TABLE orders (n)",
            "leaves id of the key of table public.orders out",
            "ALTER PUBLICATION shop SET TABLE orders (id, n)",
        ),
    ],
)
async def test_unreadable_tables_are_an_error_with_a_remedy(
    database: Database, before: str, problem: str, remedy: str
) -> None:
    database.execute(before)
    with pytest.raises(InvalidInput) as error:
        await opened(database)
    assert problem in str(error.value)
    for part in remedy.split(" (")[0].split(" one")[0].split(" orders"):
        assert part in str(error.value)
    database.execute(remedy)
    await opened(database)


@pytest.mark.integration
async def test_short_texts_need_no_full_replica_identity(database: Database) -> None:
    database.execute(PLAIN + "ALTER TABLE orders ADD note varchar(100)")
    await opened(database)


@pytest.mark.integration
async def test_the_field_of_the_operation_must_not_be_a_column(database: Database) -> None:
    database.execute(ORDERS)
    with pytest.raises(InvalidInput, match="has a column 'customer': choose another name"):
        await opened(database, operation="customer")


@pytest.mark.integration
async def test_a_policy_that_hides_rows_is_an_error(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1); ALTER TABLE orders ENABLE ROW LEVEL SECURITY")
    database.execute("DROP ROLE IF EXISTS hidden; CREATE ROLE hidden LOGIN REPLICATION PASSWORD 'secret'")
    database.execute("GRANT SELECT ON orders TO hidden")
    url = database.url.replace("postgres:secret", "hidden:secret")
    with pytest.raises(InvalidInput, match="row-level security"):
        await database.ingest(client, url=url).run()
    database.execute("ALTER ROLE hidden BYPASSRLS")
    assert (await database.ingest(client, url=url).run()).rows == 1
    database.execute("DROP OWNED BY hidden")


@pytest.mark.integration
async def test_a_recreated_table_is_an_error(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    await database.ingest(client).run()
    database.execute(f"DROP TABLE orders; {TABLE_ONLY} ALTER PUBLICATION shop ADD TABLE orders")
    with pytest.raises(SourceChanged, match=r"table public\.orders was created again"):
        await database.ingest(client).run()


@pytest.mark.integration
async def test_a_type_change_that_changes_the_text_of_values_rereads_the_table(
    client: JournalClient, database: Database
) -> None:
    """In UTC, PostgreSQL does not rewrite the table for this type change."""
    database.execute(f"ALTER DATABASE {database.name} SET timezone = 'UTC'")
    database.reconnect()
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, at timestamp); CREATE PUBLICATION shop FOR TABLE orders")
    database.execute("INSERT INTO orders VALUES (1, '2026-01-01 10:00')")
    await database.ingest(client).run()
    database.execute("ALTER TABLE orders ALTER at TYPE timestamptz")
    await database.ingest(client).run()
    copy = Copies(await events(client), exact=False)
    assert copy["public.orders"] == {1: {"id": 1, "at": "2026-01-01T10:00:00Z"}}


@pytest.mark.integration
async def test_a_renamed_key(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1)")
    await database.ingest(client).run()
    database.execute("UPDATE orders SET cents = 1; ALTER TABLE orders RENAME id TO number; UPDATE orders SET cents = 2")
    await database.ingest(client).run()
    assert [each.get("id", each.get("number")) for each in await events(client)] == [1] * 4


@pytest.mark.integration
async def test_names_that_need_quotes(client: JournalClient, database: Database) -> None:
    table = '"My Shop"."O\'rders ""2"'
    database.execute(f'CREATE SCHEMA "My Shop"; CREATE TABLE {table} ("Id %s" int PRIMARY KEY, "select" int)')
    database.execute(f'CREATE PUBLICATION "It\'s ""mine" FOR TABLE {table}; INSERT INTO {table} VALUES (1, 2), (2, 3)')
    await database.ingest(client, publication="It's \"mine").run()
    database.execute(f'UPDATE {table} SET "select" = 7 WHERE "select" = 3')
    await database.ingest(client, publication="It's \"mine").run()
    found = Copies(await events(client), "Id %s", exact=False)
    assert found['My Shop."O\'rders ""2"'] == {1: {"Id %s": 1, "select": 2}, 2: {"Id %s": 2, "select": 7}}


@pytest.mark.integration
async def test_a_row_with_a_reserved_column_is_poison(client: JournalClient, database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, _meta int); CREATE PUBLICATION shop FOR TABLE orders")
    database.execute("INSERT INTO orders VALUES (1, 2)")
    with pytest.raises(PoisonRow, match=r"postgres public\.orders, .*reserved for metadata"):
        await database.ingest(client).run()


COLUMN = TableColumn(1, "id", 23, -1, "integer", False)
NOTE = TableColumn(2, "note", 25, -1, "text", False)
TABLE = Table(5, "public", "orders", 7, 100, 100, False, "", ("id",), (COLUMN, NOTE), 0)


@pytest.mark.parametrize(
    ("changed", "is_again"),
    [
        ({}, False),
        ({"files": 101}, False),  # VACUUM FULL, TRUNCATE
        ({"columns": (COLUMN,)}, False),
        ({"columns": (COLUMN, NOTE._replace(name="text"))}, True),
        ({"columns": (COLUMN, NOTE._replace(shown="character varying(8)"))}, False),
        ({"columns": (COLUMN, NOTE._replace(shown="timestamp(3) with time zone"))}, True),
        ({"columns": (COLUMN, NOTE._replace(shown="integer")), "files": 101}, True),
        ({"columns": (COLUMN, NOTE, NOTE._replace(number=3))}, False),
        ({"columns": (COLUMN, NOTE, NOTE._replace(number=3, has_missing=True))}, True),
        ({"columns": (COLUMN, NOTE, NOTE._replace(number=3)), "files": 101}, True),
    ],
)
def test_column_changes_that_require_rereading(changed: dict[str, Any], is_again: bool) -> None:
    assert must_be_read_again(TABLE._replace(**changed), position_of(TABLE)) is is_again


def test_a_position_has_the_keys_of_earlier_positions() -> None:
    position = position_of(TABLE)
    for name in ("a", "b", "c", "d"):
        position = position_of(TABLE._replace(key=(name,)), position)
    assert position["keys"] == [["d"], ["c"], ["b"], ["a"]]
    assert position_of(TABLE._replace(key=("d",)), position)["keys"] == position["keys"]
