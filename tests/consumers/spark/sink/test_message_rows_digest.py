"""The digest of rows: equal for equal rows in any order and partitioning, and different for others."""

import os
import random

import numpy as np
import pyarrow as pa
import pytest

from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, new_producer_id
from coranto_consumers.spark.sink.message_rows import ObjectTextRows, RowDigest

FRAMING = JsonLines()
TEXTS = [f'{{"n":{n},"t":"{"x" * (n % 7)}"}}' for n in range(200)] + [
    "{}",
    "{}",
    ' {"n": 1}',
    '{"_meta":{"uuid":"old"}}',
]


def digest(*parts: list[str], framing: JsonLines = FRAMING, at: int = 1 << 20) -> str:
    """Return the digest of texts, with a different producer for each part."""
    digests = []
    for texts in parts:
        producer, one = new_producer_id(os.urandom), RowDigest()
        lines = ObjectTextRows(pa.array(texts, pa.string())).lines(framing, producer, at, Flags.CONTINUE_TXN)
        one.add(lines.slice(0, len(texts) // 2), framing, producer)
        one.add(lines.slice(len(texts) // 2), framing, producer)
        digests.append(one)
    return str(RowDigest.of(digests))


@pytest.mark.parametrize("framing", [FRAMING, JsonLines("/id"), JsonLines("/a/b/c")])
def test_equal_rows_have_equal_digests_in_any_order_and_partitioning(framing):
    shuffled = TEXTS.copy()
    random.Random(7).shuffle(shuffled)
    whole = digest(TEXTS, framing=framing)
    assert whole == digest(shuffled, framing=framing, at=1 << 50)
    assert whole == digest(shuffled[:50], shuffled[50:51], shuffled[51:], [], framing=framing)


def test_other_rows_have_other_digests():
    known = {
        digest(TEXTS),
        digest(TEXTS[:-1]),
        digest([*TEXTS, "{}"]),
        digest([]),
        digest(["{}"]),
        digest(["{}", "{}"]),
    }
    changed = TEXTS.copy()
    changed[11] = changed[12]
    known |= {digest(changed), digest([*TEXTS[:-1], '{"_meta":{"uuid":"old"},"n":1}'])}
    assert len(known) == 8


def test_sums_of_many_rows_do_not_overflow():
    with np.errstate(all="raise"):
        assert digest(TEXTS * 50).startswith(f"{len(TEXTS) * 50}-")
