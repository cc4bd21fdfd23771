"""Reporting of errors: maps our errors to gRPC status codes, and logs failed calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog

from coranto.errors import (
    CoordinationError,
    CorantoError,
    CorruptData,
    InvalidInput,
    PermissionDenied,
    StatusError,
    StoreError,
    Unauthenticated,
    Unavailable,
)
from coranto_broker.authorization import TokenExpired
from coranto_broker.rpc.rolled_back import RolledBack, TooManyAppends

_log = structlog.get_logger(__name__)
_MOST_TOLD: Final = 1500
_MOST_LOGGED: Final = 8000
Context = grpc.aio.ServicerContext[Any, Any]


_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (TokenExpired, grpc.StatusCode.DEADLINE_EXCEEDED),
    (RolledBack, grpc.StatusCode.ABORTED),
    (StatusError, grpc.StatusCode.FAILED_PRECONDITION),
    (CorruptData, grpc.StatusCode.DATA_LOSS),
    (StoreError, grpc.StatusCode.UNAVAILABLE),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (CoordinationError, grpc.StatusCode.UNAVAILABLE),
    (CorantoError, grpc.StatusCode.UNKNOWN),
    (OSError, grpc.StatusCode.INTERNAL),
)


_concerned: ContextVar[str] = ContextVar("journal", default="")


def concerns(journal: str) -> None:
    """Name the journal in the log entry if this call fails later."""
    _concerned.set(journal)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


@asynccontextmanager
async def reported(method: str, context: Context) -> AsyncIterator[None]:
    """End the call with a status code and log it, if the block raises CorantoError or OSError."""
    try:
        yield
    except (CorantoError, OSError) as error:
        await report(error, method, context)


async def report(error: CorantoError | OSError, method: str, context: Context) -> NoReturn:
    """End the call with the status code of an error, and log it."""
    code = code_of(error)
    if not isinstance(error, TooManyAppends):  # `Admission` logs these, many in one entry.
        level = logging.INFO if code is grpc.StatusCode.INVALID_ARGUMENT else logging.WARNING
        journal = {"journal": name} if (name := _concerned.get()) else {}
        text = str(error)[:_MOST_LOGGED]
        _log.log(level, "call.failed", method=method, client=context.peer(), code=code.name, error=text, **journal)
    await context.abort(code, told(error))


def told(error: CorantoError | OSError) -> str:
    """Return an error's text for the caller: without a store's own words, and cut to fit into the end of a call."""
    text = error.told if isinstance(error, CorantoError) else str(error)
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}…"
