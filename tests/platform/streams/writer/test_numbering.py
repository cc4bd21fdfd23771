"""Numbers and sequences of a writer's units."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.streams.model.events import MAX_SEQUENCE
from coranto.streams.writer.numbering import Numbering


def test_units_are_numbered_consecutively() -> None:
    numbering = Numbering(stable=False)
    assert numbering.last == 0
    assert [numbering.next(None) for _ in range(3)] == [1, 2, 3]
    assert numbering.last == 3


@pytest.mark.parametrize("first", [None, 7])
def test_either_all_units_have_a_sequence_or_none(first: int | None) -> None:
    numbering = Numbering(stable=True)
    numbering.next(first)
    with pytest.raises(InvalidInput, match="either all events and transactions of a writer have a sequence, or none"):
        numbering.next(8 if first is None else None)
    assert numbering.next(first) == 2  # Refused units have no number.


@pytest.mark.parametrize("wrong", [-1, MAX_SEQUENCE + 1])
def test_sequences_have_63_bits_and_need_a_writer_id(wrong: int) -> None:
    with pytest.raises(InvalidInput, match=f"{wrong} is not a sequence"):
        Numbering(stable=True).next(wrong)
    Numbering(stable=True).check(MAX_SEQUENCE)
    with pytest.raises(InvalidInput, match="requires a writer with an id"):
        Numbering(stable=False).next(0)
