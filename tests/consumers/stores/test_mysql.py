"""Peculiarities of MariaDB and MySQL, on a real MariaDB server: implicit commits, lost connections, exact values."""

from __future__ import annotations

import datetime as dt
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    Time,
    UniqueConstraint,
    inspect,
    select,
)
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from structlog.testing import capture_logs

from coranto.errors import CommitOutcomeUnknown, InvalidInput, RejectedRow, SqlStoreError
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.stores import Add, SqlShardStore, SqlStore
from coranto_consumers.stores.merge import merge_staged, plan_merge
from coranto_consumers.stores.mysql import code_of
from coranto_consumers.stores.staging import StageWriter, delete_staged, stage_of
from tests.servers.sql import MariadbServer, why_no_mariadb

pytestmark = [pytest.mark.skipif(bool(why_no_mariadb()), reason=why_no_mariadb())]

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True), Column("seen", Integer))


def checkpoint(offset: int) -> Checkpoint:
    return Checkpoint({"a/journal": Source(offset)})


@pytest.fixture
def url(mariadb: MariadbServer) -> str:
    return mariadb.new_database()


@pytest.fixture
def store(url: str) -> SqlStore:
    opened = SqlStore(url)
    opened.create_tables(NUMBERS)
    return opened


def numbers(store: SqlStore) -> list[int]:
    with store.engine.connect() as connection:
        return list(connection.execute(select(NUMBERS.c.n).order_by(NUMBERS.c.n)).scalars())


def insert(connection: Any, *found: int) -> None:
    connection.execute(NUMBERS.insert(), [{"n": n, "seen": 0} for n in found])


@pytest.fixture
def settings(mariadb: MariadbServer) -> Iterator[Callable[[int], None]]:
    """A function that sets when the server syncs its log."""

    def set_to(value: int) -> None:
        mariadb.execute(f"SET GLOBAL innodb_flush_log_at_trx_commit = {value}")

    yield set_to
    set_to(0)


@pytest.mark.parametrize("value", [0, 2])
def test_a_server_that_may_lose_commits_is_refused_unless_allowed(
    url: str, settings: Callable[[int], None], value: int
) -> None:
    settings(value)
    plain = url.removesuffix("?relaxed_durability=true")
    with pytest.raises(InvalidInput, match=f"innodb_flush_log_at_trx_commit is {value}: set it to 1") as caught:
        SqlStore(plain).raise_fence("shard")
    assert "secret" not in str(caught.value)
    with capture_logs() as logs:
        assert SqlStore(url).raise_fence("shard").fence == 1
    assert [entry["settings"] for entry in logs] == [[f"innodb_flush_log_at_trx_commit is {value}: set it to 1"]]
    settings(1)
    with capture_logs() as logs:
        assert SqlStore(plain).raise_fence("shard").fence == 2
    assert logs == []


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE other (n INTEGER)",
        "  /* why */ truncate numbers",
        "ALTER TABLE numbers ADD COLUMN m INTEGER",
        "ANALYZE LOCAL TABLE numbers",
        "COMMIT",
        "ROLLBACK",
        "START TRANSACTION",
    ],
)
def test_statements_that_commit_without_the_checkpoint_are_refused(store, statement):
    fence, _ = store.raise_fence("shard")

    def slip() -> None:
        with store.transaction("shard", fence) as transaction:
            insert(transaction.connection, 1)
            transaction.connection.exec_driver_sql(statement)

    with pytest.raises(InvalidInput, match="would commit the transaction without its checkpoint"):
        slip()
    assert numbers(store) == []
    assert store.read("shard") == (fence, Checkpoint())


def test_statements_that_do_not_commit_are_accepted(store):
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        insert(transaction.connection, 1)
        transaction.connection.exec_driver_sql("CREATE TEMPORARY TABLE mine (n INTEGER)")
        savepoint = transaction.connection.begin_nested()
        insert(transaction.connection, 2)
        savepoint.rollback()
        transaction.connection.exec_driver_sql("DROP TEMPORARY TABLE mine")
        transaction.connection.exec_driver_sql("ANALYZE SELECT n FROM numbers")
        transaction.commit(checkpoint(100))
    assert numbers(store) == [1]


def test_a_transaction_ended_by_the_server_does_not_continue(store):
    """Committed rows cannot be rolled back, but the shard must not commit the rest."""
    fence, _ = store.raise_fence("shard")

    with store.transaction("shard", fence) as transaction:
        insert(transaction.connection, 1)
        with pytest.raises(InvalidInput, match="'SET autocommit = 1' has ended the transaction"):
            transaction.connection.exec_driver_sql("SET autocommit = 1")
        with pytest.raises(PendingRollbackError):
            insert(transaction.connection, 2)
        with pytest.raises(SqlStoreError, match="checkpoint could not be written"):
            transaction.commit(checkpoint(100))
    assert store.read("shard") == (fence, Checkpoint())


def test_no_part_of_a_transaction_can_commit_after_a_deadlock(store):
    """The application ignores the error. The server has rolled back and would begin another transaction."""
    fence, _ = store.raise_fence("shard")
    with store.engine.begin() as connection:
        insert(connection, *range(40))
    waiting = threading.Event()
    caught: list[DBAPIError] = []

    def other() -> None:
        with store.engine.begin() as connection:
            # It has changed more rows than the store's transaction, so the server rolls back the store's.
            connection.execute(NUMBERS.update().where(NUMBERS.c.n > 0).values(seen=1))
            waiting.set()
            connection.execute(NUMBERS.update().where(NUMBERS.c.n == 0).values(seen=1))

    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(NUMBERS.update().where(NUMBERS.c.n == 0).values(seen=2))
        insert(transaction.connection, 100)
        thread = threading.Thread(target=other)
        thread.start()
        assert waiting.wait(30)
        try:
            transaction.connection.execute(NUMBERS.update().where(NUMBERS.c.n == 1).values(seen=2))
        except DBAPIError as error:
            caught.append(error)
        with pytest.raises(PendingRollbackError):
            insert(transaction.connection, 101)
        with pytest.raises(SqlStoreError):
            transaction.commit(checkpoint(100))
    thread.join()

    assert [code_of(error) for error in caught] == [1213]
    assert SqlShardStore(store).is_transient(caught[0])
    assert numbers(store) == list(range(40))
    assert store.read("shard") == (fence, Checkpoint())


def test_an_unavailable_lock_is_transient(store):
    with store.engine.begin() as holder, store.engine.begin() as other:
        insert(holder, 1)
        with pytest.raises(DBAPIError) as caught:
            other.exec_driver_sql("SELECT * FROM numbers WHERE n = 1 FOR UPDATE NOWAIT")
        assert code_of(caught.value) == 1205
        assert SqlShardStore(store).is_transient(caught.value)
        other.rollback()


def test_a_connection_lost_within_a_transaction_is_transient(store, mariadb):
    fence, _ = store.raise_fence("shard")

    def lose() -> None:
        with store.transaction("shard", fence) as transaction:
            insert(transaction.connection, 1)
            mariadb.execute(f"KILL {transaction.connection.exec_driver_sql('SELECT CONNECTION_ID()').scalar_one()}")
            insert(transaction.connection, 2)

    with pytest.raises(SqlStoreError, match="a transaction of shard failed") as caught:
        lose()
    assert isinstance(caught.value.__cause__, DBAPIError)
    assert SqlShardStore(store).is_transient(caught.value.__cause__)
    assert numbers(store) == []


def test_an_invalid_statement_is_not_transient(store):
    with store.engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.exec_driver_sql("SELECT colour FROM numbers")
    assert not SqlShardStore(store).is_transient(caught.value)


def test_an_unreachable_server_is_transient_and_shows_no_password():
    store = SqlStore("mariadb://u:hunter2@127.0.0.1:1/name")

    with pytest.raises(SqlStoreError, match=r"store mysql\+pymysql://u:\*\*\*@127.0.0.1:1/name") as caught:
        store.raise_fence("shard")
    assert "hunter2" not in str(caught.value)
    assert SqlShardStore(store).is_transient(caught.value.__cause__)


@pytest.fixture
def lossy(url: str) -> Iterator[tuple[SqlStore, list[str]]]:
    """A store whose next commit loses its connection "before" or "after" the server gets it, by the list."""
    losses: list[str] = []

    def commit(connection: Any) -> None:
        if losses:
            driver = connection.connection.driver_connection
            if losses.pop() == "after":
                driver._execute_command(3, "COMMIT")  # A query whose response is not read.
            driver._sock.shutdown(socket.SHUT_RDWR)
        connection.commit()

    store = SqlStore(url, commit=commit)
    store.create_tables(NUMBERS)
    yield store, losses
    assert not losses


@pytest.mark.parametrize("loss", ["before", "after"])
def test_the_outcome_of_a_commit_with_a_lost_connection_is_read(lossy, loss):
    store, losses = lossy
    fence, _ = store.raise_fence("shard")
    losses.append(loss)

    def commit() -> None:
        with store.transaction("shard", fence) as transaction:
            insert(transaction.connection, 1)
            transaction.commit(checkpoint(100))

    if loss == "after":
        commit()
    else:
        with pytest.raises(SqlStoreError, match="was not applied") as caught:
            commit()
        assert not isinstance(caught.value, CommitOutcomeUnknown)
    assert numbers(store) == ([1] if loss == "after" else [])
    assert store.read("shard") == (fence, checkpoint(100) if loss == "after" else Checkpoint())


def test_the_same_checkpoint_may_be_committed_twice(store):
    """The server reports changed rows, but the number of matched rows counts."""
    fence, _ = store.raise_fence("shard")
    for n in (1, 2):
        with store.transaction("shard", fence) as transaction:
            insert(transaction.connection, n)
            transaction.commit(checkpoint(100))
    assert numbers(store) == [1, 2]


def test_names_are_distinguished_by_every_character(store):
    names = ["shard", "Shard", "shard ", "shárd", "sha\u0301rd", "shard🜁"]
    for count, name in enumerate(names, start=1):
        for _ in range(count):
            store.raise_fence(name)
    assert [store.read(name).fence for name in names] == list(range(1, len(names) + 1))

    with pytest.raises(SqlStoreError, match="a text is too long for its column"):
        store.raise_fence("x" * 513)
    assert store.raise_fence("/" * 512).fence == 1


def test_sessions_are_strict_read_committed_and_short_lived(store):
    with store.engine.connect() as connection:
        query = "SELECT @@tx_isolation, @@wait_timeout, @@time_zone, @@character_set_client, @@autocommit, @@sql_mode"
        *settings, modes = connection.exec_driver_sql(query).one()
    assert settings == ["READ-COMMITTED", 120, "+00:00", "utf8mb4", 0]
    assert {"STRICT_ALL_TABLES", "NO_AUTO_VALUE_ON_ZERO"} <= set(modes.split(","))


class ForgetfulProxy(socketserver.BaseRequestHandler):
    """Forward all but one setting of a session, like a proxy whose clients share sessions."""

    to: ClassVar[int]
    kept: ClassVar[tuple[bytes, bytes]]

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.to)) as there:

            def answer() -> None:
                while found := there.recv(1 << 16):
                    self.request.sendall(found)

            answering = threading.Thread(target=answer, daemon=True)
            answering.start()
            sent, instead = self.kept
            while found := self.request.recv(1 << 16):
                there.sendall(found.replace(sent, instead.ljust(len(sent))))
            there.shutdown(socket.SHUT_WR)
            answering.join()


SET_MODE = b"sql_mode = 'TRADITIONAL,NO_AUTO_VALUE_ON_ZERO'"
FORGOTTEN = {
    "no modes": (SET_MODE, b"sql_mode = ''", "sql_mode is ''"),
    "a mode more": (SET_MODE, b"sql_mode = CONCAT(@@sql_mode,',ANSI')", "sql_mode is '.*ANSI"),
    "the zone": (b"time_zone = '+00:00'", b"time_zone = '-05:00'", "time_zone is -05:00 in a session"),
    "the isolation": (b"ISOLATION LEVEL READ COMMITTED", b"ISOLATION LEVEL SERIALIZABLE", "is SERIALIZABLE in a"),
    "nothing": (SET_MODE, SET_MODE, ""),
    "the characters": (b"SET NAMES utf8mb4", b"SET NAMES latin1", "character_set_client is latin1 and"),
}


@pytest.fixture
def forgetful(url: str, mariadb: MariadbServer) -> Iterator[Callable[[str], str]]:
    """A function that returns the server's URL through a proxy that loses a setting."""

    def through(what: str) -> str:
        ForgetfulProxy.to, ForgetfulProxy.kept = mariadb.port, FORGOTTEN[what][:2]
        return url.replace(str(mariadb.port), str(proxy.server_address[1]))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), ForgetfulProxy) as proxy:
        proxy.daemon_threads = True  # A failed test does not close its connection.
        serving = threading.Thread(target=proxy.serve_forever)
        serving.start()
        try:
            yield through
        finally:
            proxy.shutdown()
            serving.join()


@pytest.mark.parametrize("what", sorted(FORGOTTEN.keys() - {"nothing"}))
def test_a_proxy_that_loses_settings_of_sessions_is_refused_with_advice(store, forgetful, what):
    fence, _ = store.raise_fence("shard")
    there = SqlStore(forgetful(what))

    def change() -> None:
        with there.transaction("shard", fence) as transaction:
            insert(transaction.connection, 1)
            transaction.commit(checkpoint(100))

    works = (change, lambda: there.raise_fence("shard"), lambda: there.create_tables(NUMBERS), lambda: there.read("x"))
    for work in works:
        with pytest.raises(InvalidInput, match=FORGOTTEN[what][2]) as caught:
            work()
        assert caught.value.field == "store_url"
        assert "ProxySQL: multiplexing off" in str(caught.value)
        assert "secret" not in str(caught.value)
    assert (numbers(store), store.read("shard")) == ([], (fence, Checkpoint()))


def test_a_proxy_that_keeps_the_settings_is_accepted(store, forgetful):
    there = SqlStore(forgetful("nothing"))
    fence, _ = there.raise_fence("shard")
    with there.transaction("shard", fence) as transaction:
        insert(transaction.connection, 1)
        transaction.commit(checkpoint(100))
    assert numbers(store) == [1]


@pytest.mark.parametrize(("name", "problem"), [("SECRET", "(name, error 1406)"), ("b", "(PRIMARY, error 1062)")])
def test_the_names_in_a_rejection_do_not_depend_on_the_servers_language(url, mariadb, name, problem):
    columns = (Column("id", Integer, primary_key=True), Column("name", String(3), nullable=False))
    table = Table("orders", MetaData(), *columns)
    store = SqlStore(url)
    store.create_tables(table)
    fence, _ = store.raise_fence("shard")
    with store.engine.begin() as connection:
        connection.execute(table.insert(), [{"id": 1, "name": "a"}])
    mariadb.execute("SET GLOBAL lc_messages = 'de_DE'")
    try:
        with pytest.raises(RejectedRow) as caught, store.transaction("shard", fence) as transaction:
            transaction.connection.execute(table.insert(), [{"id": 1, "name": name}])
    finally:
        mariadb.execute("SET GLOBAL lc_messages = 'en_US'")
    assert problem in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_values_keep_their_size_and_precision(store):
    table = Table(
        "sizes",
        MetaData(),
        Column("id", Integer, primary_key=True),
        Column("raw", LargeBinary),
        Column("text", Text),
        Column("at", DateTime),
        Column("time", Time),
        Column("real", Float),
    )
    store.create_tables(table)
    zoned = dt.datetime(2013, 1, 2, 3, 4, 5, 678901, dt.timezone(dt.timedelta(hours=-5)))
    row = {"id": 1, "raw": bytes(range(256)) * 300, "text": "🜁\\'%s" * 20_000}
    row |= {"at": zoned, "time": dt.time(1, 2, 3, 4), "real": 0.1 + 0.2}
    with store.engine.begin() as connection:
        connection.execute(table.insert().values(row))
        found = dict(connection.execute(select(table)).mappings().one())
    assert found == {**row, "at": dt.datetime(2013, 1, 2, 8, 4, 5, 678901)}


def test_a_large_checkpoint_is_kept(store):
    large = Checkpoint({f"journal/{n:05}": Source(n) for n in range(10_000)})
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        transaction.commit(large)
    assert len(large.to_bytes()) > 1 << 16
    assert store.read("shard").checkpoint == large


def test_a_table_created_for_gazette_is_used_unchanged(url, mariadb):
    store = SqlStore(url)
    mariadb.execute(
        f"CREATE TABLE {store.engine.url.database}.gazette_checkpoints (shard_fqn VARCHAR(255) PRIMARY KEY NOT NULL, "
        "fence INTEGER NOT NULL, checkpoint BLOB NOT NULL)"
    )
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        transaction.commit(checkpoint(100))
    assert store.raise_fence("shard") == (2, checkpoint(100))
    assert str(inspect(store.engine).get_columns("gazette_checkpoints")[0]["type"]).startswith("VARCHAR(255)")


def test_an_interrupted_creation_is_completed(store):
    """The table exists without its index, because its creation is not rolled back."""
    table = Table("halves", MetaData(), Column("a", Integer), Column("b", Integer))
    store.create_tables(table)
    Index("halves_b", table.c.b, unique=True)
    store.create_tables(table)
    store.create_tables(table)
    (index,) = inspect(store.engine).get_indexes("halves")
    assert (index["name"], index["unique"]) == ("halves_b", True)


def test_tables_without_transactions_or_with_unbounded_keys_are_refused(store):
    plain = Table("plain", MetaData(), Column("n", Integer, primary_key=True), mysql_engine="MyISAM")
    with pytest.raises(InvalidInput, match=r"table plain: is kept by MyISAM.*ENGINE=InnoDB"):
        store.create_tables(plain)
    for keys in ([Column("k", Text, primary_key=True)], [Column("k", LargeBinary), UniqueConstraint("k")]):
        with pytest.raises(InvalidInput, match=r"table loose: key 'k' .*String\(200\)"):
            store.create_tables(Table("loose", MetaData(), *keys))


def stage_and_merge(store: SqlStore, table: Table, keys: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    columns = tuple(rows[0])
    plan = plan_merge(table, columns, keys, {name: Add() for name in columns if name not in keys} if keys else {})
    stage = stage_of(store, plan)
    with StageWriter(store.url, stage, "shard", 1, "attempt") as writer:
        writer.write(rows)
    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, ["attempt"], len(rows))
        delete_staged(connection, stage, "shard", below_fence=2)


def rows_of(store: SqlStore, *columns: Column[Any]) -> list[tuple[Any, ...]]:
    with store.engine.connect() as connection:
        return sorted(tuple(row) for row in connection.execute(select(*columns)))


def test_zero_is_a_key_like_any_other(store):
    stage_and_merge(store, NUMBERS, (), [{"n": 0, "seen": 1}, {"n": 7, "seen": 2}])
    assert numbers(store) == [0, 7]


def test_keys_that_differ_in_case_or_spaces_are_merged_separately(store):
    table = Table("words", MetaData(), Column("word", String(20), primary_key=True), Column("n", BigInteger))
    words = ["A", "a", "a ", "á"]
    for _ in range(2):
        stage_and_merge(store, table, ("word",), [{"word": word, "n": 1} for word in words * 2])
    assert rows_of(store, *table.c) == [(word, 4) for word in words]


def test_a_merge_that_could_hit_another_rows_key_is_refused(store):
    columns = (Column("id", Integer, primary_key=True), Column("k", Integer, nullable=False), Column("v", Integer))
    both = Table("both", MetaData(), *columns, UniqueConstraint("k"))
    with pytest.raises(InvalidInput, match=r"table both: has another unique key \(id\)"):
        stage_and_merge(store, both, ("k",), [{"id": 1, "k": 1, "v": 1}])


def test_a_merge_ignores_an_autoincrement_key(store):
    columns = (Column("id", Integer, primary_key=True), Column("k", Integer, nullable=False), Column("v", Integer))
    both = Table("both", MetaData(), *columns, UniqueConstraint("k"))
    for _ in range(2):
        stage_and_merge(store, both, ("k",), [{"k": 5, "v": 1}, {"k": 6, "v": 1}])
    assert rows_of(store, both.c.k, both.c.v) == [(5, 2), (6, 2)]
