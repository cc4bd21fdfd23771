"""URLs of SQL stores from the fields of a connection. Does not import Airflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from coranto.errors import InvalidInput

_DRIVERS: Final = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "sqlite",
}


def store_url(
    kind: str,
    *,
    host: str = "",
    port: int | None = None,
    database: str = "",
    login: str = "",
    password: str = "",
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Return the SQLAlchemy URL of a store, with Coranto's drivers. Raises InvalidInput for an unsupported type."""
    import sqlalchemy as sa

    driver = _DRIVERS.get(kind)
    if driver is None:
        raise InvalidInput(f"a connection of type {kind!r} cannot be a store; give one of type {', '.join(_DRIVERS)}")
    if driver == "sqlite":  # Airflow keeps the path in the host.
        return sa.URL.create(driver, database=host or database).render_as_string(hide_password=False)
    query = {name: str(value) for name, value in (extra or {}).items() if isinstance(value, str | int)}
    url = sa.URL.create(driver, login or None, password or None, host or None, port, database or None, query)
    return url.render_as_string(hide_password=False)


def checked_store_url(url: str) -> str:
    """Return a validated URL. Raises InvalidInput if it is invalid or has a password, which Airflow would show."""
    import sqlalchemy as sa

    if not url:
        raise InvalidInput("the consumer has no store; give store_conn_id, or a store_url without a password")
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise InvalidInput("store_url is not a SQLAlchemy URL, such as sqlite:////data/store.db") from error
    if parsed.password is not None or any("pass" in name.lower() for name in parsed.query):
        raise InvalidInput("store_url holds a password, which Airflow would show; use a connection and store_conn_id")
    return url
