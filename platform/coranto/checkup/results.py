"""The results of examinations."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Condition(enum.StrEnum):
    """A judgement of one thing."""

    OK = "ok"
    NOT_EXAMINED = "not looked at"
    """There is nothing to look at: not installed, or not named."""
    WARNING = "warning"
    """It works now, and harms later or in some uses."""
    PROBLEM = "problem"
    """It does not work."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The condition of one thing: the finding, and a remedy unless it is good."""

    subject: str
    condition: Condition
    found: str
    advice: str = ""


def good(subject: str, found: str) -> Examination:
    """Return the result for a thing that works."""
    return Examination(subject, Condition.OK, found)


def absent(subject: str, found: str, advice: str = "") -> Examination:
    """Return the result for a thing that there was no occasion to look at."""
    return Examination(subject, Condition.NOT_EXAMINED, found, advice)


def warning(subject: str, found: str, advice: str) -> Examination:
    """Return the result for a thing that works now."""
    return Examination(subject, Condition.WARNING, found, advice)


def problem(subject: str, found: str, advice: str) -> Examination:
    """Return the result for a thing that does not work."""
    return Examination(subject, Condition.PROBLEM, found, advice)
