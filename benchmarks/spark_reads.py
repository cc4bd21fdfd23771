"""Reads by Spark that are timed, by the clock and by the processor time of Spark's processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "carrier string, month int, arr_delay double, tailnum string, dest string, distance double"
COLUMNS = ("sum(distance)", "count(tailnum)")
"""Aggregates that need values of the flights' columns."""


def parsed_rows(spark: SparkSession, kind: str, options: Mapping[str, str]) -> DataFrame:
    """Return the flights' columns as a format reads them: `journal` or `kafka`."""
    reader = spark.read.format(kind).options(**options)
    if kind == "journal":
        return reader.schema(f"{SCHEMA}, _flags INT").load().where("_flags != 2")
    return reader.load().select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")).select("v.*")


class TimedRead:
    """A read of all rows, timed, with the rows per second of processor time of Spark's processes at each call.

    The read ends with aggregates, so that no column that they need is left out.
    """

    def __init__(self, rows: int, frame: Callable[[], DataFrame], aggregates: tuple[str, ...] = COLUMNS) -> None:
        self._rows = rows
        self._frame = frame
        self._aggregates = aggregates
        self.by_processor_time: list[float] = []

    def __call__(self) -> float:
        spent, begun = processor_seconds(), time.perf_counter()
        answer = self._frame().selectExpr("count(*) AS n", *self._aggregates).collect()[0]
        seconds = time.perf_counter() - begun
        self.by_processor_time.append(self._rows / (processor_seconds() - spent))
        assert answer["n"] == self._rows, (answer, self._rows)
        return self._rows / seconds


def processor_seconds() -> float:
    """Return the processor time of Spark's JVM, of its Python workers, and of workers that have ended."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has ended meanwhile.
            command = (folder / "cmdline").read_bytes()
            user, system, ended_user, ended_system = map(int, _after_name(folder / "stat")[11:15])
            if str(os.getpid()) not in _ancestors(folder.name):
                continue
            if b"java" in command.partition(b"\0")[0] and b"org.apache.spark" in command:
                ticks += user + system
            elif b"pyspark" in command:
                ticks += user + system + ended_user + ended_system
    return ticks / os.sysconf("SC_CLK_TCK")


def _after_name(stat: Path) -> list[bytes]:
    """Return the fields of a process behind its name, which may hold anything."""
    return stat.read_bytes().rpartition(b")")[2].split()


def _ancestors(process: str) -> Iterator[str]:
    while process != "0":
        process = _after_name(Path("/proc", process, "stat"))[1].decode()
        yield process
