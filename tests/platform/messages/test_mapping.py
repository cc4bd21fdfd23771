"""Mappings agree with the fixtures of other Gazette clients."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from coranto.errors import InvalidInput, Unavailable
from coranto.messages import mapping


def partitions(count: int) -> list[str]:
    return [f"a/topic/part-{index:03}" for index in range(count)]


def test_modulo_fixtures() -> None:
    fixtures = {"It always": 119, "seems": 54, "until": 97, "temperate - Shakespeare": 228}
    journals = partitions(443)
    by_modulo = mapping.ModuloMapping(journals)
    for key, index in fixtures.items():
        assert mapping.modulo(key.encode(), journals) == journals[index]
        assert by_modulo(key.encode()) == journals[index]


@pytest.mark.parametrize("count", [400, 500])
def test_rendezvous_fixtures_stay_when_partitions_are_added(count: int) -> None:
    fixtures = {"It always": 21, "seems": 179, "until": 13, "temperate - Shakespeare": 75}
    journals = partitions(count)
    for key, index in fixtures.items():
        assert mapping.rendezvous(key.encode(), journals) == journals[index]


def test_fnv_vectors() -> None:
    assert mapping.fnv1a32(b"") == 0x811C9DC5
    assert mapping.fnv1a32(b"a") == 0xE40C292C
    assert mapping.fnv1a32(b"foobar") == 0xBF9CF968


def test_rendezvous_moves_only_keys_of_a_removed_journal() -> None:
    journals = partitions(8)
    before, after = mapping.RendezvousMapping(journals), mapping.RendezvousMapping(journals[:-1])
    keys = [str(number).encode() for number in range(500)]
    moved = [key for key in keys if before(key) != after(key)]
    assert moved
    assert all(before(key) == journals[-1] for key in moved)


def test_random_mapping_reaches_every_journal() -> None:
    anywhere = mapping.RandomMapping(partitions(5), random.Random(7))
    assert {anywhere(b"same key") for _ in range(200)} == set(partitions(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: mapping.ModuloMapping([]),
        lambda: mapping.RendezvousMapping([]),
        lambda: mapping.RandomMapping([], random.Random(1)),
        lambda: mapping.modulo(b"key", []),
    ],
)
def test_mapping_to_no_journals_is_a_clear_error(make: object) -> None:
    assert callable(make)
    with pytest.raises(InvalidInput, match="no journal to map to"):
        make()


def test_a_live_mapping_follows_its_journals() -> None:
    journals: list[str] = []
    made: list[tuple[str, ...]] = []

    def make(names: Sequence[str]) -> mapping.Mapping:
        made.append(tuple(names))
        return mapping.RendezvousMapping(names)

    live = mapping.LiveMapping(lambda: tuple(journals), make)
    with pytest.raises(Unavailable, match="try again when one exists"):
        live(b"key")
    journals += partitions(3)
    assert {live(str(n).encode()) for n in range(100)} == set(journals)
    journals += ["another"]
    assert live(b"key") == mapping.rendezvous(b"key", journals)
    assert made == [tuple(partitions(3)), (*partitions(3), "another")]


def test_the_key_of_a_message_determines_its_journal() -> None:
    destination = mapping.by_key(lambda message: str(message["id"]).encode(), mapping.ModuloMapping(partitions(5)))
    assert destination({"id": "seems"}) == mapping.modulo(b"seems", partitions(5))
