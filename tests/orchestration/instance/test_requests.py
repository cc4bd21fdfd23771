"""A sensor's requests: missing and failed runs are requested again with new keys."""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.storage.tags import RUN_KEY_TAG, SENSOR_NAME_TAG
from dagster._core.test_utils import create_run_for_test

from dagster_coranto.instance.requests import Requests, backoff_seconds, unused_run_key

SENSOR = "sensor"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def created(instance: dg.DagsterInstance, request: dg.RunRequest, status: DagsterRunStatus) -> dg.DagsterRun:
    """Create a requested run as Dagster's daemon does."""
    tags = {**request.tags, RUN_KEY_TAG: request.run_key or "", SENSOR_NAME_TAG: SENSOR}
    return create_run_for_test(instance, status=status, tags=tags)


def requests(instance: dg.DagsterInstance, cursor: str | None = "1") -> Requests:
    return Requests(dg.build_sensor_context(instance=instance, cursor=cursor), SENSOR)


def test_each_key_of_a_purpose_is_used_once(instance: dg.DagsterInstance) -> None:
    keys = []
    for _ in range(3):
        request = requests(instance).request("p", tags={"a": "b"})
        assert request.tags["a"] == "b"
        keys.append(request.run_key)
        created(instance, request, DagsterRunStatus.FAILURE)
    assert keys == ["p", "p:1", "p:2"]
    assert unused_run_key(instance, "other", "p") == "p"


@pytest.mark.parametrize(
    ("status", "due"),
    [
        (DagsterRunStatus.NOT_STARTED, False),
        (DagsterRunStatus.STARTED, False),
        (DagsterRunStatus.SUCCESS, False),
        (DagsterRunStatus.CANCELED, False),
        (DagsterRunStatus.FAILURE, True),
    ],
)
def test_another_run_is_due_after_a_failed_one(
    instance: dg.DagsterInstance, status: DagsterRunStatus, due: bool
) -> None:
    assert requests(instance).histories(["p", "q"])["p"].due(60) == 0.0, "no run was created yet"
    created(instance, requests(instance).request("p"), status)
    found = requests(instance).histories(["p", "q"])
    assert (found["p"].due(60) is not None) is due
    assert found["q"].due(60) == 0.0
    assert requests(instance, None).histories(["p"])["p"].due(60) == 0.0, "the cursor was reset"


def test_pauses_double_with_each_failure_up_to_half_an_hour(instance: dg.DagsterInstance) -> None:
    assert [backoff_seconds(failures, 60) for failures in (1, 2, 3, 9, 5000)] == [60, 120, 240, 1800, 1800]
    ends = [
        created(instance, requests(instance).request("p"), DagsterRunStatus(status))
        for status in ("FAILURE", "SUCCESS", "FAILURE", "FAILURE")
    ]
    history = requests(instance).histories(["p"])["p"]
    assert history.failures == 2
    assert [record.dagster_run.run_id for record in history.records] == [run.run_id for run in reversed(ends)]


def test_a_run_retried_by_dagster_is_not_requested_again(instance: dg.DagsterInstance) -> None:
    request = requests(instance).request("p", tags={"dagster/max_retries": "1", "dagster/will_retry": "true"})
    created(instance, request, DagsterRunStatus.FAILURE)
    assert requests(instance).histories(["p"])["p"].due(60) is None
