"""The errors of calls: their gRPC status codes, and the texts for callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc

from coranto.errors import (
    CoordinationError,
    CorantoError,
    CorruptData,
    EtcdFull,
    InvalidInput,
    LimitExceeded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from coranto.security.admission import KeysNotFetched, TokenExpired

MAX_TEXT: Final = 1500
"""The maximum length of an error's text in characters: it must fit into the trailers of a call."""

Codes = Sequence[tuple[type[BaseException], grpc.StatusCode]]

CODES: Final[Codes] = (
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (TokenExpired, grpc.StatusCode.DEADLINE_EXCEEDED),
    (KeysNotFetched, grpc.StatusCode.ABORTED),  # The client then knows that an append was not applied.
    (CorruptData, grpc.StatusCode.DATA_LOSS),
    (LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EtcdFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (CoordinationError, grpc.StatusCode.UNAVAILABLE),
    (CorantoError, grpc.StatusCode.UNKNOWN),
    (BaseException, grpc.StatusCode.INTERNAL),
)
"""The code of each kind of error. The first match applies."""


def code_of(error: BaseException, first: Codes = ()) -> grpc.StatusCode:
    """Return the gRPC status code for an error. `first` has codes that take precedence over CODES."""
    return next(code for kind, code in (*first, *CODES) if isinstance(error, kind))


def public_text(error: BaseException) -> str:
    """Return an error's text for the caller, without error texts of stores, cut to MAX_TEXT."""
    text = error.public_text if isinstance(error, CorantoError) else str(error)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
