"""Rows of tables and their changes are written to a stream, each once, despite failures."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import InvalidInput, PoisonRow, Unavailable
from coranto.ingest.engine import Ingest
from coranto.ingest.postgres.source import PostgresSource
from coranto.ingest.progress import load
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from tests.platform.ingest.lists import STREAM, events, until
from tests.platform.ingest.postgres.database import ORDERS, SLOT, Copies, Database

pytestmark = pytest.mark.integration

THE_SLOT = "pg_replication_slots WHERE slot_name = %s"


async def run(ingest: Ingest) -> int:
    """Read all available rows and changes. Return the number of rows."""
    return (await ingest.run()).rows


def facts(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "_meta"}


async def test_rows_are_read_first_and_then_their_changes(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1, 'ada', 500), (2, 'bob', NULL)")
    assert await run(database.ingest(client)) == 2
    database.execute("BEGIN; INSERT INTO orders VALUES (3, 'eve', 7); UPDATE orders SET cents = 1 WHERE id = 2; COMMIT")
    database.execute("DELETE FROM orders WHERE id = 1")
    assert await run(database.ingest(client)) == 3
    assert await run(database.ingest(client)) == 0
    found = {(each["_meta"]["op"], each["id"]): each for each in await events(client)}
    assert {name: facts(each) for name, each in found.items()} == {
        ("read", 1): {"id": 1, "customer": "ada", "cents": 500, "version": 0},
        ("read", 2): {"id": 2, "customer": "bob", "cents": None, "version": 0},
        ("insert", 3): {"id": 3, "customer": "eve", "cents": 7, "version": 0},
        ("update", 2): {"id": 2, "customer": "bob", "cents": 1, "version": 0},
        ("delete", 1): {"id": 1, "customer": "ada", "cents": 500, "version": 0},
    }
    update, insert, delete = (found[each]["_meta"] for each in (("update", 2), ("insert", 3), ("delete", 1)))
    assert update["before"] == {"id": 2, "customer": "bob", "cents": None, "version": 0}
    assert (update["table"], update["xid"], update["seq"]) == ("public.orders", insert["xid"], 2)
    assert update["lsn"] == insert["lsn"] < delete["lsn"]
    assert delete["deleted"] is True
    assert "before" not in insert
    assert found["read", 1]["_meta"]["lsn"] < update["lsn"]


async def test_a_transaction_on_several_tables_is_one_read(database: Database) -> None:
    database.execute(ORDERS)
    database.execute("CREATE TABLE lines (a int, b int, PRIMARY KEY (a, b)); ALTER PUBLICATION shop ADD TABLE lines")
    source = PostgresSource(database.options(), "loads")
    await source.open({}, follow=True)
    try:
        done: set[str] = set()
        while len(done) < 2:
            reads = await source.read(1000) or ()
            done |= {each.split for each in reads if each.split != "log" and each.position["done"]}
        database.execute("BEGIN; INSERT INTO orders VALUES (1); INSERT INTO lines VALUES (1, 7), (1, 8); COMMIT")
        while not (found := [rows for each in reads if (rows := list(each.rows))]):
            reads = await source.read(1) or ()
        [rows] = found
        assert [row.key for row in rows] == ["public.orders/1", "public.lines/1/7", "public.lines/1/8"]
    finally:
        await source.close()


async def test_rows_changed_during_the_snapshot_are_correct(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders SELECT n, 'c' || n, n FROM generate_series(1, 3000) n")
    end = threading.Event()

    def write() -> None:
        chance = random.Random(3)
        with database.connect() as connection:
            while not end.is_set():
                with connection.transaction():
                    for _ in range(chance.randrange(1, 5)):
                        number = chance.randrange(1, 4000)
                        connection.execute("DELETE FROM orders WHERE id = %s AND version %% 3 = 2", [number])
                        connection.execute(
                            "INSERT INTO orders VALUES (%s, 'new', 0) ON CONFLICT (id) DO UPDATE "
                            "SET cents = orders.cents + 1, version = orders.version + 1",
                            [number],
                        )

    writer = threading.Thread(target=write)
    ingest = database.ingest(client, poll_seconds=1.0)
    ingest.spec = database.spec(given={"batch_bytes": 20_000, "batch_seconds": 0.05})
    running = asyncio.create_task(ingest.run(follow=True))
    writer.start()
    try:
        await until(lambda: ingest.report.rows > 5000)
    finally:
        end.set()
        await asyncio.to_thread(writer.join)
        ingest.stop()
        await running
    await run(database.ingest(client))
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_a_changed_key_is_a_deletion_and_an_insertion(client: JournalClient, database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, cents bigint); CREATE PUBLICATION shop FOR TABLE orders"
    )
    database.execute("INSERT INTO orders VALUES (1, 5), (2, 6)")
    await run(database.ingest(client))
    database.execute("UPDATE orders SET id = 10 WHERE id = 1; UPDATE orders SET cents = 9 WHERE id = 2")
    await run(database.ingest(client, operation="did"))
    found = [each for each in await events(client) if each["_meta"]["op"] != "read"]
    assert sorted((each["did"], each["id"], each.get("cents", "-")) for each in found) == [
        ("delete", 1, "-"),
        ("insert", 10, 5),
        ("update", 2, 9),
    ]
    assert all(("key_changed" in each["_meta"]) == (each["id"] != 2) for each in found)


async def test_large_unchanged_values_are_included(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("ALTER TABLE orders ALTER customer SET STORAGE EXTERNAL")
    database.execute("INSERT INTO orders VALUES (1, repeat('x', 20000), 1)")
    await run(database.ingest(client))
    database.execute("UPDATE orders SET cents = 2")
    await run(database.ingest(client))
    assert Copies(await events(client))["public.orders"] == database.rows()
    assert len((await events(client))[-1]["customer"]) == 20_000


async def test_missing_large_values_are_errors_or_omitted(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("ALTER TABLE orders ALTER customer SET STORAGE EXTERNAL")
    database.execute("INSERT INTO orders VALUES (1, repeat('x', 20000), 1)")
    await run(database.ingest(client))
    database.execute("ALTER TABLE orders REPLICA IDENTITY DEFAULT; UPDATE orders SET cents = 2")
    with pytest.raises(InvalidInput, match=r"run ALTER TABLE public\.orders REPLICA IDENTITY FULL"):
        await run(database.ingest(client))
    database.execute("ALTER TABLE orders REPLICA IDENTITY FULL; UPDATE orders SET cents = 3")
    with pytest.raises(PoisonRow, match=r"change 1 of the transaction at .* lacks customer: .*`toast: omit`"):
        await run(database.ingest(client))
    assert await run(database.ingest(client, omits_toast=True)) == 2
    _, lacking, last = await events(client)
    assert facts(lacking) == {"id": 1, "cents": 2, "version": 0}
    assert lacking["_meta"]["unchanged"] == ["customer"]
    assert len(last["customer"]) == 20_000


async def test_a_truncate_is_an_error_an_event_or_ignored(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1), (2)")
    await run(database.ingest(client))
    database.execute("INSERT INTO orders VALUES (3)")
    database.execute("TRUNCATE orders")
    database.execute("INSERT INTO orders VALUES (4)")
    with pytest.raises(PoisonRow, match=r"table public.orders: the row is a TRUNCATE.*`truncate: event`"):
        await run(database.ingest(client))
    assert await run(database.ingest(client, truncate="event", operation="op")) == 2
    found = await events(client)
    assert sorted(each["_meta"]["op"] for each in found) == ["insert", "insert", "read", "read", "truncate"]
    assert [each["op"] for each in found if each["_meta"]["op"] == "truncate"] == ["truncate"]
    database.execute("TRUNCATE orders")
    assert await run(database.ingest(client, truncate="skip")) == 0


async def test_a_truncate_keeps_its_place_in_a_stream_of_one_segment(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1), (2)")

    async def again() -> None:
        given = database.spec(truncate="event")
        assert given.create is not None
        given = replace(given, create=replace(given.create, segments=1))
        await run(Ingest(client, given, PostgresSource(given.options, given.name)))

    await again()
    database.execute("TRUNCATE orders")
    database.execute("INSERT INTO orders VALUES (2, 'new'), (3, 'too')")
    await again()
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_columns_are_added_renamed_changed_and_dropped(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders SELECT n, 'c', n FROM generate_series(1, 5) n")
    ingest = database.ingest(client)
    running = asyncio.create_task(ingest.run(follow=True))

    await until(lambda: ingest.report.rows >= 5)

    async def is_equal() -> bool:
        return dense(Copies(await events(client), exact=False)["public.orders"]) == dense(database.rows())

    await until(is_equal)
    for statement in (
        "ALTER TABLE orders ADD note text DEFAULT 'none'",
        "INSERT INTO orders VALUES (6, 'c', 6, 0, 'mine')",
        "ALTER TABLE orders RENAME customer TO buyer",
        "UPDATE orders SET buyer = 'new' WHERE id = 6",
        "ALTER TABLE orders ALTER cents TYPE text USING 'cents ' || cents",
        "UPDATE orders SET cents = 'x' WHERE id = 1",
        "BEGIN; ALTER TABLE orders ADD two int; UPDATE orders SET two = 2 WHERE id = 2; COMMIT",
    ):
        database.execute(statement)
        if not statement.startswith("INSERT"):
            await until(is_equal)
    ingest.stop()
    await running
    database.execute("ALTER TABLE orders DROP note; UPDATE orders SET version = 1 WHERE id = 1")
    assert await run(database.ingest(client)) == 1, "dropping a column does not make it read all rows again"
    assert Copies(await events(client), exact=False)["public.orders"][1] == database.rows()[1]


def dense(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return rows without nulls, because adding a column without values changes no row."""
    return {key: {name: value for name, value in row.items() if value is not None} for key, row in rows.items()}


async def test_an_added_table_is_read_from_its_beginning(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("CREATE TABLE lines (id int PRIMARY KEY); INSERT INTO lines VALUES (1), (2)")
    await run(database.ingest(client))
    ingest = database.ingest(client)
    running = asyncio.create_task(ingest.run(follow=True))
    database.execute("ALTER PUBLICATION shop ADD TABLE lines")
    database.execute("INSERT INTO lines VALUES (3)")

    async def is_equal() -> bool:
        return Copies(await events(client))["public.lines"] == database.rows("lines")

    await until(is_equal)
    ingest.stop()
    await running


async def test_the_snapshot_continues_after_the_last_key(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders SELECT n, repeat('c', 200), n FROM generate_series(1, 2000) n")
    ingest = Ingest(
        client, given := database.spec(given={"batch_bytes": 40_000}), PostgresSource(given.options, "loads")
    )
    running = asyncio.create_task(ingest.run(follow=True))
    await until(lambda: ingest.report.batches >= 2)
    ingest.stop()
    assert 0 < (await running).rows < 2000
    database.execute(
        "UPDATE orders SET cents = 0, version = 1 WHERE id % 100 = 0; DELETE FROM orders WHERE id % 100 = 1"
    )
    await run(database.ingest(client))
    found = await events(client)
    assert Copies(found)["public.orders"] == database.rows()
    reads = [each["id"] for each in found if each["_meta"]["op"] == "read"]
    assert len(reads) == len(set(reads)) < 2000


async def test_a_transaction_that_is_too_large_is_an_error_or_divided(
    client: JournalClient, database: Database
) -> None:
    database.execute(ORDERS)
    await run(database.ingest(client))
    database.execute("INSERT INTO orders SELECT n, repeat('c', 100), n FROM generate_series(1, 5000) n")
    with pytest.raises(InvalidInput, match=r"more than 100000 bytes of changes: .*`larger: divide`"):
        await run(database.ingest(client, transaction_bytes=100_000))
    given = database.spec(given={"batch_bytes": 1000}, transaction_bytes=100_000, divides=True)
    ingest = Ingest(client, given, PostgresSource(given.options, "loads"))
    running = asyncio.create_task(ingest.run(follow=True))
    await until(lambda: ingest.report.batches >= 2)
    ingest.stop()
    assert 0 < (await running).rows < 5000
    assert "+" in ingest.report.progress.splits["log"], "it was divided"
    await run(database.ingest(client, transaction_bytes=100_000, divides=True))
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_the_ingest_survives_restarts_of_the_server(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1)")
    ingest = database.ingest(client)
    running = asyncio.create_task(ingest.run(follow=True))
    await until(lambda: ingest.report.rows == 1)
    for number in (2, 3):
        database.execute("INSERT INTO orders VALUES (%s)", number)
        database.reconnect()
        await asyncio.to_thread(database.server.restart, crash=number == 3)
        database.execute("INSERT INTO orders VALUES (%s)", number + 10)
    await until(lambda: ingest.report.rows == 5)
    ingest.stop()
    await running
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_one_of_two_processes_reads_and_the_other_takes_over(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders SELECT n, 'c', n FROM generate_series(1, 100) n")
    both = [database.ingest(client), database.ingest(client)]
    running = [asyncio.create_task(each.run(follow=True)) for each in both]
    await until(lambda: sum(each.report.rows for each in both) == 100)
    first = max((0, 1), key=lambda at: both[at].report.rows)
    both[first].stop()
    await running[first]
    database.execute("UPDATE orders SET version = 1")
    await until(lambda: both[1 - first].report.rows >= 100)
    both[1 - first].stop()
    await running[1 - first]
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_the_lag_and_the_retained_log_of_the_server(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1)")
    source = PostgresSource(database.options(), "loads")
    assert (await source.lag({}))["public.orders"] > 0
    assert await source.retained() == 0, "there is no slot yet"
    ingest = database.ingest(client)
    await run(ingest)
    splits = ingest.report.progress.splits
    before = await source.lag(splits)
    assert set(before) == {"log"}
    database.execute("INSERT INTO orders SELECT n, repeat('c', 1000), n FROM generate_series(2, 1000) n")
    assert (await source.lag(splits))["log"] > before["log"] + 1_000_000
    retained = await source.retained()
    assert retained is not None
    assert retained > 1_000_000
    ingest = database.ingest(client)
    await run(ingest)
    assert (await source.lag(ingest.report.progress.splits))["log"] < 1_000_000
    assert ingest.metrics.retained.labels("loads")._value.get() >= 0
    async with BatchWriter[Any](client, STREAM) as writer:
        _, progress = await load(writer, "loads")
    confirmed = f"SELECT confirmed_flush_lsn::text FROM {THE_SLOT}"  # The server may remove ingested parts of its log.
    await until(lambda: database.execute(confirmed, SLOT) == [(progress.splits["log"].partition("@")[0],)])


async def test_the_server_may_remove_its_log_even_if_no_row_changes(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("CREATE TABLE other (n int, PRIMARY KEY (n))")
    await run(database.ingest(client))
    [before] = database.execute(f"SELECT confirmed_flush_lsn FROM {THE_SLOT}", SLOT)
    database.execute("INSERT INTO other SELECT * FROM generate_series(1, 10000)")
    await run(database.ingest(client))
    moved = f"SELECT confirmed_flush_lsn - %s::pg_lsn > 100000 FROM {THE_SLOT}"
    await until(lambda: database.execute(moved, before[0], SLOT) == [(True,)])


async def test_partitions_filters_and_column_lists(client: JournalClient, database: Database) -> None:
    database.execute(
        """CREATE TABLE orders (id int, part int, secret text, cents int, PRIMARY KEY (id, part))
        PARTITION BY LIST (part);
        CREATE TABLE orders_1 PARTITION OF orders FOR VALUES IN (1);
        CREATE TABLE orders_2 PARTITION OF orders FOR VALUES IN (2);
        INSERT INTO orders VALUES (1, 1, 'x', 5), (2, 2, 'y', -5), (3, 2, 'z', 6);
        CREATE PUBLICATION shop FOR TABLE orders (id, part, cents) WHERE (part > 0 AND id < 100)
        WITH (publish_via_partition_root)"""
    )
    assert await run(database.ingest(client, omits_toast=True)) == 3
    database.execute(
        "UPDATE orders SET cents = 7 WHERE id = 1; INSERT INTO orders VALUES (100, 1, 's', 1), (4, 1, 's', 1)"
    )
    assert await run(database.ingest(client, omits_toast=True)) == 2
    found = await events(client)
    assert {each["_meta"]["table"] for each in found} == {"public.orders"}
    assert not any("secret" in each for each in found)
    assert Copies(found, exact=False)["public.orders"] == {
        row[0]: {"id": row[0], "part": row[1], "cents": row[2]}
        for row in database.execute("SELECT id, part, cents FROM orders WHERE id < 100")
    }


async def test_creating_a_slot_waits_for_a_writing_transaction(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    ingest = database.ingest(client)
    with database.connect() as other:
        with other.transaction():
            other.execute("INSERT INTO orders VALUES (1, 'open')")
            running = asyncio.create_task(ingest.run(follow=True))
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%%' AND datname = %s"
            )
            await until(lambda: database.execute(waits, database.name) == [(1,)])
            assert ingest.report.rows == 0
        await until(lambda: ingest.report.rows == 1)
    ingest.stop()
    await running
    assert Copies(await events(client))["public.orders"] == database.rows()


async def test_prepared_transactions_are_read_after_their_commit(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    await run(database.ingest(client))
    database.execute("BEGIN; INSERT INTO orders VALUES (1); PREPARE TRANSACTION 'one'")
    database.execute("INSERT INTO orders VALUES (2)")
    assert await run(database.ingest(client)) == 1
    database.execute("COMMIT PREPARED 'one'")
    assert await run(database.ingest(client)) == 1


async def test_a_server_that_does_not_answer_is_unavailable(client: JournalClient, database: Database) -> None:
    source = PostgresSource(database.options(url="postgresql://127.0.0.1:1/nothing"), "loads")
    with pytest.raises(Unavailable, match="a call to the server failed"):
        await source.open({}, follow=False)
    await source.close()
