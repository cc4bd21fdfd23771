"""Kafka to a table of PostgreSQL: an ingest and a table, against Spark's Structured Streaming with `foreachBatch`.

A topic of eight partitions gets records of 140 bytes in one transaction, so that its commit makes all of them readable.
Both sides read committed records only, and replace the row of each record's key exactly once. The measurement ends with
the commit of the last row, at the time that the database recorded.

*Cold* begins with the start of the processes, with the records in Kafka: `coranto ingest run` and `coranto table run`
with its default runner, and a program with a new session of Spark. *Warm* begins with the commit of the same number of
records, which replace the rows, while the same processes wait for them. Only the processes of one side run at a time.
The brokers of Kafka and of Coranto (R=1) and the database share a disk, and their processor time is included.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import psycopg

from benchmarks import kafka
from benchmarks.kafka_foreach_batch import SCHEMA
from benchmarks.runner import Figure
from coranto.cluster import EmbeddedCluster
from tests.servers.sql import PostgresServer

RECORDS: Final = 1_000_000
PARTITIONS: Final = 8
RECORD_BYTES: Final = 140
_SECONDS: Final = 3600
_BY_PROCESSOR: Final = "records per s of processor time"
_MEASURES: Final = (
    ("cold", "records/s"),
    ("cold, by processor time", _BY_PROCESSOR),
    ("warm", "records/s"),
    ("warm, by processor time", _BY_PROCESSOR),
)
_COMMAND: Final = (sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())")
_INGEST: Final = """
name: bench
stream: {topic}/orders
source:
  kafka: {{brokers: "{server}", topics: [{topic}]}}
create: {{segments: 1}}
"""
_TABLE: Final = """
name: bench
input: {{stream: {topic}/orders}}
columns: {schema}
store: {url}
table: orders
mode: upsert
key: [id]
"""


def records(part: int, first: int, count: int) -> Iterator[bytes]:
    """Yield the records of a partition as lines: a unique key, a tab, and a value of 140 bytes."""
    for number in range(part, count, PARTITIONS):
        row = {"id": number, "n": first + number, "customer": f"customer-{number % 97}", "cents": 995}
        text = json.dumps({**row, "at": "2026-11-28T21:00:00.000Z", "note": ""}, separators=(",", ":"))
        yield f"{number}\t{text[:-2]}{'x' * (RECORD_BYTES - len(text))}{text[-2:]}\n".encode()


def write_files(folder: Path, first: int, count: int) -> list[Path]:
    """Write the records of each partition to a file."""
    folder.mkdir()
    files = [folder / str(part) for part in range(PARTITIONS)]
    for part, file in enumerate(files):
        file.write_bytes(b"".join(records(part, first, count)))
    return files


class Target:
    """The table `orders` of an empty database that records the time of each commit."""

    def __init__(self, server: PostgresServer) -> None:
        self.store = server.new_database()
        self.url = self.store.replace("+psycopg", "").partition("?")[0]

    @property
    def jdbc(self) -> dict[str, str]:
        login, _, place = self.url.removeprefix("postgresql://").rpartition("@")
        user, _, password = login.partition(":")
        url = f"jdbc:postgresql://{place}?reWriteBatchedInserts=true"
        return {"url": url, "user": user, "password": password, "driver": "org.postgresql.Driver"}

    def completed(self, processes: Sequence[subprocess.Popen[bytes]], first: int, count: int) -> float:
        """Wait for `count` rows, numbered from `first`, and return the commit time of the last one.

        Rows are counted after the last row of each partition exists: counting takes processor time of the server.
        """
        deadline = time.monotonic() + _SECONDS
        with psycopg.connect(self.url, autocommit=True) as connection:
            while True:
                found = None
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    last = connection.execute(
                        "SELECT count(*) = %s FROM orders WHERE id >= %s AND n >= %s",
                        [PARTITIONS, count - PARTITIONS, first],
                    ).fetchone()
                    if last is not None and last[0]:
                        found = connection.execute(
                            "SELECT count(*), extract(epoch FROM max(pg_xact_commit_timestamp(xmin))) FROM orders "
                            "WHERE n >= %s",
                            [first],
                        ).fetchone()
                if found is not None and found[0] == count:
                    return float(found[1])
                assert all(each.poll() is None for each in processes), "a process has ended"
                assert time.monotonic() < deadline, f"{found} of {count} rows exist"
                time.sleep(1)


@dataclass(frozen=True, slots=True)
class Bench:
    """Servers, the files with both sets of records, and the settings of Spark."""

    folder: Path
    endpoint: str
    broker: kafka.KafkaServer
    database: PostgresServer
    files: tuple[list[Path], list[Path]]
    count: int
    settings: dict[str, str]

    def ours(self, topic: str) -> list[float]:
        target = Target(self.database)
        ingest, table = self.folder / f"{topic}.ingest.yaml", self.folder / f"{topic}.table.yaml"
        ingest.write_text(_INGEST.format(topic=topic, server=self.broker.address))
        table.write_text(_TABLE.format(topic=topic, schema=SCHEMA, url=target.store))
        endpoint = ("--endpoint", self.endpoint)
        commands = (
            (*_COMMAND, "ingest", "run", str(ingest), "--follow", *endpoint),
            (*_COMMAND, "table", "run", str(table), *endpoint),
        )
        return self._measured(topic, target, commands)

    def spark(self, topic: str) -> list[float]:
        target = Target(self.database)
        request = {"settings": self.settings, "server": self.broker.address, "topic": topic, "url": target.url}
        request |= {"jdbc": target.jdbc, "folder": str(self.folder / f"{topic}.checkpoint")}
        command = (sys.executable, "-m", "benchmarks.kafka_foreach_batch", json.dumps(request))
        return self._measured(topic, target, (command,))

    def _measured(self, topic: str, target: Target, commands: Sequence[Sequence[str]]) -> list[float]:
        """Return the records per second and per second of processor time, cold and warm."""
        self.broker.write(topic, self.files[0], transactions=1)
        path = os.pathsep.join((self.broker.client_path, os.environ.get("PYTHONPATH", "")))
        seconds = []
        with ExitStack() as exits:
            begun, used = time.time(), processor_seconds()
            processes = [exits.enter_context(_process(command, path)) for command in commands]
            seconds += [target.completed(processes, 0, self.count) - begun, processor_seconds() - used]
            begun, used = self.broker.write(topic, self.files[1], transactions=1), processor_seconds()
            seconds += [target.completed(processes, self.count, self.count) - begun, processor_seconds() - used]
        return [self.count / each for each in seconds]


def processor_seconds() -> float:
    """Return the processor time of all descendants of this process."""
    found = 0.0
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += sum(each.cpu_times()[:4])
    return found


@contextlib.contextmanager
def _process(command: Sequence[str], path: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            yield process
        finally:
            process.terminate()


def run(rounds: int, count: int = RECORDS) -> list[Figure]:
    """Measure both sides in turns."""
    fetched, driver = kafka.fetched(), kafka.jdbc_driver()
    found: dict[str, list[list[float]]] = {"spark": [], "ours": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder) / "cluster", brokers=1) as cluster,
        PostgresServer("track_commit_timestamp=on", "max_wal_size=4GB") as database,
        kafka.KafkaServer(fetched, partitions=PARTITIONS) as broker,
    ):
        files = tuple(write_files(Path(folder) / f"records-{each}", each * count, count) for each in range(2))
        settings = {"spark.jars": ",".join((fetched.settings["spark.jars"], str(driver)))}
        bench = Bench(Path(folder), cluster.info.endpoints[0], broker, database, (files[0], files[1]), count, settings)
        for number in range(rounds):
            found["spark"].append(bench.spark(f"spark-{number}"))
            found["ours"].append(bench.ours(f"ours-{number}"))
    note = f"{count} records of {RECORD_BYTES} bytes, connector {fetched.connector_version}"
    floor = "Spark's Structured Streaming, foreachBatch"
    return [
        Figure(
            f"Kafka to PostgreSQL, {name}",
            unit,
            [each[at] for each in found["ours"]],
            [each[at] for each in found["spark"]],
            floor,
            note,
        )
        for at, (name, unit) in enumerate(_MEASURES)
    ]
