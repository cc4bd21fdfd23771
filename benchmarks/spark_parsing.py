"""Processor time of parsing a line of JSON: the workers' parser against Spark's `from_json`, for lines of many shapes.

Both parse the same lines in memory into the same columns. The workers' parser runs in this process as it does in a
worker, including lines that it must parse one by one. Spark's time is its process's time for a job that needs all
columns, minus the time for a job that only reads the texts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from benchmarks.runner import Figure, measure_pairs
from benchmarks.spark_reads import processor_seconds
from coranto.messages import JsonLines
from coranto_consumers.journals.reading import parse_lines
from coranto_consumers.spark.decoding.json_times import zone_of
from coranto_consumers.spark.decoding.rows import BatchBuilder, Misfits, parsed_layout
from coranto_consumers.spark.session.sessions import new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = 300_000
BLOCK_BYTES = 4 << 20
"""The size of the blocks to parse."""
ZONE: Final = "Europe/Berlin"
WARM_UPS = 2
"""Additional warm-up runs before `measure_pairs`, because Java compiles frequent code."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns and the records of lines of one form."""

    columns: str
    record: Callable[[int], Mapping[str, Any]]
    """Returns the fields of a line by its number. JSON text is a `Raw`."""


class Raw(str):
    """A value that is written unchanged."""

    __slots__ = ()


def _flight(n: int) -> Mapping[str, Any]:
    return {
        "carrier": "UA",
        "month": 1 + n % 12,
        "arr_delay": n % 97 - 11.5,
        "tailnum": f"N{n % 4000}",
        "dest": "IAH",
        "distance": 1400.0 + n % 7,
    }


def _odd_times(n: int) -> Mapping[str, Any]:
    day, minute = f"2024-{1 + n % 12}-{1 + n % 28}", n % 60
    forms = (f"{day} 7:{minute}", f"{day}T07:08:{minute:02} America/New_York", f"2024-05-06T07:{minute:02}:09.1234567Z")
    return {"id": n, "at": 1_700_000_000 + n if n % 4 == 3 else forms[n % 4], "day": day}


SHAPES: Final[Mapping[str, Shape]] = {
    "plain columns": Shape(
        "carrier STRING, month INT, arr_delay DOUBLE, tailnum STRING, dest STRING, distance DOUBLE", _flight
    ),
    "plain times": Shape(
        "id BIGINT, at TIMESTAMP, day DATE",
        lambda n: {
            "id": n,
            "at": f"2024-05-06T07:{n % 60:02}:{n // 60 % 60:02}.25Z",
            "day": f"2024-05-{1 + n % 28:02}",
        },
    ),
    "odd times": Shape("id BIGINT, at TIMESTAMP, day DATE", _odd_times),
    "a MAP": Shape(
        "id BIGINT, tags MAP<STRING, INT>, name STRING",
        lambda n: {"id": n, "tags": {f"t{each}": n + each for each in range(n % 4)}, "name": f"order {n}"},
    ),
    "structs in an ARRAY": Shape(
        "id BIGINT, lines ARRAY<STRUCT<item: STRING, price: DOUBLE>>",
        lambda n: {"id": n, "lines": [{"item": f"item {each}", "price": each + 0.5} for each in range(1 + n % 3)]},
    ),
    "objects in STRING": Shape(
        "id BIGINT, payload STRING",
        lambda n: {"id": n, "payload": {"kind": "order", "at": [n, n + 1], "note": 'a "quoted" text'}},
    ),
    "wide decimals": Shape(
        "id BIGINT, amount DECIMAL(38, 10), rate DECIMAL(28, 4)",
        lambda n: {"id": n, "amount": Raw(f"{n}12345678901234567890.0123456789"), "rate": Raw(f"{n}.{n % 10_000:04}")},
    ),
    "one line in 100 that does not fit": Shape(
        "carrier STRING, month INT, arr_delay DOUBLE, tailnum STRING, dest STRING, distance DOUBLE",
        lambda n: {**_flight(n), "month": "May"} if n % 100 == 0 else _flight(n),
    ),
}


def lines_of(shape: Shape) -> list[bytes]:
    """Return the lines of a shape, including newlines."""
    return [_line(shape.record(number)) for number in range(ROWS)]


def _line(record: Mapping[str, Any]) -> bytes:
    fields = (
        f"{json.dumps(name)}:{value if isinstance(value, Raw) else json.dumps(value, separators=(',', ':'))}"
        for name, value in record.items()
    )
    return ("{" + ",".join(fields) + "}\n").encode()


class WorkersParser:
    """Parses a shape's lines as a worker does. A call returns rows per second of processor time."""

    def __init__(self, shape: Shape, lines: list[bytes]) -> None:
        framing = JsonLines(None, tolerant=True)
        schema = StructType.fromDDL(shape.columns)
        self._layout = parsed_layout(schema, "", Misfits.PERMISSIVE, framing, zone_of(ZONE))
        self._blocks = []
        block: list[bytes] = []
        size = 0
        for line in lines:
            block.append(line)
            size += len(line)
            if size >= BLOCK_BYTES:
                self._blocks.append(parse_lines(framing, "bench", 0, b"".join(block)))
                block, size = [], 0
        if block:
            self._blocks.append(parse_lines(framing, "bench", 0, b"".join(block)))

    def __call__(self) -> float:
        builder, rows = BatchBuilder(self._layout), 0
        begun = time.process_time()
        for lines in self._blocks:
            rows += sum(batch.num_rows for batch in builder.build(lines))
        seconds = time.process_time() - begun
        assert rows == ROWS, rows
        return ROWS / seconds


class SparksParser:
    """Parses texts by `from_json`. A call returns rows per second of processor time of Spark's process."""

    def __init__(self, shape: Shape, texts: DataFrame) -> None:
        self._columns = StructType.fromDDL(shape.columns).names
        self._texts = texts
        self._parsed = texts.select(
            F.from_json("value", shape.columns, {"timeZone": ZONE}).alias("v"),
        ).select("v.*")

    def __call__(self) -> float:
        only_texts = _spent(self._texts, "sum(length(value))")
        parsed = _spent(self._parsed, *(f"count({name})" for name in self._columns))
        return ROWS / max(parsed - only_texts, 1e-3)


def _spent(frame: DataFrame, *aggregates: str) -> float:
    """Return the processor time of Spark's process for aggregates over all rows, in seconds."""
    begun = processor_seconds().spark
    [answer] = frame.selectExpr("count(*) AS n", *aggregates).collect()
    assert answer["n"] == ROWS, answer
    return processor_seconds().spark - begun


def run(rounds: int) -> list[Figure]:
    """Measure each shape."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        spark = new_session("coranto-bench-parsing")
        try:
            for number, (name, shape) in enumerate(SHAPES.items()):
                lines = lines_of(shape)
                path = Path(folder, f"{number}.txt")
                path.write_bytes(b"".join(lines))
                texts = spark.read.text(str(path)).cache()
                workers, sparks = WorkersParser(shape, lines), SparksParser(shape, texts)
                for _ in range(WARM_UPS):
                    workers(), sparks()
                subject, floor = measure_pairs(rounds, sparks, workers)
                figures.append(
                    Figure(f"parsing, {name}", "rows per s of processor time", subject, floor, "Spark's from_json")
                )
                texts.unpersist(blocking=True)
        finally:
            spark.stop()
    return figures
