"""The checks, jobs and schedules of a group's verification."""

from __future__ import annotations

import dagster as dg

from dagster_coranto import JournalGroup, build_verification


def test_both_depths_have_a_check_a_job_and_a_stopped_schedule() -> None:
    made = build_verification(JournalGroup("shop/my-orders.eu"), deep_schedule="5 4 * * *", timezone="Europe/Athens")
    assert [key.name for key in made.check_keys] == ["audit", "deep_audit"]
    assert [job.name for job in made.jobs] == ["audit_shop__my_orders_eu", "deep_audit_shop__my_orders_eu"]
    assert [
        (each.name, each.cron_schedule, each.execution_timezone, each.default_status) for each in made.schedules
    ] == [
        ("audit_shop__my_orders_eu_schedule", "17 * * * *", "Europe/Athens", dg.DefaultScheduleStatus.STOPPED),
        ("deep_audit_shop__my_orders_eu_schedule", "5 4 * * *", "Europe/Athens", dg.DefaultScheduleStatus.STOPPED),
    ]
    assert [each.job_name for each in made.schedules] == [job.name for job in made.jobs]
