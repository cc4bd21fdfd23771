"""A writer's entries in earlier segments, and the errors of its units."""

from __future__ import annotations

from typing import Any

import pytest

from coranto import labels
from coranto.errors import (
    AppendOutcomeUnknown,
    CommitUnknown,
    CorantoError,
    EarlierWriteFailed,
    Outcome,
    PreconditionFailed,
    Unauthenticated,
    WriterClosed,
    WriterExpired,
    WriterFenced,
)
from coranto.streams.model.keys import KEY_SPACE, KeyRange
from coranto.streams.model.lineage import Lineage, trace
from coranto.streams.model.registers import Registers, WriterEntry
from coranto.streams.model.stream import Segment, Stream, segment_journal
from coranto.streams.writer.failures import failure_of

LABEL = "coranto.dev/writer-01"
LOW, HIGH = KeyRange.FULL.split(2)


class History:
    """Segments, and the last sequence of the writer in each sealed one."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.registers: dict[int, tuple[Registers, int] | None] = {}
        self.inspected: list[int] = []

    def add(self, number: int, keys: KeyRange, *predecessors: int) -> None:
        self.segments[number] = Segment(
            number, number, segment_journal("s", number), keys, frozenset(predecessors), sealing=True
        )

    def set_entry(self, number: int, sequence: int | None, **others: str) -> None:
        found = {"coranto.dev/held": "1", **{f"coranto.dev/{name}": value for name, value in others.items()}}
        if sequence is not None:
            found[LABEL] = WriterEntry(1, sequence, 100 + sequence, 0, 0).encode()
        self.registers[number] = Registers.of(labels.label_set(found)), 10

    async def look(self, segment: Segment) -> tuple[Registers, int] | None:
        self.inspected.append(segment.number)
        return self.registers[segment.number]

    async def of(self, number: int, *, has_entry: bool = False) -> Lineage:
        stream = Stream("s", {n: each for n, each in self.segments.items() if self.registers.get(n, 0) is not None})
        return await trace(stream, self.segments[number], LABEL, has_entry, self.look)


async def test_a_segment_without_predecessors_has_an_empty_lineage() -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    assert await history.of(0) == Lineage([], False)


async def test_after_a_split_the_predecessor_determines_the_sequence_of_its_keys() -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    history.add(1, LOW, 0)
    history.set_entry(0, 7)
    lineage = await history.of(1)
    assert (lineage.sequence_of(0), lineage.clock, lineage.forgot) == (7, 107, False)
    assert (await history.of(1, has_entry=True)).floors == []  # Later entries are ahead of the predecessor's.


async def test_after_a_merge_each_predecessor_determines_the_sequence_of_its_keys() -> None:
    history = History()
    history.add(0, LOW)
    history.add(1, HIGH)
    history.add(2, KeyRange.FULL, 0, 1)
    history.set_entry(0, 4)
    history.set_entry(1, 6)
    for has_entry in (False, True):
        lineage = await history.of(2, has_entry=has_entry)
        assert (lineage.sequence_of(0), lineage.sequence_of(KEY_SPACE - 1)) == (4, 6)


async def test_segments_without_writes_of_the_writer_are_skipped() -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    history.add(1, LOW, 0)
    history.add(2, LOW, 1)
    history.set_entry(0, 3)
    history.set_entry(1, None)
    lineage = await history.of(2)
    assert (lineage.sequence_of(0), lineage.forgot, history.inspected) == (3, False, [1, 0])


@pytest.mark.parametrize("others", [{"expired": "5.5"}, {"restored": "a"}])
async def test_a_predecessor_that_forgot_writers_may_have_forgotten_this_one(others: dict[str, str]) -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    history.add(1, LOW, 0)
    history.set_entry(0, None, **others)
    assert (await history.of(1)).forgot
    assert not (await history.of(1, has_entry=True)).forgot
    history.set_entry(0, 3, **others)
    assert not (await history.of(1)).forgot


@pytest.mark.parametrize("gone", [True, False])
async def test_a_deleted_predecessor_or_lost_registers_count_as_forgotten(gone: bool) -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    history.add(1, LOW, 0)
    history.registers[0] = None if gone else (Registers.of(labels.label_set()), 10)
    assert (await history.of(1)).forgot


async def test_an_empty_predecessor_has_forgotten_nothing() -> None:
    history = History()
    history.add(0, KeyRange.FULL)
    history.add(1, LOW, 0)
    history.registers[0] = Registers.of(labels.label_set()), 0
    assert await history.of(1) == Lineage([], False)


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        # The errors of the first unit, of later units, and of units that may have been applied.
        (Unauthenticated("token"), (Unauthenticated, EarlierWriteFailed, CommitUnknown)),
        (AppendOutcomeUnknown("cut"), (EarlierWriteFailed, EarlierWriteFailed, CommitUnknown)),
        (CommitUnknown("gone"), (EarlierWriteFailed, EarlierWriteFailed, CommitUnknown)),
        (WriterFenced("other"), (WriterFenced, WriterFenced, CommitUnknown)),
        (WriterExpired("gone"), (WriterExpired, WriterExpired, WriterExpired)),
        (WriterClosed("closed"), (WriterClosed, WriterClosed, CommitUnknown)),
        (PreconditionFailed("fence", None), (PreconditionFailed, PreconditionFailed, CommitUnknown)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CorantoError) else "",
)
def test_errors_say_for_each_unit_whether_it_may_be_durable(error: CorantoError, kinds: tuple[Any, ...]) -> None:
    first = failure_of(error, doubtful=False, first=True)
    behind = failure_of(error, doubtful=False, first=False)
    doubtful = failure_of(error, doubtful=True, first=True)
    assert tuple(type(each) for each in (first, behind, doubtful)) == kinds
    assert (first.outcome, behind.outcome, doubtful.outcome) == (
        Outcome.NOT_APPLIED,
        Outcome.NOT_APPLIED,
        Outcome.UNKNOWN,
    )
    assert behind is error or behind.__cause__ is error
