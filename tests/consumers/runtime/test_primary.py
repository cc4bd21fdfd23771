"""A running shard with a broker and a store: consumed messages count once, through any failure."""

from __future__ import annotations

import asyncio
import copy
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc
import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, select
from structlog.testing import capture_logs

from coranto.client import AppendResult, JournalClient
from coranto.effects import SystemClock
from coranto.errors import (
    ConsumerChanged,
    CorruptMessage,
    Fenced,
    InvalidInput,
    JournalNotFound,
    NotAllowed,
    TornMessage,
)
from coranto.messages import (
    Checkpoint,
    Envelope,
    Flags,
    JsonLines,
    ProducerClock,
    ProducerState,
    Source,
    TransactionBuilder,
    iter_messages,
    new_producer_id,
)
from coranto.messages.pruning import DEFAULT_PRUNE_DISTANCE
from coranto.messages.uuids import clock_from_ns
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.outputs.dead_letters import DeadLetters, dead_letter_table
from coranto_consumers.runtime import column_intake
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary
from coranto_consumers.runtime.producers import ProducerWatch
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.runtime.transaction import DeferToNextTransaction, EmptyTransactionDeferred
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.sql import SqlStore
from tests.spans import recorded_spans

SUMS = Table(
    "sums",
    MetaData(),
    Column("key", String(50), primary_key=True),
    Column("total", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)
COLUMNS = pa.schema([("key", pa.string()), ("n", pa.int64())])
SPEC = shard_spec("shard-sums", ["in/one"], max_seconds=600)
"""The transactions of this shard end when there is nothing more to read, at any speed of the machine."""


@pytest.fixture(params=["sqlite", "sqlite-batches", pytest.param("postgresql", marks=pytest.mark.integration)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def in_batches(kind: str) -> Container[str]:
    """Messages and batches have the same rules. The crash matrix tests batches with other databases."""
    return ("in/one", "in/two") if kind.endswith("-batches") else ()


@pytest.fixture
def store_url(kind: str, new_store: Callable[[str], str]) -> str:
    """The crash matrix tests the runtime on MariaDB more thoroughly."""
    return new_store(kind.removesuffix("-batches"))


async def test_messages_are_summed_published_and_checkpointed(journals, client, sums):
    async with running_shard(sums, SPEC, client) as shard:
        head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3})
        await shard.read_through({"in/one": head})

        assert sums.sums() == {"a": (4, 2), "b": (2, 1)}
        assert shard.progress.publish_at == {"out/one": journals.head("out/one")}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}, {"key": "b", "n": 2}, {"key": "a", "n": 3}]
    checkpoint = sums.database.read("shard-sums").checkpoint
    assert checkpoint.sources["in/one"].read_through == head
    assert set(checkpoint.ack_intents) == {"out/one"}


async def test_a_transaction_is_one_trace_with_its_phases_and_appends(journals, client, sums):
    with recorded_spans() as spans:
        async with JournalClient(journals.fake.endpoint) as traced, running_shard(sums, SPEC, traced) as shard:
            head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "b", "n": 2})
            await shard.read_through({"in/one": head})
            head = await journals.publish("in/one", {"key": "a", "n": 3})
            await shard.read_through({"in/one": head})
    transactions = spans.named("transaction shard-sums")
    assert [span.attributes["coranto.messages"] for span in transactions] == [2, 1]
    for transaction in transactions:
        assert (transaction.parent, transaction.kind.name) == (None, "CONSUMER")
        assert transaction.attributes["messaging.consumer.group.name"] == "shard-sums"
        inside = spans.within(transaction)
        appends = [span for span in inside if span.name == "append out/one"]
        assert len(appends) >= 2, "one for its acknowledgement, and at least one for its messages"
        phases = sorted((span for span in inside if span not in appends), key=lambda span: span.end_time)
        names = [span.name for span in phases]
        assert names == [f"{phase} shard-sums" for phase in ("consuming", "stalled", "committing", "acknowledging")]
        assert phases[0].start_time == pytest.approx(transaction.start_time, abs=10**9)
        assert phases[-1].end_time == transaction.end_time
        assert all(before.end_time == after.start_time for before, after in pairwise(phases))
        assert all(transaction.start_time <= span.start_time <= transaction.end_time for span in appends)


async def test_a_failed_transaction_ends_its_trace_without_values_of_rows(journals, client, sums):
    def fail(content: dict[str, Any]) -> None:
        if content["n"] == 2:
            raise ValueError("a secret value")

    sums.before = fail
    with recorded_spans() as spans:
        async with running_shard(sums, SPEC, client) as shard:
            head = await journals.publish("in/one", {"key": "a", "n": 1})
            await shard.read_through({"in/one": head})
            sums.before = lambda content: None
            sums.database.engine.dispose()
            finalize = sums.finalize_txn
            sums.finalize_txn = lambda *given: fail({"n": 2}) or finalize(*given)
            await journals.publish("in/one", {"key": "a", "n": 3})
            with pytest.raises(ValueError, match="a secret value"):
                await shard.read_through({"in/one": journals.head("in/one")})
    (done, failed) = spans.named("transaction shard-sums")
    assert done.status.is_unset
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "")
    assert failed.attributes["error.type"] == "ValueError"


async def test_a_shard_continues_from_its_checkpoint(journals, client, sums):
    for n in range(3):
        head = await journals.publish("in/one", {"key": "a", "n": n})
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})

    assert sums.sums() == {"a": (3, 3)}
    assert [each["n"] for each in journals.committed("out/one")] == [0, 1, 2]
    assert sums.database.read("shard-sums").fence == 3


async def test_rolled_back_messages_count_as_read_even_before_restored_acknowledgements(
    journals, client, sums, monkeypatch
):
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    abandoned = journals.producer()
    abandoned.add("in/one", {"key": "a", "n": 100})
    await journals.flush(abandoned)
    for journal, content in abandoned.rollback_intents().items():
        await journals.fake.write(journal, content)
    append, noted = client.append, asyncio.Event()
    note = Primary._record_skipped_ends

    def noted_first(primary):
        note(primary)
        if primary._input.skipped_ends:
            noted.set()  # Not counted yet, as the acknowledgements are not written.

    async def append_later(*arguments, **options):
        await noted.wait()
        return await append(*arguments, **options)

    monkeypatch.setattr(Primary, "_record_skipped_ends", noted_first)
    monkeypatch.setattr(client, "append", append_later)
    async with running_shard(sums, SPEC, client) as shard, asyncio.timeout(60):
        await shard.read_through({"in/one": journals.head("in/one")})
    assert noted.is_set()
    assert sums.sums() == {"a": (1, 1)}


@pytest.mark.parametrize("blank", [b"\n", b" \t\r\n\n", b"\xef\xbb\xbf\n"])
async def test_a_source_that_ends_in_blank_lines_is_read_to_its_end(journals, client, sums, blank):
    await journals.publish("in/one", {"key": "a", "n": 1})
    await journals.fake.write("in/one", blank)
    async with running_shard(sums, SPEC, client) as shard, asyncio.timeout(60):
        await shard.read_through({"in/one": journals.head("in/one")})
        await journals.fake.write("in/one", blank)
        await shard.read_through({"in/one": journals.head("in/one")})
        pending = journals.producer()
        pending.add("in/one", {"key": "a", "n": 100})
        await journals.flush(pending)
        await journals.fake.write("in/one", blank)
        for journal, content in pending.rollback_intents().items():
            await journals.fake.write(journal, content + blank)
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (1, 1)}


async def test_several_sources_are_consumed_together(journals, client, sums):
    first = await journals.publish("in/one", {"key": "a", "n": 1})
    second = await journals.publish("in/two", {"key": "a", "n": 2})

    async with running_shard(sums, shard_spec("shard-sums", ["in/one", "in/two"]), client) as shard:
        await shard.read_through({"in/one": first, "in/two": second})
    assert sums.sums() == {"a": (3, 2)}


async def test_min_offset_skips_earlier_content(journals, client, sums):
    skipped = await journals.publish("in/one", {"key": "a", "n": 1})
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    spec = shard_spec("shard-sums", ["in/one"])
    spec.sources[0].min_offset = skipped

    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (2, 1)}


async def test_pending_and_rolled_back_messages_are_not_consumed(journals, client, sums):
    abandoned = journals.producer()
    abandoned.add("in/one", {"key": "a", "n": 100})
    await journals.flush(abandoned)
    for journal, content in abandoned.rollback_intents().items():
        await journals.fake.write(journal, content)
    pending = journals.producer()
    pending.add("in/one", {"key": "a", "n": 1000})
    await journals.flush(pending)
    head = await journals.publish("in/one", {"key": "a", "n": 1})

    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], disable_wait_for_ack=True), client) as shard:
        await shard.read_through({"in/one": head})
        assert sums.sums() == {"a": (1, 1)}
        await journals.commit(pending)
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (1001, 2)}


async def test_a_transaction_waits_for_acknowledgements_of_messages_it_has_read(journals, client, sums):
    """"""
    first, second = journals.producer(), journals.producer()
    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], max_seconds=600), client) as shard:
        second.add("in/one", {"key": "a", "n": 2})
        await journals.flush(second)
        first.add("in/one", {"key": "a", "n": 1})
        await journals.commit(first)
        second.add("in/one", {"key": "a", "n": 3})
        await journals.commit(second)
        await shard.read_through({"in/one": journals.head("in/one")})

    assert sums.transactions == [[1, 2, 3], []]


async def test_transactions_larger_than_the_ring_are_replayed(journals, client, sums):
    spec = shard_spec("shard-sums", ["in/one"], ring_buffer_size=3)
    head = await journals.publish("in/one", *({"key": str(n % 7), "n": n} for n in range(50)))

    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == list(range(50))
    assert sum(total for total, _ in sums.sums().values()) == sum(range(50))


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.integration)])
@pytest.mark.parametrize("ring_buffer_size", [2, 100])
async def test_a_deferred_message_begins_the_next_transaction(journals, client, sums, ring_buffer_size):
    def defer_fours(message: dict) -> None:
        if message["n"] % 4 == 0 and sums.transactions[-1]:
            raise DeferToNextTransaction

    sums.before = defer_fours
    spec = shard_spec("shard-sums", ["in/one"], min_seconds=1, max_seconds=600, ring_buffer_size=ring_buffer_size)
    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(1, 11)))
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": head})

    assert sums.transactions == [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10], []]
    assert sums.sums() == {"a": (55, 10)}


@pytest.mark.parametrize("kind", ["sqlite-batches"])
async def test_a_deferred_batch_begins_the_next_transaction_with_its_dead_letters_once(
    journals, client, sums, monkeypatch
):
    """The batch may be inside an acknowledged set, if the set has several batches."""
    monkeypatch.setattr(column_intake, "MAX_ROWS", 2)
    letters = dead_letter_table("letters")
    sums.columns = Columns(COLUMNS, misfits=DeadLetters(table=letters))
    sums.most = 3

    async def publish_misfits(begin: int) -> int:
        producer = journals.producer()
        for n in range(begin, begin + 4):
            producer.add("in/one", {"key": "a", "n": n})
            producer.add("in/one", {"key": "a", "n": f"{n}!"})
            await journals.flush(producer)
        await journals.commit(producer)
        return journals.head("in/one")

    spec = shard_spec("shard-sums", ["in/one"], min_seconds=1, max_seconds=600, ring_buffer_size=2)
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": await publish_misfits(1)})
        await shard.read_through({"in/one": await publish_misfits(5)})

    assert sums.sums() == {"a": (36, 8)}
    assert [n for each in sums.transactions for n in each] == list(range(1, 9))
    assert len([each for each in sums.transactions if each]) > 2, "some were deferred"
    with sums.database.engine.connect() as connection:
        kept = [row.line for row in connection.execute(select(letters).order_by(letters.c.offset))]
    assert [line.partition(b'"n":')[2] for line in kept] == [f'"{n}!"}}'.encode() for n in range(1, 9)]


@pytest.mark.parametrize("kind", ["sqlite-batches"])
async def test_sources_in_batches_and_single_messages_can_be_mixed_and_switched(journals, client, sums):
    """Their checkpoints are interchangeable, also with pending messages."""
    pending = journals.producer()
    pending.add("in/one", {"key": "p", "n": 100})
    await journals.flush(pending)
    total = 0
    for turn in range(4):
        sums.in_batches = ("in/one",) if turn % 2 else ("in/two",)
        first = await journals.publish("in/one", {"key": "a", "n": turn})
        second = await journals.publish("in/two", {"key": "b", "n": turn})
        total += turn
        spec = shard_spec("shard-sums", ["in/one", "in/two"], disable_wait_for_ack=True)
        async with running_shard(sums, spec, client) as shard:
            await shard.read_through({"in/one": first, "in/two": second})
        assert sums.sums() == {"a": (total, turn + 1), "b": (total, turn + 1)}
    await journals.commit(pending)
    async with running_shard(sums, spec, client) as shard:
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums()["p"] == (100, 1)


async def test_removing_a_source_from_a_spec_needs_confirmation(journals, client, sums):
    both = shard_spec("shard-sums", ["in/one", "in/two"])
    heads = {journal: await journals.publish(journal, {"key": "a", "n": 1}) for journal in ("in/one", "in/two")}
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": heads["in/one"]})
    async with running_shard(sums, both, client) as shard:  # An additional journal needs no confirmation.
        await shard.read_through(heads)
    fewer = await journals.publish("in/one", {"key": "a", "n": 2})
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(ConsumerChanged, match=f"the rest of in/two from {heads['in/two']} on is not read") as no:
            await shard.task
    code = str(no.value).rpartition("--accept-changes ")[2].partition(" ")[0]
    async with running_shard(sums, SPEC, client, accept_changes=code) as shard:
        await shard.read_through({"in/one": fewer})
    more = await journals.publish("in/one", {"key": "a", "n": 3})
    async with running_shard(sums, SPEC, client) as shard:  # The change is recorded.
        await shard.read_through({"in/one": more})
    assert sums.sums() == {"a": (7, 4)}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_declared_journals_are_recorded_and_another_declaration_is_refused(journals, client, sums):
    journals.create("out/two")
    sums.publishes = ["out/one"]
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    known = sums.database.read(SPEC.id).checkpoint.identity
    assert known.outputs == {"table sums", "journals out/one"}

    other = copy.copy(sums)
    other.output, other.publishes = "out/two", ["out/two"]
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    async with running_shard(other, SPEC, client) as shard:
        with pytest.raises(
            ConsumerChanged,
            match="journals out/one gets nothing any more, journals out/two gets nothing of the earlier",
        ) as no:
            await shard.task
    assert sums.sums() == {"a": (1, 1)}
    code = str(no.value).rpartition("--accept-changes ")[2].partition(" ")[0]
    async with running_shard(other, SPEC, client, accept_changes=code) as shard:
        await shard.read_through({"in/one": head})
    other.publishes = ()
    async with running_shard(other, SPEC, client) as shard:
        with pytest.raises(ConsumerChanged, match="journals out/two gets nothing any more"):
            await shard.task
    assert [each["n"] for each in journals.committed("out/one") + journals.committed("out/two")] == [1, 2]


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-batches"])
async def test_a_message_for_an_undeclared_journal_fails_the_shard_before_the_commit(journals, client, sums):
    sums.publishes = "name:prefix=out/, content-type"
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
        journals.create("out/later")  # A new journal that matches the selector is declared.
        sums.output = "out/later"
        head = await journals.publish("in/one", {"key": "a", "n": 2})
        await shard.read_through({"in/one": head})
        journals.create("elsewhere/one")
        sums.output = "elsewhere/one"
        await journals.publish("in/one", {"key": "a", "n": 3})
        with pytest.raises(InvalidInput, match=r"publishes: Sums declares .* has a message for elsewhere/one, which"):
            await shard.task
    assert sums.sums() == {"a": (3, 2)}
    assert journals.committed("elsewhere/one") == []
    assert sums.database.read(SPEC.id).checkpoint.identity.outputs == {"table sums", f"journals {sums.publishes}"}


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_a_shard_of_another_application_or_in_a_copied_database_is_refused(journals, client, sums, tmp_path):
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    head = await journals.publish("in/one", {"key": "a", "n": 2})
    other = copy.copy(sums)
    other_sums = Table("other_sums", MetaData(), Column("n", Integer))
    other.new_store = lambda shard: SqlShardStore(sums.database, other_sums)
    async with running_shard(other, SPEC, client) as shard:
        with pytest.raises(
            ConsumerChanged, match=r"table sums gets nothing any more, table other_sums gets nothing of"
        ):
            await shard.task
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})

    place = tmp_path / "copy.db"
    with sqlite3.connect(str(sums.database.engine.url.database)) as source, sqlite3.connect(place) as target:
        source.backup(target)
    copied = type(sums)(SqlStore(f"sqlite:///{place}"))
    async with running_shard(copied, SPEC, client) as shard:
        with pytest.raises(
            ConsumerChanged, match=r"store: recorded sqlite:///.*, now sqlite:///.*copy\.db; commits there"
        ) as no:
            await shard.task
    code = str(no.value).rpartition("--accept-changes ")[2].partition(" ")[0]
    head = await journals.publish("in/one", {"key": "a", "n": 3})
    async with running_shard(copied, SPEC, client, accept_changes=code) as shard:
        await shard.read_through({"in/one": head})
    assert copied.sums() == {"a": (6, 3)}


@pytest.mark.parametrize("kind", ["sqlite-batches"])
async def test_a_message_that_does_not_fit_the_columns_ends_the_shard(journals, client, sums):
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await journals.publish("in/one", {"key": "a", "n": "many"})
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(CorruptMessage, match=f"offset {head}.*does not fit the columns key string, n int64"):
            await shard.task
    assert sums.sums() == {}


async def test_deferring_the_first_message_is_an_error(journals, client, sums):
    def defer(message: dict) -> None:
        raise DeferToNextTransaction

    sums.before = defer
    await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(EmptyTransactionDeferred):
            await shard.task


async def test_an_error_of_the_application_ends_the_shard_and_rolls_back(journals, client, sums):
    def fail(message: dict) -> None:
        if message["n"] == 2:
            raise ZeroDivisionError("boom")

    head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "a", "n": 2})
    sums.before = fail
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(ZeroDivisionError):
            await shard.task
    assert sums.sums() == {}
    assert journals.committed("out/one") == []

    sums.before = lambda message: None
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    assert sums.sums() == {"a": (3, 2)}
    assert [each["n"] for each in journals.committed("out/one")] == [1, 2]


async def test_content_that_is_not_a_message_ends_the_shard(journals, client, sums):
    await journals.fake.write("in/one", b"not json\n")
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(CorruptMessage, match="offset 0"):
            await shard.task


@pytest.mark.parametrize("kind", ["sqlite", "sqlite-batches"])
@pytest.mark.parametrize("piece", [b'{"key":"a","n":1', b'{"_meta":{"uuid":"00000009-0000-1000-8000-010203040506"},"n'])
async def test_a_torn_line_loses_no_other_message_or_acknowledgement(journals, client, sums, kind, piece):
    """Single messages use a tolerant framing, and batches a policy for misfits."""
    letters, passed = dead_letter_table("letters"), []

    class Tolerant(type(sums)):
        def new_message(self, journal: pb.JournalSpec) -> Any:
            return super().new_message(journal) if kind.endswith("-batches") else JsonLines(tolerant=True)

        def consume_message(self, shard, store, message: Envelope, publisher) -> None:
            try:
                super().consume_message(shard, store, message, publisher)
            except CorruptMessage as error:
                passed.append((error.offset, message.content))

    columns = Columns(COLUMNS, misfits=DeadLetters(table=letters))
    app = Tolerant(sums.database, in_batches=("in/one",) if kind.endswith("-batches") else ())
    app.columns = columns
    head = await journals.publish("in/one", {"key": "a", "n": 1}, {"key": "b", "n": 2})
    await journals.fake.write("in/one", piece)
    pending = journals.producer()
    pending.add("in/one", {"key": "a", "n": 3})
    await journals.flush(pending)
    before_ack = journals.head("in/one")
    await journals.fake.write("in/one", piece)
    await journals.commit(pending)
    async with running_shard(app, SPEC, client) as shard:
        await shard.read_through({"in/one": journals.head("in/one")})
    assert app.sums() == {"a": (4, 2), "b": (2, 1)}
    kept = passed
    if kind.endswith("-batches"):
        with sums.database.engine.connect() as connection:
            kept = [(row.offset, row.line) for row in connection.execute(select(letters).order_by(letters.c.offset))]
    assert kept == [(head, piece), (before_ack, piece)]


async def test_without_a_policy_a_torn_line_ends_the_shard_with_the_next_offset(journals, client, sums):
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await journals.fake.write("in/one", b'{"key":"a')
    await journals.publish("in/one", {"key": "a", "n": 2})
    async with running_shard(sums, SPEC, client) as shard:
        with pytest.raises(TornMessage, match=rf"in/one at offset {head}: .* next one begins at offset {head + 9}\."):
            await shard.task


async def test_a_missing_source_ends_the_shard(client, sums):
    async with running_shard(sums, shard_spec("shard-sums", ["in/none"]), client) as shard:
        with pytest.raises(JournalNotFound, match="in/none"):
            await shard.task


async def test_a_zombie_cannot_commit_after_a_takeover(journals, client, sums):
    """The race for the store fence: the old process consumes, the new one restores, and the old one tries to commit."""
    blocked, resume = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def block(message: dict) -> None:
        loop.call_soon_threadsafe(blocked.set)
        asyncio.run_coroutine_threadsafe(resume.wait(), loop).result()

    class Old(type(sums)):
        def consume_message(self, shard, store, message: Envelope, publisher) -> None:
            publisher.publish("out/one", {"key": "zombie", "n": 0})
            self.before(message.message)

    head = await journals.publish("in/one", {"key": "a", "n": 1})
    old = Old(sums.database, "out/one")
    old.before = block
    async with running_shard(old, SPEC, client) as zombie:
        await blocked.wait()
        async with running_shard(sums, SPEC, client) as shard:
            await shard.read_through({"in/one": head})
            resume.set()
            with pytest.raises(Fenced):
                await zombie.task
            head = await journals.publish("in/one", {"key": "a", "n": 2})
            await shard.read_through({"in/one": head})

    assert sums.sums() == {"a": (3, 2)}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}, {"key": "a", "n": 2}]


async def test_finishing_completes_consumed_messages(journals, client, sums):
    await journals.publish("in/one", {"key": "a", "n": 1})
    consumed = asyncio.Event()
    loop = asyncio.get_running_loop()
    sums.before = lambda message: loop.call_soon_threadsafe(consumed.set)

    async with running_shard(sums, shard_spec("shard-sums", ["in/one"], min_seconds=60, max_seconds=60), client) as it:
        await consumed.wait()
        await it.finish()
    assert sums.sums() == {"a": (1, 1)}
    assert journals.committed("out/one") == [{"key": "a", "n": 1}]


async def test_duplicates_count_as_read_through(journals, client, sums):
    """Nothing is committed for duplicates, but waiting for their offsets ends."""
    await journals.publish("in/one", {"key": "a", "n": 1})
    content = journals.fake.journals["in/one"].content
    async with running_shard(sums, SPEC, client) as shard:
        await shard.read_through({"in/one": len(content)})
        await journals.fake.write("in/one", content)
        await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (1, 1)}
    assert sums.transactions == [[1], []]


async def test_an_application_may_be_async(journals, client, sums):
    class Async(Application):
        async def new_store(self, shard):
            return SqlShardStore(sums.database, SUMS)

        async def consume_message(self, shard, store, message, publisher):
            connection = await store.begin()
            connection.execute(SUMS.insert().values(key=message.uuid, total=message.message["n"], count=1))
            publisher.publish("out/one", {"n": message.message["n"]})

        async def finalize_txn(self, shard, store, publisher):
            publisher.publish("out/one", {"n": -1})

    async with running_shard(Async(), SPEC, client) as shard:
        for n in range(3):
            head = await journals.publish("in/one", {"key": "a", "n": n})
            await shard.read_through({"in/one": head})
    assert sorted(total for total, _ in sums.sums().values()) == [0, 1, 2]
    assert [each["n"] for each in journals.committed("out/one")] == [0, -1, 1, -1, 2, -1]


async def test_recovered_acknowledgements_are_written_unless_the_journal_is_deleted(journals, client, sums):
    """After a crash between commit and acknowledgement, committed messages are delivered and later ones rolled back."""
    crashed = journals.producer()
    crashed.add("out/one", {"n": 1})
    await journals.flush(crashed)
    intents = crashed.ack_intents()
    crashed.commit()
    crashed.finish()
    crashed.add("out/one", {"n": 2})
    await journals.flush(crashed)
    assert journals.committed("out/one") == []
    fence, _ = sums.database.raise_fence("shard-sums")
    with sums.database.transaction("shard-sums", fence) as transaction:
        transaction.commit(Checkpoint({}, {**intents, "deleted/journal": b"whatever"}))

    async with running_shard(sums, SPEC, client) as shard:
        head = await journals.publish("in/one", {"key": "a", "n": 3})
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == [1, 3]


class InMemory(Store):
    """A store without waits."""

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        return Checkpoint()

    async def start_commit(self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]):
        return asyncio.gather(*wait_for)

    async def destroy(self) -> None:
        """Nothing to release."""


async def test_an_async_application_that_never_yields_publishes_after_the_acknowledgement(journals, client):
    """Available messages are consumed as soon as a transaction begins to commit, before any other task runs."""

    class Eager(Application[InMemory]):
        consumed = 0

        def new_store(self, shard):
            return InMemory()

        async def consume_message(self, shard, store, message, publisher):
            if self.consumed == 1:
                raise DeferToNextTransaction
            self.consumed += 1
            publisher.publish("out/one", {"n": message.message["n"]})

        async def finalize_txn(self, shard, store, publisher):
            self.consumed = 0

    head = await journals.publish("in/one", *({"key": "a", "n": n} for n in range(5)))
    async with running_shard(Eager(), SPEC, client) as shard:
        await shard.read_through({"in/one": head})
    assert [each["n"] for each in journals.committed("out/one")] == [0, 1, 2, 3, 4]


async def test_a_transaction_with_unpublished_messages_does_not_commit(journals, client, sums):
    """The failed append may have ended before the commit begins."""
    sums.output = "deleted/journal"
    spec = shard_spec("shard-sums", ["in/one"], min_seconds=0.3, max_seconds=5)
    await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(sums, spec, client) as shard:
        with pytest.raises(JournalNotFound, match="deleted/journal"):
            await shard.task
    assert sums.sums() == {}
    assert sums.database.read("shard-sums").checkpoint == Checkpoint()


class Kept(InMemory):
    """A store that keeps its checkpoint between runs, and calls back after each commit."""

    def __init__(self, committed: Callable[[], None] = lambda: None) -> None:
        self.checkpoint = Checkpoint()
        self._committed = committed

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        return self.checkpoint

    async def start_commit(self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]):
        async def commit() -> None:
            await asyncio.gather(*wait_for)
            self.checkpoint = checkpoint
            self._committed()

        return asyncio.ensure_future(commit())


class Copies(Application[Kept]):
    """An application that publishes each message to several journals."""

    def __init__(self, store: Kept, *outputs: str) -> None:
        self.store = store
        self.outputs = outputs

    def new_store(self, shard):
        return self.store

    async def consume_message(self, shard, store, message, publisher):
        for output in self.outputs:
            publisher.publish(output, {"n": message.message["n"]})


class SlowClient(JournalClient):
    """A client with delayed appends to the journal `slow`."""

    slow = ""

    async def append(self, journal, content, **options):
        if journal == self.slow:
            await asyncio.sleep(0.2)
        return await super().append(journal, content, **options)


@pytest.fixture
async def slow_client(journals) -> AsyncIterator[SlowClient]:
    async with SlowClient(journals.fake.endpoint) as connected:
        yield connected


async def test_a_read_only_journal_does_not_prevent_other_acknowledgements(journals, slow_client):
    """The journal becomes read-only between the commit and the acknowledgements, and stays so after a restart."""
    journals.create("out/two", "out/three")

    def protect() -> None:
        journals.fake.journals["out/one"].spec.flags = pb.JournalSpec.O_RDONLY
        slow_client.slow = "out/two"

    store = Kept(protect)
    app = Copies(store, "out/one", "out/two", "out/three")
    await journals.publish("in/one", {"key": "a", "n": 1})
    async with running_shard(app, SPEC, slow_client) as shard:
        with pytest.raises(NotAllowed, match="out/one"):
            await shard.task
    assert [journals.committed(output) for output in app.outputs] == [[], [{"n": 1}], [{"n": 1}]]

    # Remove the acknowledgements of the first run, as if it had died before them.
    for output in ("out/two", "out/three"):
        spool = journals.fake.journals[output].spool
        del spool[bytes(spool).index(b"\n") + 1 :]
        assert journals.committed(output) == []
    async with running_shard(app, SPEC, slow_client) as shard:
        with pytest.raises(NotAllowed, match="out/one"):
            await shard.task
    assert [journals.committed(output) for output in app.outputs] == [[], [{"n": 1}], [{"n": 1}]]

    journals.fake.journals["out/one"].spec.flags = 0
    async with running_shard(app, SPEC, slow_client) as shard:
        await shard.read_through({"in/one": await journals.publish("in/one")})
    assert journals.committed("out/one") == [{"n": 1}]


async def test_a_failing_shard_acknowledges_its_last_commit(journals, slow_client):
    """The source is deleted, so no later run would write the acknowledgement."""
    crashed = journals.producer()
    crashed.add("out/one", {"n": 1})
    await journals.flush(crashed)
    store = Kept()
    store.checkpoint = Checkpoint({}, crashed.ack_intents())
    slow_client.slow = "out/one"
    async with running_shard(Copies(store), shard_spec("shard-sums", ["in/gone"]), slow_client) as shard:
        with pytest.raises(JournalNotFound, match="in/gone"):
            await shard.task
    assert journals.committed("out/one") == [{"n": 1}]


async def test_a_producer_with_a_fast_clock_loses_no_message_of_others(journals, client, sums):
    """A transaction spans a checkpoint, and an append is repeated after a restart of the shard."""
    day = 25 * 3600 * 10**9
    ahead = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(lambda: time.time_ns() + day), JsonLines())
    right, repeating = journals.producer(), journals.producer()
    repeating.add_outside("in/one", {"key": "b", "n": 10})
    ((_, repeated),) = repeating.take_batches(1 << 20)
    await journals.fake.write("in/one", repeated)
    right.add("in/one", {"key": "a", "n": 1})
    right.add("in/one", {"key": "a", "n": 2})
    await journals.flush(right)
    ahead.add("in/one", {"key": "c", "n": 5})
    await journals.commit(ahead)
    spec = shard_spec("shard-sums", ["in/one"], disable_wait_for_ack=True, max_seconds=0.1)
    for last in (False, True):
        async with running_shard(sums, spec, client) as shard:
            await shard.read_through({"in/one": journals.head("in/one")})
            if not last:
                await journals.fake.write("in/one", repeated)
                await shard.read_through({"in/one": journals.head("in/one")})
            else:
                await journals.commit(right)
                await shard.read_through({"in/one": journals.head("in/one")})
    assert sums.sums() == {"a": (3, 2), "b": (10, 1), "c": (5, 1)}


async def test_producers_are_monitored_and_pruned(journals, client):
    """Skewed clocks and open transactions are counted; producers without content in the journal are pruned."""
    journal = journals.fake.journals["in/one"]
    await journals.publish("in/one", {"key": "a", "n": 1})
    journal.roll()
    await journals.publish("in/one", {"key": "a", "n": 2})
    begin = journal.spool_begin
    journal.drop_before(begin)
    now = 1_900_000_000
    fast, slow = (ProducerState(clock_from_ns((now + off) * 10**9), -1, 300) for off in (7200, -7200))
    right, gone = ProducerState(clock_from_ns(now * 10**9), -1, 200), ProducerState(5, 1, begin)
    one, two, three, four = (new_producer_id(os.urandom) for _ in range(4))
    clock = FrozenClock(now)
    metrics = ConsumerMetrics()
    sources = {"in/one": Source(250, {one: right, four: gone})}
    watch = ProducerWatch("shard-sums", client, clock, metrics, ["in/one"], sources)

    def value(name: str, **given: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"shard": "shard-sums", **given})

    watch.committing({"in/one": Source(400, {**sources["in/one"].producers, two: fast, three: slow})})
    await watch.check()
    await watch.check()
    assert value("coranto_shard_skewed_producers_total", direction="ahead") == 1
    assert value("coranto_shard_skewed_producers_total", direction="behind") == 1
    assert value("coranto_shard_open_transactions") == 1
    assert watch.pruning().first_offsets == {}, "no producer is old enough to query"

    read_through = begin + DEFAULT_PRUNE_DISTANCE
    watch.committing({"in/one": Source(read_through, {four: gone})})
    await watch.check()
    await watch.check()
    assert journals.fake.count("ListFragments") == 1
    assert watch.pruning().first_offsets == {"in/one": begin}
    assert watch.pruning().prune("in/one", {four: gone}, read_through) == {}
    metrics.forget("shard-sums")
    assert value("coranto_shard_open_transactions") is None


class FrozenClock(SystemClock):
    def __init__(self, now: float) -> None:
        self._now = now

    def now(self) -> float:
        return self._now


async def test_an_unavailable_journal_does_not_hide_that_another_is_read_only(journals, client, monkeypatch):
    monkeypatch.setattr("coranto_consumers.runtime.primary.ACKNOWLEDGE_SECONDS", 0.2)
    journals.create("out/two", "out/three")
    crashed = journals.producer()
    for output in ("out/one", "out/two", "out/three"):
        crashed.add(output, {"n": 1})
    await journals.flush(crashed)
    store = Kept()
    store.checkpoint = Checkpoint({}, crashed.ack_intents())
    journals.fake.journals["out/one"].spec.flags = pb.JournalSpec.O_RDONLY
    real = client.append

    async def append(journal, content, **options):
        if journal == "out/two":
            await asyncio.Event().wait()
        return await real(journal, content, **options)

    monkeypatch.setattr(client, "append", append)
    with capture_logs() as logs:
        async with running_shard(Copies(store), SPEC, client) as shard:
            with pytest.raises(NotAllowed, match="out/one"):
                await shard.task
    assert journals.committed("out/three") == [{"n": 1}]
    assert {each["journal"] for each in logs if each["event"] == "acknowledgement.failed"} == {"out/one", "out/two"}


async def test_a_late_duplicate_of_an_acknowledgement_loses_no_output(journals, client, sums, monkeypatch):
    """A hanging broker applies the first attempt of an acknowledgement long after the client has repeated it."""
    append, late = client.append, []

    async def append_with_doubt(journal: str, content: Any, **options: Any) -> AppendResult:
        result = await append(journal, content, **options)
        messages = list(iter_messages(JsonLines(), journal, [b"".join(content)], 0))
        if messages[0].flags == Flags.CONTINUE_TXN and late:
            await journals.fake.write(journal, late[0])
        if messages[-1].flags == Flags.ACK_TXN and not late:
            late.append(b"".join(content))
            return replace(result, may_repeat=True)
        return result

    monkeypatch.setattr(client, "append", append_with_doubt)
    async with running_shard(sums, SPEC, client) as shard:
        for n in range(6):
            await shard.read_through({"in/one": await journals.publish("in/one", {"key": str(n), "n": n})})
    assert [each["n"] for each in journals.committed("out/one")] == list(range(6))


async def test_a_shard_logs_each_minute_that_brokers_refuse_appends_and_continues(journals, sums):
    """There is no limit: the committed messages must be acknowledged."""
    journals.fake.at(CallPoint.APPEND_BEGUN, None, *[grpc.StatusCode.UNAVAILABLE] * 100)
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    metrics, progress = ConsumerMetrics(), Progress()
    labels = {"shard": "shard-sums"}
    async with JournalClient(journals.fake.endpoint, clock=HurriedClock()) as hurried:
        primary = Primary(
            sums,
            Shard(SPEC, hurried),
            clock=SystemClock(),
            producer=new_producer_id(os.urandom),
            progress=progress,
            metrics=metrics,
        )
        with capture_logs() as logs:
            running = asyncio.create_task(primary.run())
            async with asyncio.timeout(120):
                await progress.wait_for({"in/one": head})
            primary.stop()
            await running
    outages = [each for each in logs if each["event"] == "shard.waiting_for_brokers"]
    assert len(outages) == 2, "100 attempts take more than two minutes"
    assert {each["journal"] for each in outages} == {"out/one"}
    assert [each["n"] for each in journals.committed("out/one")] == [1]
    assert metrics.registry.get_sample_value("coranto_shard_outage_seconds", labels) == 0
