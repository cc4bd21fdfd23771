"""URLs of SQL stores from connections, and allowed URLs in a DAG."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from airflow_coranto.store_url import checked_store_url, store_url
from coranto.errors import InvalidInput


def test_connections_become_urls_with_corantos_drivers() -> None:
    url = store_url("postgres", host="db", port=5432, database="flights", login="me", password="p@ss/word")
    parsed = sa.make_url(url)
    assert (parsed.drivername, parsed.password, parsed.database) == ("postgresql+psycopg", "p@ss/word", "flights")
    assert store_url("mysql", host="db", database="x").startswith("mysql+pymysql://db/x")
    assert store_url("sqlite", host="/data/store.db") == "sqlite:////data/store.db"
    assert sa.make_url(store_url("postgres", host="db", extra={"sslmode": "require"})).query == {"sslmode": "require"}


def test_another_kind_of_connection_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be a store"):
        store_url("http", host="db")


@pytest.mark.parametrize(
    "url", ["", "no url", "postgresql+psycopg://me:secret-word@db/x", "postgresql+psycopg://db/x?password=secret-word"]
)
def test_a_password_in_a_dag_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        checked_store_url(url)
    assert "secret-word" not in str(refused.value)


def test_a_url_without_a_password_is_accepted() -> None:
    assert checked_store_url("sqlite:////data/store.db") == "sqlite:////data/store.db"
    assert checked_store_url("postgresql+psycopg://me@db/x") == "postgresql+psycopg://me@db/x"
