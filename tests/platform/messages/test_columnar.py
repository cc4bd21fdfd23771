"""Columnar sequencing by example, and reading UUIDs from many lines compared with reading them line by line."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage
from coranto.messages import columnar
from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar import ALWAYS, DROPPED, ClockReset, CommittedWindows, RowSegment
from coranto.messages.columnar_lines import LineColumns, read_json_lines
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.special_lines import read_block
from coranto.messages.uuids import Flags, ProducerId, format_uuid

A = ProducerId(b"\x01AAAAA")
B = ProducerId(b"\x01BBBBB")
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN
LINES = JsonLines()


def scan(*rows: tuple[ProducerId, int, int], begin: int = 0) -> columnar.RangeScan:
    """Return a scan of messages of ten bytes each."""
    return columnar.scan(
        np.array([columnar.producer_number(producer) for producer, _, _ in rows], dtype=np.uint64),
        np.array([clock for _, clock, _ in rows], dtype=np.uint64),
        np.array([flags for _, _, flags in rows], dtype=np.uint16),
        np.arange(len(rows), dtype=np.int64) * 10 + begin,
    )


def test_segments_are_increasing_runs_and_single_acknowledgements() -> None:
    segments, rows = scan(
        (B, 1, CONTINUE),
        (A, 5, CONTINUE),
        (A, 7, CONTINUE),
        (A, 5, CONTINUE),
        (A, 6, CONTINUE),
        (B, 2, CONTINUE),
        (A, 0, CONTINUE),
        (A, 8, CONTINUE),
        (A, 9, ACK),
        (A, 9, ACK),
        (A, 2, OUTSIDE),
        (A, 3, 77),
    )
    assert segments == [
        RowSegment(B, CONTINUE, 1, 2, 0),
        RowSegment(A, CONTINUE, 5, 8, 10),
        RowSegment(A, ACK, 9, 9, 80),
        RowSegment(A, ACK, 9, 9, 90),
        RowSegment(A, OUTSIDE, 2, 3, 100),
    ]
    assert rows.tolist() == [0, 1, 1, DROPPED, DROPPED, 0, ALWAYS, 1, DROPPED, DROPPED, 4, 4]


def test_an_empty_range_has_no_segments() -> None:
    segments, rows = scan()
    assert segments == []
    assert len(rows) == 0
    resolution = columnar.resolve([segments], {}, replayed=())
    assert resolution.windows == (CommittedWindows((), ()),)
    assert len(columnar.committed_mask(rows, resolution.windows[0], np.array([], dtype=np.uint64))) == 0


def test_an_acknowledgement_in_a_later_range_commits_an_earlier_one() -> None:
    first, second = scan((A, 5, CONTINUE), (A, 6, CONTINUE), (A, 9, CONTINUE)), scan((A, 6, ACK), begin=30)
    resolution = columnar.resolve([first.segments, second.segments], {}, replayed=())
    assert resolution.windows == (CommittedWindows((4,), (6,)), CommittedWindows((0,), (0,)))
    clocks = np.array([5, 6, 9], dtype=np.uint64)
    assert columnar.committed_mask(first.row_segment, resolution.windows[0], clocks).tolist() == [True, True, False]
    assert resolution.states == {A: ProducerState(6)}


def test_replay_is_requested_only_when_an_acknowledgement_needs_it() -> None:
    entry = {A: ProducerState(4, 70), B: ProducerState(1, 50)}
    more = scan((A, 9, CONTINUE), begin=100).segments
    resolution = columnar.resolve([more], entry, replayed=())
    assert resolution.replay == {}
    assert resolution.states == entry

    rolled_back = scan((A, 4, ACK), begin=110).segments
    resolution = columnar.resolve([more, rolled_back], entry, replayed=())
    assert resolution.replay == {}
    assert resolution.states[A] == ProducerState(4)

    committed = scan((A, 10, ACK), begin=110).segments
    assert columnar.resolve([more, committed], entry, replayed=()).replay == {A: entry[A]}
    before = scan((A, 5, CONTINUE), (A, 6, CONTINUE), begin=70).segments
    resolution = columnar.resolve([before, more, committed], entry, replayed={A})
    assert resolution.replay == {}
    assert resolution.windows[:2] == (CommittedWindows((4,), (10,)), CommittedWindows((6,), (10,)))
    assert resolution.states == {A: ProducerState(10), B: entry[B]}


def test_replayed_content_that_was_removed_leaves_nothing_pending() -> None:
    resolution = columnar.resolve([], {A: ProducerState(4, 70)}, replayed={A})
    assert resolution.states == {A: ProducerState(4)}


def test_rows_before_the_checkpoint_count_only_for_replayed_producers() -> None:
    producers = np.array([columnar.producer_number(p) for p in (A, A, B, A, B, A)], dtype=np.uint64)
    clocks = np.array([1, 2, 1, 0, 2, 3], dtype=np.uint64)
    offsets = np.array([0, 10, 20, 30, 40, 50], dtype=np.int64)
    replay = {A: ProducerState(1, 10), B: ProducerState(0)}
    mask = columnar.replay_mask(producers, clocks, offsets, replay, 40)
    assert mask.tolist() == [False, True, False, False, True, True]
    assert columnar.replay_mask(producers, clocks, offsets, {}, 0).all()


def test_an_outdated_producer_is_reported() -> None:
    segments = scan((A, 9, OUTSIDE), (A, 5, ACK), (A, 6, OUTSIDE)).segments
    resolution = columnar.resolve([segments], {}, replayed=())
    assert resolution.resets == (ClockReset(A, 10, 5, 9),)
    assert resolution.windows == (CommittedWindows((8, 0, 5), (9, 0, 6)),)


def test_states_contain_the_offset_through_which_producers_were_seen() -> None:
    def seen(*rows: tuple[ProducerId, int, int], replayed: tuple[ProducerId, ...] = ()) -> int:
        entry = {A: ProducerState(4, 70, 80)}
        resolution = columnar.resolve([scan(*rows).segments], entry, replayed=replayed, through=200)
        return resolution.states[A].seen_through

    assert seen() == seen((B, 9, CONTINUE)) == 80
    assert seen((A, 9, CONTINUE)) == seen((A, 3, CONTINUE)) == seen((A, 9, OUTSIDE)) == seen((A, 9, ACK)) == 200
    assert seen((A, 6, CONTINUE), replayed=(A,)) == 200


def test_clocks_use_all_64_bits() -> None:
    top = 2**64 - 1
    segments, rows = scan((A, 2**63 - 1, CONTINUE), (A, 2**63, CONTINUE), (A, top - 1, CONTINUE), (A, top, ACK))
    (windows,) = columnar.resolve([segments], {}, replayed=()).windows
    clocks = np.array([2**63 - 1, 2**63, top - 1, top], dtype=np.uint64)
    assert columnar.committed_mask(rows, windows, clocks).tolist() == [True, True, True, False]


def test_a_run_that_begins_with_duplicates_counts_from_its_first_new_message() -> None:
    entry = {A: ProducerState(6), B: ProducerState(6)}
    rows = [(A, 5, OUTSIDE), (A, 6, OUTSIDE), (A, 7, OUTSIDE), (B, 6, CONTINUE), (B, 8, CONTINUE), (B, 9, ACK)]
    segments, row_segment = scan(*rows)
    resolution = columnar.resolve([segments], entry, replayed=())
    clocks = np.array([clock for _, clock, _ in rows], dtype=np.uint64)
    committed = columnar.committed_mask(row_segment, resolution.windows[0], clocks)
    assert committed.tolist() == [False, False, True, False, True, False]
    assert resolution.states == {A: ProducerState(7), B: ProducerState(9)}
    again = columnar.resolve([scan(*rows[:3]).segments], {A: ProducerState(7)}, replayed=())
    assert again.windows == (CommittedWindows((0,), (0,)),)


def test_workers_return_small_results() -> None:
    count = 100_000
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    producers = np.where(numbers % 2 == 0, columnar.producer_number(A), columnar.producer_number(B)).astype(np.uint64)
    segments = columnar.scan(
        producers, numbers, np.full(count, CONTINUE, dtype=np.uint16), numbers.astype(np.int64)
    ).segments
    assert len(segments) == 2
    assert len(pickle.dumps(segments)) < 500


# Lines.

uuid_texts = st.builds(
    format_uuid, st.binary(min_size=6, max_size=6).map(ProducerId), st.integers(0, 2**64 - 1), st.integers(0, 1023)
) | st.just("00000000-0000-0000-0000-000000000000")


usual_lines = (uuid_texts | uuid_texts.map(str.upper)).map(lambda uuid: LINES.marshal({"a": 1}, uuid))
lines_by_others = uuid_texts.map(lambda uuid: f'{{"b":"ü","_meta":{{"uuid":"{uuid}"}}}}\n'.encode())
any_lines = usual_lines | usual_lines | lines_by_others | st.sampled_from([b"{}\n", b'{"a":1}\n', b'{"_meta":{}}\n'])


def parts_of(lines: LineColumns, begin: int) -> list[tuple[int, bytes, int, int]]:
    producers, clocks, flags = (column.tolist() for column in lines.uuids)
    return [
        (offset, producer.to_bytes(6, "big"), clock, flag)
        for offset, producer, clock, flag in zip(lines.offsets(begin).tolist(), producers, clocks, flags, strict=True)
    ]


@given(st.lists(any_lines, max_size=10), st.integers(0, 2**40), st.integers(0, 30))
def test_content_is_read_as_line_by_line(lines: list[bytes], begin: int, tail: int) -> None:
    whole = b"".join(lines)
    content = whole + LINES.uuid_prefix[:tail]
    read = read_json_lines(LINES, "j", content, begin)
    one_by_one = list(iter_messages(LINES, "j", [content], begin))
    assert parts_of(read, begin) == [(e.begin, e.producer, e.clock, e.flags) for e in one_by_one]
    assert [content[s:e] for s, e in zip(read.starts, read.ends, strict=True)] == [e.content for e in one_by_one]
    assert read.consumed == len(whole)


@given(
    st.lists(
        any_lines
        | st.sampled_from([b"oops\n", b"\n", b" \r\n", b"\xef\xbb\xbf\n", b"\xef\xbb\xbf[]\n", b"[]\n"])
        | usual_lines.map(lambda line: line[5:])
    )
)
def test_corrupt_content_has_the_same_offset_as_line_by_line(lines: list[bytes]) -> None:
    content = b"".join(lines)

    def offset_of_failure(framing: JsonLines, columns: bool) -> int | None:
        try:
            if columns:
                read_block(framing, "j", content, 1000)
            else:
                list(iter_messages(framing, "j", [content], 1000))
        except CorruptMessage as error:
            return error.offset if error.journal == "j" else -1
        return None

    for framing in (LINES, JsonLines(require_uuid=True), JsonLines("/uuid")):
        assert offset_of_failure(framing, True) == offset_of_failure(framing, False)


@pytest.mark.parametrize(
    "text",
    [
        "83fc2f81-cc5f-41e9-8002-010203040506",
        "83fc2f81-cc5f-11e9-c002-010203040506",
        "83fc2f81-cc5f-11e9-8002-01020304050g",
        "83fc2f81-cc5f-11e9-8002_010203040506",
        "83fc2f8-1cc5f-11e9-8002-010203040506",
    ],
)
def test_a_malformed_uuid_at_the_usual_place_is_reported(text: str) -> None:
    good = LINES.marshal({}, format_uuid(A, 160, 1))
    bad = good.replace(format_uuid(A, 160, 1).encode(), text.encode())
    with pytest.raises(CorruptMessage, match=text) as caught:
        read_json_lines(LINES, "j", good + bad + good, 50)
    assert caught.value.offset == 50 + len(good)


def test_blocks_of_more_lines_than_are_parsed_together() -> None:
    count = 40_000
    content = b"".join(LINES.marshal({"n": n}, format_uuid(A, 160 * (n + 1), n % 3)) for n in range(count))
    lines = read_json_lines(LINES, "j", content, 0)
    assert lines.uuids.clocks.tolist() == [160 * (n + 1) for n in range(count)]
    assert lines.uuids.flags.tolist() == [n % 3 for n in range(count)]
    assert set(lines.uuids.producers.tolist()) == {columnar.producer_number(A)}
