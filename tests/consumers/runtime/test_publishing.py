"""Acknowledgements of a shard's published messages."""

from __future__ import annotations

import pyarrow as pa

from coranto.messages import Flags, JsonLines, ProducerClock, iter_messages, new_producer_id
from coranto_consumers.runtime.publishing import ShardPublisher


def test_messages_are_acknowledged_once_per_journal_and_transaction():
    publisher = ShardPublisher(new_producer_id(lambda n: bytes(n)), ProducerClock(lambda: 1_700_000_000_000_000_000))
    publisher.publish("a/journal", {"n": 1})
    publisher.publish("b/journal", {"n": 2})
    publisher.publish_table("a/journal", pa.table({"n": [3, 4]}))
    staged = publisher.staged_bytes
    taken = dict(publisher.take())
    intents = publisher.ack_intents()
    assert publisher.chosen == {"a/journal", "b/journal"}

    assert staged == sum(map(len, taken.values()))
    assert intents.keys() == {"a/journal", "b/journal"}
    found = list(iter_messages(JsonLines(), "a/journal", [taken["a/journal"] + intents["a/journal"]], 0))
    assert [each.flags for each in found] == [*[Flags.CONTINUE_TXN] * 3, Flags.ACK_TXN]
    assert [each.message.get("n") for each in found] == [1, 3, 4, None]
    assert [each.clock for each in found] == sorted({each.clock for each in found})
    assert (publisher.take(), publisher.ack_intents(), publisher.staged_bytes) == ([], {}, 0)


def test_journals_of_the_runtime_are_not_chosen_by_the_application():
    publisher = ShardPublisher(new_producer_id(lambda n: bytes(n)), ProducerClock(lambda: 1_700_000_000_000_000_000))
    publisher.keep("dead/letters", {"line": "x"})
    assert publisher.chosen == set()
    assert publisher.ack_intents().keys() == {"dead/letters"}
