"""A reader group's journal, read by an independent parser: holders of segments, with begin and consumed offsets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .anomalies import Anomaly
from .segments import Segment


@dataclass(slots=True)
class Holding:
    """A reader's time with a segment: from offset `begin` on, with content reported as consumed up to `end`."""

    token: str
    segment: int
    begin: int
    end: int
    ended_by: str = ""


@dataclass(slots=True)
class Ledger:
    """The state after the records of a group's journal."""

    segments: Mapping[int, Segment]
    at: dict[int, int] = field(default_factory=dict)
    """The consumed end of each acquired segment."""
    members: dict[str, str] = field(default_factory=dict)
    held: dict[int, Holding] = field(default_factory=dict)
    holdings: list[Holding] = field(default_factory=list)
    complete: set[int] = field(default_factory=set)
    passed: set[tuple[str, str]] = field(default_factory=set)
    found: list[Anomaly] = field(default_factory=list)

    def take(self, record: Mapping[str, Any]) -> None:
        if "state" in record:
            open_ = _offsets(record["state"]["frontier"]["open"])
            if self.at and open_ != {n: at for n, at in self.at.items() if n not in self.complete}:
                self._bad(f"a snapshot has {open_}, where there was {self.at}")
            self.at.update(open_)
            return
        update = record["update"]
        kind, token = update["kind"], update.get("token", "")
        if kind == "joined":
            self._leave(self.members.get(update["reader"], ""), kind)
            self.members[update["reader"]] = token
        elif kind == "reset":
            for number in list(self.held):
                self._give_up(number, kind)
            self.members.clear()
            self.at = _offsets(update["frontier"]["open"])
            self.complete = {int(number) for number in update["frontier"].get("finished", {})}
            self.complete |= self._before([*self.at, *self.complete])
        elif kind == "acquired":
            for number in update["segments"]:
                self._acquire(number, token)
        elif kind == "completed":
            self._complete(token, update["completion"])
        else:
            self._advance(token, _offsets(update.get("positions", {})))
            if kind == "released":
                for number in _offsets(update["positions"]):
                    self._give_up(number, kind)
            elif kind == "left":
                self._leave(token, kind)
                self.members.pop(update["reader"], None)
            elif kind == "checkpoint-passed":
                self.passed.add((token, update["name"]))

    def _advance(self, token: str, positions: Mapping[int, int]) -> None:
        for number, offset in positions.items():
            holding = self.held.get(number)
            if holding is None or holding.token != token or offset < holding.end:
                self._bad(f"{token} moves segment {number} to {offset}, but it is held as {holding}")
            else:
                holding.end = self.at[number] = offset

    def _acquire(self, number: int, token: str) -> None:
        if number in self.held or number not in self.at:
            self._bad(f"{token} takes segment {number}, which is {self.held.get(number, 'not to be read yet')}")
        holding = Holding(token, number, self.at.get(number, 0), self.at.get(number, 0))
        self.held[number] = holding
        self.holdings.append(holding)

    def _complete(self, token: str, completion: Mapping[str, Any]) -> None:
        number, end = int(completion["number"]), int(completion["end"])
        if end != self.segments[number].sealed_at:
            self._bad(
                f"segment {number} is reported to end at {end}, but was sealed at {self.segments[number].sealed_at}"
            )
        self._advance(token, {number: end})
        self._give_up(number, "completed")
        self.complete.add(number)
        for opened, begin in completion.get("opened", {}).items():
            if not self.segments[int(opened)].predecessors <= self.complete:
                self._bad(f"segment {opened} was opened when only {sorted(self.complete)} were read")
            self.at[int(opened)] = int(begin)

    def _leave(self, token: str, kind: str) -> None:
        for number in [each for each, holding in self.held.items() if holding.token == token]:
            self._give_up(number, kind)

    def _give_up(self, number: int, kind: str) -> None:
        if number in self.held:
            self.held.pop(number).ended_by = kind

    def _before(self, numbers: Iterable[int]) -> set[int]:
        found: set[int] = set()
        stack = list(numbers)
        while stack:
            for number in self.segments[stack.pop()].predecessors - found:
                found.add(number)
                stack.append(number)
        return found

    def _bad(self, what: str) -> None:
        self.found.append(Anomaly("group-state", what))


def _offsets(positions: Mapping[str, Any]) -> dict[int, int]:
    return {int(number): int(each["offset"]) for number, each in positions.items()}


def read_ledger(content: bytes, segments: Iterable[Segment]) -> Ledger:
    """Return the ledger of a group's journal."""
    ledger = Ledger({segment.number: segment for segment in segments})
    for line in content.splitlines():
        ledger.take(json.loads(line))
    return ledger
