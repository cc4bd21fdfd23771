"""Reports of checks that have run."""

from __future__ import annotations

import pytest

from coranto.audit.check import Result, run_checks
from coranto.audit.findings import Kind, Subject
from coranto.errors import SqlStoreError
from tests.platform.audit.reports import FIRST, LOST, OLD, Gives, report_of


async def test_findings_are_sorted_by_severity_and_subjects_merge_the_facts_of_all_checks() -> None:
    report = await report_of(FIRST, OLD, LOST)
    assert list(report.findings) == [LOST, OLD, FIRST]
    assert report.subjects == {"a/a": {"head": 3, "begin": 0}, "a/b": {"head": 10}}
    assert report.kinds() == {Kind.CONTENT_LOST, Kind.UNPERSISTED_TOO_OLD, Kind.FIRST_AUDIT}
    assert report.of(Subject.journal("a/b")) == [LOST]
    assert not report.sound
    assert report.summary == "NOT sound: 1 error, 1 warning, 1 info; 2 examined"


async def test_only_errors_make_a_report_unsound() -> None:
    assert (await report_of(OLD, FIRST)).sound
    assert (await report_of()).summary == "sound: 2 examined"
    joined = (await report_of()).joined(await report_of(LOST))
    assert not joined.sound


async def test_a_failed_check_hides_no_findings_of_other_checks() -> None:
    class Fails:
        name = "consumer"

        async def run(self) -> Result:
            raise SqlStoreError("the database has gone away")

    journals = Gives("journals", Result([LOST], {"a/b": {"head": 10}}))
    for checks in ([journals, Fails()], [Fails(), journals]):
        report = await run_checks("all journals", checks)
        assert report.kinds() == {Kind.CONTENT_LOST, Kind.NOT_EXAMINED}
        (text,) = report.of(Subject.selector("all journals"))
        assert "`consumer` could not examine anything: the database has gone away" in text.message
        assert not report.sound
        assert report.subjects
    with pytest.raises(SqlStoreError):
        await run_checks("all journals", [Fails()])
