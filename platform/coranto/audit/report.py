"""The report of an audit, and its form as JSON. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pydantic

from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject, ranked
from coranto.security.documents import parse_document

FORMAT: Final = 1
"""The version of the report's JSON. Parsing rejects later ones."""


class Depth(enum.StrEnum):
    """The depth of an audit."""

    CHEAP = "cheap"
    """Listings, coverage, ages and health. No content is read."""
    DEEP = "deep"
    """Also the SHA-1 of content, up to the budget."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The scope of a check: its coverage and its omissions.

    `examined` and `left_out` are counted in `unit`, such as journals or bytes. `reason` explains omissions,
    for people.
    """

    check: str
    unit: str
    examined: int
    left_out: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit of `selector`. Times are Unix seconds.

    `subjects` has the facts about each examined subject, such as a journal's head. A report without errors is sound,
    but only within its `coverage`.
    """

    selector: str
    depth: Depth
    begun_at: float
    ended_at: float
    subjects: Mapping[str, Mapping[str, Fact]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    coverage: Sequence[Coverage] = ()
    cluster: str = ""
    """The id of the audited cluster, in hexadecimal; empty when it is not known."""
    format: int = FORMAT

    @property
    def errors(self) -> list[Finding]:
        return [each for each in self.findings if each.severity is Severity.ERROR]

    @property
    def warnings(self) -> list[Finding]:
        return [each for each in self.findings if each.severity is Severity.WARNING]

    @property
    def sound(self) -> bool:
        """True if no examined subject has an error. `coverage` has the extent."""
        return not self.errors

    def of(self, subject: Subject) -> list[Finding]:
        """Return the findings about one subject."""
        return [each for each in self.findings if each.subject == subject]

    def kinds(self) -> set[Kind]:
        """Return the kinds of all findings."""
        return {each.kind for each in self.findings}

    @property
    def summary(self) -> str:
        """One sentence with the result and the number of examined subjects."""
        examined = f"{len(self.subjects)} examined"
        if not self.findings:
            return f"sound: {examined}"
        counts = [
            f"{count} {severity}{'s' if count > 1 and severity is not Severity.INFO else ''}"
            for severity in Severity
            if (count := sum(1 for each in self.findings if each.severity is severity))
        ]
        return f"{'sound' if self.sound else 'NOT sound'}: {', '.join(counts)}; {examined}"

    def joined(self, other: Report) -> Report:
        """Return one report of this audit and of another one with other subjects."""
        return Report(
            selector=self.selector if self.selector == other.selector else f"{self.selector}; {other.selector}",
            depth=self.depth if self.depth is other.depth else Depth.CHEAP,
            begun_at=min(self.begun_at, other.begun_at),
            ended_at=max(self.ended_at, other.ended_at),
            subjects={**self.subjects, **other.subjects},
            findings=ranked([*self.findings, *other.findings]),
            coverage=[*self.coverage, *other.coverage],
            cluster=self.cluster or other.cluster,
        )

    def to_json(self, *, indent: int | None = None) -> str:
        return _REPORT.dump_json(self, indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Parse a report from its JSON. Raises InvalidInput for other text, and for reports of later versions."""
        return parse_document(_REPORT, text, name="report of an audit", field="report", newest=FORMAT)


_REPORT: Final = pydantic.TypeAdapter(Report)


def collect(
    selector: str,
    depth: Depth,
    begun_at: float,
    ended_at: float,
    *,
    subjects: Mapping[str, Mapping[str, Fact]],
    findings: Iterable[Finding],
    coverage: Iterable[Coverage],
    cluster: str = "",
) -> Report:
    """Return a report with its findings in order of severity."""
    return Report(selector, depth, begun_at, ended_at, dict(subjects), ranked(findings), list(coverage), cluster)
