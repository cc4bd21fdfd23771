"""Commits through a REST catalog. Only a success response determines the outcome of a commit.

A server, or a proxy in front of it, may answer 5xx, or not at all, although it applies the commit. It may also reject
(409) a commit that was applied, if a proxy has sent the request twice. So after a rejection the table itself is read
(`outcome_of`). After any other failure the outcome is unknown, and the owner resolves it (`IcebergOwner.resolve`).

pyiceberg's `Transaction.commit_transaction` removes a commit's manifests after each rejection. Here they are removed
only if the commit can never be applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Final

import requests
from pyiceberg.catalog import Catalog
from pyiceberg.catalog import rest as pyiceberg_rest
from pyiceberg.catalog.rest import RestCatalog, auth
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    CommitStateUnknownException,
    ServerError,
    ServiceUnavailableError,
    TooManyRequestsError,
)
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import AssertTableUUID
from requests import PreparedRequest, RequestException, Response
from requests.adapters import BaseAdapter

from coranto_consumers.stores.iceberg.multi_table import remove_manifests

_TIMEOUT_S: Final = (10.0, 120.0)
"""The timeouts in seconds to connect to a server, and to wait for its data. pyiceberg itself has none."""
_TRANSIENT: Final = (
    AuthorizationExpiredError,
    CommitStateUnknownException,
    RequestException,
    ServerError,
    ServiceUnavailableError,
    TooManyRequestsError,
)


class CommitOutcome(Enum):
    """The outcome of a commit, as the table's metadata shows it."""

    APPLIED = auto()
    NEVER = auto()
    """The commit was not applied, and cannot be applied any more, even if its request is still in flight."""
    OPEN = auto()
    """The commit was not applied, but still may be; or the history has expired."""


def outcome_of(transaction: Transaction, now: TableMetadata) -> CommitOutcome:
    """Return the outcome of a commit with a snapshot. `now` is its table's metadata from any time since it began.

    A commit requires that its parent is the current snapshot. Once another snapshot has followed the parent, the commit
    cannot be applied, even after a rollback to the parent, because sequence numbers only increase.
    """
    before = transaction._table.metadata
    if now.table_uuid != before.table_uuid:
        return CommitOutcome.NEVER  # The table was dropped and recreated.
    made = transaction.table_metadata.current_snapshot_id
    if made is not None and now.snapshot_by_id(made) is not None:
        return CommitOutcome.APPLIED
    parent, snapshot = before.current_snapshot_id, now.current_snapshot()
    while snapshot is not None and snapshot.snapshot_id != parent:
        if snapshot.parent_snapshot_id == parent:
            return CommitOutcome.NEVER
        above = snapshot.parent_snapshot_id
        snapshot = now.snapshot_by_id(above) if above is not None else None
    return CommitOutcome.OPEN  # Nothing has followed the parent, or the history has expired.


class RestCommits:
    """Commits of one table each."""

    supports_multi_table: Final = False

    def __init__(self, catalog: RestCatalog) -> None:
        """Set timeouts for the catalog's calls."""
        self._catalog = catalog
        set_timeouts(catalog)

    def risks(self) -> list[str]:
        """Return an empty list: the settings of a REST catalog's database are unknown."""
        return []

    def commit(self, transactions: Sequence[Transaction]) -> None:
        """Commit the transaction of a table, which has a snapshot.

        Raises CommitFailedException if the transaction can never be applied (its manifests are removed). After any
        other error the outcome is unknown.
        """
        (transaction,) = transactions
        table = transaction._table
        requirements = (*transaction._requirements, AssertTableUUID(uuid=table.metadata.table_uuid))
        try:
            self._catalog.commit_table(table, requirements, transaction._updates)
        except CommitFailedException as error:
            outcome = outcome_of(transaction, self._catalog.load_table(table.name()).metadata)
            if outcome is CommitOutcome.OPEN:
                raise CommitStateUnknownException(f"refused, and might be applied yet: {error}") from error
            if outcome is CommitOutcome.NEVER:
                remove_manifests(transactions)
                raise


def is_transient(error: BaseException | None) -> bool:
    """Return True for failures of a REST catalog that a retry may fix."""
    return isinstance(error, _TRANSIENT)


def set_timeouts(catalog: Catalog) -> None:
    """Set timeouts for a REST catalog's calls, and for requests for tokens. Other catalogs are left unchanged."""
    if not isinstance(catalog, RestCatalog):
        return
    set_token_timeout()
    set_configuration_timeout()
    for prefix, adapter in list(catalog._session.adapters.items()):
        if not isinstance(adapter, _TimeoutAdapter):
            catalog._session.mount(prefix, _TimeoutAdapter(adapter))


def set_token_timeout() -> None:
    """Set a timeout for pyiceberg's requests for tokens of the type `oauth2`, in the whole process.

    pyiceberg sends them outside of a catalog's session, with `requests.post`.
    """
    vars(auth)["requests"] = _Requests


def set_configuration_timeout() -> None:
    """Set a timeout for the first request of each REST catalog that is created from now on, in the whole process.

    The constructor of a catalog requests the catalog's configuration, in a session that is not accessible.
    """
    vars(pyiceberg_rest)["Session"] = _TimeoutSession


class _TimeoutSession(requests.Session):
    """A session whose requests have a timeout."""

    def __init__(self) -> None:
        super().__init__()
        for prefix, adapter in list(self.adapters.items()):
            self.mount(prefix, _TimeoutAdapter(adapter))


class _Requests:
    """Stand-in for `requests` in pyiceberg's token module, which calls only `post`."""

    @staticmethod
    def post(*arguments: Any, **options: Any) -> Response:
        return requests.post(*arguments, **{"timeout": _TIMEOUT_S, **options})


class _TimeoutAdapter(BaseAdapter):
    """Adds a timeout to requests that have none."""

    def __init__(self, inner: BaseAdapter) -> None:
        super().__init__()
        self._inner = inner

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: dict[str, str] | None = None,
    ) -> Response:
        return self._inner.send(request, stream, timeout or _TIMEOUT_S, verify, cert, proxies)

    def close(self) -> None:
        self._inner.close()
