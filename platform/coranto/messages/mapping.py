"""Mapping keys to journals, so that messages of one key stay together and in order.

`modulo` and `rendezvous` map a key to the same journal as every other Gazette client. Rendezvous moves the fewest keys
when journals are added or removed. Modulo is cheaper with very many journals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from coranto.errors import InvalidInput, Unavailable

M = TypeVar("M")

Mapping = Callable[[bytes], str]
"""A function from a message's key to its journal."""

MappingName = Literal["rendezvous", "modulo", "random"]
"""The names of the mappings."""


def by_key(key: Callable[[M], bytes], mapping: Mapping) -> Callable[[M], str]:
    """Return a function from a message to its journal by its key: a destination for a publisher."""
    return lambda message: mapping(key(message))


def fnv1a32(data: bytes) -> int:
    """Return the 32-bit FNV-1a hash of `data`."""
    value = 0x811C9DC5
    for byte in data:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def modulo(key: bytes, journals: Sequence[str]) -> str:
    """Return the journal at index `hash(key) % len(journals)`. The order of `journals` matters."""
    return _require(journals)[fnv1a32(key) % len(journals)]


def rendezvous(key: bytes, journals: Sequence[str]) -> str:
    """Return the journal whose hashed name XOR the hashed key is largest; the first one if several are equal."""
    return RendezvousMapping(journals)(key)


class ModuloMapping:
    """`modulo` over a fixed sequence of journals."""

    def __init__(self, journals: Sequence[str]) -> None:
        self._journals = tuple(_require(journals))

    def __call__(self, key: bytes) -> str:
        return self._journals[fnv1a32(key) % len(self._journals)]


class RendezvousMapping:
    """`rendezvous` over a fixed sequence of journals, whose names are hashed once."""

    def __init__(self, journals: Sequence[str]) -> None:
        self._hashed = tuple((fnv1a32(name.encode()), name) for name in _require(journals))

    def __call__(self, key: bytes) -> str:
        hashed_key = fnv1a32(key)
        best, chosen = -1, ""
        for hashed_name, name in self._hashed:
            weight = hashed_key ^ hashed_name
            if weight > best:
                best, chosen = weight, name
        return chosen


class RandomMapping:
    """Any of the journals with equal probability, drawn from `rng`. The key is ignored."""

    def __init__(self, journals: Sequence[str], rng: random.Random) -> None:
        self._journals = tuple(_require(journals))
        self._rng = rng

    def __call__(self, key: bytes) -> str:
        return self._rng.choice(self._journals)


class LiveMapping:
    """A mapping over a changing set of journals.

    `journals` is called for each key and returns the current journals. While they do not change, it should return the
    same sequence object. When they change, `make` creates a new mapping over them, such as `RendezvousMapping`. Raises
    Unavailable while there are no journals.
    """

    def __init__(
        self,
        journals: Callable[[], Sequence[str]],
        make: Callable[[Sequence[str]], Mapping] = RendezvousMapping,
    ) -> None:
        self._journals = journals
        self._make = make
        self._made: tuple[Sequence[str], Mapping] | None = None

    def __call__(self, key: bytes) -> str:
        journals = self._journals()
        if not journals:
            raise Unavailable("no journal to map to now: try again when one exists")
        if self._made is None or (self._made[0] is not journals and tuple(self._made[0]) != tuple(journals)):
            self._made = (journals, self._make(journals))
        return self._made[1](key)


def _require(journals: Sequence[str]) -> Sequence[str]:
    if not journals:
        raise InvalidInput("no journal to map to: list the journals again, or create one")
    return journals
