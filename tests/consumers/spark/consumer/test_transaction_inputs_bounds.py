"""Transactions are bounded by messages as well as by bytes, and a service takes new content at a pace."""

from hypothesis import given
from hypothesis import strategies as st

from coranto_consumers.journals.ranges import Range, plan_transaction
from coranto_consumers.spark.consumer.spark_consumer import Pace
from coranto_consumers.spark.consumer.transaction_inputs import SHORTEST_MESSAGE, MessageBound


def whole(length: int, journal: str = "a") -> Range:
    return Range(journal, 0, length, length)


def test_messages_are_planned_by_the_mean_length_of_those_before():
    bound = MessageBound(1_000_000, 100)
    assert bound.max_bytes == 100 * SHORTEST_MESSAGE, "the first transaction rather reads too little"
    bound.see([whole(6_000), whole(4_000, "b")], 20)
    assert bound.max_bytes == 100 * SHORTEST_MESSAGE, "a plan stays the same until it is settled"
    bound.settle()
    assert bound.max_bytes == 100 * 500
    bound.see([whole(50_000)], 0)
    bound.settle()
    assert bound.max_bytes == 100 * 500, "nothing was read"
    bound.see([whole(50_000_000)], 10)
    bound.settle()
    assert bound.max_bytes == 1_000_000, "the bound by bytes stays"


def test_without_a_bound_by_messages_none_is_too_many():
    bound = MessageBound(1_000, None)
    bound.see([whole(1_000)], 1_000_000)
    bound.settle()
    assert bound.max_bytes == 1_000


@given(st.lists(st.lists(st.integers(1, 2_000), min_size=1, max_size=60), min_size=1, max_size=4), st.integers(1, 20))
def test_each_transaction_has_at_most_about_so_many_messages_and_all_are_read(journals, most):
    """`journals` are lengths of messages. A transaction that must not be is planned again, and each plan ends."""
    ends = [[sum(lengths[: n + 1]) for n in range(len(lengths))] for lengths in journals]
    bound, at = MessageBound(1 << 20, most), [0] * len(journals)
    read, tries = 0, 0
    while True:
        heads = {f"{each}": (at[each], ends[each][-1]) for each in range(len(journals))}
        ranges = plan_transaction(heads, bound.max_bytes)
        if not ranges:
            break
        after = list(at)
        for each in ranges:  # A line belongs to the range where it starts.
            mine = ends[int(each.journal)]
            after[int(each.journal)] = next(end for end in mine if end >= each.end)
        found = sum(len([end for end in mine if at[n] < end <= after[n]]) for n, mine in enumerate(ends))
        if not bound.see(ranges, found):
            tries += 1
            assert tries < 20, "it is planned again with half the bytes at most"
            continue
        assert found <= 2 * max(most, len(ranges))
        at, read, tries = after, read + found, 0
        bound.settle()
    assert read == sum(map(len, journals))


def test_a_service_takes_what_was_written_at_most_once_in_so_many_seconds():
    now = 0.0
    pace = Pace(10.0, lambda: now)
    assert pace.is_due
    pace.took()
    assert not pace.is_due
    now = 9.9
    assert not pace.is_due
    now = 10.0
    assert pace.is_due


def test_without_a_pace_it_is_always_due():
    pace = Pace(0.0, lambda: 5.0)
    pace.took()
    assert pace.is_due


def test_a_transaction_with_too_many_messages_is_planned_again_at_once_with_their_length():
    bound = MessageBound(1 << 20, 10)
    assert not bound.see([whole(1_000)], 21)
    assert bound.max_bytes == 10 * 1_000 // 21
