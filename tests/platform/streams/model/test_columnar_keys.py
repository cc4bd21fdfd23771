"""Columns of routing keys hash to the same places as single keys."""

import random

import pyarrow as pa

from coranto.streams.model.columnar_keys import key_hashes, text_hashes
from coranto.streams.model.keys import key_hash


def test_columns_of_keys_hash_as_single_keys() -> None:
    chosen = random.Random(7)
    keys = ["".join(chosen.choices("abcXYZ019-_/ ", k=length)) for length in range(200)]
    keys += ["", "ä", "a" * 7 + "ä", "🙂 smile", "日本", "x", "a" * 127, "a" * 128, "k\0"]
    keys += [f"customer-{chosen.getrandbits(chosen.randrange(1, 60))}" for _ in range(500)]
    column = pa.array(keys)

    assert key_hashes(column).tolist() == [key_hash(key) for key in keys]
    assert key_hashes(column.slice(100, 80)).tolist() == [key_hash(key) for key in keys[100:180]]
    assert key_hashes(column.slice(0, 0)).tolist() == []


def test_texts_that_are_not_unicode_hash_as_single_keys() -> None:
    chosen = random.Random(11)
    characters = ["a", "7", "/", "é", "日", "🙂", "\ud83d", "\ude42", "\udcff", "\0"]
    keys = ["".join(chosen.choices(characters, k=chosen.randrange(20))) for _ in range(2000)]
    assert text_hashes(keys).tolist() == [key_hash(key) for key in keys]
    assert text_hashes([]).tolist() == []
