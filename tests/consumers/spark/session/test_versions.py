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
from coranto_consumers.spark.session.versions import PositionedReader, arrow_schema, require_spark, stream_reader
from coranto_consumers.spark.streaming.lag import bytes_behind


class Steps:
    """A reader of a journal of 25 bytes, in batches of 10."""

    def __init__(self, begin: int = 0, head: int = 25) -> None:
        self.begin, self.head = begin, head
        self.planned: list[tuple[int, int]] = []
        self.stopped = False

    def initialOffset(self) -> dict[str, Any]:
        return {"a": self.begin}

    def getDefaultReadLimit(self) -> int:
        return 10

    def latestOffset(self, start: dict[str, Any], limit: int) -> dict[str, Any]:
        return {"a": min(start["a"] + limit, self.head)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        self.planned.append((start["a"], end["a"]))
        return [object()]

    def stop(self) -> None:
        self.stopped = True


def kept(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset as Spark gives it back."""
    return json.loads(json.dumps(offset))


def batches(reader: PositionedReader, start: dict[str, Any] | None, count: int) -> list[int]:
    """The ends of the next batches of a query, which is new if it has no start."""
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
    assert batches(PositionedReader(steps), None, 4) == [10, 20, 25, 25]
    assert steps.planned == [(0, 10), (10, 20), (20, 25)]


def test_a_new_query_may_have_nothing_to_read() -> None:
    assert batches(PositionedReader(Steps(head=0)), None, 3) == [0, 0, 0]


def test_a_query_with_a_checkpoint_continues_at_its_offset() -> None:
    steps = Steps()
    reader = PositionedReader(steps)
    assert list(reader.partitions({"a": 12}, {"a": 12})) == []
    assert batches(reader, {"a": 12}, 3) == [22, 25, 25]
    assert steps.planned == [(12, 22), (22, 25)]


def test_a_query_that_repeats_a_batch_continues_behind_it() -> None:
    steps = Steps()
    reader = PositionedReader(steps)
    reader.partitions({"a": 9}, {"a": 9})
    reader.partitions({"a": 4}, {"a": 9})
    assert batches(reader, {"a": 9}, 2) == [19, 25]
    assert steps.planned == [(4, 9), (9, 19), (19, 25)]


def test_available_now_is_refused_by_name_for_a_new_query() -> None:
    reader = PositionedReader(Steps())
    end = kept(reader.latestOffset())
    reader.initialOffset()  # Spark's wrapper of the source asks for it, and the first batch does, too.
    start = kept(reader.initialOffset())
    with pytest.raises(VersionTooOld, match=r"Trigger\.AvailableNow needs PySpark 4\.2 or later, and PySpark \S+ is"):
        reader.partitions(start, end)


@pytest.mark.parametrize("offset", [10, 12])
def test_available_now_is_refused_for_a_query_with_a_checkpoint(offset: int) -> None:
    steps = Steps()
    reader = PositionedReader(steps)
    reader.latestOffset()
    with pytest.raises(VersionTooOld, match=r"Trigger\.AvailableNow"):
        reader.partitions({"a": offset}, {"a": offset})
    assert not steps.planned


def test_the_reader_is_stopped() -> None:
    steps = Steps()
    PositionedReader(steps).stop()
    assert steps.stopped


def test_readers_are_in_the_form_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: Any = Steps()
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    assert isinstance(stream_reader(steps), PositionedReader)
    monkeypatch.setattr(versions, "SPARK", (4, 2))
    assert stream_reader(steps) is steps


def test_what_a_version_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_spark("a feature", (4, 0))
    monkeypatch.setattr(versions, "SPARK", (4, 1))
    with pytest.raises(VersionTooOld, match=r"^bytes_behind needs PySpark 4\.2 or later, and PySpark ") as caught:
        bytes_behind({"sources": []})
    assert (caught.value.package, caught.value.found) == ("PySpark", pyspark.__version__)


def test_timestamps_are_in_utc() -> None:
    assert arrow_schema(StructType().add("at", "timestamp")).field("at").type == pa.timestamp("us", tz="UTC")
