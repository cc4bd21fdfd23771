"""The results of examinations."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Condition(enum.StrEnum):
    """The condition of an examined thing."""

    OK = "ok"
    NOT_EXAMINED = "not looked at"
    """There is nothing to examine: not installed, or not given."""
    WARNING = "warning"
    """It works now, but may fail later or in some uses."""
    PROBLEM = "problem"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The result for one thing: its condition, the finding, and a remedy unless it is OK."""

    subject: str
    condition: Condition
    found: str
    advice: str = ""


def good(subject: str, found: str) -> Examination:
    """Return the result for a thing that works."""
    return Examination(subject, Condition.OK, found)


def absent(subject: str, found: str, advice: str = "") -> Examination:
    """Return the result for a thing that was not examined."""
    return Examination(subject, Condition.NOT_EXAMINED, found, advice)


def warning(subject: str, found: str, advice: str) -> Examination:
    """Return the result for a thing that works now but may fail."""
    return Examination(subject, Condition.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Examination:
    """Return the result for a thing that does not work."""
    return Examination(subject, Condition.PROBLEM, found, advice)
