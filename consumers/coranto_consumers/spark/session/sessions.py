"""Spark sessions with settings for consumers."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coranto.extras import with_install_advice

try:
    import pyspark
    from pyspark.errors import PySparkException, PySparkRuntimeError
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.errors import InvalidInput
from coranto_consumers.spark.session.class_archive import archive_options, find_java

_LOGGING = Path(__file__).with_name("log4j2.properties")

_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""The environment variable that `spark-submit` sets for the program that it runs."""

_DESCRIPTION = "spark.job.description"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_DEFAULT_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
"""The options that precede `_JAVA_OPTIONS`. Users usually do not set them."""

_SETTINGS: Mapping[str, str] = {
    _JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.driver.memory": "2g",
    # Otherwise whole journals are read, even with filters on offsets and times.
    "spark.sql.python.filterPushdown.enabled": "true",
    # Aggregates of one transaction are small, so more partitions than cores only cost time.
    "spark.sql.shuffle.partitions": "2",
    # The rows of a transaction are kept until it has committed. Compression would take half as long as reading.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
}

_LOCAL_SETTINGS: Mapping[str, str] = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""Settings for sessions without executors on other machines, which would have to reach the driver."""

_IN_PROCESS_SETTINGS: Mapping[str, str] = {"spark.python.daemon.module": "coranto_consumers.spark.session.workers"}
"""Settings for sessions without other executors, which might have another Python environment."""

_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""Java's option for quick compilation without optimization. Otherwise the compiler uses most of the first minute."""

_INTERPRETER = """#!/bin/sh
# Spark puts a zip of PySpark first, and each Python process would compile the zip's modules again. This interpreter has
# PySpark itself.
PYTHONPATH=$(printf %s "$PYTHONPATH" | tr : '\\n' | grep -v '/pyspark[.]zip$' | paste -sd : -)
export PYTHONPATH
exec {python} "$@"
"""


def settings_for(master: str) -> dict[str, str]:
    """Return the settings for consumers on a master, without settings that depend on the cluster."""
    return {
        **_SETTINGS,
        **(_LOCAL_SETTINGS if _is_local(master) else {}),
        **(_IN_PROCESS_SETTINGS if _is_in_process(master) else {}),
    }


def running_session() -> SparkSession | None:
    """Return this process's session. None if there is none."""
    try:
        active = SparkSession.active()
    except PySparkRuntimeError:
        return None
    # `createDataFrame` in a batch of a streaming query makes the query's copy of the session the active one.
    return active if is_remote() else SparkSession.builder.getOrCreate()


def new_session(
    app_name: str, *, master: str = "local[2]", settings: Mapping[str, str] | None = None, short: bool = False
) -> SparkSession:
    """Return a new session on `master`. `settings` override the settings for consumers.

    If the process already has a session, returns it unchanged. For `short` sessions, of a few minutes, Java compiles
    quickly, without optimization. Python workers run on this interpreter, unless PYSPARK_PYTHON names another one.
    Raises InvalidInput without Java.
    """
    if (running := running_session()) is not None:
        return running
    if find_java() is None:
        raise InvalidInput("Spark needs Java 17 or later: install it (openjdk-17-jre-headless), or set JAVA_HOME")
    if _is_local(master):
        # Otherwise Spark looks up this machine's name, and logs a warning.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(app_name).master(master)
    chosen = {**settings_for(master), **(settings or {})}
    if short:
        chosen[_JAVA_OPTIONS] = f"{chosen[_JAVA_OPTIONS]} {_QUICK_COMPILER}"
    if _DEFAULT_JAVA_OPTIONS not in chosen and (archived := archive_options()):
        chosen[_DEFAULT_JAVA_OPTIONS] = archived
    for key, value in chosen.items():
        builder = builder.config(key, value)
    with _workers_on(_local_interpreter() if _is_in_process(master) else sys.executable):
        return builder.getOrCreate()


def start_session(app_name: str, master: str | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Return the session of a program: a new one, by default on `local[2]`, or the session of `spark-submit`.

    The session of `spark-submit` gets the `spark.sql.*` settings for consumers that it lacks. Raises InvalidInput
    without Java, and for a master or settings if `spark-submit` has started the program.
    """
    if _SUBMITTED not in os.environ:
        return new_session(app_name, master=master or "local[2]", settings=settings)
    if master or settings:
        raise InvalidInput(
            f"spark-submit has started this program, so {'the master' if master else 'settings of Spark'} cannot be "
            "given here: give --master and --conf to spark-submit"
        )
    spark = SparkSession.builder.appName(app_name).getOrCreate()
    given = spark.sparkContext.getConf()
    for name, value in settings_for(given.get("spark.master") or "").items():
        if name.startswith("spark.sql.") and not given.contains(name):
            spark.conf.set(name, value)
    return spark


def warm_up(spark: SparkSession) -> None:
    """Run an empty job, so that Java loads the classes for jobs, and Python's workers start."""
    tasks = max(1, spark.sparkContext.defaultParallelism)
    spark.range(0, tasks, 1, tasks).mapInArrow(_unchanged, "id BIGINT").count()


def _unchanged(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Describe the jobs that this thread starts in the block. Sessions of Spark Connect have no descriptions."""
    try:
        context = spark.sparkContext
    except PySparkException:
        yield
        return
    before = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]  # None removes it.


@contextmanager
def _workers_on(interpreter: str) -> Iterator[None]:
    """Make sessions that start in the block run their workers on an interpreter, unless the environment names one."""
    names = [name for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") if name not in os.environ]
    os.environ |= dict.fromkeys(names, interpreter)
    try:
        yield
    finally:
        # Other sessions of this process and its children need an interpreter that is not removed.
        os.environ |= dict.fromkeys(names, sys.executable)


def _is_local(master: str) -> bool:
    """Return True if all executors are on this machine."""
    return master.startswith("local")


def _is_in_process(master: str) -> bool:
    """Return True if the driver is the only executor."""
    return master == "local" or master.startswith("local[")


@functools.cache
def _local_interpreter() -> str:
    """Return a command that runs this interpreter with its own PySpark. It exists until this process ends."""
    if ".zip" in pyspark.__file__:
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="coranto-spark-")
    atexit.register(folder.cleanup)
    command = Path(folder.name) / "python"
    command.write_text(_INTERPRETER.format(python=shlex.quote(sys.executable)))
    command.chmod(0o700)
    return str(command)
