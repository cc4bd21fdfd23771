"""Faults planted in the history of one journal, to prove that checkers find them.

Each function changes a sound history. In it, the journal is a list of appends, and other answers are positions in the
list. `plant` returns the changed history and content.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

from coranto.labels import label_set
from coranto.testing.histories import History, Operation, OperationKind, OperationOutcome, numbers_in
from coranto.wire import protocol_pb2 as pb


@dataclass(slots=True)
class Journal:
    """A sound history of one journal: its appends in order, and the number of appends before each other answer."""

    history: History
    appends: list[Operation]
    looks: dict[int, int]
    """The number of appends before a barrier or read, by its number."""
    rng: random.Random
    reversed_reads: set[int]
    """The reads that return their last two appends in the wrong order."""

    def shift(self, index: int, by: int) -> None:
        """Move answers after the append at `index`."""
        self.looks = {number: count + by * (count > index) for number, count in self.looks.items()}

    def acknowledged(self) -> list[int]:
        """Return the indexes of acknowledged appends, except those near the ends."""
        found = [index for index, each in enumerate(self.appends) if each.outcome is OperationOutcome.OK]
        return found[len(found) // 4 : -2]


def lost(journal: Journal) -> None:
    """Lose an acknowledged append: the next one takes its place."""
    index = journal.rng.choice(journal.acknowledged())
    del journal.appends[index]
    journal.shift(index, -1)


def duplicated(journal: Journal) -> None:
    """Apply an acknowledged append twice."""
    index = journal.rng.choice(journal.acknowledged())
    journal.appends.insert(index, journal.appends[index])
    journal.shift(index, 1)


def reordered(journal: Journal) -> None:
    """Place an append before one that had returned before it began."""
    for index in journal.acknowledged():
        first, begun = journal.appends[index], journal.appends[index + 1 :]
        later = [place for place, each in enumerate(begun, index + 1) if each.invoked > first.returned]
        if later and all(count <= index or count > later[0] for count in journal.looks.values()):
            journal.appends[index], journal.appends[later[0]] = journal.appends[later[0]], first
            return
    raise ValueError("all appends are concurrent")


def resurrected(journal: Journal) -> None:
    """Apply an append that was refused."""
    index = journal.rng.choice(journal.acknowledged())
    refused = [each for each in journal.history.operations if each.refusal == pb.REGISTER_MISMATCH]
    journal.appends.insert(index, journal.rng.choice(refused))
    journal.shift(index, 1)


def unchecked(journal: Journal) -> None:
    """Accept an append whose check of registers does not match."""
    index = journal.rng.choice(journal.acknowledged())
    journal.appends[index].check = pb.LabelSelector(include=label_set(owner="stranger"))


def stale(journal: Journal) -> None:
    """Answer a read without an append that was acknowledged before the read began."""
    for number, count in sorted(journal.looks.items(), reverse=True):
        read = next(each for each in journal.history.operations if each.number == number)
        before = [index for index in range(count) if journal.appends[index].returned < read.invoked]
        if read.kind is OperationKind.READ and before:
            journal.looks[number] = before[-1]
            return
    raise ValueError("no read began after an append had returned")


def misread(journal: Journal) -> None:
    """Answer a read with two appends in the wrong order."""
    reads = [each for each in journal.history.operations if each.kind is OperationKind.READ]
    journal.reversed_reads = {max(each.number for each in reads if journal.looks.get(each.number, 0) > 1)}


PLANTS: tuple[Callable[[Journal], None], ...] = (lost, duplicated, reordered, resurrected, unchecked, stale, misread)


def plant(
    fault: Callable[[Journal], None], history: History, name: str, content: bytes, seed: int
) -> tuple[History, bytes]:
    """Return the history of the journal `name` with a fault, and the corresponding final content."""
    mine = History([copy.copy(each) for each in history.operations if each.journal == name])
    by_number = {each.number: each for each in mine.operations}
    appends = [by_number[number] for number, _ in numbers_in(content)]
    ends: dict[int, int] = {0: 0}
    end = 0
    for count, each in enumerate(appends, 1):
        end += len(each.content)
        ends[end] = count
    looks = {
        each.number: ends[each.begin]
        for each in mine.operations
        if each.kind in (OperationKind.BARRIER, OperationKind.READ) and each.outcome is OperationOutcome.OK
    }
    journal = Journal(mine, appends, looks, random.Random(seed), set())
    fault(journal)
    return mine, _rebuild(journal, by_number)


def _rebuild(journal: Journal, by_number: dict[int, Operation]) -> bytes:
    """Recompute the offsets of all answers from the list of appends. Return the content."""
    offsets = [0]
    for each in journal.appends:
        if each.outcome is OperationOutcome.OK:
            each.begin, each.end = offsets[-1], offsets[-1] + len(each.content)
            each.offset = each.begin if each.offset else 0
        offsets.append(offsets[-1] + len(each.content))
    for number, count in journal.looks.items():
        look, seen = by_number[number], journal.appends[:count]
        look.begin = look.end = offsets[count]
        if number in journal.reversed_reads:
            seen[-2:] = reversed(seen[-2:])
        if look.kind is OperationKind.READ:
            look.content = b"".join(each.content for each in seen)
    return b"".join(each.content for each in journal.appends)
