"""Breakdown of a Spark consumer's rounds: time of steps and tasks, processor time, and calls to brokers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import grpc.aio
import psutil

from coranto_consumers.spark.consumer.progress import Hooks, Step

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTS: Final = {
    Step.PLANNED: "planning",
    Step.SEQUENCED: "reading",
    Step.PUBLISHED: "writing",
    Step.COMMITTED: "committing",
    Step.ACKNOWLEDGED: "acknowledging",
}
"""The part that each step ends. `reading` includes the time of rows that are written immediately."""
LOOKING: Final = "looking for more"
_STREAMS: Final = ("stream_stream", "stream_unary", "unary_stream", "unary_unary")


class CallCounts:
    """Counts the calls to brokers that this process starts, by method name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Iterator[CallCounts]:
        """Count the calls of all channels opened within the block."""
        opened = grpc.aio.insecure_channel

        def counted(*arguments: Any, **named: Any) -> Any:
            return _CountedChannel(opened(*arguments, **named), self.calls)

        with mock.patch.object(grpc.aio, "insecure_channel", counted):
            yield self


class _CountedChannel:
    """A channel whose calls are counted."""

    def __init__(self, channel: grpc.aio.Channel, calls: Counter[str]) -> None:
        self._channel = channel
        for kind in _STREAMS:
            setattr(self, kind, _counted(getattr(channel, kind), calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


def _counted(make: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def counted(method: str, *arguments: Any, **named: Any) -> Callable[..., Any]:
        begin, name = make(method, *arguments, **named), method.rpartition("/")[2]

        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return begin(*arguments, **named)

        return call

    return counted


class RoundParts(Hooks):
    """Measures the parts of rounds: call `begin` before each round, and `end` after it.

    `reads` returns the number of Read calls that brokers have served, to the driver and to tasks.
    """

    def __init__(self, spark: SparkSession, reads: Callable[[], int]) -> None:
        self._spark = spark
        self._reads = reads
        self._driver = CallCounts()
        self._last = time.monotonic()
        self._before: Mapping[str, float] = {}
        self._seconds: Counter[str] = Counter()
        self.rounds: list[dict[str, float]] = []

    @contextmanager
    def measuring(self) -> Iterator[RoundParts]:
        with self._driver.counting():
            yield self

    def begin(self) -> None:
        self._seconds.clear()
        self._before = self._totals()
        self._last = time.monotonic()

    def on_step(self, step: Step) -> None:
        if step in PARTS:
            self._ended(PARTS[step])

    def end(self) -> None:
        self._ended(LOOKING)
        after = self._totals()
        spent = {name: after[name] - self._before.get(name, 0) for name in after}
        self.rounds.append({**{f"{name}, s": value for name, value in self._seconds.items()}, **spent})

    def _ended(self, part: str) -> None:
        now = time.monotonic()
        self._seconds[part] += now - self._last
        self._last = now

    def _totals(self) -> dict[str, float]:
        calls = {f"{name} calls of the driver": float(count) for name, count in self._driver.calls.items()}
        served = {"Read calls that brokers served": float(self._reads())}
        return {"tasks, s": self._of_tasks(), **_processor(), **calls, **served}

    def _of_tasks(self) -> float:
        """Return the total time of all tasks, in seconds."""
        found = self._spark.sparkContext._jsc.sc().statusStore().executorList(False)
        return sum(float(found.apply(index).totalDuration()) for index in range(found.size())) / 1000


def _processor() -> dict[str, float]:
    """Return the seconds of processor time of this process, of Spark's processes, and of brokers."""
    own = psutil.Process()
    used = Counter({"processor of the driver, s": _seconds(own)})
    for each in own.children(recursive=True):
        try:
            command = " ".join(each.cmdline())
            if "java" in command or "coranto_consumers.spark.session.workers" in command or "pyspark" in command:
                used["processor of Spark, s"] += _seconds(each)
            elif "coranto_broker" in command:
                used["processor of brokers, s"] += _seconds(each)
        except psutil.NoSuchProcess:
            continue
    return dict(used)


def _seconds(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))
