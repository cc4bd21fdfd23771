"""The transaction of a consumer: its steps, its failures, and the acknowledgements of its checkpoint."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, PermissionDenied, RejectedRow, SqlStoreError
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.security.tokens import BearerToken, Capability, Keys, Secret, claims_for, scope_of, sign
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark import Hooks, JournalOutput, Outputs, Step, TableOutput
from coranto_consumers.spark.consumer import transaction as transaction_module
from coranto_consumers.spark.consumer.progress import PhaseTimes
from coranto_consumers.spark.consumer.transaction import ConsumerTransaction, Owner, acknowledge
from coranto_consumers.spark.inputs.input_reader import Input
from coranto_consumers.spark.outputs.staging import Published
from coranto_consumers.spark.outputs.stores import OutputStore
from coranto_consumers.stores.fencing import Restored
from tests.spans import recorded_spans

INTENTS = {"out/gone": b"ack\n", "out/here": b"ack\n"}


def test_a_deleted_journal_does_not_block_acknowledgements_of_others(broker):
    broker.create("out/here")
    with SyncJournalClient.of(broker.config) as client:
        assert acknowledge(client, INTENTS) == (1, False)
    assert broker.content("out/here") == b"ack\n"


def test_a_journal_hidden_from_the_token_does_not_count_as_deleted(broker):
    broker.create("out/here")
    claims = claims_for(Capability.APPEND, scope_of(["out/here"]), time.time(), 60)
    token = BearerToken.parse(sign(claims, Keys((Secret(b"k" * 32),))))
    with SyncJournalClient.of(replace(broker.config, auth=token)) as client:
        with pytest.raises(PermissionDenied, match=r"out/gone.* the token does not cover it"):
            acknowledge(client, INTENTS)
    assert broker.content("out/here") == b"ack\n"


class Rows(OutputStore[str]):
    """A store in memory. It rejects rows in `rejected` when they are committed."""

    def __init__(self) -> None:
        self.kept = Restored(0, Checkpoint())
        self.rejects: RejectedRow | None = None
        self.fails: CorantoError | None = None
        self.written: list[str] = []
        self.rows: list[str] = []
        self.swept: list[int] = []

    @property
    def name(self) -> str:
        return "memory"

    def raise_fence(self, shard: str) -> Restored:
        self.kept = Restored(self.kept.fence + 1, self.kept.checkpoint)
        return self.kept

    def resume(self, shard: str, fence: int) -> Checkpoint:
        return self.kept.checkpoint

    def sweep(self, shard: str, fence: int) -> None:
        self.swept.append(fence)

    def write(self, output: TableOutput, shard: str, fence: int, expected=None) -> str:
        self.written.append(str(output.table))
        return str(output.table)

    def read(self, shard: str) -> Restored | None:
        return self.kept

    def compare(self, outputs: Outputs) -> None:
        pass

    def rejection(self, outputs: Outputs, shard: str, fence: int) -> RejectedRow | None:
        return None

    def commit(self, shard: str, fence: int, written, checkpoint: Checkpoint, merged) -> None:
        if self.rejects is not None:
            raise self.rejects
        merged()
        if self.fails is not None:
            raise self.fails
        self.rows += written
        self.kept = Restored(fence, Checkpoint.from_bytes(checkpoint.to_bytes()))


class Recorder(Hooks):
    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_step(self, step: Step) -> None:
        self.steps.append(step)


def outputs(committed) -> Outputs:
    return Outputs(tables=[TableOutput(f"{committed}", None)])  # type: ignore[arg-type]


@pytest.fixture
def owner() -> Owner:
    owner = Owner("sums", "sums", outputs, Rows(), MisfitPolicy.FAIL, IdentityCheck("sums"), Recorder())
    owner.raise_fence()
    return owner


def read_of(name: str, end: int, messages: int = 3) -> Input:
    return Input(name, messages, messages, {"a/one": Source(end)}, not messages)  # type: ignore[arg-type]


def no_client():
    raise AssertionError("nothing is published")


def test_a_transaction_runs_its_steps_and_counts(owner):
    transaction = ConsumerTransaction(owner, replace(owner.progress, offsets={"a/one": 0}), no_client)
    staged = []
    transaction.run(read_of("first", 10), lambda read: staged.append(list(owner.hooks.steps)))
    steps = [Step.STAGED, Step.PUBLISHED, Step.MERGED, Step.COMMITTED, Step.ACKNOWLEDGED]
    assert owner.hooks.steps == steps
    assert staged == [steps[:2]]
    report = transaction.report
    assert (report.transactions, report.messages, report.records_read, report.offsets) == (1, 3, 3, {"a/one": 10})
    assert owner.progress == report
    assert owner.store.rows == ["first"]
    assert owner.commits.checkpoint.sources == {"a/one": Source(10)}


def test_an_input_without_messages_calls_no_application_and_commits_its_offsets(owner):
    ConsumerTransaction(owner, owner.progress, no_client).run(read_of("none", 5, messages=0))
    assert owner.store.written == []
    assert owner.store.kept.checkpoint.offsets == {"a/one": 5}


def test_an_attempt_after_a_failure_continues_under_the_fence_and_sweeps_its_own_rows(owner):
    owner.recover(Checkpoint(), no_client)
    owner.store.fails = SqlStoreError("the server is away")
    with pytest.raises(SqlStoreError):
        ConsumerTransaction(owner, owner.progress, no_client).run(read_of("first", 10))
    owner.store.fails = None
    assert owner.has_fence
    checkpoint = owner.raise_fence()
    assert (owner.fence, checkpoint, owner.progress.transactions) == (1, Checkpoint(), 0)
    owner.recover(checkpoint, no_client)
    assert owner.store.swept == [1, 2]
    ConsumerTransaction(owner, owner.progress, no_client).run(read_of("first", 10))
    assert owner.store.rows == ["first"]


def test_a_rejected_row_ends_a_transaction_of_expected_messages_without_a_search(owner):
    owner.store.rejects = RejectedRow("too long")
    transaction = ConsumerTransaction(owner, owner.progress, no_client)
    transaction.write_expected(outputs("expected"), None)  # type: ignore[arg-type]
    with pytest.raises(RejectedRow):
        transaction.run(read_of("expected", 10))
    assert owner.store.kept.checkpoint == Checkpoint()


def test_a_rejected_message_is_omitted_and_the_rest_commits(owner, monkeypatch):
    owner.store.rejects = RejectedRow("too long")

    def settled(read, rejections, problem):
        owner.store.rejects = None
        return replace(read, committed="settled", messages=2, misfits=1)

    monkeypatch.setattr(transaction_module, "without_rejected", settled)
    transaction = ConsumerTransaction(owner, owner.progress, no_client)
    assert transaction.run(read_of("all", 10)).committed == "settled"
    assert (owner.store.rows, transaction.report.messages, transaction.report.misfits) == (["settled"], 2, 1)


@pytest.mark.parametrize(("fails_after_merge", "appended"), [(False, b"rollback\n"), (True, b"")])
def test_published_messages_are_rolled_back_unless_the_commit_may_have_happened(
    owner, broker, monkeypatch, fails_after_merge, appended
):
    broker.create("out/one")
    published = Published({"out/one": b"ack\n"}, 1, {"out/one": b"rollback\n"})
    monkeypatch.setattr(transaction_module, "publish_journal_outputs", lambda journals, client, ids: published)
    owner.outputs = lambda committed: Outputs(journals=[JournalOutput(None, "a=b")])
    owner.store.fails = SqlStoreError("the server is away") if fails_after_merge else None

    def refuse(read: Input) -> None:
        if not fails_after_merge:
            raise SqlStoreError("before the commit")

    connect = partial(SyncJournalClient.of, broker.config)
    with pytest.raises(SqlStoreError):
        ConsumerTransaction(owner, owner.progress, connect).run(read_of("first", 10), refuse)
    assert broker.content("out/one") == appended
    owner.store.fails = None
    ConsumerTransaction(owner, owner.progress, connect).run(read_of("first", 10))
    assert broker.content("out/one") == appended + b"ack\n"


def test_a_transaction_is_one_trace_with_its_phases_and_appends(owner, broker, monkeypatch):
    broker.create("out/one")
    published = Published({"out/one": b"ack\n"}, 1, {"out/one": b"rollback\n"})
    monkeypatch.setattr(transaction_module, "publish_journal_outputs", lambda journals, client, ids: published)
    owner.outputs = lambda committed: Outputs(journals=[JournalOutput(None, "a=b")])

    def refuse(read: Input) -> None:
        raise SqlStoreError("a secret value")

    with recorded_spans() as spans:
        connect = partial(SyncJournalClient.of, broker.config)
        times = PhaseTimes(owner.name)
        times.end_phase("planning")
        with pytest.raises(SqlStoreError):
            ConsumerTransaction(owner, owner.progress, connect, times).run(read_of("first", 10), refuse)
        ConsumerTransaction(owner, owner.progress, connect).run(read_of("first", 10))
    failed, done = spans.named("transaction sums")
    assert (failed.status.status_code.name, failed.status.description) == ("ERROR", "")
    assert failed.attributes["error.type"] == "SqlStoreError"
    assert done.attributes["coranto.messages"] == 3
    for transaction, expected in (
        (failed, ["planning sums", "reading sums", "writing sums"]),
        (done, ["reading sums", "writing sums", "committing sums", "acknowledging sums"]),
    ):
        assert transaction.attributes["messaging.consumer.group.name"] == "sums"
        inside = spans.within(transaction)
        assert [span.name for span in inside if span.name.startswith("append")] == ["append out/one"]
        phases = [span for span in inside if not span.name.startswith("append")]
        assert [span.name for span in phases] == expected
        assert phases[0].start_time == transaction.start_time
        assert all(before.end_time == after.start_time for before, after in pairwise(phases))
