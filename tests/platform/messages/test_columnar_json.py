"""Rows of tables become messages with their own UUIDs, by every way of publishing."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages import (
    Flags,
    JsonLines,
    ProducerClock,
    ProducerId,
    Publisher,
    Sequencer,
    SyncPublisher,
    TypedLines,
    columnar_json,
    iter_messages,
    new_producer_id,
)
from coranto.messages.columnar_json import line_pieces, object_texts, parts_of, stamped_rows, table_of
from coranto.messages.sequencer import read_committed

PRODUCER = ProducerId(b"\x01abcde")
SCHEMA = pa.schema(
    [
        *(("n", pa.int64()), ("u", pa.uint64()), ("b", pa.bool_()), ("s", pa.string()), ("f", pa.float64())),
        *(("l", pa.list_(pa.int32())), ("o", pa.struct([("x", pa.string()), ("y", pa.float32())]))),
        ("m", pa.map_(pa.string(), pa.int64())),
    ]
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(['"', "\\", "\n\x00", "é", ""])
ROWS = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "u": st.none() | st.integers(0, (1 << 64) - 1),
        "b": st.none() | st.booleans(),
        "s": st.none() | TEXTS,
        "f": st.none() | st.floats(allow_nan=False, allow_infinity=False),
        "l": st.none() | st.lists(st.none() | st.integers(-5, 5), max_size=3),
        "o": st.none() | st.fixed_dictionaries({"x": st.none() | TEXTS, "y": st.none() | st.sampled_from([0.5, 1.0])}),
        "m": st.none() | st.dictionaries(TEXTS, st.none() | st.integers(-5, 5), max_size=2).map(lambda d: [*d.items()]),
    }
)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in row.items() if value is not None}
    if "o" in found:
        found["o"] = {name: value for name, value in found["o"].items() if value is not None}
    if "m" in found:
        found["m"] = dict(found["m"])
    return found


@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 3))
def test_rows_become_messages_with_values_and_uuids_in_order(rows, skipped):
    table = pa.Table.from_pylist(rows, SCHEMA).slice(skipped)
    lines = []
    for part in parts_of(table_of(table)):
        lines += stamped_rows(part, JsonLines(), PRODUCER, 1600, Flags.CONTINUE_TXN).to_pylist()
    found = list(iter_messages(JsonLines(require_uuid=True), "j", lines, 0))
    assert [(each.producer, each.clock, each.flags) for each in found] == [
        (PRODUCER, 1600 + 160 * n, Flags.CONTINUE_TXN) for n in range(len(rows[skipped:]))
    ]
    for each, row in zip(found, rows[skipped:], strict=True):
        message = dict(each.message)
        assert list(message.pop("_meta")) == ["uuid"]
        assert message == expected(row)
        assert {name: type(value) for name, value in message.items()} == {
            name: type(value) for name, value in expected(row).items()
        }


WHOLE = st.integers(-(1 << 54), 1 << 54).map(float) | st.sampled_from([0.0, -0.0, 1e9, 9999999999.0, 1e10, -1e10, 1e22])


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
@given(values=st.lists(st.none() | WHOLE | st.integers(-20_000_000, 20_000_000).map(float), min_size=1, max_size=5))
@example(values=[16777216.0])
@example(values=[16777217.0, None])
def test_whole_floats_are_written_the_same_with_and_without_fractions(kind, values):
    alone = object_texts(["f"], [pa.array(values, kind)], len(values)).to_pylist()
    among = object_texts(["f"], [pa.array([*values, 0.5], kind)], len(values) + 1).to_pylist()
    assert alone == among[:-1]


def test_the_text_form_of_other_types():
    table = pa.table(
        {
            "at": pa.array([dt.datetime(2024, 2, 29, 1, 2, 3)], pa.timestamp("us", "Europe/Berlin")),
            "local": pa.array([dt.datetime(2024, 2, 29, 1, 2, 3)], pa.timestamp("s")),
            "day": pa.array([dt.date(2024, 2, 29)]),
            "price": pa.array([Decimal("1.50")]),
            "raw": pa.array([b"\x00\xff"]),
            "kind": pa.array(["a"]).dictionary_encode(),
            "none": pa.nulls(1),
            "f": pa.array([float("nan")]),
            "g": pa.array([float("-inf")]),
        }
    )
    [line] = stamped_rows(table_of(table).to_batches()[0], JsonLines(), PRODUCER, 1600, Flags.OUTSIDE_TXN).to_pylist()
    message = json.loads(line)
    del message["_meta"]
    assert message == {
        "at": "2024-02-29T01:02:03.000000Z",
        "local": "2024-02-29T01:02:03",
        "day": "2024-02-29",
        "price": 1.5,
        "raw": "AP8=",
        "kind": "a",
        "f": "NaN",
        "g": "-Infinity",
    }


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ([{"n": 1}], "not list"),
        (pa.table({"d": pa.array([1], pa.duration("s"))}), "d is duration"),
        (pa.table({"o": pa.array([{"t": dt.time(1)}])}), r"o\.t is time64"),
        (pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), "two columns 'a'"),
        (pa.table({"_meta": [1]}), "column '_meta' is the place of UUIDs"),
    ],
)
def test_unsupported_tables_are_refused_before_anything_is_appended(table, reason):
    appended: list[bytes] = []
    publisher = SyncPublisher(
        lambda journal, content: appended.append(content),
        producer=PRODUCER,
        clock=ProducerClock(lambda: 0),
        framing=JsonLines(),
    )
    with pytest.raises(InvalidInput, match=reason):
        publisher.publish_table("j", table)
    publisher.flush()
    assert appended == []


def test_only_json_lines_accept_tables():
    publisher = SyncPublisher(
        lambda journal, content: None, producer=PRODUCER, clock=ProducerClock(lambda: 0), framing=TypedLines(dict)
    )
    with pytest.raises(InvalidInput, match="not by TypedLines"):
        publisher.add_table("j", pa.table({"n": [1]}))


def committed(content: bytes) -> list[int]:
    messages = iter_messages(JsonLines(), "j", [content], 0)
    return [each.message["n"] for each in read_committed(messages, Sequencer(), lambda _: ())]


@pytest.mark.parametrize("kind", [pa.table, pd.DataFrame, pl.DataFrame])
async def test_tables_and_single_messages_are_published_in_order(kind):
    """In bounded batches, within and outside transactions, with both publishers."""
    tables = [kind({"n": list(range(begin, begin + 500))}) for begin in (1, 502)]
    batches: list[bytes] = []

    async def append(journal: str, content: bytes) -> None:
        batches.append(content)

    def settings() -> dict[str, Any]:
        return {
            "producer": new_producer_id(os.urandom),
            "clock": ProducerClock(lambda: 0),
            "framing": JsonLines(),
            "max_batch_bytes": 10_000,
            "max_pending_bytes": 30_000,
        }

    async with Publisher(append, **settings()) as publisher:
        await publisher.add("j", {"n": 0})
        assert await publisher.add_table("j", tables[0]) == 500
        await publisher.add("j", {"n": 501})
        with pytest.raises(InvalidInput, match="a transaction has messages for j"):
            await publisher.publish_table("j", tables[1])
        await publisher.commit()
        await publisher.publish_table("j", tables[1])
        await publisher.add_table("j", tables[0])
        await publisher.rollback()
    assert committed(b"".join(batches)) == list(range(1002))
    assert max(map(len, batches)) <= 10_000

    synchronous: list[bytes] = []
    other = SyncPublisher(lambda journal, content: synchronous.append(content), **settings())
    other.publish("j", {"n": 0})
    assert other.publish_table("j", tables[0]) == 500
    other.add_table("j", tables[1])
    other.commit()
    assert committed(b"".join(synchronous)) == [*range(501), *range(502, 1002)]
    assert max(map(len, synchronous)) <= 10_000


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_transaction_ends_after_tables_that_another_task_adds(end, monkeypatch):
    monkeypatch.setattr(columnar_json, "BATCH_ROWS", 1)
    batches: list[bytes] = []
    begun = asyncio.Event()

    async def append(journal: str, content: bytes) -> None:
        batches.append(content)
        begun.set()

    async with Publisher(
        append, producer=PRODUCER, clock=ProducerClock(lambda: 0), framing=JsonLines(), max_batch_bytes=100
    ) as publisher:
        adding = asyncio.create_task(publisher.add_table("j", pa.table({"n": list(range(100))})))
        await asyncio.wait_for(begun.wait(), 60)
        assert not adding.done()
        await getattr(publisher, end)()
        assert adding.done()
        assert await adding == 100
    assert committed(b"".join(batches)) == (list(range(100)) if end == "commit" else [])


def test_large_rows_are_encoded_in_small_parts(monkeypatch):
    monkeypatch.setattr(columnar_json, "BATCH_BYTES", 1000)
    table = pa.table({"n": range(100), "s": ["x" * 100] * 100})
    parts = list(parts_of(table))
    assert max(part.nbytes for part in parts) <= 1000 < table.nbytes
    assert pa.Table.from_batches(parts) == table
    assert len(list(parts_of(table.select(["n"])))) == 1


def test_a_part_encodes_only_the_elements_of_its_rows(monkeypatch):
    monkeypatch.setattr(columnar_json, "BATCH_ROWS", 2)
    encoded: list[int] = []
    elements = columnar_json._elements
    monkeypatch.setattr(columnar_json, "_elements", lambda values: encoded.append(len(values)) or elements(values))
    rows = [{"l": [n] * n, "m": [("k", n)], "o": [[n], None]} for n in range(6)]
    kinds = {"l": pa.list_(pa.int8()), "m": pa.map_(pa.string(), pa.int8()), "o": pa.list_(pa.list_(pa.int8()))}
    lines = []
    for part in parts_of(pa.Table.from_pylist(rows, pa.schema(kinds))):
        lines += stamped_rows(part, JsonLines(), PRODUCER, 1600, Flags.OUTSIDE_TXN).to_pylist()
    found = [json.loads(line) for line in lines]
    assert [(each["l"], each["m"], each["o"]) for each in found] == [
        (row["l"], dict(row["m"]), row["o"]) for row in rows
    ]
    assert encoded == [1, 2, 4, 2, 5, 2, 4, 2, 9, 2, 4, 2]


def test_rows_too_large_for_an_array_of_lines_are_invalid_input(monkeypatch):
    def full(pieces: Any) -> Any:
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    monkeypatch.setattr(columnar_json, "_joined", full)
    [part] = parts_of(pa.table({"n": [1]}))
    with pytest.raises(InvalidInput, match="1 rows cannot be written as JSON: array cannot contain"):
        stamped_rows(part, JsonLines(), PRODUCER, 1600, Flags.OUTSIDE_TXN)


def test_a_line_longer_than_a_piece_is_a_separate_piece():
    lines = pa.array([b"a" * 5, b"b" * 50, b"c" * 5, b"d" * 5], pa.binary())
    assert list(line_pieces(lines.slice(1), 12)) == [b"b" * 50, b"c" * 5 + b"d" * 5]
