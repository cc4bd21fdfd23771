"""Recovery as jobs: one that plans, and one that executes a plan whose hash a person has approved.

The engine is `coranto.recovery`. This module has its jobs, and a sensor that starts a planning run when an audit fails.
"""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Final, TypeVar

import dagster as dg
from pydantic import Field

from coranto.client.groups import JournalGroup
from coranto.client.loop import run_blocking
from coranto.errors import CorantoError
from coranto.recovery import JournalsRecovery, MoreAudits, MoreDoctors, NotApproved, Plan, Recovery
from dagster_coranto.instance.requests import Requests
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.metadata import JournalRow, namespaced, table, verbatim

T = TypeVar("T")

OP: Final = "recover"
_COLUMNS: Final = {"step": "int", "kind": "string", "of": "string", "action": "string", "gives_up": "string"}


class RecoveryConfig(dg.Config):
    """The approval of a plan."""

    approved: str = Field(description="The hash of the plan that you have read, from the metadata of a planning run.")


@dataclass(frozen=True, slots=True)
class JournalRecovery:
    """The jobs of a recovery. `plan_job` changes nothing. `job` changes nothing without an approved hash."""

    job: dg.JobDefinition
    plan_job: dg.JobDefinition

    @property
    def jobs(self) -> list[dg.JobDefinition]:
        return [self.plan_job, self.job]


def build_journal_recovery(
    group: JournalGroup,
    *,
    name: str = "journal_recovery",
    memory: str = "",
    doctors: MoreDoctors | None = None,
    audits: MoreAudits | None = None,
    resource_key: str = "journals",
) -> JournalRecovery:
    """Return the jobs `journal_recovery_plan` and `journal_recovery` for the journals of a group.

    The planning run's metadata shows the steps in order, permanent losses, and the plan's hash. Launch the other job
    with that hash (`ops: recover: config: approved: …`). That job diagnoses again. If the plan has changed, it changes
    nothing, fails, and shows the current plan. After the steps it runs an audit, and fails if the audit fails. Both
    read all content of the journals.

    `memory` is the URL of the store with the records of audits. `doctors` and `audits` add consumers.
    """

    def work(resource: JournalResource) -> JournalsRecovery:
        selector = resource.group(group).selector_text
        return JournalsRecovery(resource.audit_config(), selector, memory, doctors, audits)

    @dg.op(name="plan", required_resource_keys={resource_key}, description="Find damage, and plan its repair.")
    def plan_recovery(context: dg.OpExecutionContext) -> None:
        plan = _run(work(getattr(context.resources, resource_key)).plan())
        context.log.info(plan.summary)
        context.add_output_metadata(plan_metadata(plan))

    @dg.op(name=OP, required_resource_keys={resource_key}, description="Carry out the plan of the approved hash.")
    def recover(context: dg.OpExecutionContext, config: RecoveryConfig) -> None:
        try:
            recovery = _run(work(getattr(context.resources, resource_key)).carry_out(config.approved.strip()))
        except NotApproved as error:
            raise dg.Failure(str(error), metadata=plan_metadata(error.plan), allow_retries=False) from error
        metadata = recovery_metadata(recovery)
        if not recovery.succeeded:
            raise dg.Failure("the recovery left something to do", metadata=metadata, allow_retries=False)
        context.add_output_metadata(metadata)

    @dg.job(name=f"{name}_plan", description=f"Plan the recovery of the journals {group.name}/…. Changes nothing.")
    def plan_job() -> None:
        plan_recovery()

    @dg.job(name=name, description=f"Carry out an approved plan for the journals {group.name}/….")
    def job() -> None:
        recover()

    return JournalRecovery(job, plan_job)


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        return run_blocking(work)
    except NotApproved:
        raise
    except CorantoError as error:
        raise dg.Failure(f"nothing could be examined: {error}", allow_retries=False) from error


def plan_metadata(plan: Plan) -> dict[str, Any]:
    """Return a plan as metadata."""
    return namespaced(_fields_of(plan))


def _fields_of(plan: Plan) -> dict[str, Any]:
    rows: list[JournalRow] = [
        {"step": number, "kind": step.kind.value, "of": step.subject, "action": step.action, "gives_up": step.loses}
        for number, step in enumerate(plan.steps, 1)
    ]
    metadata: dict[str, Any] = {"summary": plan.summary, "steps": table(rows, _COLUMNS)}
    if not plan.is_empty:
        metadata["hash"] = plan.hash
        metadata["to_approve"] = verbatim([f"ops: {{{OP}: {{config: {{approved: '{plan.hash}'}}}}}}"])
    for name, losses in (("gone_for_good", plan.gone), ("lost_unless_you_act", plan.kept)):
        if losses:
            metadata[name] = verbatim([f"{loss.subject}: {loss.message}" for loss in losses])
    if plan.remarks:
        metadata["left_alone"] = verbatim([f"{mark.subject}: {mark.message}" for mark in plan.remarks])
    return metadata


def recovery_metadata(recovery: Recovery) -> dict[str, Any]:
    """Return the result of a recovery as metadata."""
    done = [
        f"{each.step.kind.value} {each.step.subject}: {'FAILED: ' + each.problem if each.problem else each.done}"
        for each in recovery.results
    ]
    metadata = {"done": verbatim(done or ["nothing"]), "plan": recovery.plan.summary}
    if recovery.report is not None:
        metadata["audit"] = recovery.report.summary
        if recovery.report.errors:
            metadata["findings"] = verbatim([f"{each.kind}: {each}" for each in recovery.report.errors])
    return namespaced({**metadata, **{f"left_{name}": value for name, value in _fields_of(recovery.remaining).items()}})


def build_recovery_sensor(
    recovery: JournalRecovery,
    checks: Sequence[dg.AssetCheckKey],
    *,
    name: str = "journal_recovery_sensor",
    minimum_interval_seconds: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Return a sensor that launches the planning of a recovery, once for each failed evaluation of one of `checks`.

    Failed planning runs are retried after a backoff that doubles with each failure, up to half an hour. "Reset cursor"
    lets the sensor plan again. The sensor launches only the planning job, which changes nothing. The recovery itself
    needs a person with the plan's hash.
    """

    @dg.sensor(
        name=name,
        job=recovery.plan_job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Plans a recovery when an audit has failed. Never carries one out.",
    )
    def propose(context: dg.SensorEvaluationContext) -> Any:
        latest = context.instance.event_log_storage.get_latest_asset_check_execution_by_key(list(checks))
        failed = {
            key.to_user_string(): record
            for key, record in latest.items()
            if record.event is not None
            and record.event.dagster_event is not None
            and (evaluation := record.event.asset_check_evaluation) is not None
            and not evaluation.passed
            and evaluation.severity is dg.AssetCheckSeverity.ERROR
        }
        if not failed:
            return dg.SkipReason("no audit has failed")
        evaluations = ",".join(f"{key}={record.id}" for key, record in sorted(failed.items()))
        requests = Requests(context, name)
        due = requests.histories([evaluations])[evaluations].due(minimum_interval_seconds)
        if due is None:
            return dg.SkipReason("a recovery from these failures is planned")
        if (left := due - time()) > 0:
            return dg.SkipReason(f"the planning run has failed; the next one follows in {left:.0f} s")
        return requests.request(evaluations, tags={"coranto/failed_checks": ",".join(sorted(failed))[:250]})

    return propose
