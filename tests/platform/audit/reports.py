"""Reports of given findings, for tests."""

from __future__ import annotations

from coranto.audit.check import Result, run_checks
from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.audit.report import Coverage, Depth, Report

LOST = Finding(
    Kind.CONTENT_LOST,
    Severity.ERROR,
    Subject.journal("a/b"),
    "[0, 10) is gone",
    {"spans": [[0, 10]], "retention_seconds": 0.5, "stores": ["file:///"], "known": True, "other": None},
    since=12.5,
)


OLD = Finding(Kind.UNPERSISTED_TOO_OLD, Severity.WARNING, Subject.journal("a/a"), "waits for 90 s")


FIRST = Finding(Kind.FIRST_AUDIT, Severity.INFO, Subject.journal("a/a"), "nothing is known from before")


class Gives:
    """A check with a fixed result."""

    def __init__(self, name: str, result: Result) -> None:
        self.name = name
        self._result = result

    async def run(self) -> Result:
        return self._result


async def report_of(*findings: Finding) -> Report:
    coverage = [Coverage("content", "bytes", 5, 7, "the budget is 5 bytes")]
    one = Gives("one", Result(list(findings), {"a/a": {"head": 3}}, coverage, "c1"))
    two = Gives("two", Result([], {"a/a": {"begin": 0}, "a/b": {"head": 10}}))
    return await run_checks("name:prefix=a/", [one, two], depth=Depth.DEEP)
