"""The SQLSTATE of a connection that PostgreSQL refuses.

The driver's error lacks the SQLSTATE, and the server's text depends on its `lc_messages`. So a refused connection is
retried once, with a trace of the server's responses, which contains the SQLSTATE.
"""

from __future__ import annotations

import os
import re
import select
import time
from typing import Any, Final

from sqlalchemy import Engine, event

from coranto.errors import InvalidInput
from coranto_consumers.stores.urls import display_url

_STATE: Final = re.compile(rb'^B\t\d+\tErrorResponse\t.{0,200}? C "([0-9A-Z]{5})"', re.MULTILINE)
_OPTIONS_OF_DRIVER: Final = frozenset({"autocommit", "prepare_threshold", "context", "row_factory", "cursor_factory"})
_TIMEOUT_S: Final = 10.0


def explain_connection_errors(engine: Engine) -> None:
    """Set the SQLSTATE of the driver's error when a PostgreSQL server refuses a connection.

    Connecting raises InvalidInput for options that the driver does not support.
    """

    if engine.driver != "psycopg":
        return

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Any, _record: Any, arguments: Any, options: dict[str, Any]) -> Any:
        driver = dialect.loaded_dbapi
        try:
            return dialect.connect(*arguments, **options)
        except driver.errors.ConnectionTimeout:
            raise
        except driver.OperationalError as error:
            if error.sqlstate is None:
                given = {name: value for name, value in options.items() if name not in _OPTIONS_OF_DRIVER}
                error.sqlstate = _state_of(engine, driver, driver.conninfo.make_conninfo(*arguments, **given), error)
            raise


def _state_of(engine: Engine, driver: Any, conninfo: str, error: Exception) -> str | None:
    """Connect again, and return the SQLSTATE of the refusal. None if the server does not answer, or accepts now."""
    pq = driver.pq
    connection = pq.PGconn.connect_start(conninfo.encode())
    try:
        if connection.status != pq.ConnStatus.BAD:
            found = _STATE.findall(_traced(connection, pq)) if hasattr(os, "memfd_create") else []
            return found[-1].decode() if found else None
    finally:
        connection.finish()
    if pq.PGconn.ping(conninfo.encode()) == pq.Ping.NO_ATTEMPT:
        raise InvalidInput(
            f"{display_url(engine.url)}: the driver does not take an option of the URL: {error}", field="store_url"
        ) from error
    return None


def _traced(connection: Any, pq: Any) -> bytes:
    """Finish connecting, and return the trace. It is kept in memory only, because it may contain a password."""
    waits = {pq.PollingStatus.READING: select.POLLIN, pq.PollingStatus.WRITING: select.POLLOUT}
    deadline = time.monotonic() + _TIMEOUT_S
    trace, wait, is_traced = os.memfd_create("coranto-trace"), select.POLLOUT, False
    try:
        while wait and (left := deadline - time.monotonic()) > 0:
            ready = select.poll()
            ready.register(connection.socket, wait)
            ready.poll(left * 1000)
            wait = waits.get(connection.connect_poll(), 0)
            if wait == select.POLLIN and not is_traced:  # Connected.
                is_traced = True
                connection.trace(os.dup(trace))
                connection.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        if is_traced:
            connection.untrace()  # This flushes the trace.
        return os.pread(trace, os.fstat(trace).st_size, 0)
    finally:
        os.close(trace)
