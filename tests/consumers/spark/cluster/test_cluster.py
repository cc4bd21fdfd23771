"""Sources and consumers on clusters, where executors are separate processes with their own environment."""

import base64
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest
from sqlalchemy import text

from coranto.cluster.processes import free_port
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto.testing.http_store import HttpStore
from coranto_consumers.stores import SqlStore
from tests.servers.spark import running, standalone_cluster, until

HOME = Path(pyspark.__file__).parent
PROGRAM = Path(__file__).with_name("program.py")
SOURCES = [f"numbers/in/{n}" for n in range(3)]
SINKS = ["numbers/out/a", "numbers/out/b"]
COPIES = ["numbers/copied/a", "numbers/copied/b"]
STREAMED = ["numbers/streamed/a", "numbers/streamed/b"]
KEY = base64.b64encode(random.Random(1).randbytes(32)).decode()
SMALL = {
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Blocks of a killed executor are requested three times, by default every five seconds.
    "spark.shuffle.io.retryWait": "200ms",
    "spark.locality.wait": "0s",
}
NO_CONNECT = "" if find_spec("grpc_status") else "pyspark[connect] is not installed: install coranto[spark]"

ONLY_FROM_ARCHIVES = '''
import importlib.machinery
import sys


class OnlyFromArchives:
    """Finds Coranto's packages in archives only, as in an environment without them."""

    def find_spec(self, name, path=None, target=None):
        if path is not None or name not in ("coranto", "coranto_consumers", "pyspark_coranto", "pyspark_coranto_name"):
            return None
        archives = [entry for entry in sys.path if entry.endswith(".zip")]
        found = importlib.machinery.PathFinder.find_spec(name, archives)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


sys.meta_path.insert(0, OnlyFromArchives())
'''


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A folder for the Python path of processes without an installed Coranto."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(ONLY_FROM_ARCHIVES)
    return folder


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """An archive of Coranto's packages, made as documented."""
    import coranto
    import coranto_consumers
    import pyspark_coranto
    import pyspark_coranto_name

    path = tmp_path_factory.mktemp("archive") / "coranto.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for package in (coranto, coranto_consumers, pyspark_coranto, pyspark_coranto_name):
            folder = Path(package.__file__).parent
            for file in folder.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    packed.write(file, file.relative_to(folder.parent))
    return path


def environment(**changes: str) -> dict[str, str]:
    ours = [entry for entry in sys.path if entry and Path(entry).name != "lib-dynload" and "python3" not in entry]
    return {
        **os.environ,
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(ours),
        **changes,
    }


@pytest.fixture(scope="module")
def standalone(tmp_path_factory, bare) -> Iterator[str]:
    """The URL of a standalone master with two workers, without an installed Coranto."""
    with standalone_cluster(tmp_path_factory.mktemp("standalone"), HOME, environment(PYTHONPATH=str(bare))) as url:
        yield url


@dataclass
class Numbers:
    """Journals of numbers, and the expected results of a driver."""

    broker: object
    store: str
    folder: Path
    committed: list[int]
    fragments: HttpStore

    def ask(
        self,
        *command: object,
        env: dict[str, str],
        straggles: bool = False,
        remote: str = "",
        program: object = PROGRAM,
        **more,
    ) -> dict:
        """Run a program and return its results."""
        asked, answer = self.folder / "asked.json", self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        question = {"endpoint": self.broker.endpoint, "key": KEY, "store": self.store, "straggles": straggles}
        asked.write_text(
            json.dumps(
                {**question, "remote": remote, "settings": {}, "artifacts": [], "checkpoint": "", "answer": str(answer)}
                | more
            )
        )
        words = [str(word) for word in (*command, program, asked)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=550, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert KEY not in done.stdout + done.stderr
        return json.loads(answer.read_text())

    def check(self, answer: dict) -> None:
        assert "error" not in answer, answer
        assert answer["read"] == {"count": len(self.committed), "sum": sum(self.committed)}
        assert answer["messages"] == len(self.committed)
        assert "journal" in answer["plan"]
        assert KEY not in answer["plan"]
        buckets = {n % 10: [m for m in self.committed if m % 10 == n % 10] for n in self.committed}
        with SqlStore(self.store).engine.connect() as connection:
            rows = connection.execute(text("SELECT bucket, messages, total FROM totals ORDER BY bucket")).all()
        assert [tuple(row) for row in rows] == [(b, len(ns), sum(ns)) for b, ns in sorted(buckets.items())]
        assert self.arrived(SINKS) == sorted(buckets[7])
        assert answer["published"] == len(buckets[7])
        assert len(self.fragments.fetched) == len(SOURCES)

    def check_copies(self) -> None:
        """Check the output of a program that uses the sink."""
        assert self.arrived(COPIES) == self.committed

    def arrived(self, journals: list[str]) -> list[int]:
        """Return the numbers in journals, as a reader of committed messages sees them."""
        found = []
        for journal in journals:
            envelopes = iter_messages(JsonLines(), journal, [self.broker.content(journal)], 0)
            found += [each.message["n"] for each in read_committed(envelopes, Sequencer(), lambda wanted: [])]
        return sorted(found)

    def check_fetched(self, machines: int = 2) -> None:
        """Check that each of the two workers fetches a fragment at most once. They share nothing."""
        assert max(self.fragments.fetched.values()) <= machines


@pytest.fixture
def numbers(broker, postgres, tmp_path) -> Iterator[Numbers]:
    broker.create(*SOURCES, *SINKS, *COPIES, *STREAMED, "numbers/ledger")
    committed = []
    for turn in range(4):
        publisher = SyncPublisher(
            broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=JsonLines()
        )
        batch = range(turn * 100, turn * 100 + 100)
        for n in batch:
            publisher.add(SOURCES[n % 3], {"n": n})
        if turn == 2:
            publisher.rollback()
        else:
            publisher.commit()
            committed += batch
    with HttpStore() as fragments:
        for journal in SOURCES:
            broker.fake.journals[journal].roll_to(fragments)
        yield Numbers(broker, postgres.new_database(), tmp_path, committed, fragments)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Spark's home as a folder of links, because the workers of `local-cluster` write into it."""
    folder = tmp_path_factory.mktemp("home")
    for entry in HOME.iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.exhaustive
def test_a_standalone_cluster_gets_packages_from_spark_submit_speculates_and_shows_no_secrets(
    numbers, standalone, archive
):
    events = numbers.folder / "events"
    events.mkdir()
    settings = {
        **SMALL,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "200ms",
    }
    submit = (HOME / "bin" / "spark-submit", "--master", standalone, "--py-files", archive)
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]

    checkpoint = str(numbers.folder / "checkpoint")
    numbers.check(numbers.ask(*submit, *words, env=environment(), straggles=True, checkpoint=checkpoint))
    numbers.check_copies()
    numbers.check_fetched(3)  # The driver also reads, to plan the query's batches.
    assert numbers.arrived(STREAMED) == numbers.committed

    logged = "".join(file.read_text() for file in events.rglob("*") if file.is_file())
    assert "SparkListenerTaskEnd" in logged
    assert "MapInArrow" in logged
    assert '"Speculative":true' in logged, "an attempt was overtaken"
    credentials = numbers.store.partition("://")[2].partition("@")[0]
    assert ":" in credentials
    for secret in (KEY, credentials):
        assert secret not in logged


@pytest.mark.skipif(bool(NO_CONNECT), reason=NO_CONNECT)
@pytest.mark.exhaustive
def test_spark_connect_reports_missing_packages_and_ships_them_to_executors(numbers, standalone, archive):
    port = free_port()
    settings = {**SMALL, "spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": port}
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    server = (
        *(HOME / "bin" / "spark-submit", "--master", standalone, *words),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
    )
    log = numbers.folder / "server"
    with running(log, *server, env=environment()) as process:
        until(lambda: "Spark Connect server started" in log.read_text(), [process], log)
        ask = {"env": environment(), "remote": f"sc://127.0.0.1:{port}"}

        lacking = numbers.ask(sys.executable, **ask)
        numbers.check(numbers.ask(sys.executable, **ask, artifacts=[str(archive)]))
        numbers.check_copies()
        numbers.check_fetched()

    assert lacking["error"] == "InvalidInput"
    assert "executors have no package coranto_consumers: install coranto[spark]" in lacking["text"]
    assert KEY not in log.read_text()
