"""Offsets with the ids of their journals, and offset vectors as JSON.

An offset vector maps journals to offsets, such as a file for `--as-of`, Spark's option `startingOffsets` or
`heads` of an Airflow event. In JSON an offset is a number, or an object that also has the id of its journal:

    {"shop/orders": {"offset": 1024, "journal_id": "5d3c7a-1f"}, "shop/refunds": 96}

Coranto writes the object if it knows the id, and accepts both forms. An offset above 0 with an id is refused if the
journal's id shows that its content below the offset differs (`coranto.journal_ids`): the journal was deleted and
created again under the same name, or its head fell. An offset without an id matches any journal with that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from coranto.errors import InvalidInput


class JournalOffset(int):
    """An offset with the id of its journal (empty: unknown). It compares, adds and prints as an int."""

    journal_id: str

    def __new__(cls, offset: int, journal_id: str = "") -> Self:
        made = super().__new__(cls, offset)
        made.journal_id = journal_id
        return made


def id_of(offset: int) -> str:
    """Return the id that a journal must have to be read from or up to an offset. Empty: any id."""
    return offset.journal_id if isinstance(offset, JournalOffset) and offset > 0 else ""


def offset_to_json(offset: int) -> int | dict[str, int | str]:
    """Return an offset as JSON: a number, or an object if it has an id."""
    journal_id = offset.journal_id if isinstance(offset, JournalOffset) else ""
    return {"offset": int(offset), "journal_id": journal_id} if journal_id else int(offset)


def offset_of_json(raw: Any) -> int:
    """Parse the JSON of `offset_to_json`. Raises ValueError for anything else."""
    offset, journal_id = raw, ""
    if isinstance(raw, Mapping):
        if unknown := sorted(raw.keys() - {"offset", "journal_id"}):
            raise ValueError(f"it has {unknown[0]!r}, and may have offset and journal_id only")
        offset, journal_id = raw.get("offset"), raw.get("journal_id", "")
    if not isinstance(journal_id, str):
        raise ValueError(f"its journal_id {journal_id!r} is not a text")
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise ValueError("give a whole number of 0 or more, or an object with offset and journal_id")
    return JournalOffset(offset, journal_id) if journal_id else int(offset)


def vector_to_json(offsets: Mapping[str, int]) -> dict[str, int | dict[str, int | str]]:
    """Return an offset vector as a JSON object, in the order of the journals' names."""
    return {journal: offset_to_json(offset) for journal, offset in sorted(offsets.items())}


def vector_of_json(raw: Any, field: str, symbol: int | None = None) -> dict[str, int]:
    """Parse an offset vector from a JSON object. An offset may also be `symbol`, such as -1.

    Raises InvalidInput, which names `field`, for anything else.
    """
    if not isinstance(raw, Mapping):
        raise InvalidInput("is not a JSON object of journals and offsets, such as {'a/journal': 0}", field=field)
    found: dict[str, int] = {}
    for journal, offset in raw.items():
        if symbol is not None and type(offset) is int and offset == symbol:
            found[str(journal)] = symbol
            continue
        try:
            found[str(journal)] = offset_of_json(offset)
        except ValueError as error:
            raise InvalidInput(f"{offset!r} is not an offset for {journal}: {error}", field=field) from error
    return found
