"""A server that cannot be read is an error that contains the statement to run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from coranto.client import JournalClient
from coranto.errors import CorantoError, InvalidInput, SourceChanged
from coranto.ingest.postgres.source import PostgresSource
from tests.platform.ingest.lists import events, until
from tests.platform.ingest.postgres.database import ORDERS, SETTINGS, SLOT, Copies, Database
from tests.servers.sql import PostgresServer, PostgresStandby

pytestmark = pytest.mark.integration


async def refused(database: Database, **changes: object) -> str:
    """Return the error of opening a source."""
    source = PostgresSource(database.options(**changes), "loads")
    try:
        with pytest.raises(CorantoError) as error:
            await source.open({}, follow=False)
    finally:
        await source.close()
    assert not error.value.retriable, error.value
    return str(error.value)


async def test_wal_level_is_not_logical() -> None:
    with PostgresServer() as server, Database(server) as database:
        database.execute(ORDERS)
        assert "run ALTER SYSTEM SET wal_level = 'logical', and restart the server" in await refused(database)
        database.execute("ALTER SYSTEM SET wal_level = 'logical'")
        database.reconnect()
        server.restart()
        source = PostgresSource(database.options(), "loads")
        await source.open({}, follow=False)
        await source.close()


async def test_a_role_without_rights(database: Database) -> None:
    database.execute(ORDERS)
    database.execute("DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN PASSWORD 'secret'")
    url = database.url.replace("postgres:secret", "reader:secret")
    found = await refused(database, url=url)
    assert "run ALTER ROLE reader REPLICATION" in found
    database.execute("ALTER ROLE reader REPLICATION")
    found = await refused(database, url=url)
    assert "run GRANT USAGE ON SCHEMA public TO reader and GRANT SELECT ON public.orders TO reader" in found
    database.execute("GRANT USAGE ON SCHEMA public TO reader; GRANT SELECT ON public.orders TO reader")
    source = PostgresSource(database.options(url=url), "loads")
    await source.open({}, follow=False)
    await source.close()
    database.execute("DROP OWNED BY reader")


async def test_a_wrong_password_database_or_role(database: Database) -> None:
    for wrong in (
        database.url.replace("secret", "guess"),
        database.url.replace(database.name, "nowhere"),
        database.url.replace("postgres:secret", "stranger:secret"),
    ):
        found = await refused(database, url=wrong)
        assert "the server refuses" in found
        assert "guess" not in found


async def test_a_slot_of_another_kind(database: Database) -> None:
    database.execute(ORDERS)
    database.execute("SELECT pg_create_physical_replication_slot('mine')")
    assert "a slot of physical replication" in await refused(database, slot="mine")
    database.execute("SELECT pg_drop_replication_slot('mine')")


async def run(client: JournalClient, database: Database) -> None:
    await database.ingest(client).run()


async def test_a_dropped_or_recreated_slot_is_an_error(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    database.execute("INSERT INTO orders VALUES (1)")
    await run(client, database)
    database.drop_slots()
    database.execute("INSERT INTO orders VALUES (2)")
    with pytest.raises(SourceChanged, match=f"slot {SLOT} is gone, and with it the changes after .*another stream"):
        await run(client, database)
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", SLOT)
    with pytest.raises(SourceChanged, match="the slot was created again, or another program reads it"):
        await run(client, database)


async def test_a_slot_invalidated_by_the_server_is_an_error(client: JournalClient) -> None:
    with PostgresServer(*SETTINGS, "max_slot_wal_keep_size=1MB", "min_wal_size=32MB", "max_wal_size=32MB") as server:
        with Database(server) as database:
            database.execute(ORDERS)
            await run(client, database)
            status = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = %s"
            while database.execute(status, SLOT) != [(True,)]:
                database.execute("SELECT pg_switch_wal()")
                database.execute("INSERT INTO orders SELECT coalesce(max(id), 0) + 1 FROM orders")
                database.execute("CHECKPOINT")
            with pytest.raises(SourceChanged, match=r"invalidated .*max_slot_wal_keep_size.*pg_drop_replication_slot"):
                await run(client, database)


async def test_a_dropped_or_recreated_publication_is_an_error(client: JournalClient, database: Database) -> None:
    database.execute(ORDERS)
    await run(client, database)
    database.execute("DROP PUBLICATION shop")
    database.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(InvalidInput, match="run CREATE PUBLICATION shop FOR TABLE"):
        await run(client, database)
    database.execute("CREATE PUBLICATION shop FOR TABLE orders")
    with pytest.raises(SourceChanged, match="taken out of the publication shop and added again"):
        await run(client, database)


async def test_a_failover_without_the_slot_is_an_error(client: JournalClient) -> None:
    with PostgresServer(*SETTINGS) as primary, PostgresStandby(primary, *SETTINGS) as standby:
        with Database(primary) as database:
            database.execute(ORDERS)
            await run(client, database)
            before, port = database.url, f":{standby.port}/"
            there = before.replace(f":{primary.port}/", port)
            source = PostgresSource(database.options(url=there), "loads")
            with pytest.raises(CorantoError, match="the server is a standby"):
                await source.open({}, follow=False)
            await source.close()
        primary.stop()
        standby.promote()
        await until(lambda: standby.holds("SELECT NOT pg_is_in_recovery()"))
        database.url = there
        with pytest.raises(SourceChanged, match="is gone"):
            await run(client, database)
        database.reconnect()


@contextlib.asynccontextmanager
async def standby_with_slots(client: JournalClient, database: Database) -> AsyncIterator[PostgresStandby]:
    """A standby with the slot of an ingest, which has read all of `database` so far."""
    database.execute(ORDERS)
    database.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)", SLOT)
    primary = database.server
    assert isinstance(primary, PostgresServer)
    with PostgresStandby(primary, *SETTINGS, "hot_standby_feedback=on") as standby:
        primary.execute("SELECT pg_create_physical_replication_slot('standby')")
        standby.execute("ALTER SYSTEM SET primary_slot_name = 'standby'")
        standby.execute("SELECT pg_reload_conf()")
        await until(
            lambda: primary.holds("SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = 'standby'")
        )
        while not standby.holds(
            f"SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{SLOT}' AND NOT temporary)"
        ):
            database.execute("INSERT INTO orders SELECT coalesce(max(id), 0) + 1 FROM orders")
            await run(client, database)
            database.execute("CHECKPOINT")
            standby.execute("SELECT pg_sync_replication_slots()")
        yield standby


async def fail_over(database: Database, standby: PostgresStandby) -> None:
    """Fail over to the standby."""
    port = f":{database.server.port}/"
    database.reconnect()
    database.server.stop()
    standby.promote()
    await until(lambda: standby.holds("SELECT NOT pg_is_in_recovery()"))
    database.url = database.url.replace(port, f":{standby.port}/")


async def test_a_failover_with_the_slot_continues(client: JournalClient) -> None:
    with PostgresServer(*SETTINGS) as primary:
        database = Database(primary)
        async with standby_with_slots(client, database) as standby:
            await fail_over(database, standby)
            database.execute("INSERT INTO orders VALUES (1000), (1001)")
            await run(client, database)
            database.execute("UPDATE orders SET cents = 5 WHERE id = 1000")
            await run(client, database)
            assert Copies(await events(client))["public.orders"] == database.rows()
            database.reconnect()


async def test_a_failover_that_lost_ingested_transactions_is_an_error(client: JournalClient) -> None:
    with PostgresServer(*SETTINGS) as primary:
        database = Database(primary)
        async with standby_with_slots(client, database) as standby:
            primary.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
            primary.execute("SELECT pg_reload_conf()")
            standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            standby.execute("SELECT pg_reload_conf()")
            await until(lambda: primary.holds("SELECT NOT EXISTS (SELECT FROM pg_stat_replication)"))
            database.execute("INSERT INTO orders VALUES (1000)")
            await run(client, database)
            [(lost,)] = database.execute("SELECT pg_current_wal_lsn()::text")
            await fail_over(database, standby)
            while not standby.holds(f"SELECT pg_current_wal_lsn() > '{lost}'"):  # Hide the loss.
                database.execute("INSERT INTO orders SELECT coalesce(max(id), 0) + 1 FROM orders")
            with pytest.raises(SourceChanged, match=r"continues another history from .* has lost transactions"):
                await run(client, database)
            database.reconnect()
