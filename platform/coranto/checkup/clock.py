"""Judge the difference between two clocks."""

from __future__ import annotations

from typing import Final

from coranto.checkup.results import Examination, good, problem, warning

WARN_SECONDS: Final = 2.0
REFUSE_SECONDS: Final = 300.0
"""Above this difference, stores refuse signed requests, and tokens are not valid yet or no longer."""


def clock_result(whose: str, difference: float, uncertainty: float) -> Examination:
    """Judge the difference to another clock, in seconds (positive: the other one is ahead)."""
    subject = f"clock of {whose}"
    least = max(0.0, abs(difference) - uncertainty)
    if least < WARN_SECONDS:
        return good(subject, f"agrees within {abs(difference) + uncertainty:.1f} s")
    found = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} this machine's"
    advice = (
        "set the time of both machines with NTP (`timedatectl` shows it): tokens, signed URLs and UUIDs depend on it"
    )
    return (problem if least > REFUSE_SECONDS else warning)(subject, found, advice)
