"""Error reporting: maps errors to gRPC status codes, and logs failed calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog

from coranto.errors import CorantoError, StatusError, StoreError
from coranto.member import call_errors
from coranto_broker.append.overload import StreamOverloaded
from coranto_broker.quotas import QuotaExceeded
from coranto_broker.rpc.rolled_back import RolledBack, TooManyAppends

_log = structlog.get_logger(__name__)
_MAX_LOGGED: Final = 8000
_MAX_NAMED: Final = 128
Context = grpc.aio.ServicerContext[Any, Any]


_CODES: Final = (
    (RolledBack, grpc.StatusCode.ABORTED),
    (StatusError, grpc.StatusCode.FAILED_PRECONDITION),
    (StreamOverloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StoreError, grpc.StatusCode.UNAVAILABLE),
)
"""The codes of errors that only brokers raise."""

STATUS_SECONDS: Final = 5.0
"""The maximum wait for a client to read the status of a failed call."""

_logged_journal: ContextVar[str] = ContextVar("journal", default="")


def set_logged_journal(journal: str) -> None:
    """Set the journal that is logged if this call fails."""
    _logged_journal.set(journal)


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC status code for an error."""
    return call_errors.code_of(error, _CODES)


@asynccontextmanager
async def reported(method: str, context: Context) -> AsyncIterator[None]:
    """End the call with a status code and log it, if the block raises CorantoError or OSError."""
    try:
        yield
    except (CorantoError, OSError) as error:
        await report(error, method, context)


async def report(error: CorantoError | OSError, method: str, context: Context) -> NoReturn:
    """Log an error, and end the call with its status code. If the client reads nothing, the call is cancelled."""
    code, text = log_failure(error, method, context, _logged_journal.get()), call_errors.public_text(error)
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            await context.abort(code, text)
    except TimeoutError:
        raise asyncio.CancelledError from error


def log_failure(error: Exception, method: str, context: Context, journal: str) -> grpc.StatusCode:
    """Log the error that ends a client's request, and return its status code. `journal` may be empty."""
    code = code_of(error)
    if not isinstance(error, (TooManyAppends, QuotaExceeded)):  # `Admission` and `Quotas` log these together.
        level = logging.INFO if code is grpc.StatusCode.INVALID_ARGUMENT else logging.WARNING
        about = {"journal": journal} if journal else {}
        if name := _name_of(context):
            about["client_name"] = name
        text = str(error)[:_MAX_LOGGED]
        _log.log(level, "call.failed", method=method, client=context.peer(), code=code.name, error=text, **about)
    return code


def _name_of(context: Context) -> str:
    """Return the client's name (`ClientConfig.name`), or an empty string."""
    agents = [value for key, value in context.invocation_metadata() or () if key == "user-agent"]
    agent = agents[0] if agents and isinstance(agents[0], str) else ""
    name, _, library = agent.partition(" ")
    is_named = library.startswith("grpc-") and not name.startswith("grpc-") and name.isprintable()
    return name[:_MAX_NAMED] if is_named else ""
