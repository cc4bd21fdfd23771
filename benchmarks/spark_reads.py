"""Spark jobs timed by elapsed time and by the processor time of Spark's processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "carrier string, month int, arr_delay double, tailnum string, dest string, distance double"
COLUMNS = ("sum(distance)", "count(tailnum)")
"""Aggregates that need values of the flights' columns."""


def parsed_rows(spark: SparkSession, kind: str, options: Mapping[str, str]) -> DataFrame:
    """Return the flights' columns, read by the format `journal` or `kafka`."""
    reader = spark.read.format(kind).options(**options)
    if kind == "journal":
        return reader.schema(f"{SCHEMA}, _flags INT").load().where("_flags != 2")
    return reader.load().select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")).select("v.*")


class TimedJob:
    """A job over `rows` rows, timed by elapsed and by processor time.

    A call returns rows per second, and adds the rows per second of processor time to each list.
    """

    def __init__(self, rows: int, job: Callable[[], object]) -> None:
        self.rows = rows
        self._job = job
        self.by_processor_time: list[float] = []
        """Rows per second of processor time of Spark's processes."""
        self.with_brokers: list[float] = []
        """Rows per second of processor time of all processes that this process has started."""

    def __call__(self) -> float:
        before, begun = processor_seconds(), time.perf_counter()
        self._job()
        seconds, after = time.perf_counter() - begun, processor_seconds()
        self.by_processor_time.append(self.rows / (after.spark - before.spark))
        self.with_brokers.append(self.rows / (after.all - before.all))
        return self.rows / seconds


class TimedRead(TimedJob):
    """A timed read of all rows. Its aggregates prevent Spark from pruning the columns that they need."""

    def __init__(self, rows: int, frame: Callable[[], DataFrame], aggregates: tuple[str, ...] = COLUMNS) -> None:
        def read() -> None:
            answer = frame().selectExpr("count(*) AS n", *aggregates).collect()[0]
            assert answer["n"] == rows, (answer, rows)

        super().__init__(rows, read)


class ProcessorSeconds(NamedTuple):
    """Processor time of the processes that this process has started."""

    spark: float
    """Seconds of Spark's JVM and its Python workers, including workers that have exited."""
    all: float


def processor_seconds() -> ProcessorSeconds:
    """Return the total processor time so far."""
    spark = others = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has exited.
            command = (folder / "cmdline").read_bytes()
            user, system, ended_user, ended_system = map(int, _after_name(folder / "stat")[11:15])
            if str(os.getpid()) not in _ancestors(folder.name):
                continue
            if b"java" in command.partition(b"\0")[0] and b"org.apache.spark" in command:
                spark += user + system
            elif b"pyspark" in command:
                spark += user + system + ended_user + ended_system
            else:
                others += user + system
    second = os.sysconf("SC_CLK_TCK")
    return ProcessorSeconds(spark / second, (spark + others) / second)


def _after_name(stat: Path) -> list[bytes]:
    """Return the fields of a process after its name, which may contain any character."""
    return stat.read_bytes().rpartition(b")")[2].split()


def _ancestors(process: str) -> Iterator[str]:
    while process != "0":
        process = _after_name(Path("/proc", process, "stat"))[1].decode()
        yield process
