"""Outlines of ranges give the same results as all of their segments, and stay small."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.messages import columnar
from coranto.messages.checkpoints import ProducerState
from coranto.messages.outlines import Limit, limited_mask, outline, resolve_outlines
from coranto.messages.uuids import Flags, ProducerId

A, B, C = (ProducerId(bytes([1, 0, 0, 0, 0, number])) for number in (7, 3, 200))
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN
producers = st.sampled_from([A, B, C])
rows = st.lists(st.tuples(producers, st.integers(0, 12), st.sampled_from([1, 1, 1, 2, 2, 0, 77])), max_size=40)
states = st.builds(ProducerState, st.integers(0, 9), st.sampled_from([-1, -1, 5]))


def scan(rows, begin=0):
    producers, clocks, flags = zip(*rows, strict=True) if rows else ((), (), ())
    return columnar.scan(
        np.array([columnar.producer_number(producer) for producer in producers], dtype=np.uint64),
        np.array(clocks, dtype=np.uint64),
        np.array(flags, dtype=np.uint16),
        np.arange(begin, begin + len(rows), dtype=np.int64) * 10,
    )


@given(
    rows=rows,
    cuts=st.lists(st.integers(0, 40), max_size=6),
    entry=st.dictionaries(producers, states, max_size=3),
    replays=st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_outlines_of_any_ranges_decide_like_all_segments(rows, cuts, entry, replays):
    marks = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    parts = [rows[begin:end] for begin, end in itertools.pairwise(marks)]
    scans = [scan(part, begin) for part, begin in zip(parts, marks, strict=False)]
    replayed = set(entry) if replays else set()

    wanted = columnar.resolve([each.segments for each in scans], entry, replayed=replayed, through=1000)
    found = resolve_outlines([outline(each.segments) for each in scans], entry, replayed=replayed, through=1000)

    for part, each, windows, limits in zip(parts, scans, wanted.windows, found.limits, strict=True):
        clocks = np.array([clock for _, clock, _ in part], dtype=np.uint64)
        expected = columnar.committed_mask(each.row_segment, windows, clocks)
        assert limited_mask(each.row_segment, limits, clocks).tolist() == expected.tolist()
        assert list(limits) == sorted(limits)
    assert found.states == wanted.states
    assert found.replay == wanted.replay
    assert list(found.resets) == sorted(wanted.resets, key=lambda reset: reset.offset)


def test_many_committed_transactions_leave_a_border_and_no_limits():
    segments = scan([(A, clock, flags) for clock in range(1, 5000) for flags in (CONTINUE, ACK)]).segments

    found = outline(segments)

    assert [number for number, _ in found.border] == [0, 1, len(segments) - 1]
    assert found.limits == ()


def test_messages_rolled_back_within_a_range_have_a_limit():
    # A transaction, a rolled-back one, and one whose acknowledgement excludes its last message.
    first = [(A, 1, CONTINUE), (A, 1, ACK), (A, 2, CONTINUE), (A, 1, ACK)]
    second = [(A, 3, CONTINUE), (A, 4, CONTINUE), (A, 3, ACK), (A, 9, CONTINUE)]

    found = outline(scan(first + second).segments)

    assert found.limits == (Limit(2, 0, 0), Limit(4, 1, 3))
    assert [number for number, _ in found.border] == [0, 1, 5, 6]
