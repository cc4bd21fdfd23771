"""Scheduled verification: an hourly cheap audit, and a daily deep audit that covers all content in rotation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from coranto.audit import Depth
from coranto.audit.journals import DEFAULT_BUDGET
from coranto.client.groups import JournalGroup
from dagster_coranto.translation.translator import DagsterJournalTranslator
from dagster_coranto.verification.checks import MoreChecks, build_audit_check


@dataclass(frozen=True, slots=True)
class Verification:
    """The definitions of a group's verification. Give all of them to `dg.Definitions`, or merge `definitions`."""

    checks: Sequence[dg.AssetChecksDefinition]
    jobs: Sequence[Any] = field(default_factory=tuple)
    schedules: Sequence[dg.ScheduleDefinition] = field(default_factory=tuple)

    @property
    def check_keys(self) -> list[dg.AssetCheckKey]:
        """The keys of the checks, for `build_recovery_sensor`."""
        return [key for check in self.checks for key in check.check_keys]

    @property
    def definitions(self) -> dg.Definitions:
        return dg.Definitions(asset_checks=list(self.checks), jobs=list(self.jobs), schedules=list(self.schedules))


def build_verification(
    group: JournalGroup,
    *,
    cheap_schedule: str = "17 * * * *",
    deep_schedule: str = "43 3 * * *",
    timezone: str = "UTC",
    budget: int | None = DEFAULT_BUDGET,
    memory: str = "",
    allow_empty: bool = False,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
    more: MoreChecks | None = None,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
) -> Verification:
    """Return two checks of a group, `audit` and `deep_audit`, each with a job and a cron schedule.

    A deep audit reads up to `budget` bytes, least recently read content first. Choose the budget so that it covers all
    content within your time limit for detecting damage. The other parameters are as in `build_audit_check`.
    """
    name = group.name.replace("/", "__").replace("-", "_").replace(".", "_")
    checks, jobs, schedules = [], [], []
    for depth, cron in ((Depth.CHEAP, cheap_schedule), (Depth.DEEP, deep_schedule)):
        check = build_audit_check(
            group,
            depth=depth,
            budget=budget,
            memory=memory,
            allow_empty=allow_empty,
            more=more,
            dagster_journal_translator=dagster_journal_translator,
            resource_key=resource_key,
        )
        word = "deep_audit" if depth is Depth.DEEP else "audit"
        job = dg.define_asset_job(
            f"{word}_{name}",
            selection=dg.AssetSelection.checks(check),
            description=f"{'Deep' if depth is Depth.DEEP else 'Cheap'} audit of the journals {group.name}/…",
        )
        checks.append(check)
        jobs.append(job)
        schedules.append(
            dg.ScheduleDefinition(
                name=f"{word}_{name}_schedule",
                job=job,
                cron_schedule=cron,
                execution_timezone=timezone,
                default_status=default_status,
            )
        )
    return Verification(checks, jobs, schedules)
