"""Store URLs: supported databases, and hidden passwords."""

from __future__ import annotations

import pytest

from coranto.errors import CorantoError, InvalidInput
from coranto_consumers.stores import SqlStore, display_url, parse_store_url
from coranto_consumers.stores.urls import location_of


def test_sqlite_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert parse_store_url("sqlite:///folder/store.db").database == str(tmp_path / "folder/store.db")
    assert parse_store_url("sqlite:////srv/store.db").database == "/srv/store.db"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("postgresql://u:hunter2@db:5432/shop?sslmode=require", "postgresql://db:5432/shop"),
        ("postgresql+psycopg://other@db:5432/shop", "postgresql://db:5432/shop"),
        ("postgresql://u@/shop?host=/run/pg", "postgresql:///run/pg/shop"),
        ("mariadb://u:hunter2@db/shop", "mysql://db/shop"),
        ("sqlite:////srv/store.db?timeout=3", "sqlite:///srv/store.db"),
    ],
)
def test_a_location_is_the_same_for_other_users_drivers_and_options(text, location):
    assert location_of(parse_store_url(text)) == location


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_is_reached_through_psycopg(scheme):
    assert parse_store_url(f"{scheme}://u:p@db:5432/name").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "store.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory",
        "sqlite+aiosqlite:///x.db",
        "oracle://u:hunter2@db/name",
        "mysql+aiomysql://u:hunter2@db/name",
        "mariadb://u:hunter2@db",
        "postgresql+asyncpg://u:hunter2@db/name",
        "postgresql://u:hunter2@db",
        "postgresql://u:hunter2@db:port/name",
    ],
)
def test_other_urls_are_refused_by_an_error_that_lists_the_accepted_ones(text):
    with pytest.raises(InvalidInput, match=r"store_url: .*sqlite:////absolute.* or postgresql\+psycopg") as caught:
        parse_store_url(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "mysql+pymysql", "mariadb+pymysql"])
def test_mariadb_and_mysql_are_reached_through_pymysql(scheme):
    parsed = parse_store_url(f"{scheme}://u:p@db:3306/name?ssl_ca=/etc/ca.pem")
    assert parsed.drivername == "mysql+pymysql"
    assert parsed.query == {"ssl_ca": "/etc/ca.pem"}


@pytest.mark.parametrize("option", ["charset=latin1", "autocommit=true", "init_command=SELECT+1"])
def test_options_of_a_session_that_stores_set_themselves_are_refused(option):
    with pytest.raises(InvalidInput, match=f"sets '{option.split('=')[0]}', which the store sets itself") as caught:
        parse_store_url(f"mysql://u:hunter2@db/name?{option}")
    assert "hunter2" not in str(caught.value)


def test_relaxed_durability_is_one_url_option():
    parsed = parse_store_url("postgresql://u:p@db/name?relaxed_durability=true&application_name=x")
    assert parsed.query == {"relaxed_durability": "true", "application_name": "x"}
    store = SqlStore("postgresql://u:p@db/name?relaxed_durability=true&application_name=x")
    assert store.engine.url.query == {"application_name": "x"}
    with pytest.raises(InvalidInput, match="relaxed_durability is not 'true'"):
        parse_store_url("postgresql://u:p@db/name?relaxed_durability=no")


def test_passwords_are_not_shown():
    store = SqlStore("postgresql://u:hunter2@db/name")

    assert "hunter2" not in repr(store) + store.name + str(store.engine)
    assert "hunter2" in store.url
    assert display_url(parse_store_url("postgresql://u:hunter2@db/name")) == "postgresql+psycopg://u:***@db/name"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:{}@127.0.0.1:1/db",
        "postgresql://user@127.0.0.1:1/db?password={}",
        "postgresql://user@127.0.0.1:1/db?sslmode=prefer&sslpassword={}",
        "mysql://user@127.0.0.1:1/db?password={}",
        "mysql://user@127.0.0.1:1/db?ssl_key_password={}",
        "oracle://user:{}@127.0.0.1/db",
        "postgresql://user:{}@127.0.0.1:port/db",
        "postgresql://user:{}@127.0.0.1:1/",
    ],
)
def test_no_secret_of_a_stores_url_is_shown(url: str) -> None:
    """Neither the store's name, used in errors and logs, nor the error about a refused URL shows it."""
    shown = []
    try:
        store = SqlStore(url.format("hush-hush", "hush-hush"))
        shown += [store.name, repr(store)]
        store.raise_fence("blue")
    except CorantoError as error:
        shown += [str(error), repr(error), repr(error.__cause__)]
    assert shown
    assert "hush" not in " ".join(shown)
