"""Checks: the parts of an audit. Each one returns findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.audit.report import Coverage, Depth, Report, collect
from coranto.effects import Clock, SystemClock
from coranto.errors import CorantoError


@dataclass(slots=True)
class Result:
    """The result of one check: findings, facts of each examined subject by its name, and the coverage."""

    findings: list[Finding] = field(default_factory=list)
    subjects: dict[str, dict[str, Fact]] = field(default_factory=dict)
    coverage: list[Coverage] = field(default_factory=list)
    cluster: str = ""

    def add(self, other: Result) -> None:
        """Add the results of another check. Facts about one subject are merged."""
        self.findings += other.findings
        self.coverage += other.coverage
        self.cluster = self.cluster or other.cluster
        for name, facts in other.subjects.items():
            self.subjects.setdefault(name, {}).update(facts)


class Check(Protocol):
    """A part of an audit. A check returns a finding about everything that it cannot examine.

    Checks only read, so cancelling `run` has no effects.
    """

    @property
    def name(self) -> str:
        """A stable name in lower case, which the report's coverage shows."""
        ...

    async def run(self) -> Result:
        """Run the check. Raises errors only if nothing can be examined, for example if no broker answers."""
        ...


async def run_checks(
    selector: str,
    checks: Sequence[Check],
    *,
    depth: Depth = Depth.CHEAP,
    clock: Clock | None = None,
    subjects: Mapping[str, Mapping[str, Fact]] | None = None,
) -> Report:
    """Run checks one after another, and return their report. `selector` describes the audited journals in the report.

    The error of one check becomes a finding, so that other checks still report. Raises the first error if all fail.
    Checks only read, so cancelling leaves nothing behind.
    """
    times = clock or SystemClock()
    begun_at = times.now()
    result = Result(subjects={name: dict(facts) for name, facts in (subjects or {}).items()})
    failures: list[CorantoError] = []
    for check in checks:
        try:
            result.add(await check.run())
        except CorantoError as error:
            failures.append(error)
            text = f"the check `{check.name}` could not examine anything: {error}"
            result.findings.append(Finding(Kind.NOT_EXAMINED, Severity.ERROR, Subject.selector(selector), text))
    if failures and len(failures) == len(checks):
        raise failures[0]
    return collect(
        selector,
        depth,
        begun_at,
        times.now(),
        subjects=result.subjects,
        findings=result.findings,
        coverage=result.coverage,
        cluster=result.cluster,
    )
