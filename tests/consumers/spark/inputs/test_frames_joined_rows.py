"""Batches of many ranges keep the rows and summaries of each."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from coranto.errors import CorruptMessage, OffsetJump
from coranto.messages.uuids import Flags, ProducerId, format_uuid
from coranto_consumers.journals.framings import as_tolerant
from coranto_consumers.journals.ranges import NumberedRange, Range, split
from coranto_consumers.spark.committed.scanning import SUMMARY_PIECE, RangeSummarizer, RangeSummary
from coranto_consumers.spark.decoding.rows import FIELDS, LINE, PARSED_PREFIX, PIECE, SUMMARY, Misfits, parsed_layout
from coranto_consumers.spark.inputs import frames
from coranto_consumers.spark.inputs.frames import SequencedRows
from tests.consumers.spark.folding import FRAMING, Memory
from tests.consumers.spark.histories import histories
from tests.sampling import examples

OWN = [
    StructField(PARSED_PREFIX + each.name, each.dataType)
    for each in (FIELDS["journal"], FIELDS["offset"], FIELDS["clock"], PIECE, LINE, SUMMARY)
]
SCHEMA = StructType([*OWN, StructField("n", LongType()), StructField("pad", StringType())])
KEPT = parsed_layout(SCHEMA, None, Misfits.KEPT, FRAMING)
PRODUCER = ProducerId(b"\1\0\0\0\0\1")


def message(n: object, clock: int = 1) -> bytes:
    return FRAMING.marshal({"n": n}, format_uuid(PRODUCER, clock, Flags.OUTSIDE_TXN))


def numbered(parts: list[Range]) -> list[NumberedRange]:
    return [NumberedRange(number, part) for number, part in enumerate(parts)]


def wholes(journals: dict[str, bytes]) -> list[Range]:
    return [Range(name, 0, len(content), len(content)) for name, content in journals.items()]


def table(batches) -> pa.Table:
    return pa.Table.from_batches(batches)


def messages_of(found: pa.Table) -> list[dict[str, object]]:
    return [row for row in found.to_pylist() if row["_coranto_piece"] != SUMMARY_PIECE]


def summaries_of(found: pa.Table):
    return [
        (row["_journal"], RangeSummary.loads(row["_coranto_summary"].encode()))
        for row in found.to_pylist()
        if row["_coranto_piece"] == SUMMARY_PIECE
    ]


@given(
    contents=st.lists(histories(), min_size=1, max_size=6),
    sizes=st.randoms(use_true_random=False),
    joined=st.integers(1, 3000),
)
@settings(max_examples=examples(60), deadline=None)
def test_joined_batches_have_the_rows_of_each_range(contents, sizes: random.Random, joined: int):
    journals = {f"j/{number}": content for number, content in enumerate(contents)}
    memory = Memory(journals)
    parts = numbered([part for whole in wholes(journals) for part in split(whole, sizes.randint(30, 2000))])
    alone = [(each, list(SequencedRows(KEPT).read(memory, [each], FRAMING))) for each in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "JOINED_BYTES", joined)
        patch.setattr(frames, "JOINED_RANGES", sizes.randint(1, 10))
        batches = list(SequencedRows(KEPT).read(memory, parts, FRAMING))

    if not parts:
        assert not batches
        return
    together = table(batches)
    assert messages_of(together) == [row for _, each in alone for row in messages_of(table(each))]
    expected = []
    for each in parts:
        scan = RangeSummarizer(each)
        list(scan.pieces(memory, FRAMING))
        expected.append((each.range.journal, scan.summary()))
    assert summaries_of(together) == expected


def test_small_ranges_make_one_batch_of_rows_and_one_of_summaries():
    journals = {f"j/{number:03}": message(number) for number in range(500)}
    batches = list(SequencedRows(KEPT).read(Memory(journals), numbered(wholes(journals)), FRAMING))
    assert [each.num_rows for each in batches] == [500, 500]
    assert batches[0].column("n").to_pylist() == list(range(500))
    assert batches[0].column("_journal").to_pylist() == list(journals)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_misfits_are_counted_in_their_ranges(monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr(frames, "JOINED_RANGES", at_once)
    journals = {
        "j/a": message(1) + message(2, 2),
        "j/b": message("x") + message(3, 2) + message("y", 3),
        "j/c": b"",
        "j/d": message([], 4),
    }
    found = table(SequencedRows(KEPT).read(Memory(journals), numbered(wholes(journals)), FRAMING))
    assert [(journal, each.rows, each.misfits) for journal, each in summaries_of(found)] == [
        ("j/a", 2, 0),
        ("j/b", 3, 2),
        ("j/c", 0, 0),
        ("j/d", 1, 1),
    ]


def test_lines_with_unreadable_uuids_stay_in_their_ranges():
    tolerant = as_tolerant(FRAMING)
    layout = parsed_layout(SCHEMA, None, Misfits.KEPT, tolerant)
    journals = {"j/a": message(1), "j/b": b'{"_meta":{"uuid":"no"}}\n' + message(2), "j/c": message(3)}
    found = table(SequencedRows(layout).read(Memory(journals), numbered(wholes(journals)), tolerant))
    assert [(row["_journal"], row["n"], row["_coranto_line"]) for row in messages_of(found)] == [
        ("j/a", 1, None),
        ("j/b", None, b'{"_meta":{"uuid":"no"}}'),
        ("j/b", 2, None),
        ("j/c", 3, None),
    ]
    assert [each.misfits for _, each in summaries_of(found)] == [0, 1, 0]


def test_errors_name_the_journal_of_the_message():
    journals = {"j/a": message(1), "j/b": message(2) + message("x", 2)}
    columns = StructType([StructField("_journal", StringType()), StructField("n", LongType())])
    layout = parsed_layout(columns, None, Misfits.FAILFAST, FRAMING)
    with pytest.raises(CorruptMessage, match="j/b") as caught:
        list(SequencedRows(layout).read(Memory(journals), numbered(wholes(journals)), FRAMING))
    assert caught.value.offset == len(message(2))
    with pytest.raises(OffsetJump, match="j/a"):
        list(SequencedRows(KEPT).read(Memory(journals, first=5), numbered(wholes(journals)), FRAMING))


def test_the_summaries_of_many_ranges_are_small():
    journals = {f"j/{number:05}": message(1) for number in range(1000)}
    found = table(SequencedRows(KEPT).read(Memory(journals), numbered(wholes(journals)), FRAMING))
    texts = [text for text in found.column("_coranto_summary").to_pylist() if text is not None]
    assert len(texts) == 1000
    assert max(map(len, texts)) < 200
