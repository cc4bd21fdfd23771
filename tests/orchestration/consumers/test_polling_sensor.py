from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_representation.external import RemoteSensor
from dagster._core.scheduler.instigation import InstigatorState, SensorInstigatorData
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.storage.tags import RUN_KEY_TAG, SENSOR_NAME_TAG
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.sensor import execute_sensor_iteration

from coranto.client.loop import run_blocking
from coranto.client.positions import JournalPosition
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalGroup, JournalResource, build_journal_polling_sensor
from dagster_coranto.consumers.polling_sensor import JournalPollingSensorCursor
from tests.orchestration.instances import new_instance

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
def test_heads_have_moved_when_a_journal_has_grown(
    before: JournalPollingSensorCursor, now: JournalPollingSensorCursor, moved: bool
) -> None:
    assert now.moved(before) is moved


def test_a_journal_is_identified_by_its_id_if_both_cursors_have_one() -> None:
    def at(revision: int, head: int, journal_id: str = "") -> JournalPollingSensorCursor:
        return JournalPollingSensorCursor.parse(
            JournalPollingSensorCursor.of({"a": JournalPosition(head, revision, journal_id)}).to_text()
        )

    assert at(1, 5, "b1-1").grown_bytes(at(1, 5, "b0-1")) == 5, "the journal was recreated in another cluster"
    assert at(3, 6, "b0-1").grown_bytes(at(1, 5, "b0-1")) == 1, "the journal was reapplied after etcd was restored"
    assert at(1, 6, "b0-1").grown_bytes(at(1, 5)) == 1, "an earlier version stored the cursor"


def test_the_digest_depends_only_on_the_vector() -> None:
    assert cursor(a=(1, 5), b=(2, 7)).digest == cursor(b=(2, 7), a=(1, 5)).digest
    assert cursor(a=(1, 5)).digest != cursor(a=(1, 6)).digest
    assert cursor(a=(1, 5)).digest != cursor(a=(2, 5)).digest


def test_a_cursor_of_many_journals_is_short_and_can_be_parsed() -> None:
    many = cursor(**{f"shop/orders/region_{number:05}/part": (number + 1, 7 * number) for number in range(10_000)})
    text = many.to_text()
    assert JournalPollingSensorCursor.parse(text) == many
    assert len(text) < 120_000
    assert JournalPollingSensorCursor.parse(cursor(a=(1, 5)).to_text()) == cursor(a=(1, 5))


@dg.job
def consume() -> None: ...


def tick(
    journals: JournalResource, at: str | None, instance: dg.DagsterInstance | None = None
) -> dg.SensorResult | dg.SkipReason:
    """Evaluate the sensor. Create each requested run in `instance` as successful."""
    sensor = build_journal_polling_sensor(journals=journals, group=EVENTS, job=consume)
    with dg.DagsterInstance.ephemeral() as other:
        result = sensor(dg.build_sensor_context(cursor=at, instance=instance or other))
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    if instance is not None and isinstance(result, dg.SensorResult):
        for request in result.run_requests or ():
            tags = {**request.tags, RUN_KEY_TAG: request.run_key or "", SENSOR_NAME_TAG: sensor.name}
            instance.create_run_for_job(job_def=consume, status=DagsterRunStatus.SUCCESS, tags=tags)
    return result


def test_a_run_is_requested_once_for_each_advance_of_the_heads(broker: FakeBroker, journals: JournalResource) -> None:
    broker.create(PART)
    broker.create("flights/alerts/part-000")
    assert isinstance(tick(journals, None), dg.SkipReason)

    run_blocking(broker.write(PART, b"one\n"))
    with dg.DagsterInstance.ephemeral() as instance:
        first = tick(journals, None, instance)
        assert isinstance(first, dg.SensorResult)
        assert first.cursor is not None
        assert JournalPollingSensorCursor.parse(first.cursor).positions[PART][1] == 4
        again = tick(journals, first.cursor, instance)
        assert isinstance(again, dg.SkipReason)
        assert again.skip_message == "None of 1 journals flights/events/… has grown."

        run_blocking(broker.write(PART, b"two\n"))
        second = tick(journals, first.cursor, instance)
        assert isinstance(second, dg.SensorResult)
    (one,), (two,) = first.run_requests or (), second.run_requests or ()
    assert one.run_key != two.run_key
    assert two.tags["coranto/group"] == "flights/events"


def test_an_unsaved_cursor_gives_the_same_run_key(broker: FakeBroker, journals: JournalResource) -> None:
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


DEFINITIONS = """
import dagster as dg
from dagster_coranto import *

journals = JournalResource(endpoint={endpoint!r}, file_root={root!r})


@dg.job
def consume():
    pass


sensor = build_journal_polling_sensor(
    journals=journals, group=JournalGroup("flights/events"), job=consume, minimum_interval_seconds=1
)
defs = dg.Definitions(jobs=[consume], sensors=[sensor])
"""
LAUNCH_IMMEDIATELY = {
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
}


def set_cursor(instance: dg.DagsterInstance, sensor: RemoteSensor, cursor: str | None) -> None:
    """Set the cursor of a sensor as Dagster's UI does, and make its next tick due."""
    state: InstigatorState | None = instance.get_instigator_state(sensor.get_remote_origin_id(), sensor.selector_id)
    assert state is not None
    data = state.instigator_data
    assert isinstance(data, SensorInstigatorData)
    instance.update_instigator_state(
        state.with_data(
            SensorInstigatorData(
                last_tick_timestamp=0.0,
                last_run_key=data.last_run_key,
                min_interval=data.min_interval,
                cursor=cursor,
                sensor_type=data.sensor_type,
            )
        )
    )


@pytest.mark.integration
def test_dagsters_daemon_launches_a_run_after_a_reset_cursor_or_a_deleted_run(
    broker: FakeBroker, journals: JournalResource, tmp_path: Path
) -> None:
    broker.create(PART)
    run_blocking(broker.write(PART, b"one\n"))
    source = tmp_path / "polling_definitions.py"
    source.write_text(DEFINITIONS.format(endpoint=journals.endpoint, root=journals.file_root))
    target = PythonFileTarget(str(source), None, str(tmp_path), "shop")
    with (
        new_instance(overrides=LAUNCH_IMMEDIATELY) as instance,
        create_test_daemon_workspace_context(target, instance) as workspace,
    ):
        location: Any = workspace.create_request_context().get_code_location("shop")
        (sensor,) = location.get_repository("__repository__").get_sensors()

        def cursor() -> str | None:
            state = instance.get_instigator_state(sensor.get_remote_origin_id(), sensor.selector_id)
            data = state.instigator_data if state is not None else None
            return data.cursor if isinstance(data, SensorInstigatorData) else None

        def evaluate(keep: bool = True) -> int:
            """Let the daemon evaluate the sensor, and return the number of runs."""
            if instance.all_instigator_state():
                set_cursor(instance, sensor, cursor() if keep else None)
            for problem in execute_sensor_iteration(workspace, logging.getLogger("sensors"), None, time.time()):
                assert problem is None, problem
            return instance.get_runs_count()

        assert evaluate() == 1
        assert evaluate() == 1, "nothing has grown"
        assert evaluate(keep=False) == 2, "the cursor was reset"
        assert evaluate() == 2
        assert {run.status for run in instance.get_runs()} == {DagsterRunStatus.SUCCESS}
        for run in instance.get_runs():
            instance.delete_run(run.run_id)
        assert evaluate() == 1, "the requested run was deleted"
        assert evaluate() == 1


def test_a_cursor_of_an_earlier_version_can_be_parsed() -> None:
    kept = (
        '{"__class__": "JournalPollingSensorCursor", "failures": 2, "packed": "", '
        '"positions": {"a": [1, 5, "x-1"]}, "run_key": "k"}'
    )
    wanted = JournalPollingSensorCursor(positions={"a": [1, 5, "x-1"]}, run_key="k", failures=2)
    assert JournalPollingSensorCursor.parse(kept) == wanted
    assert JournalPollingSensorCursor.parse(wanted.to_text()) == wanted
