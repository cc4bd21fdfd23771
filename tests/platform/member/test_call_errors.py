"""Errors of calls: their codes, and their texts for callers."""

from __future__ import annotations

import grpc
import pytest

from coranto.errors import CorantoError, InvalidInput, LeaseLost, PermissionDenied, StoreError, Unavailable
from coranto.member.call_errors import MAX_TEXT, code_of, public_text
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


def test_codes_of_a_service_take_precedence() -> None:
    first = [(StoreError, grpc.StatusCode.ABORTED)]
    assert code_of(StoreError("x"), first) is grpc.StatusCode.ABORTED
    assert code_of(CorantoError("x"), first) is grpc.StatusCode.UNKNOWN


def test_public_texts_hide_store_details_and_are_bounded() -> None:
    assert "secret-bucket" not in public_text(StoreError("the bucket secret-bucket is gone", kind="NoSuchBucket"))
    assert public_text(InvalidInput("length is negative")) == "length is negative"
    assert public_text(KeyError("k" * MAX_TEXT * 2)).endswith("…")
    assert len(public_text(KeyError("k" * MAX_TEXT * 2))) == MAX_TEXT + 1
