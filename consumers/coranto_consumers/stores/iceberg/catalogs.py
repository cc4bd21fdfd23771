"""The catalogs that stores support, and their commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import RESTError
from pyiceberg.table import Transaction
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores import engines
from coranto_consumers.stores.durability import risks
from coranto_consumers.stores.iceberg import rest
from coranto_consumers.stores.iceberg.multi_table import commit_tables
from coranto_consumers.stores.iceberg.rest import RestCommits

FAILURES: Final = (SQLAlchemyError, OSError, RESTError)
"""Failures of catalogs and of their warehouses."""
_PERMANENT: Final = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_SYNCHRONOUS: Final = text("SELECT current_setting('synchronous_commit')")


def is_transient(error: BaseException | None) -> bool:
    """Return True if a failure of a catalog or its warehouse is transient."""
    if isinstance(error, SQLAlchemyError):
        return engines.is_transient(error)
    return rest.is_transient(error) or (isinstance(error, OSError) and not isinstance(error, _PERMANENT))


def failure(what: str, error: Exception) -> SqlStoreError:
    """Convert one of `FAILURES` to a store's error. It is retriable if the failure is transient."""
    return SqlStoreError(f"{what}: {type(error).__name__}: {error}", retriable=is_transient(error))


class Commits(Protocol):
    """Commits of a catalog's tables."""

    @property
    def supports_multi_table(self) -> bool:
        """True if several tables can commit in one transaction."""

    def risks(self) -> list[str]:
        """Return the settings that risk the loss of commits, each with its fix."""

    def commit(self, transactions: Sequence[Transaction]) -> None:
        """Commit transactions of different tables, each with a snapshot, all or none.

        Each transaction requires that its table's current snapshot has not changed. Raises CommitFailedException if the
        transactions can never be applied (their manifests are removed). After any other error the outcome is unknown.
        """


class SqlCommits:
    """Commits in a SQL catalog's database."""

    supports_multi_table: Final = True

    def __init__(self, catalog: SqlCatalog) -> None:
        self._catalog = catalog
        engines.adapt(catalog.engine)

    def risks(self) -> list[str]:
        with self._catalog.engine.connect() as connection:
            found = risks(connection)
            if connection.dialect.name == "postgresql" and connection.execute(_SYNCHRONOUS).scalar_one() == "off":
                found.append("synchronous_commit is off: set it to on")
        return found

    def commit(self, transactions: Sequence[Transaction]) -> None:
        commit_tables(self._catalog, transactions)


def commits_of(catalog: Catalog) -> Commits:
    """Return the `Commits` for a catalog. Raises InvalidInput if it may report an applied commit as failed."""
    if isinstance(catalog, RestCatalog):
        return RestCommits(catalog)
    if isinstance(catalog, SqlCatalog) and catalog.engine.dialect.name in ("postgresql", "sqlite"):
        return SqlCommits(catalog)
    raise InvalidInput(
        f"is a {type(catalog).__name__}, which may report an applied commit as failed; use a RestCatalog, or a "
        "SqlCatalog on PostgreSQL or SQLite",
        field="catalog",
    )
