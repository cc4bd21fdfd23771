"""The writers, called as Spark does, with failed and duplicate attempts and drivers that die at any step."""

from __future__ import annotations

import base64
import contextlib
import pickle
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.types import IntegerType, StringType, StructType
from structlog.testing import capture_logs

from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.errors import BatchChanged, Fenced, InvalidInput, JournalNotFound, LedgerDamaged, NotAllowed
from coranto.messages import JsonLines
from coranto.publication import batch_ledger
from coranto.publication import ledger as ledgers
from coranto.publication.publish import append_intents
from coranto.security.tokens import BearerToken, Capability, Keys, Secret, claims_for, scope_of, sign, verify
from coranto.testing import SyncCluster
from coranto_consumers.spark.sink import producer_ids, publishing
from coranto_consumers.spark.sink import writer as writers
from coranto_consumers.spark.source.data_source import JournalDataSource

SCHEMA = StructType().add("n", IntegerType()).add("key", StringType())
KEY = b"k" * 32
KEYS = Keys((Secret(KEY),))
QUERY = "11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Job:
    """A group of journals, with the writers of drivers and tasks."""

    def __init__(self, client: SyncJournalClient, create: Callable[[str], object]) -> None:
        self.client = client
        folder = f"job/{uuid.uuid4().hex[:8]}"
        self.journals = [f"{folder}/part-{n}" for n in range(2)]
        for journal in self.journals:
            create(journal)
        self.options = {
            "endpoint": client.config.endpoint,
            "selector": f"name:prefix={folder}/",
            "ledger": f"ledgers/{folder.rpartition('/')[2]}",
        }

    def batch_writer(self, **options: str):
        return pickle.loads(pickle.dumps(JournalDataSource({**self.options, **options}).writer(SCHEMA, False)))

    def stream_writer(self, **options: str):
        return pickle.loads(pickle.dumps(JournalDataSource({**self.options, **options}).streamWriter(SCHEMA, False)))

    def numbers(self) -> list[int]:
        found = [
            envelope.message["n"]
            for journal in self.journals
            for envelope in committed_messages(self.client, journal, JsonLines())
        ]
        return sorted(found)


@pytest.fixture
def job(cluster: SyncCluster) -> Job:
    return Job(cluster.client(), cluster.create)


def rows(begin: int, end: int) -> Iterator[pa.RecordBatch]:
    numbers = list(range(begin, end))
    yield pa.record_batch({"n": pa.array(numbers, pa.int32()), "key": [f"k{n}" for n in numbers]})


def attempt(writer, begin: int, end: int, query: str = QUERY):
    return replace(writer.write(rows(begin, end)), query=query)


def test_options_that_spark_adds_are_accepted_by_sources_and_sinks(job):
    spark = {"queryName": "copies", "checkpointLocation": "/c", "path": "/p"}
    assert job.batch_writer(**spark)
    assert job.stream_writer(**spark)
    given = {name: job.options[name] for name in ("endpoint", "selector")}
    source = JournalDataSource({**given, **spark})
    assert source.reader(source.schema()).partitions() == []
    assert source.streamReader(source.schema())
    with pytest.raises(InvalidInput, match="option queryNaem: there is no such option"):
        job.stream_writer(queryNaem="x")


def test_only_attempts_reported_by_spark_count(job):
    writer = job.batch_writer()
    one = writer.write(rows(0, 10))
    writer.write(rows(0, 10))  # The slower attempt of the same task.
    two = writer.write(rows(10, 20))
    assert job.numbers() == []

    writer.commit([one, two])
    assert job.numbers() == list(range(20))
    job.batch_writer().commit([])
    assert job.numbers() == list(range(20))


def test_an_attempt_whose_rows_fail_shows_nothing(job):
    def failing() -> Iterator[pa.RecordBatch]:
        yield from rows(0, 10)
        raise RuntimeError("the task fails")

    writer = job.batch_writer()
    done = writer.write(rows(10, 20))
    with pytest.raises(RuntimeError, match="the task fails"):
        writer.write(failing())
    writer.abort([done, None])

    assert job.numbers() == []
    other = job.batch_writer()
    other.commit([other.write(rows(20, 30))])
    assert job.numbers() == list(range(20, 30))


class Died(BaseException):
    """The driver died."""


def dies(*arguments, **options):
    raise Died


STEPS = {
    "before the decision": (writers.BatchLedger, "decide"),
    "after the decision": (writers, "append_intents"),
    "after the acknowledgements": (writers.BatchLedger, "acknowledge"),
}


@pytest.mark.parametrize("step", STEPS)
def test_the_batch_of_a_driver_that_dies_is_completed_once(job, step, monkeypatch):
    writer = job.stream_writer()
    first = attempt(writer, 0, 10)
    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step], dies)
        with pytest.raises(Died):
            writer.commit([first], 0)
    writer.abort([first], 0)  # As Spark does after any failed commit.

    # Other tasks repeat the batch.
    again = job.stream_writer()
    again.commit([attempt(again, 4, 10), attempt(again, 0, 4)], 0)
    assert job.numbers() == list(range(10))

    later = job.stream_writer()
    later.commit([attempt(later, 10, 20)], 1)
    assert job.numbers() == list(range(20))


@pytest.mark.parametrize("step", [None, *STEPS])
def test_a_batch_with_other_rows_than_the_written_one_is_an_error(job, step, monkeypatch):
    writer = job.stream_writer()
    first = attempt(writer, 0, 10)
    with monkeypatch.context() as patch, contextlib.suppress(Died):
        if step is not None:
            patch.setattr(*STEPS[step], dies)
        writer.commit([first], 0)
    again = job.stream_writer()
    if step == "before the decision":  # Then nothing is written, and any rows are accepted.
        again.commit([attempt(again, 100, 103)], 0)
        assert job.numbers() == list(range(100, 103))
        return
    more = [attempt(again, 0, 6), attempt(again, 6, 13)]
    with pytest.raises(BatchChanged, match=r"batch 0 of .* with 10 messages .*failOnDataLoss=false"):
        again.commit(more, 0)
    again.abort(more, 0)
    assert job.numbers() == list(range(10)), "written messages are acknowledged, and the rest rolled back"

    accepting = job.stream_writer(failOnDataLoss="false")
    with capture_logs() as logs:
        accepting.commit([attempt(accepting, 0, 13)], 0)
    [differs] = [each for each in logs if each["event"] == "sink.batch_differs"]
    assert sum(differs["lost"].values()) == 13
    accepting.commit([attempt(accepting, 13, 15)], 1)
    assert job.numbers() == [*range(10), 13, 14]


def test_a_batch_of_an_older_version_counts_as_the_same(job, monkeypatch):
    writer = job.stream_writer()
    with monkeypatch.context() as patch:
        patch.setattr(batch_ledger, "content_register", lambda *about: {})
        writer.commit([attempt(writer, 0, 10)], 0)
    writer.commit([attempt(writer, 0, 13)], 0)
    writer.commit([attempt(writer, 13, 15)], 1)
    with pytest.raises(BatchChanged):
        writer.commit([attempt(writer, 13, 16)], 1)
    assert job.numbers() == [*range(10), 13, 14]


def test_an_unacknowledged_batch_is_completed_by_the_next_one(job, monkeypatch):
    writer = job.stream_writer()
    with monkeypatch.context() as patch:
        patch.setattr(writers, "append_intents", dies)
        with pytest.raises(Died):
            writer.commit([attempt(writer, 0, 10)], 0)
    writer.commit([attempt(writer, 10, 20)], 1)

    assert job.numbers() == list(range(20))


def test_a_decided_batch_write_is_completed_by_any_other_write(job, monkeypatch):
    writer = job.batch_writer(writerId="nightly")
    with monkeypatch.context() as patch:
        patch.setattr(writers, "finish_decision", dies)
        with pytest.raises(Died):
            writer.commit([writer.write(rows(0, 10))])
    assert job.numbers() == []

    job.batch_writer()
    assert job.numbers() == list(range(10))
    again = job.batch_writer(writerId="nightly")
    again.commit([again.write(rows(50, 60))])
    assert job.numbers() == list(range(10))


def test_a_decision_of_another_job_fails_no_write_and_is_completed_later(cluster, monkeypatch):
    one, other = (Job(cluster.client(), cluster.create) for _ in range(2))
    other.options |= {"ledger": one.options["ledger"], "authSecret": base64.b64encode(KEY).decode()}
    real, read_only = SyncJournalClient.append, set(one.journals)

    def like_a_broker_with_keys(self, journal, content, **options):
        auth = self.config.auth
        if isinstance(auth, BearerToken) and not verify(auth.token.reveal(), KEYS, time.time()).covers(journal):
            raise JournalNotFound(journal)  # A journal out of scope looks like one that does not exist.
        if journal in read_only and content:
            raise NotAllowed(journal)
        return real(self, journal, content, **options)

    read_only.clear()
    mine, theirs = one.batch_writer(writerId="one"), other.batch_writer(writerId="other")
    monkeypatch.setattr(SyncJournalClient, "append", like_a_broker_with_keys)
    with monkeypatch.context() as patch:
        patch.setattr(writers, "finish_decision", dies)
        with pytest.raises(Died):
            mine.commit([mine.write(rows(0, 10))])
    theirs.commit([theirs.write(rows(0, 10))])
    assert (one.numbers(), other.numbers()) == ([], list(range(10)))

    read_only.update(one.journals)
    with capture_logs() as logs:
        theirs = other.batch_writer(writerId="other/2")
    assert [(each["event"], each["writer_id"]) for each in logs] == [("publication.not_finished", "one")]
    theirs.commit([theirs.write(rows(10, 20))])
    assert other.numbers() == list(range(20))
    with pytest.raises(NotAllowed):
        one.batch_writer(writerId="one")

    read_only.clear()
    scope = scope_of([*other.journals, other.options["ledger"]])
    limited = sign(claims_for(Capability.ALL, scope, time.time(), 600), KEYS)
    keys = other.options.pop("authSecret")
    with capture_logs() as logs:
        other.batch_writer(authToken=limited)
    other.options["authSecret"] = keys
    assert [(each["event"], "does not cover it" in each["reason"]) for each in logs] == [
        ("publication.not_finished", True)
    ]
    assert one.numbers() == []
    other.batch_writer()
    assert one.numbers() == list(range(10))


def test_with_two_drivers_on_one_checkpoint_the_outdated_one_is_fenced(job):
    one, two = job.stream_writer(), job.stream_writer()
    mine, theirs = attempt(one, 0, 10), attempt(two, 0, 10)
    one.commit([mine], 0)
    two.commit([theirs], 0)
    assert job.numbers() == list(range(10))

    two.commit([attempt(two, 10, 20)], 1)
    with pytest.raises(Fenced, match=r"batch 0 of .* is old"):
        one.commit([attempt(one, 0, 10)], 0)
    restored = job.stream_writer()  # Its batch is planned when a later one is decided.
    with pytest.raises(
        BatchChanged, match=r"batch 0 of .* is 2 batches older than the last written one.*: 10 for |now"
    ):
        restored.commit([replace(attempt(restored, 0, 10), planned_after=restored._last_batches[QUERY])], 0)
    other = job.stream_writer()
    other.commit([attempt(other, 50, 60, "other-query")], 0)
    assert job.numbers() == [*range(20), *range(50, 60)]


def test_tasks_reuse_ids_once_no_other_process_may_acknowledge_them(job, tmp_path, monkeypatch):
    monkeypatch.setattr(producer_ids, "executor_folder", lambda: tmp_path)
    monkeypatch.setattr(publishing, "executor_folder", lambda: tmp_path)
    run = "run-1"
    monkeypatch.setattr(writers, "run_of_task", lambda: run)
    used: list[set[bytes]] = []

    def write(batch: int) -> None:
        writer = job.stream_writer()
        done = [attempt(writer, 20 * batch, 20 * batch + 10), attempt(writer, 20 * batch + 10, 20 * batch + 20)]
        attempt(writer, 0, 20)  # The slower attempt of a task.
        writer.commit(done, batch)
        used.append({each.pending.producer for each in done})

    write(0)
    write(1)
    assert used[0] == used[1]
    with monkeypatch.context() as patch:
        patch.setattr(writers, "append_intents", lambda *both: append_intents(*both) or True)
        write(2)
    write(3)
    assert used[1] == used[2]
    assert used[3].isdisjoint(used[2]), "an acknowledgement may be repeated"

    def taken_over(client, decision):
        other = job.stream_writer()
        with pytest.raises(BatchChanged):  # It has other rows, and has acknowledged the decided ones.
            other.commit([attempt(other, 0, 5)], 4)
        return append_intents(client, decision)

    with monkeypatch.context() as patch:
        patch.setattr(writers, "append_intents", taken_over)
        write(4)
    write(5)
    assert used[4] == used[3]
    assert used[5].isdisjoint(used[4]), "another process may be slow to acknowledge them"
    run = "run-2"
    write(6)
    assert used[6].isdisjoint(used[5])
    assert job.numbers() == list(range(140))


@pytest.fixture
def job_with_retention(broker, tmp_path):
    """A job, and a function that imitates retention: it removes all but the last record of the ledger."""
    job = Job(SyncJournalClient.of(broker.config), broker.create)
    broker.create(job.options["ledger"])

    def expire() -> None:
        """Let another query write, and drop older content of the ledger."""
        journal = broker.fake.journals[job.options["ledger"]]
        journal.roll(tmp_path)
        other = job.stream_writer()
        other.commit([replace(other.write(iter(())), query="other-query")], 0)
        end = journal.roll(tmp_path).begin
        journal.drop_before(end)

    with job.client:
        yield job, expire


def test_a_query_continues_after_the_retention_of_its_ledger(job_with_retention):
    job, expire = job_with_retention
    writer = job.stream_writer()
    writer.commit([attempt(writer, 0, 10)], 0)
    expire()

    again = job.stream_writer()
    again.commit([attempt(again, 0, 10)], 0)
    assert job.numbers() == list(range(10)), "its last batch was repeated"
    again.commit([attempt(again, 10, 20)], 1)
    assert job.numbers() == list(range(20))


@pytest.mark.parametrize("batch", [0, 1])
def test_the_error_of_a_query_interrupted_for_too_long_says_how_to_fix_it(job_with_retention, monkeypatch, batch):
    job, expire = job_with_retention
    writer = job.stream_writer()
    with monkeypatch.context() as patch:
        patch.setattr(writers, "append_intents", dies)
        with pytest.raises(Died):
            writer.commit([attempt(writer, 0, 10)], 0)
    expire()

    again = job.stream_writer()
    with pytest.raises(LedgerDamaged, match=r"retention is shorter .* \(accept_loss; in Spark acceptLoss=true\)"):
        again.commit([attempt(again, 0, 10)], batch)
    assert job.numbers() == []
    again = job.stream_writer(acceptLoss="true")
    again.commit([attempt(again, 0, 10)], batch)
    assert job.numbers() == list(range(10))
    again = job.stream_writer()
    again.commit([attempt(again, 10, 20)], batch + 1)
    assert job.numbers() == list(range(20))


def test_a_batch_write_continues_after_ledger_retention_once_the_loss_is_accepted(job_with_retention):
    job, expire = job_with_retention
    writer = job.batch_writer(writerId="nightly")
    writer.commit([writer.write(rows(0, 10))])
    expire()

    with pytest.raises(LedgerDamaged, match="has lost content"):
        job.batch_writer(writerId="nightly/2")
    writer = job.batch_writer(writerId="nightly/2", acceptLoss="true")
    writer.commit([writer.write(rows(10, 20))])
    assert job.numbers() == list(range(20))


def test_an_empty_batch_is_decided_too(job):
    writer = job.stream_writer()
    writer.commit([replace(writer.write(iter(())), query=QUERY)], 0)
    writer.commit([attempt(writer, 0, 5)], 1)

    assert job.numbers() == list(range(5))


def test_read_only_journals_do_not_block_acknowledgements_of_others(job, monkeypatch):
    writer = job.stream_writer(mapping="modulo")  # Each journal gets rows, for any names.
    written = attempt(writer, 0, 20)
    real = type(job.client).append

    def refusing(self, journal, content, **options):
        if journal == job.journals[0] and content:
            raise InvalidInput("read-only")
        return real(self, journal, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(type(job.client), "append", refusing)
        with pytest.raises(InvalidInput, match="read-only"):
            writer.commit([written], 0)
    assert 0 < len(job.numbers()) < 20
    again = job.stream_writer(mapping="modulo")
    again.commit([attempt(again, 0, 20)], 0)
    assert job.numbers() == list(range(20))


def reads_of(monkeypatch: pytest.MonkeyPatch, journal: str) -> list[int]:
    """Return a list that gets the offset of each read of a journal."""
    offsets: list[int] = []
    read = SyncJournalClient.read

    def noting(self, name, offset=0, **options):
        if name == journal:
            offsets.append(offset)
        return read(self, name, offset, **options)

    monkeypatch.setattr(SyncJournalClient, "read", noting)
    return offsets


def test_a_write_reads_the_ledger_once_and_then_only_appends_of_others(job, monkeypatch):
    first = job.batch_writer()
    first.commit([first.write(rows(0, 10))])
    offsets, head = reads_of(monkeypatch, job.options["ledger"]), job.client.head(job.options["ledger"])

    writer = job.batch_writer(writerId="mine")
    assert offsets == [0]
    written = writer.write(rows(10, 20))
    other = job.batch_writer()
    other.commit([other.write(rows(20, 30))])
    del offsets[:]
    writer.commit([written])
    assert min(offsets) == head, "earlier content is not read again"
    assert job.numbers() == list(range(30))


def test_a_zombie_that_publishes_during_its_successors_write_wins_without_duplicates(job):
    zombie, successor = job.batch_writer(writerId="mine"), job.batch_writer(writerId="mine")
    late = successor.write(rows(0, 10))
    zombie.commit([zombie.write(rows(0, 10))])
    successor.commit([late])
    assert job.numbers() == list(range(10))
    again = job.batch_writer(writerId="mine")
    again.commit([again.write(rows(0, 10))])
    assert job.numbers() == list(range(10))


def test_a_summary_replaces_records_removed_by_retention(job_with_retention, broker, tmp_path, monkeypatch):
    monkeypatch.setattr(ledgers, "SUMMARIZED_BYTES", 1)
    job, expire = job_with_retention
    ledger = broker.fake.journals[job.options["ledger"]]
    writer = job.batch_writer(writerId="nightly")
    writer.commit([writer.write(rows(0, 10))])
    end_of_records = ledger.roll(tmp_path).end
    begun = job.batch_writer(writerId="nightly/2")  # It appends a summary.
    written = begun.write(rows(10, 20))
    ledger.roll(tmp_path)
    ledger.drop_before(end_of_records)

    begun.commit([written])
    again = job.batch_writer(writerId="nightly")
    again.commit([again.write(rows(0, 10))])
    assert job.numbers() == list(range(20))

    expire()  # The summary is removed, too.
    with pytest.raises(LedgerDamaged, match="has lost content"):
        job.batch_writer(writerId="nightly/3")
    writer = job.batch_writer(writerId="nightly/3", acceptLoss="true")
    writer.commit([writer.write(rows(20, 30))])
    assert job.numbers() == list(range(30))
