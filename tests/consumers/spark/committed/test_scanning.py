"""Summaries of ranges."""

import json
import zlib
from base64 import b64encode

import pytest

from coranto.errors import CorruptData
from coranto.messages.columnar import ClockReset, RowSegment
from coranto.messages.outlines import BorderSegment, Limit, Outline, SegmentCommit
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.committed.scanning import SUMMARY_PIECE, RangeSummary, summary_rows
from coranto_consumers.spark.committed.sequencing import read_end


def test_a_gap_between_ranges_is_detected():
    first, second = Range("j/j", 10, 20, 40), Range("j/j", 20, 40, 40, aligned=False)
    summaries = {first: RangeSummary(0, 2, 10, 24), second: RangeSummary(1, 1, 26, 40)}

    assert read_end("j/j", 10, {first: summaries[first]}) == 24
    with pytest.raises(CorruptData, match="after 24 was found at 26"):
        read_end("j/j", 10, summaries)


def summary(producers: int) -> RangeSummary:
    ids = [ProducerId(number.to_bytes(6, "big")) for number in range(producers)]
    border = tuple(
        BorderSegment(number, RowSegment(producer, Flags.CONTINUE_TXN, 1 << 62, (1 << 62) + number, 100 * number))
        for number, producer in enumerate(ids)
    )
    found = Outline(
        border,
        (Limit(7, 1, (1 << 63) - 1),),
        (ClockReset(ids[0], 5, 1, 2),),
        (SegmentCommit(3, 9_000), SegmentCommit(4, 1)),
    )
    return RangeSummary(1 << 30, 70, 1 << 50, (1 << 50) + 9, found, tuple(range(producers)), 12, False, 3)


@pytest.mark.parametrize("producers", [1, 3, 2_000])
def test_a_summary_survives_a_round_trip(producers):
    sent = summary(producers)
    assert RangeSummary.loads(sent.dumps()) == sent
    rows, pieces = summary_rows([("j/a", sent), ("j/b", RangeSummary(1, 0, 5, 5))])
    assert pieces.tolist() == [SUMMARY_PIECE] * 2
    texts = [value.decode() for value in rows.values.to_pylist()]
    assert [RangeSummary.loads(text.encode()) for text in texts] == [sent, RangeSummary(1, 0, 5, 5)]
    assert rows.journals.to_pylist() == ["j/a", "j/b"]


def test_a_summary_is_about_as_small_as_its_information():
    assert len(RangeSummary(1, 1, 5, 9).dumps()) < 80
    assert len(summary(2_000).dumps()) < 2_000 * 20


OUTLINE = {"border": [], "limits": [], "resets": [], "acknowledged": []}
WHOLE = [1, 2, 3, 4, OUTLINE, [], 5, True, 6]


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"[]",
            b"[1,2,3,4,[[1]]]",
            b'{"a":1}',
            b"\xff",
            b"[" * 100_000,
            b64encode(zlib.compress(b"null")),
            b64encode(zlib.compress(b"5")),
        ),
        *(
            json.dumps([*WHOLE[:place], value, *WHOLE[place + 1 :]]).encode()
            for place, values in {
                0: ("1", None, True, 1.5, []),
                4: (
                    *(None, 1, [], {**OUTLINE, "border": 5}, {**OUTLINE, "border": {"a": 1}}),
                    {**OUTLINE, "border": [[1]]},
                    {**OUTLINE, "border": [[0, ["\u00e9", 0, 1, 1, 1]]]},
                    {**OUTLINE, "border": [[0, ["AAAAAAAB", 999, 1, 1, 1]]]},
                    {**OUTLINE, "limits": [[1, 2]]},
                    {**OUTLINE, "limits": [[1, 2, "3"]]},
                    *({**OUTLINE, "resets": [each]} for each in ([1], [1, 2, 3, 4], ["AAAAAAAB", 1], [])),
                    *({**OUTLINE, "acknowledged": [each]} for each in ([1, 2, 3], ["1", 2])),
                ),
                5: (None, ["1"]),
                7: (1, None),
                8: ("1", None, False),
            }.items()
            for value in values
        ),
    ],
)
def test_a_broken_summary_is_refused(content):
    with pytest.raises(CorruptData, match="summary"):
        RangeSummary.loads(content)


def test_an_unbroken_summary_is_accepted():
    assert RangeSummary.loads(json.dumps(WHOLE).encode()) == RangeSummary(1, 2, 3, 4, inner_rows=5, misfits=6)


@pytest.mark.parametrize("text", ["", "é", "[]", "AAAA", "not base64"])
def test_a_broken_row_is_refused(text):
    with pytest.raises(CorruptData, match="summary"):
        RangeSummary.loads(text.encode())
