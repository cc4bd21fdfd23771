"""The clock of an audit, corrected to the brokers' clock so that records from all machines have comparable times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coranto.audit.findings import Finding, Kind, Severity, Subject
from coranto.effects import Clock

CLOCK_SECONDS: Final = 10.0
"""The tolerated difference between the clocks of the store, the brokers and the audit."""


@dataclass(frozen=True, slots=True)
class CorrectedClock:
    """The clock `own`, which is `ahead` seconds ahead of the brokers' clock, corrected by that difference."""

    own: Clock
    ahead: float

    def now(self) -> float:
        return self.own.now() - self.ahead

    def monotonic(self) -> float:
        return self.own.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.own.sleep(seconds)


def seconds_ahead(asked: float, answered: float, broker_time: float) -> float:
    """Return the seconds that a clock is ahead of a broker's (negative: behind); 0 within the tolerance.

    `asked` and `answered` are the times of the request and the answer by that clock. A `broker_time` of 0 is unknown.
    """
    if not broker_time or asked - CLOCK_SECONDS <= broker_time <= answered + CLOCK_SECONDS:
        return 0.0
    return answered - broker_time


def difference(selector: str, ahead: float) -> list[Finding]:
    """Return the finding about a clock that differs from the brokers' clock; none for 0."""
    if not ahead:
        return []
    word = "ahead of" if ahead > 0 else "behind"
    return [
        Finding(
            Kind.CLOCK_DIFFERS,
            Severity.WARNING,
            Subject.selector(selector),
            f"the clock of this machine is {abs(ahead):.0f} s {word} the brokers' clock. This audit used the brokers' "
            "time. Correct the clock that is wrong",
            {"ahead_seconds": ahead},
        )
    ]
