"""Possessive parts of regular expressions that Python before 3.11.5 matches wrongly.

That version's `re` does not restore its position when the last attempt of a possessive group fails. Only some parts of
a pattern record a position: all but single characters. So all versions match a group alike if no part can fail after
such a part has advanced the position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from re import _constants as codes  # type: ignore[attr-defined]  # no public module has a pattern's parts
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

Part = tuple[Any, Any]
"""An operation of a parsed pattern, and its arguments."""

SINGLE = (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY)
REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)


def version_dependent_parts(pattern: re.Pattern[str] | re.Pattern[bytes]) -> list[str]:
    """Return a description of each possessive or atomic group that Python versions match differently."""
    return [str(part) for part in _groups(parser.parse(pattern.pattern, pattern.flags)) if not _is_portable(part)]


def _groups(parts: Sequence[Part]) -> Iterator[Part]:
    for part in parts:
        if part[0] in (codes.POSSESSIVE_REPEAT, codes.ATOMIC_GROUP):
            yield part
        for inner in _inner(part):
            yield from _groups(inner)


def _inner(part: Part) -> list[Sequence[Part]]:
    operation, arguments = part
    if operation in REPEATS:
        return [arguments[2]]
    if operation is codes.SUBPATTERN:
        return [arguments[3]]
    if operation is codes.BRANCH:
        return list(arguments[1])
    if operation in (codes.ASSERT, codes.ASSERT_NOT):
        return [arguments[1]]
    if operation is codes.ATOMIC_GROUP:
        return [arguments]
    return []


def _is_portable(part: Part) -> bool:
    (body,) = _inner(part)
    if len(body) == 1 and body[0][0] in SINGLE:
        return True
    return all(_restores(choice) for choice in _choices(body))


def _choices(body: Sequence[Part]) -> list[Sequence[Part]]:
    if len(body) and body[0][0] is codes.BRANCH:
        return [[*choice, *body[1:]] for choice in body[0][1][1]]
    return [body]


def _restores(choice: Sequence[Part]) -> bool:
    """Return True if no part can fail after one that has recorded an advanced position."""
    recorded = False
    for number, part in enumerate(choice):
        if part[0] in SINGLE:
            if recorded:
                return False
            continue
        if part[0] not in (*REPEATS, codes.BRANCH) or (number and _may_fail(part)):
            return False
        if not number and not all(_restores(inner) for body in _inner(part) for inner in _choices(body)):
            return False
        recorded = True
    return True


def _may_fail(part: Part) -> bool:
    operation, arguments = part
    if operation in REPEATS:
        return bool(arguments[0])
    if operation is codes.BRANCH:
        return all(any(map(_may_fail, choice)) for choice in arguments[1])
    return True
