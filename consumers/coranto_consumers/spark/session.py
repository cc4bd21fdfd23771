"""Spark sessions with settings for consumers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from coranto.errors import InvalidInput

_LOGGING = Path(__file__).with_name("log4j2.properties")

_SETTINGS: Mapping[str, str] = {
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    # Aggregates of one transaction are small, so more partitions than cores only cost time.
    "spark.sql.shuffle.partitions": "2",
}

_LOCAL_SETTINGS: Mapping[str, str] = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""Settings without executors on other machines, which have to reach the driver."""


def settings_for(master: str) -> dict[str, str]:
    """Return the settings for consumers on a master. They leave to Spark what depends on the cluster."""
    return {**_SETTINGS, **(_LOCAL_SETTINGS if _is_local(master) else {})}


def new_session(app_name: str, *, master: str = "local[2]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session on `master`, or the process's existing one. `settings` override the settings for consumers.

    Python workers run on this interpreter, unless PYSPARK_PYTHON names another. Raises InvalidInput without Java.
    """
    java = os.environ.get("JAVA_HOME")
    if not (os.path.exists(os.path.join(java, "bin", "java")) if java else shutil.which("java")):
        raise InvalidInput("Spark needs Java 17 or later: install it (openjdk-17-jre-headless), or set JAVA_HOME")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if _is_local(master):
        # Otherwise Spark looks up this machine's name, and logs a warning.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(app_name).master(master)
    for key, value in {**settings_for(master), **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _is_local(master: str) -> bool:
    """Return True if all executors are on this machine."""
    return master.startswith("local")
