"""Records of batches: their comparison, and messages about differences."""

import pytest

from coranto.errors import CorruptData
from coranto_consumers.spark.consumer.batch_content import BatchContent, difference, ends_of


def positions(**offsets: int) -> dict:
    return {
        journal: {"offset": offset, "created": 7, "producers": {"a": [1, offset]}}
        for journal, offset in offsets.items()
    }


def test_a_record_of_a_batch_equals_the_batch():
    batch = BatchContent((None,), (positions(a=3),), ("file:/a of 1",))
    again = BatchContent.from_text(batch.to_text())
    assert again.is_same(batch)
    assert batch.is_same(again)
    assert not again.is_same(BatchContent((None,), (positions(a=4),), ("file:/a of 1",)))
    assert not again.is_same(BatchContent((None,), (positions(a=3),), ()))


@pytest.mark.parametrize("files", [(), tuple(f"file:/{n} of {n}" for n in range(5000))])
def test_a_long_record_is_bounded_and_can_still_be_compared(files):
    many = {f"journal-{n}": {"0": n} for n in range(5000)}
    batch = BatchContent(({},), (many,), files)
    assert len(batch.to_text()) < 40_000
    assert BatchContent.from_text(batch.to_text()).is_same(batch)


def test_a_difference_lists_lost_and_repeated_content():
    committed = BatchContent((positions(a=0, b=0),), (positions(a=100, b=50),))
    more = BatchContent((positions(a=0, b=0),), (positions(a=160, b=40, c=5),))
    found = difference(more, committed)
    assert found.lost == ("a [100, 160)", "c [0, 5)")
    assert found.twice == ("b [40, 50)",)
    assert str(found) == "skipping it loses a [100, 160), c [0, 5); the batches after it repeat b [40, 50)"


def test_a_difference_from_an_older_batch_lists_only_certain_losses():
    committed = BatchContent((positions(a=50),), (positions(a=100),), ("f",))
    found = difference(BatchContent((positions(a=0),), (positions(a=60),)), committed, 3)
    assert not found, "the next batches may have the missing content"
    found = difference(BatchContent((positions(a=0),), (positions(a=130),), ("f", "g")), committed, 3)
    assert found.lost == ("a [100, 130)", "g (unless a batch before the last committed one had it)")
    assert found.twice == ()


def test_the_ends_of_a_batch_omit_files():
    assert ends_of(BatchContent((None,) * 3, (positions(a=3, b=4), 7, {"logOffset": 3}))) == "a 3, b 4, source 1 7"
    assert ends_of(BatchContent((), (), (), "digest")) == ""


def test_offsets_of_other_sources_are_compared_by_their_numbers():
    kafka = BatchContent(({"t": {"0": 3}}, 7), ({"t": {"0": 9, "1": 2}}, 12))
    committed = BatchContent(({"t": {"0": 3}}, 7), ({"t": {"0": 5, "1": 2}}, 8))
    assert difference(kafka, committed).lost == ("t/0 [5, 9)", "source 1 [8, 12)")


def test_lost_files_are_listed_by_name():
    begin, end = ({"logOffset": 0},), ({"logOffset": 1},)
    found = difference(BatchContent(begin, end, ("b", "c")), BatchContent(begin, end, ("a", "b")))
    assert (found.lost, found.twice) == (("c",), ("a",))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": "a", "begin": 3}'])
def test_invalid_records_are_refused(text):
    with pytest.raises(CorruptData, match="is not the record of a batch"):
        BatchContent.from_text(text)
