"""Hooks and fixtures of all tests."""

import gc
import logging
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import structlog

from coranto_consumers.spark.class_archive import archive_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = (
    "system/test_main_job.py",
    "orchestration/verification/test_damage_table.py",
    "system/test_faults.py",
    "consumers/spark/cluster/test_cluster.py",
    "orchestration/verification/test_ui.py",
    "system/test_consumer_chain.py",
    "platform/recovery/test_journals.py",
    "orchestration/test_tutorial.py",
    "orchestration/flights/test_ui.py",
    "consumers/spark/sink/test_sink.py",
    "consumers/spark/test_consumer.py",
    "consumers/spark/test_killed_executors.py",
    "consumers/spark/test_windows.py",
    "orchestration/flights/test_pipeline.py",
    "simulation/test_streams_simulation.py",
    "simulation/test_simulation.py",
    "consumers/spark/streaming/test_query.py",
    "consumers/spark/streaming/test_planning.py",
    "system/test_crash_matrix_logs.py",
    "orchestration/verification/test_recovery.py",
    "system/test_crash_matrix.py",
    "platform/cli/test_with_cluster.py",
    "broker/recovery/test_adoption.py",
    "system/test_streams_kill.py",
    "platform/cli/journals/test_journals_with_cluster.py",
    "consumers/spark/test_store_restarts.py",
    "broker/server/test_kill.py",
    "consumers/spark/test_iceberg.py",
    "consumers/spark/test_fetching.py",
    "consumers/spark/test_foreach_batch.py",
    "orchestration/flights/test_ui_processes.py",
    "orchestration/windows/test_windows_backfill.py",
    "simulation/test_consumer_simulation.py",
    "simulation/test_streams_shared_simulation.py",
    "simulation/test_forks_simulation.py",
    "orchestration/flights/test_publish.py",
    "broker/server/test_exit.py",
    "broker/handlers/test_fuzz.py",
    "broker/recovery/test_in_sync_on_brokers.py",
    "platform/cluster/test_embedded.py",
    "consumers/test_consumer_on_cluster.py",
    "platform/client/test_client_with_broker.py",
    "consumers/recoverylog/test_standby_with_cluster.py",
    "consumers/stores/test_merge.py",
    "system/test_kill_broker.py",
    "system/test_s3_journal.py",
    "consumers/forks/test_walk_through.py",
    "consumers/cli/test_consumer.py",
)
"""Files that take long, about the longest first, and those that wait in turn with those that compute.

Begun last, one of them would keep all other processes waiting.
"""

# A shell has what it starts in the background ignore interrupts, and all that this starts in turn; Dagster then has
# them ignore SIGTERM, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Spark's programs here are short, and compiling them well takes twice the time of running them. Half of the rest is
# spared by an archive of classes, for executors and servers, too.
os.environ.setdefault("JDK_JAVA_OPTIONS", f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {archive_options()}")

# Processes that share the tests must not take ports from one another while a server that was killed is away.
_PORTS_EACH = 300
_run = zlib.crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())).encode())
_number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_first = 20_000 + (_run + _number) % (10_000 // _PORTS_EACH) * _PORTS_EACH
os.environ["CORANTO_PORTS"] = f"{_first}-{_first + _PORTS_EACH - 1}"


# Whatever the collection imports stays, so nobody need look whether it can be freed.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests of `LONG` files first where processes share the tests; alone, one begins with what is quick.

    Raises UsageError for a file that there is not (any more).
    """
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONG)}
    if missing := [str(path) for path in ranks if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py: LONG names files that do not exist: {', '.join(missing)}")
    if hasattr(config, "workerinput"):  # pytest-xdist's, of a process that shares.
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The `coranto` command configures logging for its process, and to a stream that ends with a test that runs it."""
    configured, before = structlog.is_configured(), structlog.get_config()
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    if configured:
        structlog.configure(**before)
    elif structlog.is_configured():
        structlog.reset_defaults()
    else:
        return
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """The one session of all tests of a process: Spark shares its context, so a test that stops one stops them all."""
    from coranto_consumers.spark.session import new_session

    session = new_session("coranto-tests", short=True)
    yield session
    session.stop()
