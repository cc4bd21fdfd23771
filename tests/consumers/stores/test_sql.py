"""The SQL store's contract for each database: only the owner of the fence commits, and outcomes are known."""

import threading

import pytest
from sqlalchemy import (
    Column,
    Connection,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    create_engine,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import OperationalError

from coranto.errors import CommitOutcomeUnknown, CorruptData, Fenced, InvalidInput, RejectedRow, SqlStoreError
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.sql import CHECKPOINTS
from tests.servers.sql import PostgresServer

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True))


def checkpoint(offset: int) -> Checkpoint:
    return Checkpoint({"a/journal": Source(offset, {b"\x01abcde": ProducerState(17, 3)})}, {"b/journal": b"ack\n"})


def commit_number(store: SqlStore, fence: int, n: int, offset: int) -> None:
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(NUMBERS.insert().values(n=n))
        transaction.commit(checkpoint(offset))


def numbers(store: SqlStore) -> list[int]:
    with store.engine.connect() as connection:
        return list(connection.execute(select(NUMBERS.c.n).order_by(NUMBERS.c.n)).scalars())


@pytest.fixture
def store(store_url: str) -> SqlStore:
    opened = SqlStore(store_url)
    opened.create_tables(NUMBERS)
    return opened


def test_the_table_has_the_layout_of_gazette(store):
    columns = {c["name"]: c for c in inspect(store.engine).get_columns("gazette_checkpoints")}

    assert list(columns) == ["shard_fqn", "fence", "checkpoint"]
    assert not any(column["nullable"] for column in columns.values())
    assert inspect(store.engine).get_pk_constraint("gazette_checkpoints")["constrained_columns"] == ["shard_fqn"]


def test_a_consumer_starts_with_an_empty_checkpoint(store):
    assert store.read("shard") is None
    assert store.raise_fence("shard") == (1, Checkpoint())
    assert store.read("shard") == (1, Checkpoint())


def test_observing_an_unused_store_creates_nothing(store_url):
    untouched = SqlStore(store_url)

    assert untouched.read("shard") is None
    assert inspect(untouched.engine).get_table_names() == []


def test_effects_and_checkpoint_commit_together(store):
    fence, _ = store.raise_fence("shard")
    commit_number(store, fence, 1, 100)
    commit_number(store, fence, 2, 200)

    assert numbers(store) == [1, 2]
    assert store.read("shard") == (fence, checkpoint(200))
    assert store.raise_fence("shard") == (fence + 1, checkpoint(200))


def test_leaving_without_a_commit_rolls_back(store):
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(NUMBERS.insert().values(n=1))

    def fail_halfway() -> None:
        with store.transaction("shard", fence) as transaction:
            transaction.connection.execute(NUMBERS.insert().values(n=2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert numbers(store) == []
    assert store.read("shard") == (fence, Checkpoint())


def test_a_former_owner_cannot_begin_after_the_fence_was_raised(store):
    old, _ = store.raise_fence("shard")
    commit_number(store, old, 1, 100)
    store.raise_fence("shard")

    with pytest.raises(Fenced, match=f"shard: fence {old} was raised"):
        commit_number(store, old, 2, 200)
    assert numbers(store) == [1]
    assert store.read("shard").checkpoint == checkpoint(100)


def test_a_former_owner_within_its_transaction_cannot_commit(store_url):
    """The new owner recovers while the old one is about to commit."""
    old_store, new_store = SqlStore(store_url), SqlStore(store_url)
    old_store.create_tables(NUMBERS)
    old, _ = old_store.raise_fence("shard")
    raised = threading.Event()
    restored = []

    def take_over() -> None:
        restored.append(new_store.raise_fence("shard"))
        raised.set()

    taking_over = threading.Thread(target=take_over)
    try:
        with old_store.transaction("shard", old) as transaction:
            taking_over.start()
            if not old_store.is_sqlite:
                # The old owner's transaction does not block the new one.
                assert raised.wait(30)
            transaction.connection.execute(NUMBERS.insert().values(n=1))
            transaction.commit(checkpoint(100))
    except Fenced:
        committed = False
    else:
        committed = True
    taking_over.join()

    # Both outcomes are consistent: SQLite lets the old owner finish first, PostgreSQL refuses it.
    assert committed is old_store.is_sqlite
    assert restored == [(old + 1, checkpoint(100) if committed else Checkpoint())]
    assert numbers(new_store) == ([1] if committed else [])
    with pytest.raises(Fenced):
        commit_number(old_store, old, 2, 200)


def test_concurrent_owners_get_distinct_fences(store_url):
    SqlStore(store_url).create_tables()
    fences: list[int] = []
    threads = [
        threading.Thread(target=lambda: fences.append(SqlStore(store_url).raise_fence("shard").fence)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(fences) == list(range(1, 9))


def test_consumers_do_not_fence_each_other(store):
    mine, _ = store.raise_fence("shard")
    store.raise_fence("another")
    commit_number(store, mine, 1, 100)

    assert numbers(store) == [1]
    assert store.read("another") == (1, Checkpoint())


class Broken(OperationalError):
    def __init__(self) -> None:
        super().__init__("COMMIT", {}, Exception("connection lost"))


def test_a_commit_that_fails_after_it_was_applied_counts(store_url):
    def commit_then_break(connection):
        connection.commit()
        raise Broken

    store = SqlStore(store_url, commit=commit_then_break)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")

    commit_number(store, fence, 1, 100)

    assert numbers(store) == [1]
    assert store.read("shard").checkpoint == checkpoint(100)


def test_a_commit_that_fails_before_it_was_applied_does_not_count(store_url):
    def break_instead(connection):
        raise Broken

    store = SqlStore(store_url, commit=break_instead)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")

    with pytest.raises(SqlStoreError, match="was not applied: connection lost"):
        commit_number(store, fence, 1, 100)
    assert numbers(store) == []
    assert store.read("shard").checkpoint == Checkpoint()


def test_a_commit_that_fails_during_a_takeover_is_fenced(store_url):
    def taken_over_instead(connection):
        connection.rollback()
        SqlStore(store_url).raise_fence("shard")
        raise Broken

    store = SqlStore(store_url, commit=taken_over_instead)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")

    with pytest.raises(Fenced, match="the commit broke"):
        commit_number(store, fence, 1, 100)
    assert numbers(store) == []


def test_an_unavailable_store_leaves_the_outcome_unknown(store_url):
    waits: list[float] = []

    def vanish(connection):
        connection.commit()
        # The database is unreachable from here on.
        store.engine = create_engine("postgresql+psycopg://u:hunter2@127.0.0.1:1/gone")
        raise Broken

    store = SqlStore(store_url, commit=vanish, sleep=waits.append)
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")

    with pytest.raises(CommitOutcomeUnknown, match="Start the consumer again") as caught:
        commit_number(store, fence, 1, 100)
    assert "hunter2" not in str(caught.value)
    assert 15 < sum(waits) <= 20
    assert SqlStore(store_url).raise_fence("shard").checkpoint == checkpoint(100)


def test_an_owner_resumes_under_its_fence_without_raising_it(store):
    fence, _ = store.raise_fence("shard")
    assert store.resume("shard", fence) == Checkpoint()
    commit_number(store, fence, 1, 100)
    assert store.resume("shard", fence) == checkpoint(100)
    assert store.read("shard").fence == fence

    store.raise_fence("shard")
    with pytest.raises(Fenced, match=f"fence {fence} was raised"):
        store.resume("shard", fence)


def test_an_owner_does_not_resume_after_the_database_lost_its_commits(store):
    fence, _ = store.raise_fence("shard")
    with pytest.raises(CorruptData, match="has raised fence 2, and the database has 1"):
        store.resume("shard", fence + 1)
    with pytest.raises(CorruptData, match="the database has 0"):
        store.resume("another", 1)


@pytest.mark.integration
def test_an_owner_resumes_only_once_its_broken_commit_has_ended(postgres: PostgresServer):
    """The server may complete a commit although its client has lost the connection."""
    store = SqlStore(postgres.new_database())
    store.create_tables(NUMBERS)
    fence, _ = store.raise_fence("shard")
    found: list[Checkpoint] = []
    with store.transaction("shard", fence) as transaction:
        connection = transaction.connection
        connection.execute(CHECKPOINTS.update().values(checkpoint=checkpoint(100).to_bytes()))
        resuming = threading.Thread(target=lambda: found.append(store.resume("shard", fence)))
        resuming.start()
        with store.engine.connect() as other:
            while not other.execute(WAITING).scalar_one():
                other.rollback()
        assert found == []
        connection.commit()
        resuming.join(60)
    assert found == [checkpoint(100)]


WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")


def test_a_refused_statement_is_an_error_of_the_store_without_its_parameters(store):
    fence, _ = store.raise_fence("shard")
    commit_number(store, fence, 31337, 100)

    with pytest.raises(RejectedRow, match=r"UNIQUE|unique") as caught:
        commit_number(store, fence, 31337, 200)
    assert "[parameters" not in str(caught.value)
    assert store.read("shard").checkpoint == checkpoint(100)


def test_an_unreachable_database_is_an_error_of_the_store():
    store = SqlStore("postgresql://u:hunter2@127.0.0.1:1/name")

    with pytest.raises(SqlStoreError, match=r"store postgresql\+psycopg://u:\*\*\*@127.0.0.1:1/name") as caught:
        store.raise_fence("shard")
    assert "hunter2" not in str(caught.value)


def test_a_consumer_needs_a_name(store):
    with pytest.raises(InvalidInput, match="shard"):
        store.raise_fence("")


def test_tables_are_created_once_by_concurrent_owners(store_url):
    errors: list[Exception] = []

    def create() -> None:
        try:
            SqlStore(store_url).create_tables(NUMBERS)
        except SqlStoreError as error:
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    with SqlStore(store_url).engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(NUMBERS)).scalar_one() == 0


@pytest.mark.integration
def test_postgresql_commits_synchronously_despite_its_settings(postgres: PostgresServer):
    """Acknowledgements of a checkpoint that a crash loses were already appended."""
    url = postgres.new_database()
    name = SqlStore(url).engine.url.database
    postgres.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    found = []

    def commit(connection: Connection) -> None:
        found.append(connection.execute(text("SHOW synchronous_commit")).scalar_one())
        connection.commit()

    store = SqlStore(url, commit=commit)
    store.create_tables(NUMBERS)
    with store.engine.connect() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "off"
    fence, _ = store.raise_fence("shard")
    commit_number(store, fence, 1, 10)
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(text("SET LOCAL synchronous_commit = off"))
        transaction.commit(checkpoint(20))
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(text("SET LOCAL synchronous_commit = remote_write"))
        transaction.commit(checkpoint(30))
    assert found == ["on", "on", "remote_write"]


@pytest.mark.integration
def test_postgresql_without_fsync_is_refused_unless_allowed(postgres: PostgresServer):
    url = postgres.new_database()
    with pytest.raises(InvalidInput, match=r"fsync is off: set it to on\. Add relaxed_durability=true") as caught:
        SqlStore(url.partition("?")[0]).raise_fence("shard")
    assert "secret" not in str(caught.value)
    assert SqlStore(url).raise_fence("shard").fence == 1


def test_a_deferred_constraint_rejects_a_row_at_the_commit(store_url):
    if store_url.startswith("mysql"):
        pytest.skip("MariaDB defers no constraints")
    store = SqlStore(store_url)
    parents = Table("parents", MetaData(), Column("n", Integer, primary_key=True))
    deferred = ForeignKey("parents.n", deferrable=True, initially="DEFERRED")
    children = Table("children", parents.metadata, Column("n", Integer, deferred))
    store.create_tables(parents, children)
    fence, _ = store.raise_fence("shard")
    with store.transaction("shard", fence) as transaction:
        transaction.connection.execute(insert(children).values(n=7))
        with pytest.raises(RejectedRow, match=r"(?i)foreign key"):
            transaction.commit(checkpoint(100))
    assert store.raise_fence("shard").checkpoint == Checkpoint()
