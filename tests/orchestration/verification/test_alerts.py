from __future__ import annotations

import time
from typing import Any

import dagster as dg
import pytest

from dagster_coranto import build_failed_check_sensor

ORDERS = dg.AssetKey("orders")


@dg.asset_check(asset=ORDERS)
def sound() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


@dg.asset_check(asset=ORDERS)
def broken() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False, description="two fragments are gone")


@dg.asset_check(asset=ORDERS)
def drifted() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False, severity=dg.AssetCheckSeverity.WARN)


@dg.asset_check(asset="other")
def elsewhere() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=False)


def run_checks(instance: dg.DagsterInstance) -> None:
    checks = [sound, broken, drifted, elsewhere]
    assert dg.materialize(checks, instance=instance, selection=dg.AssetSelection.checks(*checks)).success


def tick(instance: dg.DagsterInstance, **options: Any) -> dg.SensorEvaluationContext:
    repository = dg.Definitions(asset_checks=[sound, broken, drifted, elsewhere]).get_repository_def()
    return dg.build_sensor_context(instance, repository_def=repository, **options)


def test_each_failed_check_is_reported_once() -> None:
    sent: list[str] = []
    sensor = build_failed_check_sensor(lambda _, found: sent.append(f"{found.check_name}: {found.description}"))
    with dg.DagsterInstance.ephemeral() as instance:
        run_checks(instance)
        later = tick(instance, last_sensor_start_time=time.time() + 1)
        sensor(later)
        assert sent == [], "the checks failed before the start of the sensor"
        context = tick(instance)
        sensor(context)
        assert sorted(sent) == ["broken: two fragments are gone", "elsewhere: None"]
        sensor(context)
        assert len(sent) == 2
        run_checks(instance)
        sensor(context)
        assert len(sent) == 4


def test_failures_while_the_sensor_was_stopped_are_reported_at_its_restart() -> None:
    sent: list[str] = []
    sensor = build_failed_check_sensor(lambda _, found: sent.append(found.check_name), assets=[ORDERS])
    with dg.DagsterInstance.ephemeral() as instance:
        before = tick(instance)
        sensor(before)
        run_checks(instance)
        sensor(tick(instance, cursor=before.cursor, last_sensor_start_time=time.time() + 1))
    assert sent == ["broken"]


def test_warnings_and_single_assets_can_be_selected() -> None:
    sent: list[str] = []
    sensor = build_failed_check_sensor(
        lambda _, found: sent.append(found.check_name), severity=dg.AssetCheckSeverity.WARN, assets=[ORDERS]
    )
    with dg.DagsterInstance.ephemeral() as instance:
        run_checks(instance)
        sensor(tick(instance))
    assert sorted(sent) == ["broken", "drifted"]


def test_an_alert_that_could_not_be_sent_is_retried() -> None:
    sent: list[str] = []
    mail_works = False

    def send(_: dg.SensorEvaluationContext, found: dg.AssetCheckEvaluation) -> None:
        if not mail_works:
            raise ConnectionError("no mail server")
        sent.append(found.check_name)

    sensor = build_failed_check_sensor(send, assets=[ORDERS])
    with dg.DagsterInstance.ephemeral() as instance:
        run_checks(instance)
        context = tick(instance)
        with pytest.raises(ConnectionError):
            sensor(context)
        assert context.cursor is None
        mail_works = True
        sensor(context)
    assert sent == ["broken"]
