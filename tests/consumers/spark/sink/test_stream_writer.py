"""The writers to a stream, called as Spark does, while streams are scaled and drivers die at any step."""

from __future__ import annotations

import base64
import hashlib
import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from traceback import format_exception

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.append.service import AppendService
from coranto.errors import (
    AppendOutcomeUnknown,
    BatchChanged,
    Fenced,
    InvalidInput,
    LedgerDamaged,
    NotAllowed,
    StreamChanged,
    StreamSealed,
)
from coranto.labels import label_set
from coranto.security.tokens import BearerToken, Keys
from coranto.streams import Merge, Split, SyncStreamReader, SyncStreams, default_template, key_hash
from coranto.streams.writer.multi_key import bulk
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto_consumers.spark.session.task_errors import error_of_task
from coranto_consumers.spark.sink import stream_publishing
from coranto_consumers.spark.source.data_source import JournalDataSource

SCHEMA = StructType().add("n", IntegerType()).add("key", StringType())
QUERY = "11111111-2222-3333-4444-555555555555"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Shop:
    """A stream of two segments, with the writers of drivers and tasks."""

    def __init__(self, cluster: SyncCluster, streams: SyncStreams) -> None:
        self.client = cluster.client()
        self.streams = streams
        self.name = f"shop-{uuid.uuid4().hex[:8]}/orders"
        streams.create(self.name, 2, template=default_template(stores=[STORE_URL]))
        self.options = {"endpoint": cluster.endpoint, "stream": self.name}

    def batch_writer(self, schema=SCHEMA, **options: str):
        return pickle.loads(pickle.dumps(JournalDataSource({**self.options, **options}).writer(schema, False)))

    def query_writer(self, **options: str):
        return pickle.loads(pickle.dumps(JournalDataSource({**self.options, **options}).streamWriter(SCHEMA, False)))

    def scale(self, *changes: Split | Merge) -> None:
        self.streams.scale(self.name, changes)

    def numbers(self) -> list[int]:
        """Return all committed numbers. Check that each key's are in order, in segments that have the key."""
        stream = self.streams.describe(self.name)
        found: dict[str, list[int]] = {}
        with SyncStreamReader(self.client, self.name) as reader:
            for event in reader:
                assert key_hash(event.data["key"]) in stream.segments[event.segment].range
                found.setdefault(event.data["key"], []).append(event.data["n"])
        for key, numbers in found.items():
            assert numbers == sorted(numbers), key
        return sorted(n for numbers in found.values() for n in numbers)


@pytest.fixture
def shop(cluster: SyncCluster) -> Iterator[Shop]:
    with SyncStreams(cluster.client()) as streams:
        yield Shop(cluster, streams)


def rows(begin: int, end: int) -> pa.RecordBatch:
    numbers = list(range(begin, end))
    return pa.record_batch({"n": pa.array(numbers, pa.int32()), "key": [f"k{n % 7}" for n in numbers]})


def attempt(writer, begin: int, end: int):
    return replace(writer.write(iter([rows(begin, end)])), query=QUERY)


def test_events_go_atomically_to_the_segments_of_their_keys(shop):
    writer = shop.batch_writer()
    one, two = attempt(writer, 0, 10), attempt(writer, 10, 40)
    attempt(writer, 10, 40)  # The slower attempt of the same task.
    assert shop.numbers() == []

    writer.commit([one, two])

    assert shop.numbers() == list(range(40))
    failed = shop.batch_writer()
    failed.abort([attempt(failed, 40, 50), None])
    assert shop.numbers() == list(range(40))


CHANGES: dict[str, Sequence[Sequence[Split | Merge]]] = {
    "a split": [[Split(0, 3)]],
    "a merge": [[Merge((0, 1))]],
    "a split of both and a merge": [[Split(0), Split(1)], [Merge((3, 4))]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_events_of_segments_sealed_before_the_commit_go_to_successors(shop, change):
    first, writer = shop.batch_writer(), shop.batch_writer()
    first.commit([attempt(first, 0, 20)])
    written = [attempt(writer, 20, 50), attempt(writer, 50, 60)]
    for changes in CHANGES[change]:
        shop.scale(*changes)

    writer.commit(written)

    assert shop.numbers() == list(range(60))
    after = shop.batch_writer()
    after.commit([attempt(after, 60, 70)])
    assert shop.numbers() == list(range(70))


@pytest.mark.parametrize("change", CHANGES)
def test_a_task_continues_in_the_successors_of_segments_sealed_while_it_writes(shop, change, monkeypatch):
    monkeypatch.setattr(stream_publishing, "_APPEND_BYTES", 400)

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(0, 30)
        for number, changes in enumerate(CHANGES[change]):
            shop.scale(*changes)
            yield rows(30 + 30 * number, 60 + 30 * number)

    writer = shop.query_writer()
    written = replace(writer.write(batches()), query=QUERY)
    assert {part.journal.endswith(("00", "01")) for part in written.pending} == {True, False}
    writer.commit([written], 0)

    assert shop.numbers() == list(range(30 + 30 * len(CHANGES[change])))


class Numbered:
    """Batches with consecutive numbers, and with keys of the segments at its creation."""

    def __init__(self, shop: Shop) -> None:
        segments = shop.streams.describe(shop.name).segments.items()
        keys = [f"k{number}" for number in range(100)]
        self._keys = {name: [key for key in keys if key_hash(key) in each.range] for name, each in segments}
        self.end = 0

    def __call__(self, rows: dict[int, int]) -> pa.RecordBatch:
        """Return a batch with the given number of rows for each segment."""
        keys = [self._keys[name][n % len(self._keys[name])] for name, count in rows.items() for n in range(count)]
        begin, self.end = self.end, self.end + len(keys)
        return pa.record_batch({"n": pa.array(range(begin, self.end), pa.int32()), "key": keys})


@pytest.fixture
def answered(monkeypatch) -> None:
    """Let a task wait for the response to each append before it continues."""
    settle = stream_publishing.SegmentPublisher._settle

    def waiting(self, journal: str, *, wait: bool) -> None:
        settle(self, journal, wait=True)

    monkeypatch.setattr(stream_publishing.SegmentPublisher, "_settle", waiting)


@pytest.mark.usefixtures("answered")
def test_keys_keep_their_order_when_another_segment_reports_theirs_sealed(shop, monkeypatch):
    monkeypatch.setattr(stream_publishing, "_APPEND_BYTES", 400)
    shop.scale(Split(1))
    batch = Numbered(shop)

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch({0: 60, 2: 3, 3: 60})  # Appends to segment 2 are delayed.
        shop.scale(Split(0), Split(2), Split(3))
        yield batch({0: 60})
        yield batch({2: 60, 3: 60})
        shop.scale(Split(8), Split(9))
        yield batch({3: 60})

    writer = shop.query_writer()
    writer.commit([replace(writer.write(batches()), query=QUERY)], 0)

    assert shop.numbers() == list(range(batch.end))


@pytest.mark.usefixtures("answered")
def test_no_events_of_two_sealed_segments_merged_into_one_are_lost(shop, monkeypatch):
    monkeypatch.setattr(stream_publishing, "_APPEND_BYTES", 4000)
    monkeypatch.setattr(stream_publishing, "_HELD_BYTES", 4000)
    batch = Numbered(shop)

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch({1: 40})
        shop.scale(Merge((0, 1)))
        shop.scale(Split(2, 3))
        yield batch({0: 48})  # It goes to two of the three segments, and events of segment 1 are sent in between.

    writer = shop.query_writer()
    writer.commit([replace(writer.write(batches()), query=QUERY)], 0)

    assert shop.numbers() == list(range(batch.end))


def test_a_segment_is_sealed_again_while_its_events_are_moved(shop, monkeypatch):
    writer = shop.batch_writer()
    written = attempt(writer, 0, 40)
    shop.scale(Split(0), Split(1))
    real, left = bulk.PartMover.move, [[Merge((2, 3))], [Split(4), Split(5)]]

    async def scaling(self, part, stream):
        if left:
            await shop.streams._inner.scale(shop.name, left.pop(0))
        return await real(self, part, stream)

    monkeypatch.setattr(bulk.PartMover, "move", scaling)
    writer.commit([written])

    assert shop.numbers() == list(range(40))


def test_a_response_lost_before_a_segment_is_sealed_duplicates_nothing(shop, monkeypatch):
    """The client repeats an append after the segment was sealed, although its first attempt is in the segment."""
    real, scaling = AppendService._resolve, []
    monkeypatch.setattr(stream_publishing, "_APPEND_BYTES", 400)

    def lost(self, journal, batch, result):
        if scaling or not result.journal.endswith("0"):
            real(self, journal, batch, result)
            return
        scaling.append(threading.Thread(target=shop.scale, args=[Split(0)]))
        scaling[0].start()
        raise NotAllowed(f"append to {result.journal}: sealed")

    monkeypatch.setattr(AppendService, "_resolve", lost)
    writer = shop.batch_writer()
    written = attempt(writer, 0, 30)
    [thread] = scaling
    thread.join()
    writer.commit([written])

    assert shop.numbers() == list(range(30))


@pytest.mark.parametrize("applied", [True, False])
def test_events_of_appends_with_lost_responses_are_stored_once(shop, applied, monkeypatch):
    send, lost = JournalClient.append, []
    monkeypatch.setattr(stream_publishing, "_APPEND_BYTES", 400)

    async def losing(self, journal, content, **options):
        if lost.count(journal) < 3 and b'"n":' in b"".join(content if isinstance(content, list) else [content]):
            lost.append(journal)
            if applied:
                await send(self, journal, content, **options)
            raise AppendOutcomeUnknown("the answer is lost")
        return await send(self, journal, content, **options)

    monkeypatch.setattr(JournalClient, "append", losing)
    writer = shop.query_writer()
    written = replace(writer.write(iter([rows(at, at + 30) for at in range(0, 120, 30)])), query=QUERY)
    shop.scale(Split(1))
    writer.commit([written], 0)

    assert len(set(lost)) >= 2
    assert shop.numbers() == list(range(120))


class Died(BaseException):
    """The driver died."""


def dies(*arguments, **options):
    raise Died


STEPS = {
    "before the decision": ("_decide", lambda shop: None),
    "after the decision": ("_acknowledge", lambda shop: None),
    "after the decision, and the stream is scaled": ("_acknowledge", lambda shop: shop.scale(Split(0), Split(1))),
}


@pytest.mark.parametrize("step", STEPS)
def test_the_batch_of_a_driver_that_dies_is_completed_once(shop, step, monkeypatch):
    method, then = STEPS[step]
    writer = shop.query_writer()
    first = attempt(writer, 0, 20)
    with monkeypatch.context() as patch:
        patch.setattr(bulk.BulkCommitter, method, dies)
        with pytest.raises(Died):
            writer.commit([first], 0)
    writer.abort([first], 0)  # As Spark does after any failed commit.
    then(shop)

    # The batch is repeated, with other rows. Those that are decided count.
    again = shop.query_writer()
    other = attempt(again, 100, 103)
    if method == "_decide":
        again.commit([other], 0)
    else:
        with pytest.raises(
            BatchChanged, match=r"batch 0 of .* with other content.*: 3 for |failOnDataLoss=false"
        ) as no:
            again.commit([other], 0)
        error = error_of_task(RuntimeError("".join(format_exception(no.value))))
        assert isinstance(error, BatchChanged), "Spark forwards only the text of the traceback"
        assert "failOnDataLoss=false" in str(error)
        again.commit([attempt(again, 7, 20), attempt(again, 0, 7)], 0)
        accepting = shop.query_writer(failOnDataLoss="false")
        accepting.commit([attempt(accepting, 100, 103)], 0)
    wanted = list(range(100, 103)) if method == "_decide" else list(range(20))
    assert shop.numbers() == wanted

    later = shop.query_writer()
    later.commit([attempt(later, 200, 220)], 1)
    assert shop.numbers() == [*wanted, *range(200, 220)]


def test_with_two_drivers_on_one_checkpoint_the_outdated_one_is_fenced(shop):
    one, two = shop.query_writer(), shop.query_writer()
    mine, theirs = attempt(one, 0, 10), attempt(two, 0, 10)
    one.commit([mine], 0)
    two.commit([theirs], 0)
    two.commit([attempt(two, 10, 20)], 1)
    with pytest.raises(Fenced, match=r"batch 0 of .* is old"):
        one.commit([attempt(one, 0, 10)], 0)
    restored = shop.query_writer()  # Its batch is planned when a later one is decided.
    with pytest.raises(
        BatchChanged, match=r"batch 0 of .* is 2 batches older than the last written one.*: 10 for |now"
    ):
        restored.commit([replace(attempt(restored, 0, 10), planned_after=restored._last_batches[QUERY])], 0)
    two.commit([replace(two.write(iter(())), query=QUERY)], 2)  # An empty batch is decided, too.
    two.commit([attempt(two, 20, 30)], 3)

    assert shop.numbers() == list(range(30))


def test_a_query_unknown_to_the_stream_is_refused_unless_loss_is_accepted(shop):
    writer = shop.query_writer()
    with pytest.raises(InvalidInput, match="knows no batch of this writer, whose next one is 7"):
        writer.commit([attempt(writer, 0, 10)], 7)
    assert shop.numbers() == []
    writer = shop.query_writer(acceptLoss="true")
    writer.commit([attempt(writer, 0, 10)], 7)
    assert shop.numbers() == list(range(10))


def test_events_without_kept_keys_are_all_refused_when_their_segment_is_sealed(shop, monkeypatch):
    monkeypatch.setattr(stream_publishing, "KEPT_PLACES", 15)
    writer = shop.query_writer()
    written = attempt(writer, 0, 20)
    shop.scale(Split(0))
    with pytest.raises(StreamChanged, match="the keys of so many events are not kept: nothing is written"):
        writer.commit([written], 0)
    assert shop.numbers() == []
    again = shop.query_writer()
    again.commit([attempt(again, 0, 20)], 0)
    assert shop.numbers() == list(range(20))


def test_a_sealed_stream_refuses_writes(shop):
    writer = shop.batch_writer()
    written = attempt(writer, 0, 10)
    shop.streams.seal(shop.name)
    with pytest.raises(StreamSealed):
        writer.commit([written])
    with pytest.raises(StreamSealed):
        shop.batch_writer()
    assert shop.numbers() == []


def refused() -> Iterator[pa.RecordBatch]:
    pytest.fail("the rows of a write that is done are read")
    yield


def test_a_repeated_named_write_adds_nothing_after_other_writes(shop, monkeypatch):
    ledger = f"ledgers/{uuid.uuid4().hex[:8]}"

    def job(day: int):
        return shop.batch_writer(writerId=f"day/{day}", ledger=ledger)

    slow = job(0)
    overtaken = attempt(slow, 0, 10)
    for day in range(3):
        writer = job(day)
        writer.commit([attempt(writer, 10 * day, 10 * day + 10)])
    slow.commit([overtaken])
    assert shop.numbers() == list(range(30))

    for day in (2, 0, 1):
        again = job(day)
        again.commit([again.write(refused())])
    assert shop.numbers() == list(range(30))

    for method, day in (("_decide", 3), ("_acknowledge", 4)):
        writer = job(day)
        written = attempt(writer, 10 * day, 10 * day + 10)
        with monkeypatch.context() as patch:
            patch.setattr(bulk.BulkCommitter, method, dies)
            with pytest.raises(Died):
                writer.commit([written])
        again = job(day)
        again.commit([attempt(again, 10 * day, 10 * day + 10)])
        assert shop.numbers() == list(range(10 * day + 10))
    registers = shop.client.append(f"{shop.name}/transactions", b"").registers
    assert sum(each.name.startswith("coranto.dev/batch/") for each in registers.labels) == 1


def test_a_named_write_reads_the_ledger_once_unless_another_intervenes(shop, monkeypatch):
    ledger, offsets = f"ledgers/{uuid.uuid4().hex[:8]}", []
    read = SyncJournalClient.read

    def noting(self, name, offset=0, **options):
        if name == ledger:
            offsets.append(offset)
        return read(self, name, offset, **options)

    def job(day: int):
        return shop.batch_writer(writerId=f"day/{day}", ledger=ledger)

    for day in range(3):
        writer = job(day)
        writer.commit([attempt(writer, 10 * day, 10 * day + 10)])
    monkeypatch.setattr(SyncJournalClient, "read", noting)
    writer, failed = job(3), job(3)
    written, lost = attempt(writer, 30, 40), attempt(failed, 30, 40)
    assert offsets.count(0) == 2
    with monkeypatch.context() as patch:
        patch.setattr(bulk.BulkCommitter, "_decide", dies)
        with pytest.raises(Died):
            failed.commit([lost])  # It has recorded the write before.
    writer.commit([written])
    assert offsets.count(0) == 2, "earlier content is not read again"
    slow, other = job(5), job(4)
    late = attempt(slow, 50, 60)
    other.commit([attempt(other, 40, 50)])
    slow.commit([late])
    assert shop.numbers() == list(range(60))
    for day in range(6):
        again = job(day)
        again.commit([again.write(refused())])
    assert shop.numbers() == list(range(60))


def test_a_named_write_is_refused_if_the_stream_or_the_ledger_lost_the_names(shop):
    ledger = f"ledgers/{uuid.uuid4().hex[:8]}"
    begun = shop.batch_writer(writerId="day/0", ledger=ledger)  # And its driver dies: nothing is decided.

    def job(day: int, **options: str):
        return shop.batch_writer(writerId=f"day/{day}", **{"ledger": ledger, **options})

    one = job(0)
    late = job(5)
    written = attempt(late, 50, 60)
    one.commit([attempt(one, 0, 10)])
    begun.commit([attempt(begun, 0, 10)])
    assert shop.numbers() == list(range(10))

    journal = f"{shop.name}/transactions"
    registers = shop.client.append(journal, b"").registers
    shop.client.append(journal, b'{"lost":1}\n', subtract_registers=registers)  # As if all its brokers were lost.
    for day in (0, 1):
        with pytest.raises(
            InvalidInput, match=f"{ledger} has named writes to stream {shop.name}, but the stream has none"
        ):
            job(day)
    with pytest.raises(InvalidInput, match="knows no batch of this writer"):
        late.commit([written])
    again = job(1, acceptLoss="true")
    again.commit([attempt(again, 10, 20)])
    after = job(1)
    after.commit([after.write(refused())])
    assert shop.numbers() == list(range(20))

    # The register exists, and the ledger was recreated.
    name = f"coranto.dev/batch/jobs-{hashlib.sha256(f'{ledger}-2'.encode()).hexdigest()[:16]}"
    shop.client.append(journal, b'{"known":1}\n', union_registers=label_set({name: "5.ab.done"}))
    with pytest.raises(
        LedgerDamaged, match=f"has named writes, but {ledger}-2 does not have their names: was it recreated"
    ):
        job(0, ledger=f"{ledger}-2")


def test_the_ledger_is_created_with_keys_that_tasks_do_not_get(shop, monkeypatch):
    made, apply = [], JournalClient.apply

    async def noting(self, changes):
        made.extend((change.upsert.name, self.config.auth) for change in changes)
        return await apply(self, changes)

    monkeypatch.setattr(JournalClient, "apply", noting)
    ledger = f"ledgers/{uuid.uuid4().hex[:8]}"
    secret = base64.b64encode(b"k" * 32).decode()
    writer = shop.batch_writer(writerId="day/0", ledger=ledger, authSecret=secret)
    assert [name for name, _ in made] == [ledger]
    assert isinstance(made[0][1], Keys), "a task's token does not permit to create a journal"
    assert isinstance(writer._options.client.auth, BearerToken)


@pytest.mark.parametrize(
    ("options", "schema", "problem"),
    [
        ({"ledger": "a/b"}, SCHEMA, "option ledger: a stream itself records"),
        ({"mapping": "modulo"}, SCHEMA, "option mapping: keys are mapped to segments"),
        ({"writerId": "x"}, SCHEMA, "option ledger: is required"),
        ({"writerId": "x", "ledger": "{stream}/x"}, SCHEMA, "option ledger: is among the stream's own journals"),
        ({"subscribe": "a/b"}, SCHEMA, "exactly one of"),
        ({"keyColumn": "id"}, SCHEMA, "no column id with the messages' routing keys"),
        ({}, StructType().add("key", BinaryType()), "the key key is binary: cast it to STRING"),
        (
            {},
            StructType().add("key", StringType()).add("journal", StringType()).add("value", StringType()),
            "leave the column journal out",
        ),
    ],
)
def test_options_that_streams_do_not_support_are_refused(shop, options, schema, problem):
    with pytest.raises(InvalidInput, match=problem):
        shop.batch_writer(schema, **{name: value.format(stream=shop.name) for name, value in options.items()})


def test_a_row_without_a_key_ends_the_write(shop):
    writer = shop.batch_writer()
    batch = pa.record_batch({"n": pa.array([1], pa.int32()), "key": pa.array([None], pa.string())})
    with pytest.raises(InvalidInput, match="a row has no routing key"):
        writer.write(iter([batch]))
