"""Micro-batches of any size, over any number of restarts, deliver the same as reading message by message."""

import json
import os
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Source
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import Flags, ProducerClock, format_uuid, new_producer_id
from coranto_consumers.journals.framings import CsvRecords
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.streaming.batches import BatchPlanner, ReadState, part_between, require_end, require_part
from coranto_consumers.spark.streaming.offsets import Position, dumps, loads
from tests.consumers.spark.folding import FRAMING, Memory
from tests.consumers.spark.histories import expected, histories
from tests.sampling import examples

J = "a/journal"


def start(offset: int = 0) -> ReadState:
    return ReadState(Position(offset), Source(offset), {})


def delivered(content: Memory, batch) -> list[int]:
    """Return the offsets of a batch's messages, in commit order if it is known."""
    read = [lines for part in batch.parts for lines in part.read(content, FRAMING)]
    rows = [
        row
        for lines in read
        for row in zip((lines.begins if lines.commits is None else lines.commits).tolist(), lines.begins, strict=True)
    ]
    return [int(begin) for _, begin in sorted(rows)]


def restarted(planner: BatchPlanner, state: ReadState) -> ReadState:
    """Return the state of a new process, restored from the offsets in the checkpoint."""
    positions = loads(json.loads(json.dumps(dumps({J: state.position}))))
    assert positions[J] == state.position
    return planner.restore(J, positions[J])


@settings(deadline=None, max_examples=examples(50))
@given(history=histories(), rng=st.randoms(use_true_random=False), part=st.integers(1, 3000), listed=st.integers(0, 3))
def test_batches_over_restarts_deliver_each_committed_message_once(history, rng, part, listed):
    content = Memory({J: history}, 500)
    planner = BatchPlanner(content, FRAMING, True, part, commits=True)
    state, found = start(), []
    while state.position.offset < len(history):
        begin = state.position.offset
        if rng.random() < 0.5:
            state = restarted(planner, state)
        end = min(len(history), begin + rng.randint(1, 2000))
        messages, replay = rng.choice([None, 1, 2, 7]), rng.choice([None, 1, 300, 1000])
        whole = Range(J, begin, end, len(history))
        batch = planner.plan(whole, state, cuts=(), max_messages=messages, listed=listed, max_replay_bytes=replay)
        replayed = sum(part.length for part in batch.parts if part.numbered.replay)
        assert replay is None or replayed <= replay
        after = batch.state.position
        if after.offset == begin:
            assert replayed, "a batch delivers a part of a transaction, or continues"
            known = restarted(planner, state)
            long, length = part_between(J, known, after)
            again = planner.plan_part(long, known, len(history), length, cuts=(), listed=listed)
            require_part(J, again, after)
        else:
            assert messages is None or batch.rows <= messages
            ended = replace(whole, end=after.offset, limit=after.offset)
            again = planner.plan(ended, restarted(planner, state), cuts=(), listed=listed)
        found += delivered(content, batch)
        assert delivered(content, again) == delivered(content, batch)
        state = batch.state
    assert found == expected(J, history)


@pytest.mark.parametrize("messages", [None, 1, 3])
def test_an_uncommitted_batch_ends_with_a_line(messages):
    lines = b'{"n":1}\n{"n":22}\n{"n":333}\n'
    content = Memory({J: lines + b'{"unfin'}, 3)
    planner = BatchPlanner(content, FRAMING, False, 5)

    batch = planner.plan(
        Range(J, 0, len(content.journals[J]), len(content.journals[J])), start(), cuts=(), max_messages=messages
    )

    end = {None: len(lines), 1: 8, 3: len(lines)}[messages]
    assert batch.state.position == Position(end)
    ranges = [part.numbered.range for part in batch.parts]
    assert (ranges[0].begin, ranges[-1].end) == (0, end)


def test_a_batch_begins_with_the_next_line_if_its_offset_is_within_one():
    producer = SyncPublisher(
        lambda journal, batch: sent.append(batch),
        producer=new_producer_id(os.urandom),
        clock=ProducerClock(time.time_ns),
        framing=FRAMING,
    )
    sent: list[bytes] = []
    for n in range(3):
        producer.publish(J, {"n": n})
    producer.flush()
    history = b"".join(sent)
    second = history.index(b"\n") + 1
    content = Memory({J: history}, 100)
    planner = BatchPlanner(content, FRAMING, True, 1 << 20)

    batch = planner.plan(Range(J, 5, len(history), len(history), aligned=False), start(5), cuts=())

    assert delivered(content, batch)[0] == second
    assert batch.state.position.offset == len(history)


def test_a_repeated_batch_with_another_end_is_an_error():
    content = Memory({J: b'{"n":1}\n'}, 100)
    batch = BatchPlanner(content, FRAMING, False, 100).plan(Range(J, 0, 8, 8), start(), cuts=())

    require_end(J, batch, 8)
    with pytest.raises(CorruptData, match="ends at 9, and now at 8"):
        require_end(J, batch, 9)


def test_a_long_transaction_of_rows_is_delivered_despite_empty_lines():
    producer, framing = new_producer_id(os.urandom), CsvRecords(2)
    rows = [f"{format_uuid(producer, 100 + n, Flags.CONTINUE_TXN)},{n}\n" for n in range(30)]
    ack = f"{format_uuid(producer, 200, Flags.ACK_TXN)},\n"
    history = "".join([*rows, "\n", "\r\n", ack]).encode()
    head, planner = len(history), BatchPlanner(Memory({J: history}, 100), framing, True, 200, commits=True)
    state, found, parts = start(), [], 0
    while state.position.offset < head:
        begin = state.position.offset
        end = min(begin + 250, head)
        batch = planner.plan(Range(J, begin, end, head), state, cuts=(), max_replay_bytes=300)
        after = batch.state.position
        if after.offset == begin:
            known = restarted(planner, state)
            parts += 1
            long, length = part_between(J, known, after)
            require_part(J, planner.plan_part(long, known, head, length, cuts=(), listed=0), after)
        found += [
            int(begin)
            for part in batch.parts
            for lines in part.read(planner.content, framing)
            for begin in lines.begins
        ]
        state = restarted(planner, batch.state)
    assert parts > 2
    assert found == [len("".join(rows[:n])) for n in range(30)]
