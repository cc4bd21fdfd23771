"""Hooks and fixtures of all tests."""

import gc
import getpass
import inspect
import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

import hypothesis
import pytest
import structlog

from coranto_consumers.spark.session.class_archive import archive_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG = (
    "system/test_main_job.py",
    "consumers/spark/consumer/test_consumer.py",
    "consumers/spark/sink/test_sink.py",
    "system/test_consumer_chain.py",
    "consumers/spark/options/test_message_types.py",
    "simulation/test_simulation.py",
    "consumers/spark/outputs/test_iceberg.py",
    "consumers/spark/consumer/test_rejections_of_batches.py",
    "consumers/spark/consumer/test_outages.py",
    "simulation/test_streams_simulation.py",
    "simulation/test_consumer_simulation.py",
    "consumers/tables/test_running.py",
    "consumers/spark/consumer/test_foreach_batch.py",
    "system/test_streams_kill.py",
    "consumers/stores/iceberg/test_shard_store.py",
    "consumers/spark/test_store_restarts.py",
    "broker/server/test_kill.py",
    "consumers/runtime/test_primary.py",
    "system/test_crash_matrix.py",
    "consumers/stores/test_sql_shard.py",
    "consumers/cli/test_consumer.py",
    "consumers/runtime/test_rejections.py",
    "consumers/tables/test_spark_runner.py",
    "simulation/test_streams_shared_simulation.py",
    "platform/ingest/test_engine_kill.py",
    "consumers/stores/test_row_buffer.py",
    "orchestration/verification/test_damage_table.py",
    "platform/client/test_client_with_broker.py",
    "platform/cli/test_with_cluster.py",
    "system/test_faults.py",
    "consumers/test_consumer_on_cluster.py",
    "consumers/spark/consumer/test_rejections.py",
    "platform/ingest/gateway/test_docs_webhooks.py",
    "system/test_kill_broker.py",
    "consumers/stores/test_sql.py",
    "system/test_torn_appends.py",
    "platform/cluster/test_embedded.py",
    "consumers/spark/consumer/test_windows.py",
    "orchestration/flights/test_pipeline.py",
    "simulation/test_forks_simulation.py",
    "orchestration/consumers/test_one_run_at_a_time.py",
    "orchestration/ingests/test_assets.py",
    "consumers/recovery/test_losses_in_time.py",
    "broker/handlers/test_authorization.py",
    "platform/ingest/postgres/test_source.py",
    "consumers/tables/test_tables_killed.py",
    "platform/streams/control/test_forking.py",
    "consumers/audit/test_check.py",
    "platform/ingest/postgres/test_server.py",
    "system/test_lost_disks.py",
    "consumers/stores/iceberg/test_rest.py",
    "consumers/spark/streaming/test_query.py",
    "consumers/spark/sink/test_stream_writer.py",
    "platform/fragments/test_store_contract.py",
    "platform/cli/journals/test_forking.py",
    "test_marks.py",
    "platform/messages/test_messages_with_brokers.py",
    "platform/cli/test_audit_with_cluster.py",
    "platform/publication/test_ledger.py",
    "platform/cli/journals/test_journals_with_cluster.py",
    "broker/handlers/test_append_stream.py",
    "system/test_crash_matrix_logs.py",
    "broker/recovery/test_adoption.py",
    "platform/checkup/test_brokers.py",
    "broker/server/test_oidc.py",
    "broker/handlers/test_overload.py",
    "consumers/spark/sink/test_writer.py",
    "platform/test_docs_commands.py",
    "broker/append/test_decision.py",
    "platform/streams/control/test_lifecycle.py",
)
"""Files that take long, about the longest first, and files whose tests alternate between waiting and computing.

If one of them started last, all other processes would wait for it.
"""

SERVERS = frozenset(
    {
        "DagsterUi",
        "EmbeddedCluster",
        "EtcdServer",
        "MariadbServer",
        "PostgresServer",
        "PostgresStandby",
        "RestServer",
        "S3Server",
        "SparkSession",
        "new_session",
    }
)
"""Names of servers and JVMs. Tests are `integration` if their code, or their fixtures, use one of these."""
DATABASES = frozenset({"postgresql", "mariadb"})
"""Parameters that make a test start a server."""
FOLDERS = {"simulation": "simulation", "system": "system"}
"""The marks of all tests below a folder."""
PROGRAMS = frozenset({"etcd", "java", "spark-submit", "initdb", "postgres", "mariadbd"})
"""Programs that only tests with one of these marks may start."""
SERVER_MARKS = frozenset({"integration", "system", "simulation", "browser"})
SLOW_FILE = Path(__file__).with_name("slow.txt")
"""Test functions without servers that take long. `make slow` writes it."""
SLOW_SECONDS = 0.1
SLOW = frozenset(SLOW_FILE.read_text().split())
EXHAUSTIVE_FILE = Path(__file__).with_name("exhaustive.txt")
"""Long tests, and cases of tests, that only `make test-all` runs. Other tests cover the same guarantees."""
EXHAUSTIVE = frozenset(EXHAUSTIVE_FILE.read_text().splitlines())

# A shell makes its background processes, and all their children, ignore SIGINT; Dagster then makes them ignore SIGTERM,
# too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The duration of an example depends more on the machine than on the code. `make test-all` selects the second profile.
hypothesis.settings.register_profile("sample", deadline=None, max_examples=30)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=100)
hypothesis.settings.load_profile("sample")

# Spark's programs here are short: compiling them well takes twice as long as running them. A class archive halves the
# remaining time, also for executors and servers.
os.environ.setdefault("JDK_JAVA_OPTIONS", f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {archive_options()}")

# Test processes, also of other runs, must not take a port of another one while its killed server is down. Each process
# owns a block of ports while it holds the block's first one.
_PORTS_EACH = 300
_ALL_PORTS = range(11_000, 32_600)
"""Below the kernel's range of ephemeral ports."""


def _own_ports() -> tuple[socket.socket, range]:
    for first in _ALL_PORTS[::_PORTS_EACH]:
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", first))
        except OSError:
            held.close()
        else:
            return held, range(first + 1, first + _PORTS_EACH)
    raise pytest.UsageError(f"all blocks of ports in {_ALL_PORTS} are in use by other test processes")


_held_port, _ports = _own_ports()
os.environ["CORANTO_PORTS"] = f"{_ports.start}-{_ports.stop - 1}"


# Imports of the collection stay loaded, so the garbage collector need not scan them.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Derive marks. In processes that share the tests, run `LONG` files first; a single process starts with quick ones.

    With `--shuffle`, the seed determines the order of files and of the tests in each file. Raises UsageError for a file
    of `LONG` that does not exist.
    """
    here = Path(__file__).parent
    for item in items:
        for mark in _derived_marks(item, here):
            item.add_marker(mark)
        if _is_exhaustive(item.nodeid):
            item.add_marker("exhaustive")
        if _has_no_server(item) and _function_name(item.nodeid) not in SLOW:
            item.add_marker("fast")
    ranks = {here / name: rank for rank, name in enumerate(LONG)}
    if missing := [str(path) for path in ranks if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py: LONG names files that do not exist: {', '.join(missing)}")
    yield
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = _shuffled(items, random.Random(seed))
    elif hasattr(config, "workerinput"):  # Set by pytest-xdist in a process that shares the tests.
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def _shuffled(items: list[pytest.Item], chance: random.Random) -> list[pytest.Item]:
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    shuffled = list(files.values())
    chance.shuffle(shuffled)
    for tests in shuffled:
        chance.shuffle(tests)
    return [item for tests in shuffled for item in tests]


def _derived_marks(item: pytest.Item, here: Path) -> Iterator[str]:
    if mark := FOLDERS.get(item.path.relative_to(here).parts[0]):
        yield mark
    if isinstance(item, pytest.Function):
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(each, str) and each in DATABASES for each in parameters):
            yield "integration"
        fixtures = [used[-1].func for used in item._fixtureinfo.name2fixturedefs.values()]
        if any(_starts_server(inspect.unwrap(function)) for function in (item.function, *fixtures)):
            yield "integration"


def _function_name(name: str) -> str:
    """Return the name of a test without its parameters."""
    return name.partition("[")[0]


def _is_exhaustive(name: str) -> bool:
    """Return True if `exhaustive.txt` lists a test, or this case of it."""
    return not EXHAUSTIVE.isdisjoint((name, _function_name(name)))


def _has_no_server(item: pytest.Item) -> bool:
    return SERVER_MARKS.isdisjoint(mark.name for mark in item.iter_markers())


@cache
def _starts_server(function: Callable[..., object]) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not SERVERS.isdisjoint(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code and in the functions nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


_fast_test = ""
"""The running test, if it must not start a server."""


def _check_program(event: str, details: tuple[object, ...]) -> None:
    """Raise AssertionError if a fast test starts a server. Programs written by tests are allowed."""
    if event != "subprocess.Popen" or not _fast_test:
        return
    program = Path(str(details[0]))
    if program.name in PROGRAMS and f"/pytest-of-{getpass.getuser()}/" not in str(program):
        raise AssertionError(f"{_fast_test} starts {program}: mark it `integration`, or extend tests/conftest.py")


sys.addaudithook(_check_program)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _fast_test
    _fast_test = item.nodeid if _has_no_server(item) else ""
    try:
        return (yield)
    finally:
        _fast_test = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in a random order")
    parser.addoption("--record-slow", action="store_true", help=f"write the names of slow tests to {SLOW_FILE.name}")


_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = _function_name(report.nodeid)
    if report.when != "teardown":
        _seconds[name] = max(report.duration, _seconds.get(name, 0.0))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-slow") and not hasattr(session.config, "workerinput"):
        slow = sorted(name for name, seconds in _seconds.items() if seconds >= SLOW_SECONDS)
        SLOW_FILE.write_text("".join(f"{name}\n" for name in slow))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Restore logging. The `coranto` command configures it for its process, on a stream that closes after the test."""
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
    """The only session of a process: Spark shares its context, so a test that stops one session stops all."""
    from coranto_consumers.spark.session.sessions import new_session

    session = new_session("coranto-tests", short=True)
    yield session
    session.stop()
