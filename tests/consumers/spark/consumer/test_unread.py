"""Planning of transactions from unread content, also ahead of the current transaction's end."""

from dataclasses import replace

from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.journals.discovery import ContentExtent
from coranto_consumers.journals.losses import LostContent
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.committed.sequencing import LongTransaction
from coranto_consumers.spark.consumer.unread import UnreadContent


def up_to(**heads: int) -> UnreadContent:
    return UnreadContent({name: ContentExtent(0, head) for name, head in heads.items()})


def planned(unread: UnreadContent, **offsets: int) -> dict[str, tuple[int, int]]:
    ranges = unread.plan({name: Source(offset) for name, offset in offsets.items()}, 100)
    return {each.journal: (each.begin, each.end) for each in ranges}


def test_transactions_read_up_to_the_heads():
    unread = up_to(a=150, b=20)
    assert planned(unread, a=0, b=0) == {"a": (0, 80), "b": (0, 20)}
    assert planned(unread, a=80, b=20) == {"a": (80, 150)}
    assert planned(unread, a=150, b=20) == {}


def test_the_next_transaction_is_planned_ahead_as_it_will_be_planned():
    unread = up_to(a=150, b=40)
    begun = {"a": Source(0), "b": Source(0)}
    ranges = unread.plan(begun, 100)
    after = {"a": Source(58), "b": Source(40)}

    planned = unread.plan_next(ranges, after, 100)

    unread.processed(ranges, after)
    assert planned == unread.plan(after, 100) == [Range("a", 58, 150, 150)]


def test_an_unfinished_line_also_ends_its_journal_in_the_plan_ahead():
    unread = up_to(a=10, b=300)
    ranges = unread.plan({"a": Source(0), "b": Source(0)}, 100)
    after = {"a": Source(0), "b": Source(90)}

    planned = unread.plan_next(ranges, after, 100)

    unread.processed(ranges, after)
    assert planned == unread.plan(after, 100) == [Range("b", 90, 190, 300)]


def test_nothing_is_planned_ahead_until_lost_content_is_skipped():
    unread = up_to(a=500)
    ranges = [Range("a", 0, 100, 500)]
    after = {"a": Source(100)}
    unread.holes.record(LostContent("a", 150, 180))

    assert unread.plan_next(ranges, after, 100) == []
    assert planned(unread, a=100) == {"a": (100, 150)}
    assert [lost.end for lost in unread.holes.pop_reached({"a": Source(150)})] == [180]
    assert unread.plan_next(ranges, after, 100) == [Range("a", 100, 200, 500)]


def test_a_long_transaction_is_due_despite_blank_rows_before_its_acknowledgement():
    producer, unread = ProducerId(b"\1abcde"), up_to(a=500)
    before = {"a": Source(398, {producer: ProducerState(1, 0)})}
    met = LongTransaction("a", producer, 400)
    unread.long.add([met])
    assert unread.long.due(before, 100) is None
    ranges = unread.plan(before, 100)
    assert ranges == [Range("a", 398, 400, 400)]

    after = {"a": replace(before["a"], read_through=400)}  # Blank rows count as read.
    unread.processed(ranges, after)

    assert unread.long.due(after, 100) == met
    nearly = {"a": Source(400, {producer: ProducerState(1, 300)})}
    assert unread.long.due(nearly, 100) is None
    assert unread.plan(nearly, 100) == [Range("a", 400, 500, 500)]
