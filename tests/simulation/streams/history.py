"""The writers' requests and the answers to them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from enum import Enum

from coranto.errors import Outcome, PositionUnknown, WriterExpired, WriterFenced


class UnitOutcome(Enum):
    OK = "ok"
    NOT_APPLIED = "not applied"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, certainty: Outcome) -> UnitOutcome:
        return cls.NOT_APPLIED if certainty is Outcome.NOT_APPLIED else cls.UNKNOWN


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a process to write a unit. Times are virtual seconds; `begin` and `end` are offsets, or -1."""

    process: str
    invoked: float
    returned: float = math.inf
    outcome: UnitOutcome = UnitOutcome.UNKNOWN
    segment: int = -1
    begin: int = -1
    end: int = -1
    deduplicated: bool = False
    expected_offset: int | None = None
    fence: int | None = None
    """The index of its fence among the fences raised for the key. `last_fence` is the index of the latest one then."""
    last_fence: int | None = None
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For a transaction on several keys: the reported offsets of its events, by segment."""
    visible: bool = True
    """True if the acknowledged events were reported as readable."""
    error: str = ""

    @property
    def was_durable(self) -> bool:
        """True if the writer reported that the unit was already durable, but did not find it."""
        return self.error.startswith(PositionUnknown.__name__)

    @property
    def has_ended(self) -> bool:
        """True if the writer reported that it cannot continue."""
        return self.error.startswith((WriterExpired.__name__, WriterFenced.__name__))


@dataclass(slots=True, eq=False)
class Unit:
    """A plain event or a transaction of a program. One writer's units are written in the order of their numbers.

    For a transaction on several keys, `keys` are the keys of its events, and `key` is the first one.
    """

    number: int
    writer: str
    key: str
    events: int
    padding: int
    transaction: bool
    attempts: list[Attempt] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    given_up: float = math.inf
    """The time when its program continued with later ones, without this one if it is not stored."""

    def __str__(self) -> str:
        kind = f"transaction of {self.events}" if self.transaction else "event"
        kind = f"{kind} on {', '.join(self.keys)}" if self.keys else kind
        tries = "; ".join(
            f"{each.process} {each.invoked:.4f}-{each.returned:.4f} {each.outcome.value}"
            f" {each.segment}:[{each.begin}, {each.end}){' again' if each.deduplicated else ''} {each.error}"
            for each in self.attempts
        )
        return f"unit {self.number} ({kind}) of {self.writer}, key {self.key}: {tries or 'never tried'}"

    def give_up(self, now: float) -> None:
        self.given_up = min(self.given_up, now)

    @property
    def outcome(self) -> UnitOutcome:
        """The best known outcome of all attempts."""
        found = {each.outcome for each in self.attempts}
        for outcome in (UnitOutcome.OK, UnitOutcome.UNKNOWN):
            if outcome in found:
                return outcome
        return UnitOutcome.NOT_APPLIED

    @property
    def invoked(self) -> float:
        return min((each.invoked for each in self.attempts), default=math.inf)

    @property
    def acknowledged(self) -> float:
        """The time when it was first known to be durable and readable."""
        known = (each.returned for each in self.attempts if each.outcome is UnitOutcome.OK and each.visible)
        return min(known, default=math.inf)

    def key_of(self, index: int) -> str:
        return self.keys[index] if self.keys else self.key

    def event(self, index: int) -> dict[str, object]:
        """Return the event of this place in the unit, as JSON."""
        return {"unit": self.number, "index": index, "events": self.events, "padding": "x" * self.padding}

    def content(self, index: int) -> bytes:
        """Return the same event as bytes."""
        return json.dumps(self.event(index), separators=(",", ":")).encode()


@dataclass(slots=True)
class History:
    units: dict[int, Unit] = field(default_factory=dict)

    def add(
        self, writer: str, key: str, *, events: int, padding: int, transaction: bool, keys: tuple[str, ...] = ()
    ) -> Unit:
        unit = Unit(len(self.units) + 1, writer, key, events, padding, transaction, keys=keys)
        self.units[unit.number] = unit
        return unit
