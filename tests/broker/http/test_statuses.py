"""The HTTP status of every kind of error: the most specific kind counts."""

from __future__ import annotations

import pytest

from coranto.errors import CorantoError, InvalidInput, PermissionDenied, StoreError, Unauthenticated, Unavailable
from coranto_broker.http.statuses import http_status
from coranto_broker.rpc.rolled_back import AppendUnderflow, DiskFull, RolledBack


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInput("what"), 400),
        (Unauthenticated("what"), 401),
        (PermissionDenied("what"), 403),
        (AppendUnderflow(1), 408),
        (RolledBack("what"), 503),
        (DiskFull("what"), 507),
        (StoreError("what"), 503),
        (Unavailable("what"), 503),
        (CorantoError("what"), 500),
        (OSError("what"), 500),
    ],
    ids=lambda each: type(each).__name__,
)
def test_each_kind_of_error_has_its_status(error: Exception, status: int) -> None:
    assert http_status(error) == status
