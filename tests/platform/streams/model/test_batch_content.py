"""Digests of batches in registers: the same content, other content, and records of earlier versions."""

import pytest

from coranto.errors import BatchChanged
from coranto.labels import label_set
from coranto.streams.model.batch_content import content_register, require_same_content


def test_another_digest_of_the_same_batch_is_an_error():
    registers = label_set(content_register("query-1", 3, "7-ab"))
    require_same_content(registers, "query-1", 3, "7-ab")
    with pytest.raises(BatchChanged, match="batch 3 of query-1 is written already, with 7 messages that are"):
        require_same_content(registers, "query-1", 3, "9-cd", 7)


@pytest.mark.parametrize(
    ("writer", "batch", "digest"), [("query-1", 4, "9-cd"), ("query-2", 3, "9-cd"), ("query-1", 3, "")]
)
def test_what_is_unknown_counts_as_the_same(writer, batch, digest):
    require_same_content(label_set(content_register("query-1", 3, "7-ab")), writer, batch, digest)
    assert content_register("query-1", 3, "") == {}
