"""Memory of a Spark consumer's driver with many producers and many journals. Less is better.

`PRODUCERS` producers, new ones in each round, write a transaction of one message each into four journals. Then each of
`JOURNALS` journals gets a message a round, on a fake broker, and on real brokers with etcd. The consumer reads each
round in one transaction. The broker runs in another process, so that the driver's memory is the consumer's alone. A
driver with bounded memory needs about as much in the last round as in the first.

It also prints the parts of each round: the time of the consumer's steps and tasks, the processor time, and the calls to
brokers (`consumer_parts.py`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, MetaData, Table

from benchmarks.consumer_parts import RoundParts
from benchmarks.runner import Figure
from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.loop import LoopThread
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.testing.fake_broker import FakeBroker
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.spark import ConsumeReport, Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.session.sessions import new_session, warm_up
from coranto_consumers.stores import SqlStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PRODUCERS = 100_000
JOURNALS = 10_000
ROUNDS = 3
CHANGES_PER_CALL = 100
BROKERS = 2
"""A broker has two open files for each recently written journal, and the limit of a process is often 20,000."""
LEASE_SECONDS = 60.0
"""A busy machine may stall for longer than the default of 20 seconds."""
STOP_SECONDS = 300.0
TIMEOUT_SECONDS = 600.0
SEEN = Table("seen", MetaData(), Column("messages", BigInteger, nullable=False))


class Counts:
    """Counts the messages of each transaction."""

    value_schema = "n BIGINT"

    def __init__(self, name: str) -> None:
        self.name = name
        self.sources = f"name:prefix={name}/"

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(tables=[TableOutput(SEEN, committed.selectExpr("count(*) AS messages"))])


def _serve(calls: Connection) -> None:
    """Serve journals: a call maps journals, created if missing, to numbers of messages, each in its own transaction.

    An empty call requests the number of Read calls so far.
    """
    loop, fake = LoopThread("fake-broker"), FakeBroker()
    loop.run(fake.__aenter__())
    calls.send(fake.endpoint)
    while (call := calls.recv()) is not None:
        if not call:
            calls.send(fake.calls.count("Read"))
            continue
        for journal, messages in call.items():
            if journal not in fake.journals:
                fake.create(journal, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
            if messages:
                loop.run(fake.write(journal, _transactions(journal, messages)))
        calls.send(None)
    loop.run(fake.__aexit__(None, None, None))
    loop.stop()


def _serve_with_brokers(calls: Connection) -> None:
    """Serve journals as `_serve` does, with real brokers."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(
            Path(folder),
            BROKERS,
            LEASE_SECONDS,
            supervise=False,
            etcd_fsync=False,
            stop_seconds=STOP_SECONDS,
            broker_arguments=("--journal-limit", str(2 * JOURNALS), "--exit-seconds", "120", "--metrics-port", "0"),
        ) as cluster,
        SyncJournalClient(cluster.info.endpoint, retry_timeout=TIMEOUT_SECONDS) as client,
    ):
        created: set[str] = set()
        calls.send(cluster.info.endpoint)
        while (call := calls.recv()) is not None:
            if not call:
                calls.send(sum(map(_reads_served, Path(folder).glob("logs/broker-*.log"))))
                continue
            new = [_created(journal) for journal in call if journal not in created]
            for begin in range(0, len(new), CHANGES_PER_CALL):
                client.apply(new[begin : begin + CHANGES_PER_CALL])
            created |= call.keys()
            with client.append_service(retry_timeout=TIMEOUT_SECONDS) as service:
                for journal, messages in call.items():
                    if messages:
                        service.append(journal, _transactions(journal, messages))
            calls.send(None)


def _reads_served(log: Path) -> int:
    """Return the number of Read calls that the broker with this log file has served."""
    endpoint = re.findall(r"member\.ready .*metrics=(\S+)", log.read_text())[-1]
    with urllib.request.urlopen(f"{endpoint}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[1])) for line in lines if line.startswith("coranto_reads_total "))


def _created(journal: str) -> pb.ApplyRequest.Change:
    spec = pb.JournalSpec(name=journal, replication=1, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.FromSeconds(3_600)
    return pb.ApplyRequest.Change(upsert=spec)


def _transactions(journal: str, count: int) -> bytes:
    content = []
    for n in range(count):
        builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
        builder.add(journal, {"n": n})
        content.append(builder.take(journal, 1 << 30))
        builder.ack_intents()
        content += builder.commit().values()
    return b"".join(content)


@contextmanager
def _broker(serve: Callable[[Connection], None]) -> Iterator[tuple[str, Callable[[dict[str, int]], Any]]]:
    """Run a broker in a separate process. Yield its endpoint, and a function that writes messages to journals.

    Without messages, the function returns the number of Read calls so far.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()

    def write(messages: dict[str, int]) -> Any:
        ours.send(messages)
        return ours.recv()

    try:
        yield ours.recv(), write
    finally:
        ours.send(None)
        process.join()


def _memory() -> float:
    """Return the memory of this process in MiB, after a garbage collection."""
    gc.collect()
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmRSS:") + 1]) / 1024


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.0f}" for number in numbers)


def _rounds(name: str, journals: Sequence[str], each: int, endpoint: str, write: Any, spark: Any) -> list[Figure]:
    parts = RoundParts(spark, lambda: write({}))
    with tempfile.TemporaryDirectory() as folder, parts.measuring():
        store = f"sqlite:///{folder}/store.db"
        found: list[float] = []
        seconds = [time.monotonic()]
        written: list[float] = []
        turns = iter(range(ROUNDS))
        reports: list[ConsumeReport] = []

        def more() -> None:
            """Record the consumed round, and write the next one."""
            if found:
                parts.end()
            found.append(_memory())
            seconds.append(time.monotonic())
            if next(turns, None) is not None:
                write(dict.fromkeys(journals, each))
                written.append(time.monotonic() - seconds[-1])
                parts.begin()

        write(dict.fromkeys(journals, 0))
        options = ConsumerOptions(max_transaction_bytes=1 << 30)
        consumer = SparkConsumer(
            Counts(name),
            ClientConfig(endpoint),
            store,
            spark,
            options,
            on_progress=reports.append,
            hooks=parts,
        )
        consumer.run_until_stopped(lambda: len(found) > ROUNDS, wait=more)
        assert reports[-1].messages == ROUNDS * each * len(journals)
        kept = SqlStore(store).read(name)
        assert kept is not None
        checkpoint = len(kept.checkpoint.to_bytes()) / (1 << 20)
    base, *after = found
    grown = [at - base for at in after]
    took = [at - before for before, at in pairwise(seconds)]
    print(f"{name}, by round: +{_list(grown)} MiB, in {_list(took)} s, including appends {_list(written)} s")
    for part in dict.fromkeys(name for each in parts.rounds for name in each):
        print(f"  {part}: {', '.join(f'{each.get(part, 0.0):,.5g}' for each in parts.rounds)}", flush=True)
    return [
        Figure(f"driver, {name}, last round", "MiB", [grown[-1]], [max(grown[0], 1.0)], "first round"),
        Figure(f"checkpoint, {name}", "MiB", [checkpoint], [grown[-1]], "memory of the driver"),
    ]


def _names(folder: str) -> list[str]:
    return [f"{folder}/{number:05}" for number in range(JOURNALS)]


def run(rounds: int) -> list[Figure]:
    """Measure once, regardless of `rounds`: each case has its own rounds."""
    spark = new_session("bench", master="local[2]")
    try:
        warm_up(spark)
        figures = []
        with _broker(_serve) as (endpoint, write):
            few = [f"producers/{n}" for n in range(4)]
            figures += _rounds("producers", few, PRODUCERS // 4, endpoint, write, spark)
            figures += _rounds("journals", _names("journals"), 1, endpoint, write, spark)
        with _broker(_serve_with_brokers) as (endpoint, write):
            figures += _rounds("real", _names("real"), 1, endpoint, write, spark)
        return figures
    finally:
        spark.stop()
