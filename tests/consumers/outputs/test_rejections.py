"""Rejected messages are found by trying parts, for any combination that a store rejects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import RejectedRow
from coranto_consumers.outputs.rejections import TooManyRejected, find_nulls, find_rejected

BAD = RejectedRow("a text is too long")


class Store:
    """A store that rejects bad messages, messages with the key of an earlier one, and messages without their parent."""

    def __init__(self, count, bad=(), keys=None, parents=None):
        self.count, self.bad = count, set(bad)
        self.keys, self.parents = keys or {}, parents or {}
        self.tries = 0

    def __call__(self, omitted, until):
        self.tries += 1
        there = [number for number in range(until) if number not in omitted]
        keys = [self.keys[number] for number in there if number in self.keys]
        lone = any(self.parents[number] not in there for number in there if number in self.parents)
        return BAD if self.bad & set(there) or len(set(keys)) < len(keys) or lone else None


@given(st.data())
def test_exactly_the_bad_messages_are_found(data):
    count = data.draw(st.integers(1, 300))
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=12))
    store = Store(count, bad)
    assert set(find_rejected(count, store, BAD)) == bad
    assert store.tries <= (len(bad) + 1) * 12


def test_of_two_messages_with_one_key_the_later_one_is_found():
    assert set(find_rejected(10, Store(10, keys={3: "a", 7: "a"}), BAD)) == {7}


def test_a_message_that_needs_a_later_one_is_not_reported():
    assert set(find_rejected(10, Store(10, bad={8}, parents={1: 5}), BAD)) == {8}


def test_an_error_caused_by_no_single_message_is_raised():
    with pytest.raises(RejectedRow, match="too long"):
        find_rejected(3, lambda omitted, until: BAD if until == 3 else None, BAD)
    with pytest.raises(RejectedRow):
        find_rejected(0, Store(0), BAD)


def test_the_search_stops_at_the_maximum_number_of_messages():
    with pytest.raises(TooManyRejected) as caught:
        find_rejected(100, Store(100, bad=range(10, 50)), BAD, most=3)
    assert set(caught.value.found) == {10, 11, 12}


@given(st.sets(st.sampled_from("abcdef")))
def test_only_the_necessary_columns_become_null(bad):
    assert find_nulls("abcdef", lambda nulls: None if bad <= set(nulls) else BAD) == bad
    assert find_nulls("abc", lambda nulls: BAD) is None
    assert find_nulls("", lambda nulls: None) is None
