"""Reports round-trip through JSON, and other documents are refused."""

from __future__ import annotations

import json

import pytest

from coranto.audit.report import Report
from coranto.errors import InvalidInput
from tests.platform.audit.reports import FIRST, LOST, OLD, report_of


async def test_a_report_round_trips_through_json() -> None:
    report = await report_of(FIRST, OLD, LOST)
    assert Report.from_json(report.to_json()) == report
    assert Report.from_json(report.to_json(indent=2).encode()) == report


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "has format 2"),
        ({"depth": "bottomless"}, "depth"),
        ({"findings": [{"kind": "unheard_of"}]}, "findings.0"),
        ({"subjects": 7}, "subjects"),
    ],
)
async def test_a_report_of_a_later_version_is_refused(change: dict[str, object], says: str) -> None:
    content = json.loads((await report_of(LOST)).to_json()) | change
    with pytest.raises(InvalidInput, match=says):
        Report.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "nothing", "[]", "{}", "null"])
def test_text_that_is_not_a_report_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a report"):
        Report.from_json(text)
