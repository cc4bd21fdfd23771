"""The state of a consumer at an offset inside a transaction."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import (
    Checkpoint,
    Envelope,
    JsonLines,
    ProducerClock,
    ProducerState,
    Source,
    TransactionBuilder,
    new_producer_id,
)
from coranto.messages.framing import iter_messages
from coranto.testing import Cluster
from coranto_consumers.positions.moves import LATEST, plan_moves

JOURNAL = "in/one"


class Written(NamedTuple):
    client: JournalClient
    messages: list[Envelope[object]]
    """Three messages of one transaction, and its acknowledgement."""


@pytest.fixture
async def written() -> AsyncIterator[Written]:
    async with Cluster(brokers=1, lease_seconds=60) as cluster:
        await cluster.create(JOURNAL, labels={CONTENT_TYPE: JSON_LINES})
        client = cluster.client()
        builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
        for n in range(3):
            builder.add(JOURNAL, {"n": n})
        content = b"".join(batch for _, batch in builder.take_batches(1 << 20))
        builder.ack_intents()
        content += b"".join(builder.commit().values())
        await client.append(JOURNAL, content)
        yield Written(client, list(iter_messages(JsonLines(), JOURNAL, [content], 0)))


async def test_the_rest_of_a_partly_processed_transaction_is_not_omitted(written: Written) -> None:
    first, second, _, ack = written.messages
    partly = Source(ack.begin, {first.producer: ProducerState(second.clock, second.end, ack.begin)})
    with pytest.raises(InvalidInput, match=r"has processed a part of a transaction in in/one.*would omit the rest"):
        await plan_moves(written.client, Checkpoint({JOURNAL: partly}), LATEST, only_forward=True)
    (back,) = await plan_moves(written.client, Checkpoint({JOURNAL: partly}), "earliest")
    assert back.source == Source(0), "all of it is delivered again"


async def test_the_messages_of_a_large_range_are_not_counted(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _, ack = written.messages
    read = Source(ack.end, {first.producer: ProducerState(ack.clock, -1, ack.end)})
    (counted,) = await plan_moves(written.client, Checkpoint({JOURNAL: read}), "earliest")
    monkeypatch.setattr("coranto_consumers.positions.moves._COUNTED_BYTES", ack.end - 1)
    (large,) = await plan_moves(written.client, Checkpoint({JOURNAL: read}), "earliest")
    assert (counted.messages, large.messages, large.source) == (3, None, Source(0))


async def test_a_pending_transaction_is_omitted_as_a_whole(written: Written) -> None:
    first, _, third, ack = written.messages
    pending = Source(ack.begin, {first.producer: ProducerState(first.clock - 1, first.begin, third.end)})
    (move,) = await plan_moves(written.client, Checkpoint({JOURNAL: pending}), LATEST)
    assert (move.messages, move.omits) == (3, True)
    assert move.source == Source(ack.end, {first.producer: ProducerState(ack.clock, -1, ack.end)})
    (within,) = await plan_moves(written.client, Checkpoint({JOURNAL: Source(0)}), {JOURNAL: third.begin})
    assert (within.messages, within.omits) == (0, True), "it is delivered later as a whole"
    assert within.source.producers[first.producer].begin == first.begin
