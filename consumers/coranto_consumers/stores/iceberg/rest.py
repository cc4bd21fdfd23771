"""Commits through a REST catalog. Only a success response determines the outcome of a commit.

A server, or a proxy in front of it, may answer 5xx, or not at all, although it applies the commit. It may also reject
(409) a commit that was applied, if a proxy has sent the request twice. So after a rejection the table itself is read
(`fate_of`). After any other failure the outcome is unknown, and the owner resolves it (`IcebergOwner.resolve`).

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

from coranto_consumers.stores.iceberg.together import remove_manifests

_TIME_LIMIT_S: Final = (10.0, 120.0)
"""The timeouts in seconds to connect to a server, and to wait for its data. pyiceberg itself has none."""
_TRANSIENT: Final = (
    AuthorizationExpiredError,
    CommitStateUnknownException,
    RequestException,
    ServerError,
    ServiceUnavailableError,
    TooManyRequestsError,
)


class CommitFate(Enum):
    """The outcome of a commit, as the table's metadata shows it."""

    APPLIED = auto()
    NEVER = auto()
    """The commit was not applied, and cannot be applied any more, even if its request is still in flight."""
    OPEN = auto()
    """The commit was not applied, but still may be; or the history has expired."""


def fate_of(transaction: Transaction, now: TableMetadata) -> CommitFate:
    """Return the outcome of a commit with a snapshot. `now` is its table's metadata from any time since it began.

    A commit requires that its parent is the current snapshot. Once another snapshot has followed the parent, the commit
    cannot be applied, even after a rollback to the parent, because sequence numbers only increase.
    """
    before = transaction._table.metadata
    if now.table_uuid != before.table_uuid:
        return CommitFate.NEVER  # The table was dropped and recreated.
    made = transaction.table_metadata.current_snapshot_id
    if made is not None and now.snapshot_by_id(made) is not None:
        return CommitFate.APPLIED
    parent, snapshot = before.current_snapshot_id, now.current_snapshot()
    while snapshot is not None and snapshot.snapshot_id != parent:
        if snapshot.parent_snapshot_id == parent:
            return CommitFate.NEVER
        above = snapshot.parent_snapshot_id
        snapshot = now.snapshot_by_id(above) if above is not None else None
    return CommitFate.OPEN  # Nothing has followed the parent, or the history has expired.


class RestCommits:
    """Commits of one table each."""

    together: Final = False

    def __init__(self, catalog: RestCatalog) -> None:
        """Set timeouts for the catalog's calls."""
        self._catalog = catalog
        limit_times(catalog)

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
        except CommitFailedException as refusal:
            fate = fate_of(transaction, self._catalog.load_table(table.name()).metadata)
            if fate is CommitFate.OPEN:
                raise CommitStateUnknownException(f"refused, and might be applied yet: {refusal}") from refusal
            if fate is CommitFate.NEVER:
                remove_manifests(transactions)
                raise


def is_transient(error: BaseException | None) -> bool:
    """Return True for failures of a REST catalog that a retry may fix."""
    return isinstance(error, _TRANSIENT)


def limit_times(catalog: Catalog) -> None:
    """Set timeouts for a REST catalog's calls, and for requests for tokens. Other catalogs are left unchanged."""
    if not isinstance(catalog, RestCatalog):
        return
    limit_tokens()
    limit_questions()
    for prefix, adapter in list(catalog._session.adapters.items()):
        if not isinstance(adapter, _TimeLimited):
            catalog._session.mount(prefix, _TimeLimited(adapter))


def limit_tokens() -> None:
    """Set a timeout for pyiceberg's requests for tokens of the type `oauth2`, in the whole process.

    pyiceberg sends them outside of a catalog's session, with `requests.post`.
    """
    vars(auth)["requests"] = _Requests


def limit_questions() -> None:
    """Set a timeout for the first request of each REST catalog that is created from now on, in the whole process.

    The constructor of a catalog requests the catalog's configuration, in a session that is not accessible.
    """
    vars(pyiceberg_rest)["Session"] = _LimitedSession


class _LimitedSession(requests.Session):
    """A session whose requests have a timeout."""

    def __init__(self) -> None:
        super().__init__()
        for prefix, adapter in list(self.adapters.items()):
            self.mount(prefix, _TimeLimited(adapter))


class _Requests:
    """Stand-in for `requests` in pyiceberg's token module, which calls only `post`."""

    @staticmethod
    def post(*arguments: Any, **options: Any) -> Response:
        return requests.post(*arguments, **{"timeout": _TIME_LIMIT_S, **options})


class _TimeLimited(BaseAdapter):
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
        return self._inner.send(request, stream, timeout or _TIME_LIMIT_S, verify, cert, proxies)

    def close(self) -> None:
        self._inner.close()
