"""Offset vectors in the SQL store are found by their digests, and bounded."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from coranto.errors import CorruptData
from coranto.offsets import JournalOffset, id_of
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.vectors import VECTORS, OffsetVector, VectorLog


def vector(number: int) -> OffsetVector:
    ends = {f"shop/orders/part-{part:05d}": part * number for part in range(300)}
    return OffsetVector(ends, {"shop/orders/part-00000": number})


def test_a_vector_is_found_by_its_digest(store_url: str) -> None:
    log = VectorLog(SqlStore(store_url))
    for consumer in ("one", "two", "one"):
        log.save(consumer, vector(1))
    assert log.find(vector(1).version) == vector(1)
    assert log.find(vector(2).version) is None
    assert vector(1).version != OffsetVector(vector(1).ends).version, "the begin of reading counts, too"


def test_a_vector_keeps_the_ids_of_journals(store_url: str) -> None:
    log = VectorLog(SqlStore(store_url))
    kept = OffsetVector({"shop/a": JournalOffset(7, "c1-2")}, {"shop/a": JournalOffset(3, "c1-2")})
    log.save("one", kept)
    found = log.find(kept.version)
    assert found == kept
    assert (id_of(found.ends["shop/a"]), id_of(found.begins["shop/a"])) == ("c1-2", "c1-2")
    assert kept.version == OffsetVector({"shop/a": 7}, {"shop/a": 3}).version, "as versions of earlier vectors"


def test_the_oldest_vectors_of_a_consumer_are_evicted(store_url: str) -> None:
    store, now = SqlStore(store_url), iter(range(100))
    log = VectorLog(store, max_bytes=6_000, wall=lambda: next(now))
    log.save("other", vector(1_000))
    for number in range(20):
        log.save("one", vector(number))
        if number > 2:
            log.save("one", vector(2))  # It is read repeatedly, and so stays.
    kept = {number for number in range(20) if log.find(vector(number).version)}
    assert 2 <= len(kept) < 10
    assert kept == {2, *range(20 - len(kept) + 1, 20)}, "the newest"
    assert log.find(vector(1_000).version), "of another consumer"
    small = VectorLog(store, max_bytes=1, wall=lambda: 1_000.0)
    small.save("one", vector(50))
    assert small.find(vector(50).version) == vector(50), "the newest stays at any size"
    assert not small.find(vector(2).version)


@pytest.mark.parametrize("content", [b"no zlib", b""])
def test_a_changed_vector_is_refused(store_url: str, content: bytes) -> None:
    store = SqlStore(store_url)
    log = VectorLog(store)
    log.save("one", vector(1))
    with store.engine.begin() as connection:
        connection.execute(update(VECTORS).values(vector=content))
    with pytest.raises(CorruptData, match="cannot be read"):
        log.find(vector(1).version)
    other = VectorLog(store)
    other.save("one", vector(2))
    with store.engine.begin() as connection:
        is_other = VECTORS.c.version == vector(2).version
        connection.execute(update(VECTORS).values(version="0" * 32).where(is_other))
    with pytest.raises(CorruptData, match="were changed"):
        other.find("0" * 32)
