from __future__ import annotations

import dagster as dg
import pytest

from coranto.client.loop import run_blocking
from coranto.client.positions import JournalPosition
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalGroup, JournalPollingSensorCursor, JournalResource, build_journal_polling_sensor

EVENTS = JournalGroup("flights/events")
PART = "flights/events/part-000"


def cursor(**heads: tuple[int, int]) -> JournalPollingSensorCursor:
    return JournalPollingSensorCursor.of(
        {journal: JournalPosition(head, revision) for journal, (revision, head) in heads.items()}
    )


@pytest.mark.parametrize(
    ("before", "now", "moved"),
    [
        (cursor(), cursor(), False),
        (cursor(), cursor(a=(1, 0)), False),
        (cursor(), cursor(a=(1, 5)), True),
        (cursor(a=(1, 5)), cursor(a=(1, 5)), False),
        (cursor(a=(1, 5)), cursor(a=(1, 6)), True),
        (cursor(a=(1, 5), b=(2, 5)), cursor(a=(1, 5)), False),
        (cursor(a=(1, 5)), cursor(a=(3, 5)), True),
        (cursor(a=(1, 5)), cursor(a=(3, 0)), False),
        (cursor(a=(1, 5)), cursor(a=(3, 2)), True),
    ],
    ids=[
        "nothing",
        "empty",
        "first",
        "same",
        "grown",
        "deleted",
        "made anew",
        "made anew, empty",
        "made anew, shorter",
    ],
)
def test_heads_have_moved_when_a_journal_holds_more_than_it_did(
    before: JournalPollingSensorCursor, now: JournalPollingSensorCursor, moved: bool
) -> None:
    assert now.moved(before) is moved


def test_the_digest_is_that_of_the_vector() -> None:
    assert cursor(a=(1, 5), b=(2, 7)).digest == cursor(b=(2, 7), a=(1, 5)).digest
    assert cursor(a=(1, 5)).digest != cursor(a=(1, 6)).digest
    assert cursor(a=(1, 5)).digest != cursor(a=(2, 5)).digest


def test_a_cursor_of_many_journals_is_short_and_reads_back() -> None:
    many = cursor(**{f"shop/orders/region_{number:05}/part": (number + 1, 7 * number) for number in range(10_000)})
    text = many.to_text()
    assert JournalPollingSensorCursor.parse(text) == many
    assert len(text) < 120_000
    assert JournalPollingSensorCursor.parse(cursor(a=(1, 5)).to_text()) == cursor(a=(1, 5))


@dg.job
def consume() -> None: ...


def tick(journals: JournalResource, at: str | None) -> dg.SensorResult | dg.SkipReason:
    sensor = build_journal_polling_sensor(journals=journals, group=EVENTS, job=consume)
    with dg.DagsterInstance.ephemeral() as instance:
        result = sensor(dg.build_sensor_context(cursor=at, instance=instance))
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    return result


def test_a_run_is_requested_once_for_each_advance_of_the_heads(broker: FakeBroker, journals: JournalResource) -> None:
    broker.create(PART)
    broker.create("flights/alerts/part-000")
    assert isinstance(tick(journals, None), dg.SkipReason)

    run_blocking(broker.write(PART, b"one\n"))
    first = tick(journals, None)
    assert isinstance(first, dg.SensorResult)
    assert first.cursor is not None
    assert JournalPollingSensorCursor.parse(first.cursor).positions[PART][1] == 4
    again = tick(journals, first.cursor)
    assert isinstance(again, dg.SkipReason)
    assert again.skip_message == "None of 1 journals flights/events/… has grown."

    run_blocking(broker.write(PART, b"two\n"))
    second = tick(journals, first.cursor)
    assert isinstance(second, dg.SensorResult)
    (one,), (two,) = first.run_requests or (), second.run_requests or ()
    assert one.run_key != two.run_key
    assert two.tags["coranto/group"] == "flights/events"


def test_a_cursor_that_was_not_stored_leads_to_the_same_run_key(broker: FakeBroker, journals: JournalResource) -> None:
    broker.create(PART)
    run_blocking(broker.write(PART, b"one\n"))
    results = [tick(journals, None), tick(journals, None)]
    keys = [
        request.run_key
        for result in results
        if isinstance(result, dg.SensorResult)
        for request in result.run_requests or ()
    ]
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_ticks_are_skipped_while_there_is_no_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = JournalResource(data_dir=str(tmp_path_factory.mktemp("empty")))
    result = tick(nowhere, None)
    assert isinstance(result, dg.SkipReason)
    assert result.skip_message is not None
    assert result.skip_message.startswith("The cluster does not answer: ")


def test_names_and_status_follow_the_conventions_of_polling_sensors() -> None:
    sensor = build_journal_polling_sensor(
        journals=JournalResource(), group=JournalGroup("flights/late-ones"), job=consume
    )
    assert sensor.name == "flights_late_ones__polling_sensor"
    assert sensor.minimum_interval_seconds == 30
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
