"""Connections of stores: concurrent creation, transient errors, and poolers."""

import datetime as dt
import socketserver
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pymysql
import pytest
from sqlalchemy import (
    Column,
    Connection,
    DateTime,
    Integer,
    MetaData,
    Table,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError, ProgrammingError

from coranto.errors import InvalidInput, SqlStoreError
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.durability import RELAXED
from coranto_consumers.stores.engines import adapt, is_transient
from coranto_consumers.stores.merge import plan_merge
from coranto_consumers.stores.staging import StageWriter, stage_of
from tests.servers.sql import PostgresServer, PostgresStandby

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True))


def test_creating_a_sqlite_file_waits_for_a_concurrent_writer(tmp_path: Path):
    errors: list[Exception] = []

    def create() -> None:
        try:
            SqlStore(f"sqlite:///{tmp_path}/store.db").create_tables(NUMBERS)
        except SqlStoreError as error:
            errors.append(error)

    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        creating = threading.Thread(target=create)
        creating.start()
        creating.join(0.1)
        other.execute("ROLLBACK")
    creating.join()

    assert errors == []
    assert inspect(SqlStore(f"sqlite:///{tmp_path}/store.db").engine).has_table("numbers")


def test_times_with_a_zone_are_in_utc_in_sqlite(tmp_path: Path):
    table = Table("times", MetaData(), Column("at", DateTime(timezone=True)))
    store = SqlStore(f"sqlite:///{tmp_path}/times.db")
    store.create_tables(table)
    there = dt.datetime(2024, 5, 6, 1, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    with store.engine.begin() as connection:
        connection.execute(insert(table), [{"at": there}, {"at": dt.datetime(2024, 5, 6, 1, 30)}, {"at": None}])
        found = connection.execute(select(table.c.at)).scalars().all()
    assert found == [dt.datetime(2024, 5, 5, 23, 30), dt.datetime(2024, 5, 6, 1, 30), None]


# -- Transient errors -------------------------------------------------------------------------------------------------


class OfServer(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__(f"an error of state {sqlstate}")
        self.sqlstate = sqlstate


PASSING = (
    *("08000", "08003", "08006", "08P01", "25006", "40001", "40P01", "53100", "53300", "55P03"),
    *("57014", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "58030"),
)
LASTING = ("22001", "22003", "22P05", "23502", "23503", "23505", "23514", "42501", "42601", "42P01", "42P05", "57P04")


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: DBAPIError("SELECT", {}, error)])
def test_transient_and_permanent_states_of_postgresql_are_distinguished(wrap: Callable[[Exception], Exception]):
    assert [state for state in PASSING if not is_transient(wrap(OfServer(state)))] == []
    assert [state for state in LASTING if is_transient(wrap(OfServer(state)))] == []


@pytest.mark.parametrize("wrap", [lambda error: error, lambda error: OperationalError("SELECT", {}, error)])
def test_transient_and_permanent_errors_of_mariadb_are_distinguished(wrap: Callable[[Exception], Exception]):
    passing = (1040, 1047, 1053, 1205, 1213, 1290, 1317, 1792, 1836, 1927, 1969, 2003, 2006, 2013, 3024, 3100)
    lasting = (1044, 1045, 1048, 1062, 1064, 1146, 1264, 1366, 1406, 1451, 1452)
    assert [code for code in passing if not is_transient(wrap(pymysql.OperationalError(code, "no")))] == []
    assert [code for code in lasting if is_transient(wrap(pymysql.OperationalError(code, "no")))] == []


def test_a_wrong_statement_on_sqlite_is_permanent_and_a_lock_is_transient(tmp_path: Path):
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    store.create_tables(NUMBERS)
    with pytest.raises(OperationalError) as mistake, store.engine.begin() as connection:
        connection.execute(text("SELECT * FROM nothing"))
    assert not is_transient(mistake.value)
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as one:
        one.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None, timeout=0)) as other:
            with pytest.raises(sqlite3.OperationalError) as locked:
                other.execute("BEGIN IMMEDIATE")
        assert is_transient(locked.value)


def test_transient_failures_to_connect_to_postgresql_are_distinguished(postgres: PostgresServer):
    def failure(**changed: Any) -> Exception:
        parts = {"host": "127.0.0.1", "port": postgres.port, "user": "postgres", "password": "secret", **changed}
        with pytest.raises(psycopg.Error) as caught:
            psycopg.connect(**{"dbname": "postgres", **parts})
        return caught.value

    assert is_transient(failure(port=1))
    assert is_transient(failure(host="no-such-host.invalid"))
    assert not is_transient(failure(password=""))
    assert not is_transient(failure(colour="red"))


@pytest.mark.parametrize(
    ("setting", "statement"),
    [
        ("default_transaction_read_only = on", "INSERT INTO numbers VALUES (7)"),
        ("statement_timeout = 20", "SELECT pg_sleep(60)"),
        ("idle_session_timeout = 60000", "SELECT pg_terminate_backend(pg_backend_pid())"),
    ],
)
def test_transient_errors_of_an_applications_statements_are_retriable(
    setting: str, statement: str, postgres: PostgresServer
):
    url = postgres.new_database()
    store = SqlStore(url)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")
    postgres.execute(f"ALTER DATABASE {store.engine.url.database} SET {setting}")
    with pytest.raises(SqlStoreError) as caught, store.transaction("shard", fence) as transaction:
        transaction.connection.execute(text(statement))
    assert caught.value.retriable
    postgres.execute(f"ALTER DATABASE {store.engine.url.database} RESET ALL")


def test_wrong_statements_of_an_application_are_not_retriable(postgres: PostgresServer):
    store = SqlStore(postgres.new_database())
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")
    for statement in ("SELECT * FROM nothing", "INSERT INTO numbers VALUES (1), (1)", "nonsense"):
        with pytest.raises(SqlStoreError) as caught, store.transaction("shard", fence) as transaction:
            transaction.connection.execute(text(statement))
        assert not caught.value.retriable
        assert isinstance(caught.value.__cause__, ProgrammingError | None)


RAISES = "DO $$ BEGIN RAISE EXCEPTION '{}' USING ERRCODE = '{}'; END $$"


def test_errors_are_classified_by_state_and_not_by_their_text(postgres: PostgresServer):
    store = SqlStore(postgres.new_database())
    for words, state in (("during recovery", "0A000"), ("recovery is in progress", "55000")):
        fence, _ = store.raise_fence("shard")
        with pytest.raises(SqlStoreError, match=words) as caught, store.transaction("shard", fence) as transaction:
            transaction.connection.execute(text(RAISES.format(words, state)))
        assert not caught.value.retriable


def test_a_store_waits_for_the_promotion_of_a_standby():
    with PostgresServer() as primary, PostgresStandby(primary) as standby:
        store = SqlStore(primary.new_database())
        store.create_tables(NUMBERS)
        fence, _ = store.raise_fence("shard")
        with store.engine.begin() as connection:
            connection.execute(text("CREATE UNLOGGED TABLE unlogged (n INTEGER)"))
        there = SqlStore(store.url.replace(str(primary.port), str(standby.port)))

        def change() -> None:
            with there.transaction("shard", fence) as transaction:
                transaction.connection.execute(insert(NUMBERS), [{"n": 1}])
                transaction.commit(Checkpoint({"a/journal": Source(7)}))

        primary.stop()
        for work in (change, lambda: there.raise_fence("another"), lambda: there.resume("shard", fence)):
            with pytest.raises(SqlStoreError, match="read-only transaction") as caught:
                work()
            assert caught.value.retriable
        for statement in (
            "SELECT * FROM unlogged",
            *(RAISES.format("im Standby", each) for each in ("0A000", "55000")),
        ):
            with pytest.raises(SqlStoreError) as caught, there.transaction("shard", fence) as transaction:
                transaction.connection.execute(text(statement))
            assert caught.value.retriable, statement
        standby.promote()
        change()
        assert there.resume("shard", fence) == Checkpoint({"a/journal": Source(7)})


def test_a_lost_connection_caught_by_the_application_is_transient():
    assert is_transient(PendingRollbackError("cannot reconnect until the transaction is rolled back"))


# -- Connection poolers -----------------------------------------------------------------------------------------------


TIMES = Table("times", MetaData(), Column("n", Integer), Column("at", DateTime(timezone=True)))


def test_no_result_depends_on_settings_of_the_session_or_connection(postgres: PostgresServer):
    """A pooler refuses a connection's options, and its sessions may have settings of other clients."""
    store = SqlStore(postgres.new_database())
    store.create_tables(TIMES, NUMBERS)
    for setting in ("timezone = 'America/New_York'", "default_transaction_isolation = 'serializable'"):
        postgres.execute(f"ALTER DATABASE {store.engine.url.database} SET {setting}")
    connected: list[dict[str, Any]] = []
    event.listen(store.engine, "do_connect", lambda _dialect, _record, _args, given: connected.append(given))
    fence, _ = store.raise_fence("shard")
    local = dt.datetime(2024, 5, 6, 1, 30)
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(insert(TIMES), [{"n": 1, "at": local}])
        shown = [transaction.connection.execute(text(f"SHOW {name}")).scalar_one() for name in SETTINGS]
        transaction.commit(Checkpoint({"a/journal": Source(7)}))
    assert shown == ["UTC", "read committed", "2min"]
    stage = stage_of(store, plan_merge(TIMES, ["n", "at"], [], {}))
    with StageWriter(store.url, stage, "shard", fence, "attempt") as writer:
        writer.write([{"n": 2, "at": local}])
    with store.engine.connect() as connection:
        found = [connection.execute(select(table.c.at)).scalar_one() for table in (TIMES, stage)]
    assert found == [local.replace(tzinfo=dt.UTC)] * 2
    assert [each for each in connected if "options" in each] == []


SETTINGS = ("timezone", "transaction_isolation", "idle_in_transaction_session_timeout")


def test_no_prepared_statement_remains_in_a_poolers_session(postgres: PostgresServer):
    prepared: list[int] = []

    def commit(connection: Connection) -> None:
        for number in range(20):
            connection.execute(select(NUMBERS.c.n).where(NUMBERS.c.n == number)).all()
        connection.execute(insert(NUMBERS), [{"n": number} for number in range(50)])
        prepared.append(connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one())
        connection.commit()

    store = SqlStore(postgres.new_database(), commit=commit)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        transaction.commit(Checkpoint({"a/journal": Source(7)}))
    assert prepared == [0]


def test_connections_of_a_catalog_prepare_no_statements(postgres: PostgresServer):
    engine = create_engine(make_url(postgres.new_database()).difference_update_query([RELAXED]))

    def prepared() -> int:
        with engine.connect() as connection:
            for number in range(20):
                connection.execute(text("SELECT :n"), {"n": number})
            found: int = connection.execute(text("SELECT count(*) FROM pg_prepared_statements")).scalar_one()
            return found

    assert prepared() > 0, "as drivers do by default"
    adapt(engine)
    assert prepared() == 0
    engine.dispose()


class FakePostgres(socketserver.BaseRequestHandler):
    """Accept or refuse a session, or respond to its first statement with an error."""

    refusal: ClassVar[bytes] = b""
    answer: ClassVar[bytes] = b""

    def handle(self) -> None:
        def read(size: int) -> bytes:
            found = b""
            while len(found) < size and (more := self.request.recv(size - len(found))):
                found += more
            return found

        def send(kind: bytes, content: bytes) -> None:
            self.request.sendall(kind + struct.pack("!i", len(content) + 4) + content)

        while len(found := read(8)) == 8:
            size, code = struct.unpack("!ii", found)
            read(size - 8)
            if code == 196608:
                break
            self.request.sendall(b"N")  # Neither TLS nor GSSAPI.
        if self.refusal:
            send(b"E", self.refusal)
            return
        send(b"R", struct.pack("!i", 0))
        send(b"Z", b"I")
        read(1)
        send(b"E", self.answer)


@contextmanager
def fake_postgres(kind: type[FakePostgres]) -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


def test_a_pooler_without_transactions_is_refused_with_advice():
    class Pooler(FakePostgres):
        """Respond like PgBouncer with `pool_mode = statement`."""

        answer = b"SFATAL\0C08P01\0Mtransaction blocks not allowed in statement pooling mode\0\0"

    with (
        fake_postgres(Pooler) as port,
        pytest.raises(InvalidInput, match="set its pool_mode to transaction or session"),
    ):
        SqlStore(f"postgresql://u:hunter2@127.0.0.1:{port}/name").raise_fence("shard")


# -- Refused connections ----------------------------------------------------------------------------------------------


GERMAN = {
    "28P01": "Passwort-Authentifizierung für Benutzer »u« fehlgeschlagen",
    "28000": "kein pg_hba.conf-Eintrag für Host »127.0.0.1«",
    "3D000": "Datenbank »name« existiert nicht",
    "53300": "tut mir leid, schon zu viele Verbindungen",
    "57P03": "das Datenbanksystem startet",
}


@pytest.mark.parametrize("state", GERMAN)
def test_a_refused_connection_is_classified_by_its_state_in_any_language(state: str):
    class Server(FakePostgres):
        refusal = f"SFATAL\0VFATAL\0C{state}\0M{GERMAN[state]}\0\0".encode()

    with fake_postgres(Server) as port:
        store = SqlStore(f"postgresql://u:hunter2@127.0.0.1:{port}/name")
        with pytest.raises(SqlStoreError, match=GERMAN[state]) as caught:
            store.raise_fence("shard")
    assert caught.value.retriable == (state in ("53300", "57P03"))
    assert "hunter2" not in str(caught.value)


def test_transient_refusals_of_a_real_server_are_distinguished(postgres: PostgresServer):
    url = make_url(postgres.new_database())
    for changed in (url.set(password="wrong"), url.set(database="no_such_database")):
        with pytest.raises(SqlStoreError) as caught:
            SqlStore(changed.render_as_string(hide_password=False)).raise_fence("shard")
        assert not caught.value.retriable
    with pytest.raises(SqlStoreError) as caught:
        SqlStore(url.set(port=1).render_as_string(hide_password=False)).raise_fence("shard")
    assert caught.value.retriable
    plain = url.update_query_dict({"sslmode": "nonsense"}).render_as_string(hide_password=False)
    with pytest.raises(
        InvalidInput, match=r'does not take an option of the URL: .*sslmode value: "nonsense"'
    ) as refused:
        SqlStore(plain).raise_fence("shard")
    assert "secret" not in str(refused.value)
