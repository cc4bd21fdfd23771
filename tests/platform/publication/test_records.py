"""Records of ledgers round-trip, and all other lines are refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.publication.records import Acknowledgement, Decision, Record, Summary, parse_record

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
TIMES = st.floats(0, allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 1 << 62)
INTENTS = st.dictionaries(NAMES, st.binary(max_size=30), max_size=3)
DECISIONS = st.builds(
    Decision, NAMES, NAMES, COUNTS, TIMES, INTENTS, st.none() | st.tuples(NAMES, st.integers(0, 1 << 40))
)
SUMMARIES = st.builds(
    Summary, st.dictionaries(NAMES, st.tuples(COUNTS, TIMES)), st.lists(DECISIONS, max_size=3).map(tuple)
)


@given(DECISIONS | SUMMARIES | st.builds(Acknowledgement, NAMES))
def test_a_record_is_one_line_that_round_trips(record: Record) -> None:
    line = record.to_line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert parse_record(line[:-1]) == record


@given(SUMMARIES)
def test_earlier_versions_read_a_summary_as_an_empty_acknowledgement(summary: Summary) -> None:
    assert json.loads(summary.to_line())["acknowledged"] == ""


DECISION = {"publication": "x", "producer": "aa", "messages": 1, "time": 1.0, "intents": {}}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "7",
        "null",
        '"summary"',
        "[]",
        '["acknowledged"]',
        "{}",
        "[" * 100_000,
        json.dumps({**DECISION, "messages": "many"}),
        json.dumps({**DECISION, "messages": float("inf")}),
        json.dumps({**DECISION, "messages": float("nan")}),
        json.dumps({**DECISION, "messages": -1}),
        json.dumps({**DECISION, "messages": True}),
        json.dumps({**DECISION, "messages": "7"}),
        json.dumps({**DECISION, "messages": 7.5}),
        json.dumps(DECISION).replace("1.0", "9" * 5000),
        json.dumps(DECISION).replace("1.0", "1e400"),
        json.dumps({**DECISION, "time": None}),
        json.dumps({**DECISION, "time": "1.5"}),
        json.dumps({**DECISION, "time": True}),
        json.dumps({**DECISION, "time": -1.5}),
        json.dumps({**DECISION, "time": float("nan")}),
        json.dumps({**DECISION, "time": float("inf")}),
        json.dumps({**DECISION, "time": float("-inf")}),
        json.dumps({**DECISION, "time": 10**400}),
        json.dumps({**DECISION, "publication": 7}),
        json.dumps({**DECISION, "producer": None}),
        json.dumps({**DECISION, "batch": [None, 7]}),
        json.dumps({**DECISION, "batch": None}),
        json.dumps({**DECISION, "batch": ["query", -7]}),
        json.dumps({**DECISION, "batch": ["query", "7"]}),
        json.dumps({"acknowledged": None}),
        json.dumps({"acknowledged": "", "summary": {"decided": {"x": [7, float("nan")]}, "pending": []}}),
        json.dumps({"acknowledged": "", "summary": {"decided": {"x": [7, -1]}, "pending": []}}),
        json.dumps({"acknowledged": "", "summary": {"decided": {"x": [-7, 1]}, "pending": []}}),
        json.dumps({**DECISION, "intents": ["x"]}),
        json.dumps({**DECISION, "intents": {"x": "no base64!"}}),
        json.dumps({**DECISION, "intents": {"x": "ü"}}),
        json.dumps({**DECISION, "batch": ["query"]}),
        json.dumps({**DECISION, "batch": 7}),
        json.dumps({"acknowledged": "", "summary": {}}),
        json.dumps({"acknowledged": "", "summary": []}),
        json.dumps({"acknowledged": "", "summary": {"decided": {"x": 7}, "pending": []}}),
        json.dumps({"acknowledged": "", "summary": {"decided": {"x": [7]}, "pending": []}}),
        json.dumps({"acknowledged": "", "summary": {"decided": {}, "pending": ["x"]}}),
        json.dumps({"acknowledged": "", "summary": {"decided": {}, "pending": [DECISION | {"time": "x"}]}}),
    ],
)
@pytest.mark.parametrize("end", [b"", b"\xff"])
def test_other_lines_are_refused(line: str, end: bytes) -> None:
    with pytest.raises(ValueError, match="not a record of a publication"):
        parse_record(line.encode() + end)


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_unreadable_records_are_not_written(time: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Decision("x", "aa", 1, time, {}).to_line()
