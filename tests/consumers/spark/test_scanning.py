"""Summaries of ranges."""

import pytest

from coranto.errors import CorruptData
from coranto_consumers.spark.ranges import Range
from coranto_consumers.spark.scanning import RangeSummary
from coranto_consumers.spark.sequencing import read_end


def test_ranges_that_do_not_add_up_are_noticed():
    first, second = Range("j/j", 10, 20, 40), Range("j/j", 20, 40, 40, aligned=False)
    summaries = {first: RangeSummary(0, 2, 10, 24), second: RangeSummary(1, 1, 26, 40)}

    assert read_end("j/j", 10, {first: summaries[first]}) == 24
    with pytest.raises(CorruptData, match="behind 24 was found at 26"):
        read_end("j/j", 10, summaries)


@pytest.mark.parametrize("content", [b"", b"[]", b"[1,2,3,4,[[1]]]", b'{"a":1}'])
def test_a_broken_summary_is_refused(content):
    with pytest.raises(CorruptData, match="summary"):
        RangeSummary.loads(content)
