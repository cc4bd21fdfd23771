"""Offset vectors as JSON: numbers, and objects that also have the id of the journal."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto.offsets import JournalOffset, id_of, offset_of_json, offset_to_json, vector_of_json, vector_to_json


def test_a_vector_round_trips_through_json() -> None:
    vector = {"shop/b": 96, "shop/a": JournalOffset(1024, "c1-1f"), "shop/c": JournalOffset(0, "c1-2")}
    shown = vector_to_json(vector)
    assert list(shown.items()) == [
        ("shop/a", {"offset": 1024, "journal_id": "c1-1f"}),
        ("shop/b", 96),
        ("shop/c", {"offset": 0, "journal_id": "c1-2"}),
    ]
    found = vector_of_json(json.loads(json.dumps(shown)), "file")
    assert found == vector
    assert vector_to_json(found) == shown


def test_an_offset_is_a_number_with_an_id() -> None:
    at = JournalOffset(7, "c1-1f")
    assert (at, f"{at}", json.dumps(at), min(at, 9), hash(at)) == (7, "7", "7", 7, hash(7))
    for again in (pickle.loads(pickle.dumps(at)), copy.deepcopy(at), max(at, 3)):
        assert (again, id_of(again)) == (7, "c1-1f")
    assert (id_of(7), id_of(at + 1), id_of(JournalOffset(0, "c1-1f"))) == ("", "", ""), (
        "offset 0 is valid in any journal"
    )
    assert offset_to_json(JournalOffset(7)) == 7


@pytest.mark.parametrize(
    "raw", [-1, True, 1.5, "7", None, [7], {}, {"journal_id": "a"}, {"offset": -1}, {"offset": 1, "journal_id": 5}]
)
def test_invalid_offsets_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"whole number|is not a text"):
        offset_of_json(raw)
    with pytest.raises(InvalidInput, match="is not an offset for shop/a"):
        vector_of_json({"shop/a": raw}, "file")


def test_invalid_vectors_are_refused_and_symbolic_offsets_are_numbers() -> None:
    for raw in ([], 7, "x", None):
        with pytest.raises(InvalidInput, match="file: is not a JSON object"):
            vector_of_json(raw, "file")
    with pytest.raises(InvalidInput, match="it has 'created'"):
        vector_of_json({"shop/a": {"offset": 1, "created": 5}}, "file")
    assert vector_of_json({"shop/a": -2}, "option", -2) == {"shop/a": -2}
    with pytest.raises(InvalidInput):
        vector_of_json({"shop/a": -2}, "option", -1)
