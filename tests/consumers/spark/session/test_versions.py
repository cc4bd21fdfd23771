"""The differences between versions of Spark. `tests/installation/elsewhere/test_spark_versions.py` runs them all."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql.types import StructType

from coranto.errors import VersionTooOld
from coranto_consumers.spark.session import versions
from coranto_consumers.spark.session.task_errors import error_of_task
from coranto_consumers.spark.session.versions import (
    PositionedReader,
    ReadAllAvailable,
    arrow_schema,
    require_spark,
    stream_reader,
)
from coranto_consumers.spark.streaming.offsets import bytes_behind


class Steps:
    """A reader of a journal of 25 bytes, in batches of 10 if limited."""

    def __init__(self, begin: int = 0, head: int = 25) -> None:
        self.begin, self.head = begin, head
        self.planned: list[tuple[int, int]] = []
        self.stopped = False

    def initialOffset(self) -> dict[str, Any]:
        return {"a": self.begin}

    def getDefaultReadLimit(self) -> int:
        return 10

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"a": self.head if isinstance(limit, ReadAllAvailable) else min(start["a"] + limit, self.head)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        self.planned.append((start["a"], end["a"]))
        return [object()]

    def stop(self) -> None:
        self.stopped = True


def limited(steps: Any) -> PositionedReader:
    return PositionedReader(steps, limited=True)


def kept(offset: dict[str, Any]) -> dict[str, Any]:
    """Return an offset as Spark returns it to a source."""
    return json.loads(json.dumps(offset))


def batches(reader: PositionedReader, start: dict[str, Any] | None, count: int) -> list[int]:
    """Return the ends of the next batches of a query, which is new if it has no start."""
    ends = []
    for _ in range(count):
        end = kept(reader.latestOffset())
        if not ends:
            first = reader.initialOffset() if start is None else start
            reader.partitions(first, end)
        elif end != start:
            reader.partitions(start, end)
        start = end
        ends.append(end["a"])
    return ends


def test_a_new_query_begins_at_the_initial_offset_and_keeps_its_limit() -> None:
    steps = Steps()
    assert batches(limited(steps), None, 4) == [10, 20, 25, 25]
    assert steps.planned == [(0, 10), (10, 20), (20, 25)]


def test_a_new_query_may_have_nothing_to_read() -> None:
    assert batches(limited(Steps(head=0)), None, 3) == [0, 0, 0]


def test_a_query_with_a_checkpoint_continues_at_its_offset() -> None:
    steps = Steps()
    reader = limited(steps)
    assert list(reader.partitions({"a": 12}, {"a": 12})) == []
    assert batches(reader, {"a": 12}, 3) == [22, 25, 25]
    assert steps.planned == [(12, 22), (22, 25)]


def test_a_query_that_repeats_a_batch_continues_after_it() -> None:
    steps = Steps()
    reader = limited(steps)
    reader.partitions({"a": 9}, {"a": 9})
    reader.partitions({"a": 4}, {"a": 9})
    assert batches(reader, {"a": 9}, 2) == [19, 25]
    assert steps.planned == [(4, 9), (9, 19), (19, 25)]


def test_a_batch_without_limits_has_all_content() -> None:
    steps = Steps()
    reader = PositionedReader(steps, limited=False)
    reader.partitions({"a": 12}, {"a": 12})
    assert batches(reader, {"a": 12}, 2) == [25, 25]
    assert steps.planned == [(12, 25)]


def test_available_now_with_sparks_wrapper_reads_all_of_a_new_query() -> None:
    steps = Steps()
    reader = PositionedReader(steps, limited=False)
    end = kept(reader.latestOffset())  # The wrapper calls it before the query has begun, and for each report.
    start = kept(reader.initialOffset())
    steps.head = 40
    reader.latestOffset()
    reader.partitions(start, end)
    assert steps.planned == [(0, 25)]


@pytest.mark.parametrize("offset", [10, 12])
def test_available_now_with_sparks_wrapper_is_refused_for_a_query_with_a_checkpoint(
    offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    steps = Steps()
    reader = PositionedReader(steps, limited=False)
    reader.latestOffset()
    pattern = r"Trigger\.AvailableNow with \S+ needs PySpark 4\.2 or later, and .*, or set that to false"
    with pytest.raises(VersionTooOld, match=pattern) as caught:
        reader.partitions({"a": offset}, {"a": offset})
    assert not steps.planned
    error = error_of_task(RuntimeError("\n".join([str(caught.value), *caught.value.__notes__])))
    assert isinstance(error, VersionTooOld)


def test_the_reader_is_stopped() -> None:
    steps = Steps()
    limited(steps).stop()
    assert steps.stopped


def test_readers_implement_the_interface_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Any = Steps()
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    reader = stream_reader(steps, limits=(), processing_time=False)
    assert isinstance(reader, PositionedReader)
    assert reader.latestOffset() == {"a": 25}
    monkeypatch.setattr(versions, "SPARK", (4, 2))
    assert stream_reader(steps, limits=("maxBytesPerTrigger",), processing_time=False) is steps


def test_limits_that_a_single_batch_would_not_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Any = Steps()
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    pattern = (
        r"^maxBytesPerTrigger with an unknown trigger needs PySpark 4\.2 .*, or set the option trigger=processingTime"
    )
    with pytest.raises(VersionTooOld, match=pattern):
        stream_reader(steps, limits=("maxBytesPerTrigger",), processing_time=False)
    reader = stream_reader(steps, limits=("maxBytesPerTrigger",), processing_time=True)
    assert reader.latestOffset() == {"a": 10}


def test_errors_name_features_that_a_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    require_spark("a feature", (4, 0))
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    with pytest.raises(VersionTooOld, match=r"^bytes_behind needs PySpark 4\.2 or later, and PySpark ") as caught:
        bytes_behind({"sources": []})
    assert (caught.value.package, caught.value.found) == ("PySpark", pyspark.__version__)


def test_timestamps_are_in_utc() -> None:
    assert arrow_schema(StructType().add("at", "timestamp")).field("at").type == pa.timestamp("us", tz="UTC")
