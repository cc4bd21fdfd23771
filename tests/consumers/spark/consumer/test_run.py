"""One attempt of a run with inputs and a store in memory: its plans, its transactions, skipped and refused content."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest

from coranto.client import SyncJournalClient
from coranto.client.retry import RetryPolicy
from coranto.errors import InvalidInput, OffsetJump, RejectedRow
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.uuids import new_producer_id
from coranto_consumers.journals.discovery import ContentExtent
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark import ConsumeReport, ConsumerOptions, Hooks
from coranto_consumers.spark.committed.sequencing import LongTransaction
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.pending_report import OldestTransactions
from coranto_consumers.spark.consumer.prefetch import Prefetcher
from coranto_consumers.spark.consumer.run import Run
from coranto_consumers.spark.consumer.transaction import Owner
from coranto_consumers.spark.consumer.transaction_inputs import MessageBound, OptimisticWrites
from coranto_consumers.spark.inputs.input_reader import FoundLong, Input
from tests.consumers.spark.consumer.test_transaction import Rows, outputs

JOURNAL = "a/one"
HEAD = 100
PRODUCER = new_producer_id(os.urandom)


class Inputs:
    """Inputs with completely read ranges. Each message has ten bytes."""

    has_session = False

    def __init__(self, options: ConsumerOptions) -> None:
        self.bound = MessageBound(options.max_transaction_bytes, options.max_transaction_messages)
        self.writing = OptimisticWrites(False)
        self.ranges: list[tuple[int, int]] = []
        self.parts: list[int] = []
        self.head, self.gone, self.long = HEAD, 0, False

    def names(self, client) -> set[str]:
        return {JOURNAL}

    def present(self, client) -> dict[str, ContentExtent]:
        return {JOURNAL: ContentExtent(0, self.head)}

    def reader(self):
        return self

    def nothing(self):
        return None

    @contextmanager
    def reading(self, client, ranges, sources, begins):
        [part] = ranges
        self.ranges.append((part.begin, part.end))
        if part.begin < self.gone:
            raise OffsetJump(JOURNAL, part.begin, self.gone)
        if self.long and part.end >= 60:
            self.long = False
            yield FoundLong((LongTransaction(JOURNAL, PRODUCER, 60),))
            return
        after = replace(sources[JOURNAL], read_through=part.end)
        yield self._input((part.end - part.begin) // 10, after)

    @contextmanager
    def read_part(self, long, sources, head, max_bytes):
        state = sources[JOURNAL].producers[PRODUCER]
        self.parts.append(state.begin)
        after = replace(sources[JOURNAL], producers={PRODUCER: replace(state, begin=state.begin + 20)})
        yield self._input(2, after)

    def _input(self, messages: int, after: Source) -> Input:
        return Input("rows", messages, messages, {JOURNAL: after}, not messages)  # type: ignore[arg-type]


class Application:
    name = "sums"
    sources = f"name={JOURNAL}"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        return outputs(committed)


class World:
    def __init__(self, client, **options) -> None:
        self.options = ConsumerOptions(**{"max_transaction_bytes": 40, **options})
        self.store = Rows()
        self.inputs = Inputs(self.options)
        self.reports: list[ConsumeReport] = []
        self.client = client

    def owner(self) -> Owner:
        return Owner("sums", "sums", outputs, self.store, MisfitPolicy.FAIL, IdentityCheck("sums"), Hooks())

    def run(self, most: int | None = None, owner: Owner | None = None) -> Run:
        owner = owner or self.owner()
        hooks = owner.hooks
        with Prefetcher[Input | FoundLong]() as ahead:
            run = Run(
                Application(),
                self.options,
                self.inputs,  # type: ignore[arg-type]
                owner,
                OldestTransactions(self.options.max_transaction_bytes),
                lambda: owner.progress,
                self.reports.append,
                Outages("sums", RetryPolicy(0.0), hooks, self.reports.append),
                self.client,
                ahead,
            )
            run.begin()
            run.catch_up(run.present(), most=most)
        return run


@pytest.fixture
def world(broker):
    broker.create(JOURNAL)
    with SyncJournalClient.of(broker.config) as client:
        yield lambda **options: World(client, **options)


def test_a_run_reads_up_to_the_heads_in_bounded_transactions(world):
    made = world()
    run = made.run()
    assert made.inputs.ranges == [(0, 40), (40, 80), (80, 100)]
    assert (run.report.transactions, run.report.messages, run.report.lag_bytes) == (3, 10, 0)
    assert [each.transactions for each in made.reports] == [0, 1, 2, 3]
    assert made.store.kept.checkpoint.offsets == {JOURNAL: HEAD}
    assert run.sources == made.store.kept.checkpoint.sources


def test_a_run_ends_after_its_maximum_of_transactions_and_the_next_continues(world):
    made = world()
    assert made.run(most=1).report.lag_bytes == 60
    run = made.run()
    assert made.inputs.ranges == [(0, 40), (40, 80), (80, 100)]
    assert (run.report.fence, run.report.transactions) == (2, 2)


def test_outputs_are_compared_with_tables_unless_the_instance_has_the_fence(world, monkeypatch):
    made = world()
    made.inputs.has_session = True
    compared = []
    monkeypatch.setattr(made.store, "compare", compared.append)
    owner, other = made.owner(), made.owner()
    for fences, each in enumerate((owner, owner, other, owner), 1):
        made.run(owner=each)
        each.commits.clear()  # As a consumer does before its next run.
        assert made.store.kept.fence == fences
    assert len(compared) == 3, "only the second run replaces its own instance"


def test_ranges_with_too_many_messages_are_planned_again_with_their_length(world):
    made = world(max_transaction_bytes=1_000, max_transaction_messages=1)
    made.run()
    assert made.inputs.ranges[:3] == [(0, 64), (0, 10), (10, 20)]
    assert made.store.kept.checkpoint.offsets == {JOURNAL: HEAD}


def test_lost_content_ends_the_run_or_is_skipped_and_reported(world):
    made = world()
    made.inputs.gone = 30
    with pytest.raises(OffsetJump):
        made.run()
    assert made.store.kept.checkpoint == Checkpoint()
    made = world(fail_on_data_loss=False)
    made.inputs.gone = 30
    run = made.run()
    assert [(each.begin, each.end) for each in run.report.lost] == [(0, 30)]
    assert made.store.kept.checkpoint.offsets == {JOURNAL: HEAD}


def opened(made: World) -> None:
    """Let the checkpoint have a transaction that was open from the journal's beginning."""
    source = Source(40, {PRODUCER: ProducerState(1, 0)})
    made.store.kept = made.store.kept._replace(checkpoint=Checkpoint({JOURNAL: source}))
    made.inputs.long = True


def test_a_long_transaction_is_delivered_in_parts_once_its_acknowledgement_is_due(world):
    made = world()
    opened(made)
    run = made.run()
    assert made.inputs.ranges == [(40, 80), (40, 60), (60, 100)]
    assert made.inputs.parts == [0], "then 40 bytes are left, which one transaction reads"
    assert run.report.transactions == 3


def test_parts_of_a_long_transaction_count_towards_the_maximum(world):
    made = world()
    opened(made)
    assert made.run(most=2).report.transactions == 2
    assert (made.inputs.ranges, made.inputs.parts) == ([(40, 80), (40, 60)], [0])


def test_an_atomic_run_ends_at_a_long_transaction_and_names_its_position(world):
    made = world(atomic=True)
    opened(made)
    problem = rf"producer {PRODUCER.hex()} .* the 60 bytes \[0, 60\) of journal {JOURNAL}, .* reads 40.*to 60 or more"
    with pytest.raises(InvalidInput, match=problem):
        made.run()
    assert made.store.rows == []


def test_a_rejected_row_ends_the_run_before_its_checkpoint(world, monkeypatch):
    made = world()
    made.store.rejects = RejectedRow("too long")
    monkeypatch.setattr(
        "coranto_consumers.spark.consumer.transaction.without_rejected", lambda read, rejections, problem: read
    )
    with pytest.raises(RejectedRow):
        made.run()
    assert made.store.kept.checkpoint == Checkpoint()
