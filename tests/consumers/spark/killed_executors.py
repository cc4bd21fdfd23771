"""A driver on `local-cluster` whose executors are killed with `kill -9` while they read, stage and publish.

It reads its task from a JSON file and writes its results to another, for `test_killed_executors.py`.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from coranto.client import ClientConfig
from coranto.security.tokens import Keys
from coranto_consumers.spark import Hooks, Outputs, SparkConsumer, Step, TableOutput, register
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.application.outputs import JournalOutput
from tests.consumers.spark.cluster.program import TOTALS, Buckets, read_source


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _executors() -> list[int]:
    """Return the processes of executors: the Java processes started by the driver's."""
    driver = SparkContext._gateway.proc.pid
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and _parent(int(folder.name)) == driver:
                found += [int(folder.name)] if (folder / "comm").read_text() == "java\n" else []
        except OSError:  # It has ended.
            continue
    return sorted(found)


def _await(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline, "no executor started"
        time.sleep(0.02)
    return found


def killing_once(marker: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a task that returns its rows. The first attempt of all then kills its executor."""

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        # The worker's parent has forked it, and the parent's parent is the executor.
        os.kill(_parent(os.getppid()), signal.SIGKILL)
        time.sleep(600)

    return task


class KillsExecutors(Hooks):
    """Kill an executor while tasks read, and another one afterwards, with the rows that it caches."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._due = {Step.PLANNED, Step.SEQUENCED}
        self._threads: list[threading.Thread] = []
        self.killed: list[str] = []

    def on_step(self, step: Step) -> None:
        if step not in self._due:
            return
        self._due.discard(step)
        if step is not Step.PLANNED:
            self._kill(step)
            return
        self._threads.append(threading.Thread(target=self._kill_while_reading))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _kill_while_reading(self) -> None:
        tracker = self._spark.sparkContext.statusTracker()

        def running() -> bool:
            stages = (tracker.getStageInfo(number) for number in tracker.getActiveStageIds())
            return any(stage is not None and stage.numActiveTasks for stage in stages)

        _await(running)
        self._kill(Step.PLANNED)

    def _kill(self, step: Step) -> None:
        os.kill(_await(_executors)[0], signal.SIGKILL)
        self.killed.append(step.name)


class KilledBuckets(Buckets):
    """Buckets whose tasks kill their executor once while they stage, and once while they publish."""

    def __init__(self, folder: Path) -> None:
        super().__init__(straggles=False)
        self._folder = folder

    def outputs(self, committed: Any) -> Outputs:
        made = super().outputs(committed)
        [table], [journal] = made.tables, made.journals
        totals = table.rows.repartition(2).mapInArrow(killing_once(self._folder / "staging"), table.rows.schema)
        passed = journal.rows.repartition(2).mapInArrow(killing_once(self._folder / "publishing"), journal.rows.schema)
        return Outputs(
            tables=[TableOutput(TOTALS, totals, keys=table.keys, merge=table.merge)],
            journals=[JournalOutput(passed, journal.journals)],
        )


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    builder = SparkSession.builder
    for name, value in asked["settings"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        register(spark)
        config = ClientConfig(asked["endpoint"], auth=Keys.parse(asked["key"]))
        hooks, folder = KillsExecutors(spark), Path(asked["answer"]).parent
        consumer = SparkConsumer(
            KilledBuckets(folder),
            config,
            asked["store"],
            spark,
            ConsumerOptions(max_partition_bytes=8_000, max_transaction_bytes=20_000),
            hooks=hooks,
        )
        report = consumer.run_until_caught_up()
        hooks.join()
        found = read_source(spark, asked)
    finally:
        spark.stop()
    answer = {
        **found,
        "messages": report.messages,
        "published": report.published,
        "transactions": report.transactions,
        "killed": hooks.killed,
    }
    Path(asked["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
