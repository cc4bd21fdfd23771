"""Keys of requests are kept for their time and round-trip through records."""

from __future__ import annotations

import json

import pytest

from coranto.errors import CorruptData
from coranto.ingest.webhook.keys import DeduplicationWindow, decode, digest_of, encode, key_of, pack


def packed(*names: str) -> bytes:
    return pack((key_of("i", name), digest_of(name.encode())) for name in names)


def test_keys_are_kept_for_their_time() -> None:
    window = DeduplicationWindow(10.0)
    window.add(100.0, packed("a", "b"))
    window.add(105.0, packed("c"))
    window.expire(110.0)
    assert len(window) == 3
    assert window.get(key_of("i", "a")) == digest_of(b"a")
    window.expire(110.5)
    assert (len(window), window.get(key_of("i", "a"))) == (1, None)
    assert window.get(key_of("i", "c")) == digest_of(b"c")


def test_a_repeated_key_is_kept_from_its_last_use() -> None:
    window = DeduplicationWindow(10.0)
    window.add(100.0, packed("a"))
    window.add(108.0, packed("a"))
    window.expire(115.0)
    assert len(window) == 1
    assert [at for at, _ in window.batches()] == [108.0]


def test_a_window_round_trips_through_a_record() -> None:
    window, copy = DeduplicationWindow(10.0), DeduplicationWindow(10.0)
    window.add(100.0, packed("a", "b"))
    window.add(101.0, b"")
    window.add(102.5, packed("c"))
    for at, keys in decode(json.loads(json.dumps(encode(window.batches())))):
        copy.add(at, keys)
    assert list(copy.batches()) == list(window.batches())
    assert len(copy) == 3
    copy.clear()
    assert (len(copy), list(copy.batches())) == (0, [])


@pytest.mark.parametrize("record", [None, [["x", ""]], [[1.0, "!"]], [[1.0]], [[1.0, "AAAA"]]])
def test_damaged_records_are_corrupt(record: object) -> None:
    with pytest.raises(CorruptData, match="keys of an ingest's progress"):
        decode(record)


def test_a_key_belongs_to_its_ingest() -> None:
    assert key_of("a", "b") != key_of("b", "b")
    assert key_of("a", "\udcff")
