"""Limits of transactions in messages and bytes, and the interval of a service."""

from hypothesis import given
from hypothesis import strategies as st

from coranto_consumers.journals.ranges import Range, plan_transaction
from coranto_consumers.spark.consumer.spark_consumer import Throttle
from coranto_consumers.spark.consumer.transaction_inputs import SHORTEST_MESSAGE, MessageBound


def whole(length: int, journal: str = "a") -> Range:
    return Range(journal, 0, length, length)


def test_messages_are_planned_by_the_mean_length_of_earlier_ones():
    bound = MessageBound(1_000_000, 100)
    assert bound.max_bytes == 100 * SHORTEST_MESSAGE, "the first transaction reads too little rather than too much"
    bound.observe([whole(6_000), whole(4_000, "b")], 20)
    assert bound.max_bytes == 100 * SHORTEST_MESSAGE, "a plan stays the same until its outcome is recorded"
    bound.apply()
    assert bound.max_bytes == 100 * 500
    bound.observe([whole(50_000)], 0)
    bound.apply()
    assert bound.max_bytes == 100 * 500, "nothing was read"
    bound.observe([whole(50_000_000)], 10)
    bound.apply()
    assert bound.max_bytes == 1_000_000, "the limit of bytes remains"


def test_without_a_message_limit_any_number_is_allowed():
    bound = MessageBound(1_000, None)
    bound.observe([whole(1_000)], 1_000_000)
    bound.apply()
    assert bound.max_bytes == 1_000


@given(st.lists(st.lists(st.integers(1, 2_000), min_size=1, max_size=60), min_size=1, max_size=4), st.integers(1, 20))
def test_transactions_stay_near_the_message_limit_and_read_everything(journals, most):
    """`journals` are lengths of messages. A transaction with too many is planned again, and planning ends."""
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
        if not bound.observe(ranges, found):
            tries += 1
            assert tries < 20, "it is planned again with half the bytes at most"
            continue
        assert found <= 2 * max(most, len(ranges))
        at, read, tries = after, read + found, 0
        bound.apply()
    assert read == sum(map(len, journals))


def test_a_service_takes_new_content_at_most_once_per_interval():
    now = 0.0
    throttle = Throttle(10.0, lambda: now)
    assert throttle.is_due
    throttle.restart()
    assert not throttle.is_due
    now = 9.9
    assert not throttle.is_due
    now = 10.0
    assert throttle.is_due


def test_without_an_interval_new_content_is_always_due():
    throttle = Throttle(0.0, lambda: 5.0)
    throttle.restart()
    assert throttle.is_due


def test_a_transaction_with_too_many_messages_is_replanned_with_their_length():
    bound = MessageBound(1 << 20, 10)
    assert not bound.observe([whole(1_000)], 21)
    assert bound.max_bytes == 10 * 1_000 // 21
