"""Errors of calls: their codes, and the text that callers are told."""

from __future__ import annotations

import grpc
import pytest

from coranto.errors import CorantoError, InvalidInput, LeaseLost, PermissionDenied, StoreError, Unavailable
from coranto.member.call_errors import MAX_TOLD, code_of, told
from coranto.security.admission import TokenExpired


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (PermissionDenied("x"), grpc.StatusCode.PERMISSION_DENIED),
        (TokenExpired("x"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (Unavailable("x"), grpc.StatusCode.UNAVAILABLE),
        (LeaseLost("x"), grpc.StatusCode.UNAVAILABLE),
        (StoreError("x"), grpc.StatusCode.UNKNOWN),
        (KeyError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_each_kind_of_error_has_its_code(error: Exception, code: grpc.StatusCode) -> None:
    assert code_of(error) is code


def test_codes_of_a_service_count_first() -> None:
    first = [(StoreError, grpc.StatusCode.ABORTED)]
    assert code_of(StoreError("x"), first) is grpc.StatusCode.ABORTED
    assert code_of(CorantoError("x"), first) is grpc.StatusCode.UNKNOWN


def test_callers_are_told_no_words_of_a_store_and_no_endless_text() -> None:
    assert "secret-bucket" not in told(StoreError("the bucket secret-bucket is gone", kind="NoSuchBucket"))
    assert told(InvalidInput("length is negative")) == "length is negative"
    assert told(KeyError("k" * MAX_TOLD * 2)).endswith("…")
    assert len(told(KeyError("k" * MAX_TOLD * 2))) == MAX_TOLD + 1
