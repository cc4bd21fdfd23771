"""Comparison of a consumer's tables with its committed messages, by a user's expectations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coranto.audit import Finding, Kind, Severity, Subject
from coranto_consumers.audit.expectations import Expectation, Number, agree, number


def compare_tables(
    consumer: Subject,
    expectations: Sequence[Expectation],
    values: Sequence[object],
    totals: Mapping[str, Number],
    problems: Sequence[str],
    allowances: Mapping[str, Number],
    *,
    deep: bool,
    accept: bool,
    resets: Sequence[str] = (),
) -> tuple[list[Finding], dict[str, Number]]:
    """Compare the results of queries with the replay. Return the findings, and the differences to allow from now on.

    `totals` has the sum of each measure, and `problems` the reasons why sums are incomplete. With `accept`, the current
    differences are allowed. `resets` are moves that repeat or omit messages on purpose: the tables may then have
    other sums.
    """
    findings: list[Finding] = []
    allowed = dict(allowances)
    for expectation, value in zip(expectations, values, strict=True):
        found = None if isinstance(value, Exception) else number(value)
        problem = ""
        if not deep:
            problem = "only a deep audit counts messages"
        elif found is None:
            problem = (
                str(value) if isinstance(value, Exception) else f"the query gives {value!r}, which is not a number"
            )
        elif problems:
            problem = "; ".join(dict.fromkeys(problems))
        if problem or found is None:
            severity = Severity.ERROR if deep else Severity.INFO
            message = f"`{expectation}` was not examined: {problem}"
            findings.append(Finding(Kind.NOT_EXAMINED, severity, consumer, message))
            continue
        total = totals.get(expectation.measure.name, 0)
        expected = total + allowances.get(str(expectation), 0)
        if agree(found, expected):
            continue
        if resets and not accept:
            findings.append(
                Finding(
                    Kind.NOT_EXAMINED,
                    Severity.WARNING,
                    consumer,
                    f"`{expectation}` was not examined: {'; '.join(dict.fromkeys(resets))}. The query gives {found}, "
                    f"and each message once gives {expected}. If the tables are right, accept that (--accept)",
                )
            )
            continue
        if accept:
            allowed[str(expectation)] = found - total
        findings.append(
            Finding(
                Kind.EXPECTATION_FAILED,
                Severity.ERROR,
                consumer,
                f"`{expectation.query}` gives {found}, and {expectation.measure.name} of the committed messages is "
                f"{expected}: "
                + (
                    "rows were removed, or the checkpoint was set forward"
                    if found < expected
                    else "messages count twice, rows were added, or the checkpoint was set back"
                ),
                {"query": expectation.query, "found": str(found), "expected": str(expected)},
            )
        )
    return findings, allowed
