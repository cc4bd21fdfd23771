"""Digests of batches in registers: equal and different contents, and records of earlier versions."""

import pytest

from coranto.errors import BatchChanged, Fenced, InvalidInput
from coranto.labels import label_set
from coranto.streams.model.batch_content import (
    content_register,
    last_batches,
    old_batch,
    require_same_content,
    validate_batch_writer,
)


def test_another_digest_of_the_same_batch_is_an_error():
    registers = label_set(content_register("query-1", 3, "7-ab"))
    require_same_content(registers, "query-1", 3, "7-ab")
    with pytest.raises(BatchChanged, match="batch 3 of query-1 is written already, with 7 messages that are"):
        require_same_content(registers, "query-1", 3, "9-cd", 7)


@pytest.mark.parametrize(
    ("writer", "batch", "digest"), [("query-1", 4, "9-cd"), ("query-2", 3, "9-cd"), ("query-1", 3, "")]
)
def test_unknown_digests_count_as_equal(writer, batch, digest):
    require_same_content(label_set(content_register("query-1", 3, "7-ab")), writer, batch, digest)
    assert content_register("query-1", 3, "") == {}


def test_registers_contain_the_last_batch_of_each_writer():
    registers = {"coranto.dev/batch/q": "12.400.done", "coranto.dev/batch/r": "0.ab", "coranto.dev/batch/s": "nonsense"}
    assert last_batches(label_set({**registers, **content_register("q", 12, "7-ab"), "other": "1.2"})) == {
        "q": 12,
        "r": 0,
    }


@pytest.mark.parametrize("planned_after", [None, 1, 2])
def test_a_batch_overtaken_after_it_was_planned_is_fenced(planned_after):
    error = old_batch("query-1", 2, 4, planned_after)
    assert isinstance(error, Fenced)
    assert "batch 2 of query-1 is old: batch 4 is written already. Another process" in str(error)


def test_a_batch_planned_after_later_ones_reports_the_age_of_the_checkpoint():
    error = old_batch("query-1", 2, 4, 3)
    assert isinstance(error, BatchChanged)
    assert error.batches == 3
    assert "checkpoint is 3 batches older than" in str(error)
    assert "batches 2 to 4, as it plans them now" in str(error)
    assert "in batch 5 or later" in str(error)


def test_names_of_writers_are_validated() -> None:
    assert validate_batch_writer("orders-1") == "orders-1"
    for name in ("", "a/b", "x" * 41, "a b"):
        with pytest.raises(InvalidInput, match="cannot name a writer of batches"):
            validate_batch_writer(name)
