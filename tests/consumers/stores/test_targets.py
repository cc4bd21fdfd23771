"""Tables of a database are compared with the rows of a consumer."""

import pytest
from sqlalchemy import BigInteger, Column, Integer, MetaData, Numeric, String, Table, Text, text

from coranto.errors import InvalidInput
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.contract import SHARD
from coranto_consumers.stores.sql_shard import SqlShardStore
from coranto_consumers.stores.targets import require_target

TABLE = Table(
    "target",
    MetaData(),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(12)),
    Column("price", Numeric(6, 2)),
)


def require(url: str, columns=None) -> None:
    with SqlStore(url).engine.connect() as connection:
        require_target(connection, TABLE, columns)


def make(url: str, ddl: str) -> None:
    with SqlStore(url).engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE target ({ddl})"))


def test_tables_as_defined_or_wider_fit(store_url):
    require(store_url)
    SqlStore(store_url).create_tables(TABLE)
    require(store_url)
    require(store_url, ["id"])


def test_wider_columns_and_those_with_defaults_fit(store_url):
    make(store_url, "id BIGINT PRIMARY KEY, name VARCHAR(20), price NUMERIC(12, 4), more INTEGER NOT NULL DEFAULT 7")
    require(store_url)


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        (
            "id BIGINT PRIMARY KEY, price NUMERIC(6, 2)",
            "it has no column 'name': ALTER TABLE target ADD COLUMN name VARCHAR",
        ),
        (
            "id BIGINT PRIMARY KEY, name VARCHAR(12), price NUMERIC(6, 2), more VARCHAR(3) NOT NULL",
            "column 'more' must not be null, and gets no value",
        ),
    ],
)
def test_missing_tables_and_columns_are_named_in_each_database(store_url, ddl, problem):
    make(store_url, ddl)
    with pytest.raises(InvalidInput, match=f"table target: does not fit its definition in the database: .*{problem}"):
        require(store_url)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("name VARCHAR(8), price NUMERIC(6, 2)", "column 'name' is VARCHAR"),
        ("name INTEGER, price NUMERIC(6, 2)", "text is written there"),
        ("name TEXT, price NUMERIC(5, 2)", "column 'price' is NUMERIC"),
        ("name TEXT, price NUMERIC(6, 1)", "column 'price' is NUMERIC"),
        ("name TEXT, price INTEGER", "column 'price' is INTEGER"),
    ],
)
def test_too_narrow_columns_are_named(new_store, column, problem):
    url = new_store("postgresql")
    make(url, f"id BIGINT PRIMARY KEY, {column}")
    with pytest.raises(InvalidInput, match=problem):
        require(url)


@pytest.mark.integration
def test_a_trigger_may_set_the_value_of_a_column(new_store):
    url = new_store("postgresql")
    make(url, "id BIGINT PRIMARY KEY, name TEXT, price NUMERIC, made TIMESTAMPTZ NOT NULL")
    with pytest.raises(InvalidInput, match="column 'made' must not be null"):
        require(url)
    with SqlStore(url).engine.begin() as connection:
        body = "BEGIN NEW.made = now(); RETURN NEW; END"
        connection.execute(text(f"CREATE FUNCTION make() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"))
        connection.execute(text("CREATE TRIGGER makes BEFORE INSERT ON target FOR EACH ROW EXECUTE FUNCTION make()"))
    require(url)


async def test_a_shard_with_unsuitable_tables_does_not_fence_off_another(store_url):
    make(store_url, "id INTEGER PRIMARY KEY, name TEXT")
    store = SqlStore(store_url)
    before, _ = store.raise_fence(SHARD)
    with pytest.raises(InvalidInput, match="it has no column 'price'"):
        await SqlShardStore(
            store_url, TABLE, Table("others", MetaData(), Column("t", Text), Column("n", Integer))
        ).restore_checkpoint(SHARD)
    found = store.read(SHARD)
    assert found is not None
    assert found.fence == before
