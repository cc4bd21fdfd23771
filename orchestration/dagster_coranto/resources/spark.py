"""A Spark session for assets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class _SharedSession:
    """The session that resources of this process share. Its last user stops it, unless it existed before its first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._started = False

    def acquire(self, master: str, settings: dict[str, str], short: bool) -> SparkSession:
        from coranto_consumers.spark.session import new_session, running_session

        with self._lock:
            if not self._users:
                self._started = running_session() is None
            session = new_session("dagster", master=master, settings=settings, short=short)
            self._users += 1
            return session

    def release(self, session: SparkSession) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._started:
                session.stop()


_SHARED = _SharedSession()


class SparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # it hands out itself
    """A Spark session, started when it is first asked for and stopped when the run ends.

    Runs in one process share a session, which stops with the last of them. A session that the process had before is
    used as it is, and left running. Use an executor that runs steps in one process: sessions take seconds to start.
    Java 17 or later is needed.
    """

    master: str = Field(default="local[2]", description="Spark's master URL.")
    settings: dict[str, str] = Field(default={}, description="Spark settings, beside those that consumers want anyway.")
    short: bool = Field(default=False, description="Whether runs take a few minutes, so that a quick start pays off.")

    _session: SparkSession | None = PrivateAttr(default=None)

    def session(self) -> SparkSession:
        """Return the session. Raises InvalidInput without Java."""
        if self._session is None:
            self._session = _SHARED.acquire(self.master, self.settings, self.short)
        return self._session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        session, self._session = self._session, None
        if session is not None:
            _SHARED.release(session)
