"""Store URLs: SQLAlchemy URLs of the databases that stores are tested with."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from coranto.errors import InvalidInput
from coranto_consumers.stores.durability import RELAXED
from coranto_consumers.stores.rejections import SHOW_VALUES

_SECRET = re.compile("pass|secret|token|key", re.IGNORECASE)
"""Matches names of drivers' secret options: `password`, `sslpassword`, `passwd`, `scram_client_key` and so on."""

ACCEPTED = (
    "sqlite:////absolute/path/to/file.db or postgresql+psycopg://user:password@host:5432/database "
    "or mysql+pymysql://user:password@host:3306/database (MariaDB, too)"
)


def parse_store_url(text: str) -> URL:
    """Parse the URL of a store. The result includes the driver, and a SQLite path is absolute.

    Raises InvalidInput. The error never quotes the URL, because it may contain a password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise InvalidInput(f"not a URL; a store URL is {ACCEPTED}", field="store_url") from error
    for option in (RELAXED, SHOW_VALUES):
        if url.query.get(option, "true") != "true":
            raise InvalidInput(f"{option} is not 'true': write that, or leave it out", field="store_url")
    backend, _, driver = url.drivername.partition("+")
    match backend:
        case "sqlite":
            return _sqlite(url, driver)
        case "postgresql" | "postgres" if driver in ("", "psycopg"):
            return _with_database(url).set(drivername="postgresql+psycopg")
        case "mysql" | "mariadb" if driver in ("", "pymysql"):
            return _mysql(_with_database(url))
        case "iceberg":
            raise InvalidInput(
                f"names Iceberg tables, and this takes a database: a URL such as {ACCEPTED}. docs/lake.md lists what "
                "Iceberg stores are for",
                field="store_url",
            )
        case _:
            raise InvalidInput(f"{url.drivername!r} is not supported; a store URL is {ACCEPTED}", field="store_url")


def _with_database(url: URL) -> URL:
    if not url.database:
        raise InvalidInput(f"names no database; a store URL is {ACCEPTED}", field="store_url")
    return url


def _mysql(url: URL) -> URL:
    fixed = {"charset", "autocommit", "init_command", "client_flag", "sql_mode", "cursorclass", "conv"}
    if refused := sorted(fixed & url.query.keys()):
        raise InvalidInput(
            f"sets {refused[0]!r}, which the store sets itself; leave that out of the URL", field="store_url"
        )
    return url.set(drivername="mysql+pymysql")


def _sqlite(url: URL, driver: str) -> URL:
    if driver not in ("", "pysqlite"):
        raise InvalidInput(f"{url.drivername!r} is not supported; a store URL is {ACCEPTED}", field="store_url")
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise InvalidInput(
            f"a SQLite store must be a file, which several processes can open; a store URL is {ACCEPTED}",
            field="store_url",
        )
    path = Path(url.database).expanduser().absolute()
    return url.set(drivername="sqlite+pysqlite", database=str(path))


def location_of(url: URL) -> str:
    """Return the location of a database: its kind, host, port and name, without users, drivers and options."""
    host = url.host or url.query.get("host") or url.query.get("unix_socket") or ""
    port = f":{url.port}" if url.port else ""
    shown = ",".join(host) if isinstance(host, tuple) else host
    return f"{url.get_backend_name()}://{shown}{port}/{(url.database or '').removeprefix('/')}"


def display_url(url: URL) -> str:
    """Format a URL for display and logs, with a password as `***`, and secret options as `hidden`."""
    secrets = {name: "hidden" for name in url.query if _SECRET.search(name)}
    return url.update_query_dict(secrets).render_as_string(hide_password=True)
