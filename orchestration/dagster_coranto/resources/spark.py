"""A Spark session for assets."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import dagster as dg
from pydantic import Field, PrivateAttr, field_validator

from dagster_coranto.resources.hidden import hide, reveal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_SECRET: Final = re.compile("(?i)secret|password|token|access[.]?key")
"""The settings that Spark itself redacts (its default `spark.redaction.regex`)."""


class _SharedSession:
    """The session that resources of this process share. The last user stops it, unless it existed before the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._started = False

    def acquire(self, master: str, settings: dict[str, str], short: bool) -> SparkSession:
        from coranto_consumers.spark.session.sessions import new_session, running_session

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


class SparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # its value is itself
    """A Spark session, started at its first use and stopped when the run ends.

    Runs in one process share a session, which stops with the last of them. A session that the process had before is
    used unchanged, and left running. Use an executor that runs steps in one process, because a session takes seconds to
    start. Java 17 or later is needed. Dagster shows `settings`, but not the values of secret ones, such as
    `spark.hadoop.fs.s3a.secret.key`.
    """

    master: str = Field(default="local[2]", description="Spark's master URL.")
    settings: dict[str, str] = Field(default={}, description="Spark settings, in addition to the consumers' own.")
    short: bool = Field(default=False, description="Whether runs take a few minutes, so that a quick start pays off.")
    early: bool = Field(
        default=False,
        description="Whether the session starts with the run, concurrently with steps that do not need it.",
    )

    _session: SparkSession | None = PrivateAttr(default=None)
    _starting: Future[SparkSession] | None = PrivateAttr(default=None)

    @field_validator("settings", mode="before")
    @classmethod
    def _hide(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        secret = {name: each for name, each in value.items() if isinstance(each, str) and _SECRET.search(str(name))}
        return {**value, **{name: hide(each) for name, each in secret.items()}}

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        if self.early:
            thread = ThreadPoolExecutor(1, thread_name_prefix="coranto-spark")
            self._starting = thread.submit(self._warm)
            thread.shutdown(wait=False)

    def session(self) -> SparkSession:
        """Return the session. Raises InvalidInput without Java."""
        if self._session is None:
            starting, self._starting = self._starting, None
            self._session = self._start() if starting is None else starting.result()
        return self._session

    def _start(self) -> SparkSession:
        settings = {name: reveal(value) for name, value in self.settings.items()}
        return _SHARED.acquire(self.master, settings, self.short)

    def _warm(self) -> SparkSession:
        from coranto_consumers.spark.session.sessions import warm_up

        session = self._start()
        try:
            warm_up(session)
        except BaseException:
            _SHARED.release(session)
            raise
        return session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        if self._starting is not None and self._starting.exception() is None:
            self.session()  # It started and was never used. If it did not start, nothing is left to stop.
        session, self._session = self._session, None
        if session is not None:
            _SHARED.release(session)
