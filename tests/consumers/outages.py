"""Outages that last for a fixed number of retries, on a machine of any speed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, event, make_url

from coranto.client.loop import LoopThread
from coranto.effects import SystemClock
from coranto_consumers.stores.sql import SqlStore
from tests.faults.links import ProxiedLink, Proxy

RETRIES = 3


class Outage:
    """One outage, begun by a test and ended by the third wait of the code that retries."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._begin, self._end = begin, end
        self._lock = threading.Lock()
        self.under_way = False
        self.has_been = False
        self.waits: list[float] = []
        """The requested waits during the outage, in seconds. They return immediately."""

    def begin(self) -> None:
        """Begin the outage; later calls have no effect."""
        with self._lock:
            if self.has_been:
                return
            self._begin()
            self.begun()

    def begun(self) -> None:
        """Record that the outage has begun in another way."""
        self.under_way = self.has_been = True

    def wait(self, seconds: float) -> None:
        """Replace a sleep: the outage ends after the last retry, and no time passes."""
        with self._lock:
            if self.under_way:
                self.waits.append(seconds)
                if len(self.waits) == RETRIES:
                    self.under_way = False
                    self._end()


class OutageClock(SystemClock):
    """The machine's clock, which does not sleep during an outage."""

    def __init__(self, outage: Outage) -> None:
        self._outage = outage

    async def sleep(self, seconds: float) -> None:
        if self._outage.under_way:
            await asyncio.to_thread(self._outage.wait, seconds)
        else:
            await super().sleep(seconds)


class ArmedLink(ProxiedLink):
    """A link that is cut when a given number of new connections has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        self.on_cut: Callable[[], object] = lambda: None

    def join(self, pipe: Any) -> None:
        super().join(pipe)
        if self.left:
            self.left -= 1
            if not self.left:
                self.on_cut()
                self.cut()


class ProxiedStore(AbstractContextManager["ProxiedStore"]):
    """A database behind a proxy: `outage` breaks all connections and refuses new ones."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._loop = LoopThread("proxy of a database")
        self.link = ArmedLink()
        assert self._url.port is not None
        self._proxy = Proxy(self._url.port, lambda process: self.link)
        self.outage = Outage(lambda: self._loop.run(self._cut()), lambda: self._loop.run(self._heal()))

    @property
    def url(self) -> str:
        """The URL through the proxy."""
        port = int(self._proxy.endpoint.rpartition(":")[2])
        return self._url.set(port=port).render_as_string(hide_password=False)

    def outage_at(self, store: SqlStore, statement: str, *, after: bool) -> None:
        """Begin the outage before a statement that contains a text is sent, or after it is answered."""

        def sent(_connection: Connection, _cursor: Any, text: str, *_: Any) -> None:
            if statement in text:
                self.outage.begin()

        event.listen(store.engine, "after_cursor_execute" if after else "before_cursor_execute", sent)

    def outage_at_connection(self, number: int) -> None:
        """Begin the outage at the given new connection, counted from 1."""
        self.link.on_cut, self.link.left = self.outage.begun, number

    def serve_from(self, port: int) -> None:
        """Forward new connections to another server."""
        self._proxy.upstream = port

    def commit_at(self, *, answered: bool) -> Callable[[Connection], None]:
        """Return a commit that begins the outage before its request is sent, or before its answer is read."""

        def commit(connection: Connection) -> None:
            if answered and not self.outage.has_been:
                connection.exec_driver_sql("COMMIT")
                self.outage.begin()
                connection.exec_driver_sql("SELECT 1")  # The client notices that the connection is lost.
            self.outage.begin()
            connection.commit()

        return commit

    async def _cut(self) -> None:
        self.link.cut()

    async def _heal(self) -> None:
        self.link.heal()

    def __enter__(self) -> Self:
        self._loop.run(self._proxy.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loop.run(self._proxy.close())
        finally:
            self._loop.stop()
