"""Content lost before it was read is an error, or is skipped and reported exactly."""

import json
import os
import time

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, select
from structlog.testing import capture_logs

from coranto.cli import main
from coranto.client import SyncJournalClient
from coranto.errors import CorruptData, InvalidInput, JournalRecreated, OffsetJump, Unavailable
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, ProducerId, new_producer_id
from coranto_consumers.journals.losses import (
    Holes,
    LostContent,
    PartlyLost,
    continue_after,
    loss_by_id,
    loss_by_offsets,
    loss_from_error,
)
from coranto_consumers.spark import Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.options.source_options import SourceOptions
from coranto_consumers.spark.source.planning import plan_read
from coranto_consumers.stores import SqlStore

JOURNAL = "losses/one"
A, B, C = (ProducerId(bytes([n] * 6)) for n in (1, 2, 3))


def test_positions_before_the_content_or_after_its_end_are_a_loss():
    assert loss_by_offsets("j", 5, 0, 10) is None
    assert loss_by_offsets("j", 10, 10, 10) is None
    assert loss_by_offsets("j", 5, 8, 10) == LostContent("j", 5, 8)
    assert loss_by_offsets("j", 11, 0, 10) == LostContent("j", 11, 10, recreated=True)
    assert loss_by_offsets("j", 11, 11, 11, is_end=False) is None
    with pytest.raises(Unavailable, match="is processed through 11, and its broker has content through 10"):
        loss_by_offsets("j", 11, 0, 10, is_end=False)
    assert isinstance(LostContent("j", 5, 8).error(""), OffsetJump)
    assert "processed through 11" in str(LostContent("j", 11, 10, recreated=True).error("x"))


def test_a_source_continues_after_lost_content_with_the_rest_of_pending_transactions():
    source = Source(100, {A: ProducerState(7, 20), B: ProducerState(8, 60), C: ProducerState(9)})

    behind, partly = continue_after(source, LostContent("j", 0, 50))
    assert behind == Source(100, {A: ProducerState(7, 50), B: ProducerState(8, 60), C: ProducerState(9)})
    assert partly == [PartlyLost("j", A, 20, 50)]

    behind, partly = continue_after(source, LostContent("j", 100, 150))
    assert (behind, partly) == (Source(150, source.producers), []), "pending messages before it are still there"

    behind, partly = continue_after(source, LostContent("j", 0, 150))
    assert behind == Source(150, {A: ProducerState(7), B: ProducerState(8), C: ProducerState(9)})
    assert partly == [PartlyLost("j", A, 20, 100), PartlyLost("j", B, 60, 100)]

    lost = [PartlyLost("j", A, 20, 100), PartlyLost("j", B, 60, 100)]
    assert continue_after(source, LostContent("j", 100, 30, recreated=True), 10) == (Source(10), lost)


def test_a_source_is_of_another_journal_only_if_both_ids_are_known():
    source = Source(100, journal_id="one")
    lost = loss_by_id(source, "j", 300, "two")
    assert lost == LostContent("j", 100, 300, recreated=True, known="one", found="two")
    assert isinstance(lost.error("Do so."), JournalRecreated)
    assert str(lost.error("Do so.")).endswith("Do so.")
    assert loss_from_error(lost.error("")) == lost
    for before, found in ((source, "one"), (source, ""), (Source(100), "two"), (Source(0, journal_id="one"), "two")):
        assert loss_by_id(before, "j", 300, found) is None


def test_content_before_a_gap_is_read_and_the_gap_skipped_once():
    holes, sources = Holes(), {"j": Source(10), "k": Source(10)}
    hole = LostContent("j", 30, 40)
    holes.record(hole)
    assert holes.ends({"j": 100, "k": 100}) == {"j": 30, "k": 100}
    assert holes.pop_reached(sources) == []
    assert holes.is_blocked("k", 10)
    assert not holes.is_blocked("j", 25), "the line that began at 25 has lost its end"
    assert holes.pop_reached({"j": Source(25)}) == [LostContent("j", 25, 40)]
    assert holes.ends({"j": 100}) == {"j": 100}
    with pytest.raises(OffsetJump):
        holes.record(hole)


ROWS = Table("rows", MetaData(), Column("n", BigInteger, primary_key=True))


class Numbers:
    name = "numbers"
    sources = f"name={JOURNAL}"
    value_schema = "n BIGINT"

    def outputs(self, committed):
        return Outputs(tables=[TableOutput(ROWS, committed.select("n"))])


class World:
    """A journal with fragments that a test adds and removes."""

    def __init__(self, broker, folder) -> None:
        self.broker = broker
        self.folder = folder
        self.fake = broker.fake.journals[JOURNAL]

    def publisher(self) -> SyncPublisher:
        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        return SyncPublisher(self.broker.write, producer=producer, clock=clock, framing=JsonLines())

    def publish(self, *numbers: int) -> int:
        """Publish immediately committed numbers as a fragment, and return its end."""
        publisher = self.publisher()
        for n in numbers:
            publisher.publish(JOURNAL, {"n": n})
        publisher.flush()
        return self.store()

    def store(self) -> int:
        """Complete a fragment, and return its end."""
        return self.fake.roll(self.folder).end

    def lose(self, begin: int, end: int) -> None:
        self.fake.stored = [each for each in self.fake.stored if not begin <= each.fragment.begin < end]


@pytest.fixture
def world(broker, tmp_path) -> World:
    broker.create(JOURNAL)
    return World(broker, tmp_path)


@pytest.fixture
def run(request, world, tmp_path):
    def start(**options):
        url = f"sqlite:///{tmp_path}/store.db"
        spark = lambda: request.getfixturevalue("spark")  # noqa: E731 - only for runs that read
        with capture_logs() as logs:
            consumer = SparkConsumer(Numbers(), world.broker.config, url, spark, ConsumerOptions(**options))
            report = consumer.run_until_caught_up()
        with SqlStore(url).engine.connect() as connection:
            rows = sorted(row.n for row in connection.execute(select(ROWS)))
        return report, rows, [log for log in logs if "lost" in log["event"]]

    return start


@pytest.mark.integration
def test_content_removed_by_retention_before_it_was_read_is_reported(world, run):
    first = world.publish(1, 2)
    run()
    world.publish(3)
    third = world.publish(4)
    world.lose(0, third)
    world.publish(5)

    with pytest.raises(OffsetJump) as error:
        run()
    assert (error.value.expected, error.value.actual) == (first, third)
    report, rows, logs = run(fail_on_data_loss=False)
    assert rows == [1, 2, 5]
    assert report.lost == (LostContent(JOURNAL, first, third),)
    assert [(log["begin"], log["end"]) for log in logs] == [(first, third)]
    assert run()[0].lost == ()


@pytest.mark.integration
def test_a_gap_in_the_content_is_reported(world, run):
    begin = world.publish(1)
    end = world.publish(2)
    world.publish(3)
    world.lose(begin, end)

    with pytest.raises(OffsetJump):
        run()
    report, rows, _ = run(fail_on_data_loss=False)
    assert rows == [1, 3]
    assert report.lost == (LostContent(JOURNAL, begin, end),)


@pytest.mark.integration
def test_a_pending_transaction_partly_removed_by_retention_is_reported(world, run):
    late = world.publisher()
    late.add(JOURNAL, {"n": 1})
    late.flush()
    first = world.store()
    late.add(JOURNAL, {"n": 2})
    late.flush()
    read = world.publish(3)
    run()
    world.lose(0, first)
    world.publish(4)
    late.commit()

    with pytest.raises(OffsetJump):
        run()
    report, rows, logs = run(fail_on_data_loss=False)
    assert rows == [2, 3, 4]
    assert report.lost == (LostContent(JOURNAL, 0, first),)
    [partly] = [log for log in logs if log["event"] == "source.transaction_lost_in_part"]
    assert (partly["producer"], partly["begin"], partly["end"]) == (late.producer.hex(), 0, first)
    assert report.offsets[JOURNAL] > read


@pytest.mark.integration
def test_a_recreated_shorter_journal_is_detected(world, run):
    world.publish(1, 2, 3)
    run()
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    world.publish(4)  # Less content than before.

    with pytest.raises(CorruptData, match="created again"):
        run()
    report, rows, _ = run(
        fail_on_data_loss=False,
    )
    assert report.lost[0].recreated
    assert 4 in rows


@pytest.mark.integration
def test_a_recreated_journal_that_grew_beyond_the_checkpoint_is_detected(world, run):
    world.broker.fake.has_ids = True
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    first = world.publish(1, 2, 3)
    run()
    known = world.fake.journal_id
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    head = world.publish(*range(10, 30))
    assert head > first

    with pytest.raises(JournalRecreated, match="fail_on_data_loss=False"):
        run()
    report, rows, logs = run(fail_on_data_loss=False)
    assert rows == [1, 2, 3, *range(10, 30)]
    found = world.fake.journal_id
    assert report.lost == (LostContent(JOURNAL, first, head, recreated=True, known=known, found=found),)
    assert [(each["begin"], each["journal_id"]) for each in logs] == [(first, found)]
    world.publish(30)
    assert run()[1] == [1, 2, 3, *range(10, 31)]


@pytest.mark.integration
def test_a_consumer_continues_in_a_journal_with_the_same_content_as_advised(world, run, tmp_path, capsys):
    world.broker.fake.has_ids = True
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    world.publish(1, 2, 3)
    run()
    content = world.fake.content
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    world.broker.write(JOURNAL, content)
    world.publish(4)
    with pytest.raises(JournalRecreated) as error:
        run()
    command = str(error.value).partition("`coranto ")[2].partition("`")[0]
    assert main(command.replace("URL", f"sqlite:///{tmp_path}/store.db").split()) == 0
    assert f"{JOURNAL}: consumer" in capsys.readouterr().out
    assert run()[1] == [1, 2, 3, 4]


@pytest.mark.integration
def test_a_journal_that_lost_content_and_grew_beyond_the_checkpoint_is_detected(world, run, tmp_path):
    world.broker.fake.has_ids = True
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    kept, first = world.publish(1), world.publish(2, 3)
    run()
    known = world.fake.journal_id
    world.fake.fall(kept)
    head = world.publish(*range(10, 30))
    assert head > first

    with pytest.raises(JournalRecreated, match=f"lost its content from offset {kept} on.*fail_on_data_loss=False"):
        run()
    report, rows, logs = run(fail_on_data_loss=False)
    assert rows == [1, 2, 3, *range(10, 30)], "current content is read, and nothing twice"
    found = world.fake.journal_id
    assert report.lost == (LostContent(JOURNAL, first, head, recreated=True, known=known, found=found),)
    assert [(each["begin"], each["same_through"]) for each in logs] == [(first, kept)]
    assert run()[1] == rows

    world.fake.fall(head)  # No content is lost.
    end = world.publish(30)
    assert run()[1] == [*rows, 30]
    (source,) = SqlStore(f"sqlite:///{tmp_path}/store.db").read("numbers").checkpoint.sources.values()
    assert source.journal_id == world.fake.journal_id

    world.fake.fall(kept)
    while world.publish(*range(head, head + 9)) <= end:
        head += 9
    with pytest.raises(JournalRecreated):
        run()


@pytest.mark.integration
def test_a_second_loss_after_an_acceptance_is_detected_without_reads_in_between(world, run, tmp_path, capsys):
    world.broker.fake.has_ids = True
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    kept, first = world.publish(1), world.publish(2, 3)
    run()
    content = world.fake.content
    world.fake.fall(kept)
    world.broker.write(JOURNAL, content[kept:])  # An operator appends the lost content again.
    with pytest.raises(JournalRecreated) as error:
        run()
    command = str(error.value).partition("`coranto ")[2].partition("`")[0]
    assert main(command.replace("URL", f"sqlite:///{tmp_path}/store.db").split()) == 0
    assert run()[1] == [1, 2, 3]
    world.fake.fall(kept)
    assert world.publish(*range(10, 20)) > first
    with pytest.raises(JournalRecreated):
        run()


@pytest.mark.integration
def test_a_checkpoint_without_ids_gets_ids(world, run, tmp_path):
    world.publish(1)
    run()
    world.fake.journal_id = "given"
    world.publish(2)
    assert run()[1] == [1, 2]
    (source,) = SqlStore(f"sqlite:///{tmp_path}/store.db").read("numbers").checkpoint.sources.values()
    assert source.journal_id == "given"


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ({"startingOffsets": 0}, ("begin", "head")),
        ({"startingOffsets": 0, "endingOffsets": 3}, None),
        ({"startingOffsets": 10_000}, ("begin", "head")),
        ({"endingOffsets": 10_000}, ("begin", "head")),
        ({"startingOffsets": 10_000, "endingOffsets": 10_001}, ("begin", "head")),
    ],
)
def test_a_read_of_removed_offsets_is_an_error_or_skips_them(world, offsets, expected):
    begin = world.publish(1)
    world.lose(0, begin)
    head = world.publish(2)
    given = {name: json.dumps({JOURNAL: offset}) for name, offset in offsets.items()}
    options = {"endpoint": world.broker.endpoint, "subscribe": JOURNAL, **given}
    with SyncJournalClient.of(world.broker.config) as client:
        with pytest.raises((OffsetJump, InvalidInput), match=r"has no content in \[0, |set failOnDataLoss to false"):
            plan_read(client, SourceOptions.parse(options))
        with capture_logs() as logs:
            ranges, _ = plan_read(client, SourceOptions.parse({**options, "failOnDataLoss": "false"}))
    found = [(part.begin, part.end) for parts in ranges.values() for part in parts]
    assert found == ([] if expected is None else [(begin, head)])
    assert [log["event"] for log in logs if "lost" in log["event"]] == ["source.content_lost"]


def test_a_read_of_offsets_of_lost_content_is_an_error_or_skips_it(world):
    world.broker.fake.has_ids = True
    world.broker.create(JOURNAL)
    world.fake = world.broker.fake.journals[JOURNAL]
    kept, before = world.publish(1), world.fake.journal_id
    lost = world.publish(2, 3)
    world.fake.fall(kept)
    head = world.publish(*range(10, 20))
    assert head > lost

    def planned(**options: object) -> list[tuple[int, int]]:
        given = {"endpoint": world.broker.endpoint, "subscribe": JOURNAL, **options}
        with SyncJournalClient.of(world.broker.config) as client:
            ranges, _ = plan_read(client, SourceOptions.parse(given))
        return [(part.begin, part.end) for parts in ranges.values() for part in parts]

    def at(offset: int) -> str:
        return json.dumps({JOURNAL: {"offset": offset, "journal_id": before}})

    assert planned(startingOffsets=at(kept)) == [(kept, head)], "it has the same content up to there"
    assert planned(endingOffsets=at(kept)) == [(0, kept)]
    for name in ("startingOffsets", "endingOffsets"):
        with pytest.raises(JournalRecreated, match=f"lost its content from offset {kept} on"):
            planned(**{name: at(lost)})
    assert planned(startingOffsets=at(lost), failOnDataLoss="false") == [(kept, head)]
    assert planned(endingOffsets=at(lost), failOnDataLoss="false") == []
