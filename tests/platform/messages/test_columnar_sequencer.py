"""The columnar sequencer compared with the message sequencer, over random histories of several journals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.errors import CorruptMessage, InvalidInput, Unavailable
from coranto.messages.batches import LINES, line_batch, parse_lines
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.columnar_sequencer import ColumnarSequencer, sequence_ranges
from coranto.messages.framing import Envelope, JsonLines, JsonObject, iter_messages
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import ReplayRange, Sequencer, read_committed
from coranto.messages.uuids import Flags, ProducerId, clock_from_ns, clock_to_ns, format_uuid
from tests.platform.messages.envelope_batches import envelope_batch

A, B, C = (ProducerId(bytes([1, 0, 0, 0, 0, number])) for number in (7, 3, 200))
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN
JSON = JsonLines()

Row = Envelope[JsonObject]


def history(rows: Iterable[tuple[ProducerId, int, int]], journal: str = "j") -> list[Row]:
    """Return messages of different lengths, some with gaps between them."""
    made, begin = [], 0
    for number, (producer, clock, flags) in enumerate(rows):
        end = begin + 10 + number % 3
        made.append(Envelope(journal, begin, end, producer, clock, flags, b"%d" % number, JSON))
        begin = end + number % 2
    return made


class Journals:
    """Histories, and the replayed ranges."""

    def __init__(self, *histories: list[Row]) -> None:
        self.rows = {rows[0].journal: rows for rows in histories if rows}
        self.replays: list[ReplayRange] = []

    def rows_of(self, wanted: ReplayRange) -> list[Row]:
        return [row for row in self.rows[wanted.journal] if wanted.begin <= row.begin and row.end <= wanted.end]

    def replay(self, wanted: ReplayRange) -> Iterator[pa.RecordBatch]:
        self.replays.append(wanted)
        rows = self.rows_of(wanted)
        for at in range(0, len(rows), 3):
            yield envelope_batch(rows[at : at + 3])


def offsets(batch: pa.RecordBatch) -> list[tuple[str, int]]:
    return list(zip(batch.column("journal").to_pylist(), batch.column("offset").to_pylist(), strict=True))


def batches(rows: list[Row], cuts: list[int]) -> Iterator[list[Row]]:
    marks = sorted([0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)])
    return (rows[begin:end] for begin, end in itertools.pairwise(marks))


producers = st.sampled_from([A, B, C])
anything = st.lists(
    st.tuples(
        producers,
        st.integers(0, 9) | st.sampled_from([2**63, 2**64 - 1]),
        st.sampled_from([1, 1, 1, 1, 2, 2, 0, 77]),
    ),
    max_size=30,
)
dense = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(1, 8), st.sampled_from([1, 1, 1, 1, 2, 0])), max_size=24
)


@st.composite
def transactions(draw: st.DrawFn) -> list[tuple[ProducerId, int, int]]:
    """Draw rows of well-behaved producers, with repeated appends and rolled-back transactions."""
    clock = 100
    last = {A: 100, B: 100, C: 100}
    rows: list[tuple[ProducerId, int, int]] = [(producer, 100, OUTSIDE) for producer in last]
    block: dict[ProducerId, list[tuple[ProducerId, int, int]]] = {A: [], B: [], C: []}
    for producer, action in draw(st.lists(st.tuples(producers, st.sampled_from("ccccrkb")), max_size=30)):
        clock += 1
        if action == "c":
            block[producer].append((producer, clock, CONTINUE))
            rows.append(block[producer][-1])
        elif action == "r":
            rows += block[producer]
        elif action == "k":
            rows.append((producer, clock, ACK))
            last[producer], block[producer] = clock, []
        else:
            rows.append((producer, last[producer], ACK))
            block[producer] = []
    return rows


histories = anything | dense | transactions()


@settings(max_examples=300)
@given(
    histories,
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.sampled_from([0, 2, 5, 100]),
    st.lists(st.booleans(), max_size=4),
)
def test_the_columnar_sequencer_agrees_with_the_message_sequencer(
    rows: list[tuple[ProducerId, int, int]], sizes: list[int], ring_rows: int, restores: list[bool]
) -> None:
    """Both commit the same rows in order and have equal states after each batch, with or without restores."""
    journals = Journals(history(rows))
    by_message: Sequencer[JsonObject] = Sequencer()
    by_column = ColumnarSequencer(journals.replay, ring_rows=ring_rows)
    left = journals.rows.get("j", [])
    for size, restore in zip(itertools.cycle(sizes), itertools.cycle([*restores, False])):
        if not left:
            break
        part, left = left[:size], left[size:]
        expected = [(row.journal, row.begin) for row in read_committed(part, by_message, journals.rows_of)]
        assert offsets(by_column.feed(envelope_batch(part))) == expected
        sources = by_column.checkpoint()
        assert sources == by_message.checkpoint()
        assert by_column.held_rows <= ring_rows
        if restore:
            stored = Checkpoint(sources).to_bytes()
            by_column = ColumnarSequencer(journals.replay, Checkpoint.from_bytes(stored).sources, ring_rows=ring_rows)


@given(histories, histories, st.lists(st.integers(0, 100), max_size=6), st.integers(0, 12))
def test_batches_may_hold_several_journals(
    first: list[tuple[ProducerId, int, int]],
    second: list[tuple[ProducerId, int, int]],
    cuts: list[int],
    ring_rows: int,
) -> None:
    journals = Journals(history(first, "a"), history(second, "b"))
    rows = [row for pair in itertools.zip_longest(*journals.rows.values()) for row in pair if row is not None]
    by_message: Sequencer[JsonObject] = Sequencer(ring_size=3)
    by_column = ColumnarSequencer(journals.replay, ring_rows=ring_rows)
    for part in batches(rows, cuts):
        expected = [(row.journal, row.begin) for row in read_committed(part, by_message, journals.rows_of)]
        found = offsets(by_column.feed(envelope_batch(part)))
        for journal in "ab":
            assert [one for one in found if one[0] == journal] == [one for one in expected if one[0] == journal]
    sources = by_column.checkpoint()
    assert sources == by_message.checkpoint()


@given(histories, st.integers(1, 20), st.integers(0, 12))
def test_message_and_columnar_sequencers_continue_each_others_checkpoints(
    rows: list[tuple[ProducerId, int, int]], size: int, ring_rows: int
) -> None:
    journals = Journals(history(rows))
    expected: Sequencer[JsonObject] = Sequencer()
    sources: dict[str, Source] = {}
    parts = list(batches(journals.rows.get("j", []), list(range(0, 60, size))))
    for number, part in enumerate(parts):
        committed = [row.begin for row in read_committed(part, expected, journals.rows_of)]
        if number % 2:
            by_message: Sequencer[JsonObject] = Sequencer(sources)
            found = [row.begin for row in read_committed(part, by_message, journals.rows_of)]
            sources = by_message.checkpoint()
        else:
            by_column = ColumnarSequencer(journals.replay, sources, ring_rows=ring_rows)
            found = [offset for _, offset in offsets(by_column.feed(envelope_batch(part)))]
            sources = by_column.checkpoint()
        assert found == committed


@given(
    histories,
    st.lists(st.integers(0, 60), max_size=3),
    st.lists(st.integers(0, 60), max_size=5),
    st.booleans(),
)
def test_ranges_may_be_sequenced_concurrently(
    rows: list[tuple[ProducerId, int, int]], stops: list[int], cuts: list[int], in_threads: bool
) -> None:
    """Consumer transactions of several ranges commit the same messages as a message reader."""
    journals = Journals(history(rows))
    by_message: Sequencer[JsonObject] = Sequencer()
    source = Source()
    with ThreadPoolExecutor(2) as threads:
        for part in batches(journals.rows.get("j", []), stops):
            expected = [row.begin for row in read_committed(part, by_message, journals.rows_of)]
            ranges = [envelope_batch(piece) for piece in batches(part, cuts)]
            run = threads.map if in_threads else map
            committed, source = sequence_ranges(ranges, source, journals.replay, run)
            found = [batch.column("offset").to_pylist() for batch in committed]
            assert all(numbers == sorted(numbers) for numbers in found)
            assert sorted(offset for numbers in found for offset in numbers) == sorted(expected)
            reference = by_message.checkpoint().get("j", Source())
            assert source.read_through == reference.read_through
            for producer, state in reference.producers.items():
                # `begin` may be an earlier offset of the same segment: see `columnar.Resolution`.
                assert source.producers[producer].last_ack == state.last_ack
                assert source.producers[producer].begin <= state.begin


def feed(sequencer: ColumnarSequencer, rows: list[Row]) -> list[int]:
    return [offset for _, offset in offsets(sequencer.feed(envelope_batch(rows)))]


def test_rows_are_replayed_only_if_they_are_no_longer_held() -> None:
    rows = history([(A, 1, CONTINUE), (B, 2, CONTINUE), (A, 3, CONTINUE), (B, 4, CONTINUE), (A, 5, ACK), (B, 6, ACK)])
    journals = Journals(rows)
    sequencer = ColumnarSequencer(journals.replay, ring_rows=2)
    assert feed(sequencer, rows[:1]) == []
    assert feed(sequencer, rows[1:2]) == []
    assert sequencer.held_rows == 2
    assert feed(sequencer, rows[2:4]) == []  # These displace the first rows of both.
    assert sequencer.held_rows == 0
    assert journals.replays == []
    assert feed(sequencer, rows[4:5]) == [rows[0].begin, rows[2].begin]
    assert feed(sequencer, rows[5:]) == [rows[1].begin, rows[3].begin]
    assert journals.replays == [
        ReplayRange("j", rows[0].begin, rows[3].end),
        ReplayRange("j", rows[1].begin, rows[4].end),
    ]


def test_a_partly_decided_batch_keeps_its_other_rows() -> None:
    rows = history([(A, 1, CONTINUE), (B, 2, CONTINUE), (A, 3, ACK), (C, 4, OUTSIDE), (B, 5, ACK)])
    journals = Journals(rows)
    sequencer = ColumnarSequencer(journals.replay)
    found = [feed(sequencer, part) for part in (rows[:2], rows[2:3], rows[3:4], rows[4:])]
    assert found == [[], [rows[0].begin], [rows[3].begin], [rows[1].begin]]
    assert journals.replays == []


def test_pending_messages_of_a_checkpoint_are_replayed_with_later_ones() -> None:
    rows = history([(A, 1, CONTINUE), (A, 2, CONTINUE), (B, 3, OUTSIDE), (A, 4, ACK)])
    journals = Journals(rows)
    first = ColumnarSequencer(journals.replay)
    feed(first, rows[:1])
    sequencer = ColumnarSequencer(journals.replay, first.checkpoint())
    assert feed(sequencer, rows[1:2]) == []
    assert sequencer.held_rows == 0
    assert feed(sequencer, rows[2:3]) == [rows[2].begin]
    assert feed(sequencer, rows[3:]) == [rows[0].begin, rows[1].begin]


def test_pending_messages_begin_after_duplicates() -> None:
    rows = history([(A, 5, OUTSIDE), (A, 3, CONTINUE), (A, 6, CONTINUE), (A, 7, CONTINUE)])
    sequencer = ColumnarSequencer(Journals(rows).replay)
    assert feed(sequencer, rows) == [rows[0].begin]
    assert sequencer.checkpoint() == {"j": Source(rows[-1].end, {A: ProducerState(5, rows[2].begin)})}
    assert sequencer.held_rows == 2


def test_other_columns_are_kept() -> None:
    rows = history([(A, 1, CONTINUE), (A, 2, CONTINUE), (A, 3, ACK)])
    batch = envelope_batch(rows).append_column("extra", pa.array(["x", None, "z"]))
    sequencer = ColumnarSequencer(Journals(rows).replay)
    assert sequencer.feed(batch.slice(0, 1)).num_rows == 0
    committed = sequencer.feed(batch.slice(1))
    assert committed.column("extra").to_pylist() == ["x", None]
    assert committed.column("content").to_pylist() == [b"0", b"1"]
    assert committed.schema == batch.schema


def test_journals_may_be_dictionary_encoded() -> None:
    first, second = history([(A, 1, CONTINUE), (A, 3, ACK)], "a"), history([(A, 1, CONTINUE), (A, 3, ACK)], "b")
    kind = pa.dictionary(pa.int32(), pa.string())

    def encoded(rows: list[Row]) -> pa.RecordBatch:
        batch = envelope_batch(rows)
        return batch.set_column(0, "journal", batch.column("journal").cast(kind))

    sequencer = ColumnarSequencer(Journals(first, second).replay)
    assert sequencer.feed(encoded([first[0], second[0]])).num_rows == 0
    committed = sequencer.feed(encoded([second[1], first[1]]))
    assert offsets(committed) == [("b", 0), ("a", 0)]


def test_a_failed_replay_changes_no_state() -> None:
    rows = history([(A, 1, CONTINUE), (A, 2, ACK)])

    def broken(wanted: ReplayRange) -> Iterator[pa.RecordBatch]:
        raise Unavailable(f"{wanted.journal} cannot be read")

    sequencer = ColumnarSequencer(broken, ring_rows=0)
    feed(sequencer, rows[:1])
    before = sequencer.checkpoint()
    with pytest.raises(Unavailable):
        feed(sequencer, rows[1:])
    assert sequencer.checkpoint() == before
    assert sequencer.read_through("j") == rows[0].end


def test_invalid_calls_are_refused() -> None:
    rows = history([(A, 1, CONTINUE), (A, 2, CONTINUE), (A, 3, ACK)])
    sequencer = ColumnarSequencer(lambda _: [envelope_batch(rows[2:])], ring_rows=0)
    feed(sequencer, rows[:2])
    with pytest.raises(InvalidInput, match=r"at \[22, 22\] are not part of the replay of j at \[0, 21\)"):
        feed(sequencer, rows[2:])
    with pytest.raises(
        InvalidInput, match="rows of j begin at offset 0, and offsets must increase; continue from offset 21"
    ):
        feed(sequencer, rows[:1])
    with pytest.raises(InvalidInput, match="must increase"):
        feed(ColumnarSequencer(lambda _: []), [rows[1], rows[0]])
    with pytest.raises(InvalidInput, match="lacks clock"):
        ColumnarSequencer(lambda _: []).feed(envelope_batch(rows).drop_columns(["clock"]))
    with pytest.raises(InvalidInput, match="-1 rows"):
        ColumnarSequencer(lambda _: [], ring_rows=-1)


def test_an_empty_batch_changes_nothing() -> None:
    sequencer = ColumnarSequencer(lambda _: [], {"j": Source(7, {A: ProducerState(3, 5)})})
    assert sequencer.feed(envelope_batch([])).num_rows == 0
    assert sequencer.checkpoint() == {"j": Source(7, {A: ProducerState(3, 5)})}
    assert sequencer.read_through("other") == 0


def test_a_producer_whose_clock_goes_back_is_reported() -> None:
    rows = history([(A, 10, OUTSIDE), (A, 5, ACK), (A, 10, OUTSIDE)])
    with capture_logs() as logs:
        assert feed(ColumnarSequencer(lambda _: []), rows) == [rows[0].begin, rows[2].begin]
    assert [(entry["offset"], entry["clock"]) for entry in logs] == [(rows[1].begin, 5)]


def hours(count: float) -> int:
    return clock_from_ns(int(10**18 + count * 3600 * 10**9))


def test_silent_producers_are_pruned_with_their_rows() -> None:
    pruning = Pruning(clock_to_ns(hours(30)) / 1e9, distance=5)
    rows = history([(A, hours(0), OUTSIDE), (B, hours(0), CONTINUE), (C, hours(30), OUTSIDE), (B, hours(0) + 1, ACK)])
    sequencer = ColumnarSequencer(Journals(rows).replay)
    feed(sequencer, rows[:1])
    feed(sequencer, rows[1:3])
    assert set(sequencer.checkpoint()["j"].producers) == {A, B, C}
    assert set(sequencer.checkpoint(pruning)["j"].producers) == {B, C}
    assert sequencer.held_rows == 1
    assert feed(sequencer, rows[3:]) == [rows[1].begin]


def test_open_transactions_removed_from_the_journal_are_forgotten() -> None:
    rows = history([(A, hours(0), CONTINUE), (B, hours(30), OUTSIDE), (B, hours(30) + 1, OUTSIDE)])
    sequencer = ColumnarSequencer(Journals(rows).replay)
    feed(sequencer, rows[:1])
    # While its rows are in memory, a producer counts as seen. From here on they are not.
    sequencer = ColumnarSequencer(Journals(rows).replay, sequencer.checkpoint())
    feed(sequencer, rows[1:])
    now = clock_to_ns(hours(30)) / 1e9
    for first_offset, kept in [(rows[0].end - 1, {A, B}), (rows[0].end, {B})]:
        pruning = Pruning(now, distance=5, first_offsets={"j": first_offset})
        assert set(sequencer.checkpoint(pruning)["j"].producers) == kept


# Lines.


def content_of(count: int, flags: int = OUTSIDE) -> bytes:
    return b"".join(
        JSON.marshal({"n": n, "name": f"row {n}"}, format_uuid(A, 160 * (n + 1), flags)) for n in range(count)
    )


def test_lines_become_batches_without_copying() -> None:
    content = content_of(3)
    batch, consumed = line_batch(JSON, "j", content + b'{"cut', 1000)
    assert consumed == len(content)
    assert batch.schema == LINES
    one_by_one = list(iter_messages(JSON, "j", [content], 1000))
    assert batch.column("content").to_pylist() == [row.content + b"\n" for row in one_by_one]
    assert batch.drop_columns(["content"]) == envelope_batch(one_by_one).drop_columns(["content"])
    address = np.frombuffer(content, dtype=np.uint8).ctypes.data
    assert line_batch(JSON, "j", content, 0)[0].column("content").buffers()[2].address == address
    assert line_batch(JSON, "j", b"", 5)[0].num_rows == 0
    with pytest.raises(CorruptMessage):
        line_batch(JSON, "j", b"oops\n", 0)


def test_committed_lines_are_parsed_as_a_table() -> None:
    content = content_of(4, CONTINUE) + JSON.acknowledgement(format_uuid(A, 160 * 3, ACK))
    batch, _ = line_batch(JSON, "j", content, 0)
    committed = ColumnarSequencer(lambda _: []).feed(batch)
    table = parse_lines(committed)
    assert table.column("n").to_pylist() == [0, 1, 2]
    schema = pa.schema([("name", pa.string()), ("missing", pa.float64())])
    table = parse_lines(committed.slice(1), schema)
    assert table.to_pylist() == [{"name": f"row {n}", "missing": None} for n in (1, 2)]
    assert parse_lines(committed.slice(0, 0), schema).num_rows == 0
    long = {"text": "x" * (3 << 20)}
    batch, _ = line_batch(JSON, "j", JSON.marshal(long, format_uuid(A, 160, OUTSIDE)), 0)
    assert parse_lines(batch).column("text").to_pylist() == [long["text"]]


def test_lines_of_conflicting_types_are_refused() -> None:
    batch, _ = line_batch(JSON, "j", b'{"a":1}\n{"a":"text"}\n', 0)
    with pytest.raises(InvalidInput, match="not lines of JSON that fit together"):
        parse_lines(batch)


def test_many_rows_of_many_producers() -> None:
    """Ten producers in turn, each acknowledging after a thousand messages, in batches with arbitrary ends."""
    rows: list[tuple[ProducerId, int, int]] = []
    for number in range(20_000):
        producer = ProducerId(bytes([1, 0, 0, 0, 0, number % 10]))
        rows.append((producer, 160 * number + 160, ACK if number // 10 % 1000 == 999 else CONTINUE))
    made = history(rows)
    sequencer = ColumnarSequencer(Journals(made).replay)
    found: list[Any] = []
    for at in range(0, len(made), 777):
        found += feed(sequencer, made[at : at + 777])
    by_message: Sequencer[JsonObject] = Sequencer(ring_size=20_000)
    assert found == [row.begin for row in read_committed(made, by_message, lambda _: ())]
    assert sequencer.checkpoint() == by_message.checkpoint()
    assert sequencer.held_rows == 0
