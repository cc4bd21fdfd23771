"""A Spark session for assets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field, PrivateAttr

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # it hands out itself
    """A Spark session, started when it is first asked for and stopped when the run ends.

    A session that the process had before is used as it is, and left running. Use an executor that runs steps in one
    process: sessions take seconds to start. Java 17 or later is needed.
    """

    master: str = Field(default="local[2]", description="Spark's master URL.")
    settings: dict[str, str] = Field(default={}, description="Spark settings, beside those that consumers want anyway.")

    _session: SparkSession | None = PrivateAttr(default=None)
    _own: bool = PrivateAttr(default=False)

    def session(self) -> SparkSession:
        """Return the session. Raises InvalidInput without Java."""
        if self._session is None:
            from pyspark.sql import SparkSession

            from coranto_consumers.spark.session import new_session

            self._own = SparkSession.getActiveSession() is None
            self._session = new_session("dagster", master=self.master, settings=self.settings)
        return self._session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        session, self._session = self._session, None
        if session is not None and self._own:
            session.stop()
