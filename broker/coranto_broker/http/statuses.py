"""Mapping of the broker's statuses and errors to HTTP statuses."""

from __future__ import annotations

from collections.abc import Mapping

from coranto.errors import (
    CoordinationError,
    InvalidInput,
    LimitExceeded,
    PermissionDenied,
    StatusError,
    StoreError,
    Unauthenticated,
    Unavailable,
)
from coranto.wire import protocol_pb2 as pb
from coranto_broker.authorization import TokenExpired
from coranto_broker.rpc.rolled_back import AppendUnderflow, DiskFull, RolledBack

# Gazette's gateway answers 404, 416, 503 (for too few brokers), and 500 for everything else.
STATUSES: Mapping[int, int] = {
    pb.OK: 206,
    pb.JOURNAL_NOT_FOUND: 404,
    pb.NO_JOURNAL_PRIMARY_BROKER: 503,
    pb.NOT_JOURNAL_PRIMARY_BROKER: 503,
    pb.NOT_JOURNAL_BROKER: 503,
    pb.INSUFFICIENT_JOURNAL_BROKERS: 503,
    pb.OFFSET_NOT_YET_AVAILABLE: 416,
    pb.WRONG_ROUTE: 503,
    pb.PROPOSAL_MISMATCH: 503,
    pb.ETCD_TRANSACTION_FAILED: 409,
    pb.NOT_ALLOWED: 403,
    pb.WRONG_APPEND_OFFSET: 409,
    pb.INDEX_HAS_GREATER_OFFSET: 409,
    pb.REGISTER_MISMATCH: 412,
    pb.SUSPENDED: 409,
    pb.FRAGMENT_STORE_UNHEALTHY: 503,
}

HINTS: Mapping[int, str] = {
    pb.JOURNAL_NOT_FOUND: "there is no journal of this name, or the token does not cover it",
    pb.NO_JOURNAL_PRIMARY_BROKER: "the journal is not assigned to a broker at the moment; try again",
    pb.INSUFFICIENT_JOURNAL_BROKERS: "the journal has fewer brokers than it must have at the moment; try again",
    pb.OFFSET_NOT_YET_AVAILABLE: "there is nothing at this offset yet; with block=true the answer waits for it",
    pb.NOT_ALLOWED: "the journal's flags forbid it",
    pb.WRONG_APPEND_OFFSET: "the journal's head is elsewhere; nothing was appended",
    pb.INDEX_HAS_GREATER_OFFSET: "the journal's store has content beyond its head; an operator must reset the head",
    pb.REGISTER_MISMATCH: "the journal's registers do not match the selector; nothing was appended",
    pb.SUSPENDED: "the journal is suspended",
    pb.FRAGMENT_STORE_UNHEALTHY: "the journal's fragment store fails; nothing was appended",
}

_ERRORS: tuple[tuple[type[BaseException], int], ...] = (
    (InvalidInput, 400),
    (Unauthenticated, 401),
    (TokenExpired, 401),
    (PermissionDenied, 403),
    (AppendUnderflow, 408),
    (DiskFull, 507),
    (LimitExceeded, 429),
    (RolledBack, 503),
    (StoreError, 503),
    (Unavailable, 503),
    (CoordinationError, 503),
)


def http_status(error: BaseException) -> int:
    """Return the HTTP status for an error."""
    if isinstance(error, StatusError):
        return STATUSES.get(error.status, 500)
    return next((status for kind, status in _ERRORS if isinstance(error, kind)), 500)
