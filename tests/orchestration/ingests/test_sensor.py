"""The sensor of an ingest: one run at a time when rows wait, with pauses after failures; and reports of the lag."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_test_daemon_workspace_context, freeze_time
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.sensor import execute_sensor_iteration

from dagster_coranto import JournalResource, build_ingest_asset, build_ingest_check, build_ingest_sensor
from dagster_coranto.instance.tags import RUN_KEY, SENSOR
from tests.orchestration.ingests.conftest import Place
from tests.orchestration.instances import new_instance

pytestmark = pytest.mark.integration


class Ticks:
    """Ticks of a sensor with a stored cursor, and its requested runs."""

    def __init__(self, place: Place, instance: dg.DagsterInstance) -> None:
        self.asset = build_ingest_asset(place.file)
        self.now = 1000.0
        self.sensor = build_ingest_sensor(self.asset, journals=place.journals, wall=lambda: self.now)
        self.check = build_ingest_check(self.asset)
        self.defs = dg.Definitions(
            assets=[self.asset],
            asset_checks=[self.check],
            sensors=[self.sensor],
            resources={"journals": place.journals},
        )
        self.instance = instance
        self.cursor: str | None = None

    def tick(self) -> Any:
        context = dg.build_sensor_context(
            instance=self.instance, repository_def=self.defs.get_repository_def(), cursor=self.cursor
        )
        found: Any = self.sensor(context)
        if isinstance(found, dg.SensorResult) and found.cursor is not None:
            self.cursor = found.cursor
        return found

    def run(self, request: dg.RunRequest, status: dg.DagsterRunStatus | None = None) -> None:
        """Execute a request, or create a run of it with another status."""
        tags = {RUN_KEY: request.run_key or "", SENSOR: self.sensor.name}
        job = self.defs.resolve_implicit_global_asset_job_def()
        if status is None:
            assert job.execute_in_process(instance=self.instance, tags=tags).success
        else:
            self.instance.create_run_for_job(job, tags=tags, status=status, asset_selection=frozenset([self.asset.key]))


@pytest.fixture
def ticks(place: Place) -> Iterator[Ticks]:
    with new_instance() as instance:
        yield Ticks(place, instance)


def requested(found: Any) -> dg.RunRequest:
    [request] = found.run_requests
    assert isinstance(request, dg.RunRequest)
    return request


def reason(found: Any) -> str:
    skipped = found if isinstance(found, dg.SkipReason) else found.skip_reason
    return str(skipped.skip_message if isinstance(skipped, dg.SkipReason) else skipped)


def test_a_run_is_requested_when_rows_wait(place: Place, ticks: Ticks) -> None:
    assert reason(ticks.tick()) == "The source has no more rows."
    place.put("a", {"n": 1})
    first = requested(ticks.tick())
    ticks.run(first)
    assert reason(ticks.tick()) == "The source has no more rows."
    place.put("b", {"n": 2})
    second = requested(ticks.tick())
    assert second.run_key != first.run_key
    ticks.run(second)
    assert place.events() == [1, 2]


def test_only_one_run_is_requested_at_a_time(place: Place, ticks: Ticks) -> None:
    place.put("a", {"n": 1})
    ticks.run(requested(ticks.tick()), dg.DagsterRunStatus.STARTED)
    place.put("b", {"n": 2})
    assert "is under way; 18 rows or bytes wait" in reason(ticks.tick())


def test_a_missing_run_is_requested_again(place: Place, ticks: Ticks) -> None:
    place.put("a", {"n": 1})
    requested(ticks.tick())
    requested(ticks.tick())


def test_the_next_run_after_a_failure_is_delayed(place: Place, ticks: Ticks) -> None:
    place.put("a", {"n": 1})
    ticks.run(requested(ticks.tick()), dg.DagsterRunStatus.FAILURE)
    place.put("b", {"n": 2})
    assert "The last runs have failed (1 in a row); the next one follows in" in reason(ticks.tick())


def test_after_a_canceled_run_the_next_one_needs_more_rows(place: Place, ticks: Ticks) -> None:
    place.put("a", {"n": 1})
    ticks.run(requested(ticks.tick()), dg.DagsterRunStatus.CANCELED)
    assert reason(ticks.tick()) == "The last run was canceled. The next one follows when more than 9 wait."
    place.put("b", {"n": 2})
    ticks.run(requested(ticks.tick()))
    assert place.events() == [1, 2]


def test_the_lag_and_the_freshness_are_reported(place: Place, ticks: Ticks) -> None:
    place.put("a", {"n": 1})
    observed, verdict = ticks.tick().asset_events
    assert isinstance(observed, dg.AssetObservation)
    assert observed.metadata["dagster-coranto/lag"].value == 9
    assert (verdict.check_name, verdict.passed) == ("is_fresh", False)
    assert verdict.description == "9 rows or bytes wait, and the stream was never materialised."
    assert not ticks.tick().asset_events, "reports are made once a minute"
    ticks.now += 60
    assert len(ticks.tick().asset_events) == 2
    ticks.run(requested(ticks.tick()))
    ticks.now += 60
    _, verdict = ticks.tick().asset_events
    assert (verdict.passed, verdict.description) == (True, "The source has no more rows.")
    ticks.now += 600
    assert not ticks.tick().asset_events, "nothing has changed"


def test_ticks_are_skipped_while_the_cluster_is_unavailable(place: Place) -> None:
    place.journals = JournalResource(endpoint="127.0.0.1:1")
    with new_instance() as instance:
        assert "The lag is unknown" in reason(Ticks(place, instance).tick())


DEFINITIONS = """
from pathlib import Path
import dagster as dg
from dagster_coranto import JournalResource, build_ingest_asset, build_ingest_check, build_ingest_sensor

journals = JournalResource(endpoint={endpoint!r})
asset = build_ingest_asset(Path({file!r}))
sensor = build_ingest_sensor(asset, journals=journals, minimum_interval_seconds=1, report_seconds=0.01)
defs = dg.Definitions(
    assets=[asset],
    asset_checks=[build_ingest_check(asset)],
    sensors=[sensor],
    resources={{"journals": journals}},
    executor=dg.in_process_executor,
)
"""
LAUNCH_IMMEDIATELY = {
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
}


@pytest.mark.exhaustive
def test_dagsters_daemon_runs_an_ingest_for_new_rows(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "ingest_definitions.py"
    source.write_text(DEFINITIONS.format(endpoint=place.cluster.endpoint, file=str(place.file)))
    target = PythonFileTarget(str(source), None, str(tmp_path), "shop")
    with (
        new_instance(overrides=LAUNCH_IMMEDIATELY) as instance,
        create_test_daemon_workspace_context(target, instance) as workspace,
    ):
        due = itertools.count(time.time(), 100.0)

        def evaluate() -> int:
            with freeze_time(next(due)):  # Make the sensor due.
                for problem in execute_sensor_iteration(workspace, logging.getLogger("sensors"), None, None):
                    assert problem is None, problem
            return instance.get_runs_count()

        assert evaluate() == 0
        place.put("a", {"n": 1})
        assert evaluate() == 1
        assert evaluate() == 1, "no rows wait"
        place.put("b", {"n": 2})
        assert evaluate() == 2
        assert evaluate() == 2
        assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS}
        assert len(instance.fetch_observations(place.key, limit=20).records) >= 3
        key = dg.AssetCheckKey(place.key, "is_fresh")
        latest = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
        assert latest.status.value == "SUCCEEDED"
    assert place.events() == [1, 2]
