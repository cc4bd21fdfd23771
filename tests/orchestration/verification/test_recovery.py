"""Scheduled verification, and recovery from a failed check to an approved plan and a sound audit, in Dagster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.tags import RUN_KEY_TAG, SENSOR_NAME_TAG

from coranto.client import SyncJournalClient
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import (
    JournalGroup,
    JournalResource,
    build_journal_recovery,
    build_recovery_sensor,
    build_verification,
)
from tests.orchestration.metadata import without_namespace

GROUP = JournalGroup("shop/orders")
PART = "shop/orders/part-000"
SIZE = 3000
VERIFICATION = build_verification(GROUP)
RECOVERY = build_journal_recovery(GROUP)
SENSOR = build_recovery_sensor(RECOVERY, VERIFICATION.check_keys)


@dg.asset(key=["shop", "orders"])
def orders() -> None: ...


DEFINITIONS = dg.Definitions.merge(
    dg.Definitions(assets=[orders], jobs=RECOVERY.jobs, sensors=[SENSOR], resources={"journals": JournalResource()}),
    VERIFICATION.definitions,
)


def stored(client: SyncJournalClient, count: int) -> list[Fragment]:
    """Wait until the index has exactly `count` stored fragments, and return them."""
    deadline = time.monotonic() + 60
    while True:
        found = [info.fragment for info in client.fragments(PART) if info.fragment.backing_store]
        if len(found) == count:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def metadata_of(result: dg.ExecuteInProcessResult, op: str) -> dict[str, Any]:
    (output,) = (event for event in result.all_events if event.is_successful_output and event.step_key == op)
    data: Any = output.event_specific_data
    return without_namespace(data.metadata)


def failure_of(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (failed,) = (event for event in result.all_events if event.is_step_failure)
    data: Any = failed.event_specific_data
    return without_namespace(data.user_failure_data.metadata)


def test_definitions_load_with_schedules_for_both_depths() -> None:
    dg.Definitions.validate_loadable(DEFINITIONS)
    assert {schedule.name: schedule.cron_schedule for schedule in VERIFICATION.schedules} == {
        "audit_shop__orders_schedule": "17 * * * *",
        "deep_audit_shop__orders_schedule": "43 3 * * *",
    }
    assert {key.name for key in VERIFICATION.check_keys} == {"audit", "deep_audit"}


def test_a_plan_with_a_failed_or_missing_run_is_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0
    monkeypatch.setattr("dagster_coranto.verification.recovery.time", lambda: time.time() + passed)
    check = VERIFICATION.check_keys[0]
    with dg.DagsterInstance.ephemeral() as instance:
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=check.asset_key, check_name=check.name, passed=False)
        )
        cursor: str | None = None

        def tick() -> dg.RunRequest | str:
            nonlocal cursor
            with dg.build_sensor_context(instance=instance, definitions=DEFINITIONS, cursor=cursor) as context:
                result: Any = SENSOR(context)
                cursor = context.cursor
            return result if isinstance(result, dg.RunRequest) else str(result.skip_message)

        def planned(request: dg.RunRequest | str) -> dg.DagsterRun:
            assert isinstance(request, dg.RunRequest)
            tags = {**request.tags, RUN_KEY_TAG: request.run_key or "", SENSOR_NAME_TAG: SENSOR.name}
            job = DEFINITIONS.resolve_job_def("journal_recovery_plan")
            return instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)

        first = tick()
        assert tick() == first
        run = planned(first)
        assert tick() == "a recovery from these failures is planned"
        instance.report_run_failed(run)
        assert str(tick()).startswith("the planning run has failed; the next one follows in ")
        passed = 61.0
        second = tick()
        assert isinstance(first, dg.RunRequest)
        assert isinstance(second, dg.RunRequest)
        assert second.run_key == f"{first.run_key}:1"
        instance.report_run_canceled(planned(second))
        assert tick() == "a recovery from these failures is planned"
        cursor = None
        third = tick()
        assert isinstance(third, dg.RunRequest)
        assert third.run_key == f"{first.run_key}:2"


@pytest.mark.exhaustive
def test_from_a_failed_check_to_an_approved_recovery(cluster_dir: Path) -> None:
    resource = JournalResource()
    spec = pb.JournalSpec(name=PART, replication=1)
    spec.fragment.length = 1024
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.FromSeconds(1)
    with resource.client() as client, dg.DagsterInstance.ephemeral() as instance:
        client.apply([pb.ApplyRequest.Change(upsert=spec)])
        for number in range(4):
            client.append(PART, bytes([65 + number]) * SIZE)
        fragments = stored(client, 3)

        def run(job: str, config: dict[str, Any] | None = None) -> dg.ExecuteInProcessResult:
            definition = DEFINITIONS.resolve_job_def(job)
            return definition.execute_in_process(run_config=config or {}, instance=instance, raise_on_error=False)

        def tick() -> Any:
            with dg.build_sensor_context(instance=instance, definitions=DEFINITIONS) as context:
                return SENSOR(context)

        assert run("audit_shop__orders").success
        assert isinstance(tick(), dg.SkipReason)

        folder = cluster_dir / "brokers"
        deadline = time.monotonic() + 60
        while [*folder.glob(f"*/spools/**/{SIZE:016x}.content")]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (cluster_dir / "fragments" / fragments[1].content_path).unlink()
        stored(client, 2)
        (evaluation,) = run("audit_shop__orders").get_asset_check_evaluations()
        assert not evaluation.passed

        proposed = tick()
        assert isinstance(proposed, dg.RunRequest)
        assert tick().run_key == proposed.run_key  # One plan per failure.
        assert SENSOR.job_name == "journal_recovery_plan"

        plan = metadata_of(run("journal_recovery_plan"), "plan")
        assert plan["summary"].startswith("1 step; ")
        assert f"[{SIZE}, {2 * SIZE})" in plan["gone_for_good"]
        assert plan["hash"] in plan["to_approve"]

        def approve(text: str) -> dg.ExecuteInProcessResult:
            return run("journal_recovery", {"ops": {"recover": {"config": {"approved": text}}}})

        refused = approve("0123456789abcdef")
        assert not refused.success
        assert failure_of(refused)["hash"] == plan["hash"]
        assert not run("audit_shop__orders").get_asset_check_evaluations()[0].passed

        recovered = approve(plan["hash"])
        assert recovered.success, failure_of(recovered)
        assert "accepted" in metadata_of(recovered, "recover")["done"]
        assert run("audit_shop__orders").get_asset_check_evaluations()[0].passed
        assert isinstance(tick(), dg.SkipReason)
