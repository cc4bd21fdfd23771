"""Operators for recovery: plan, let a person approve exactly that plan, and carry it out."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.providers.common.compat.sdk import (
    AirflowFailException,
    AirflowSkipException,
    BaseOperator,
    TaskGroup,
)
from airflow.providers.standard.operators.hitl import HITLOperator

from airflow_coranto.connection import DEFAULT_CONNECTION
from airflow_coranto.failures import airflow_errors
from airflow_coranto.hooks.coranto import CorantoHook
from airflow_coranto.links.report import ReportLink

if TYPE_CHECKING:
    from coranto.recovery import JournalsRecovery, MoreAudits, MoreDoctors, NotApproved, Plan, Recovery, StepResult

APPROVE: Final = "Approve "
REJECT: Final = "Reject"


class _RecoveryOperator(BaseOperator):
    """Arguments that planning and recovery share, and that must be equal."""

    template_fields: Sequence[str] = ("group", "memory", "coranto_conn_id")
    operator_extra_links = (ReportLink(),)
    ui_color = "#fce8e6"

    def __init__(
        self,
        *,
        group: str,
        memory: str = "",
        doctors: MoreDoctors | None = None,
        audits: MoreAudits | None = None,
        coranto_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.group = group
        self.memory = memory
        self.doctors = doctors
        self.audits = audits
        self.coranto_conn_id = coranto_conn_id

    def recovery(self) -> JournalsRecovery:
        """Return the recovery engine for the connection's cluster."""
        from coranto.client.groups import JournalGroup
        from coranto.recovery import JournalsRecovery

        config = CorantoHook(self.coranto_conn_id).client_config()
        return JournalsRecovery(config, JournalGroup(self.group).selector_text, self.memory, self.doctors, self.audits)


class PlanRecoveryOperator(_RecoveryOperator):
    """Find damage in the journals of a group, and plan its repair. Changes nothing. Reads all their content.

    `memory` is the URL of the store with the records of audits. `doctors` and `audits` add consumers (see
    `coranto.recovery`). Without damage, the task and its downstream tasks are skipped. Returns the plan: `{"hash",
    "summary", "text", "steps", "losses", "remarks"}`, where `text` is Markdown for a person.
    """

    def execute(self, context: Any) -> dict[str, Any]:
        from coranto.client.loop import run_blocking

        with airflow_errors():
            plan = run_blocking(self.recovery().plan())
        xcom_value = plan_value(plan)
        self.log.info("%s", xcom_value["summary"])
        if plan.is_empty:
            context["ti"].xcom_push(key="return_value", value=xcom_value)
            raise AirflowSkipException("nothing to recover")
        return xcom_value


class ApproveRecoveryOperator(HITLOperator):
    """Show a plan to a person, and wait for approval without using a worker.

    `plan` is the output of a PlanRecoveryOperator, and `subject` the title. The button names the plan's hash, so the
    approval is of the plan that was shown, even if the planning task was cleared. After a rejection, the task and its
    downstream tasks are skipped. Returns `{"approved": hash, "by": user}`. Further arguments go to HITLOperator.
    """

    template_fields: Sequence[str] = ("subject", "body", "plan")

    def __init__(self, *, plan: Any, subject: str = "Approve a recovery of journals", **kwargs: Any) -> None:
        # An answer may arrive before the scheduler expects it. The task then fails as lost, and a retry asks again.
        kwargs.setdefault("retries", 2)
        super().__init__(subject=subject, options=[f"{APPROVE}…", REJECT], body="", **kwargs)
        self.plan = plan

    def execute(self, context: Any) -> Any:
        if not isinstance(self.plan, Mapping) or not self.plan.get("hash"):
            raise AirflowFailException("there is no plan to approve; give the output of a PlanRecoveryOperator")
        self.options = [f"{APPROVE}{self.plan['hash']}", REJECT]
        self.body = str(self.plan["text"])
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the approval. Airflow calls this with the answer."""
        if "error" not in event:
            self.options = [str(option) for option in event["chosen_options"]]  # The plan may have changed since.
        response = super().execute_complete(context, event)
        (chosen,) = response["chosen_options"]
        if not chosen.startswith(APPROVE):
            raise AirflowSkipException("the plan was rejected")
        user = response.get("responded_by_user")
        name = user["name"] if user else "the default at the timeout"
        self.log.info("%s has approved the plan %s", name, chosen.removeprefix(APPROVE))
        return {"approved": chosen.removeprefix(APPROVE), "by": name}


class RecoverOperator(_RecoveryOperator):
    """Carry out the plan whose hash is `approved`, and audit.

    `approved` may also be the output of an ApproveRecoveryOperator. The other arguments are as for the plan: `group`,
    `memory`, `doctors` and `audits`. The task diagnoses again. If the plan has changed since the approval, it changes
    nothing and fails, with the current plan as its result. Each step is idempotent, so a killed task may be retried. It
    fails if a step fails or the audit finds an error. Returns `{"done", "remaining", "audit", "errors"}`.
    """

    template_fields: Sequence[str] = (*_RecoveryOperator.template_fields, "approved")

    def __init__(self, *, approved: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.approved = approved

    def execute(self, context: Any) -> dict[str, Any]:
        from coranto.client.loop import run_blocking
        from coranto.recovery import NotApproved

        approved = self.approved["approved"] if isinstance(self.approved, Mapping) else self.approved
        with airflow_errors():
            work = self.recovery().carry_out(str(approved or "").strip())
            recovery = run_blocking(_unless_refused(work))
        if isinstance(recovery, NotApproved):
            context["ti"].xcom_push(key="return_value", value={"remaining": plan_value(recovery.plan)})
            raise AirflowFailException(str(recovery))
        xcom_value = {
            "done": [_result_line(result) for result in recovery.results],
            "remaining": plan_value(recovery.remaining),
            "audit": recovery.report.summary if recovery.report is not None else "",
            "errors": [str(finding) for finding in recovery.report.errors] if recovery.report is not None else [],
        }
        for line in xcom_value["done"]:
            self.log.info("%s", line)
        if not recovery.succeeded:
            context["ti"].xcom_push(key="return_value", value=xcom_value)
            raise AirflowFailException(f"the recovery left something to do: {recovery.remaining.summary}")
        return xcom_value


def _result_line(result: StepResult) -> str:
    outcome = f"FAILED: {result.problem}" if result.problem else result.done
    return f"{result.step.kind.value} {result.step.subject}: {outcome}"


async def _unless_refused(work: Coroutine[Any, Any, Recovery]) -> Recovery | NotApproved:
    from coranto.recovery import NotApproved

    try:
        return await work
    except NotApproved as refused:
        return refused


def recovery_with_approval(
    group_id: str = "recovery", *, group: str, approval: Mapping[str, Any] | None = None, **arguments: Any
) -> TaskGroup:
    """Return a task group of planning, approval and recovery.

    `approval` are arguments of the ApproveRecoveryOperator, such as `assigned_users` or `response_timeout`. Further
    arguments go to both other operators.
    """
    with TaskGroup(group_id) as tasks:
        plan = PlanRecoveryOperator(task_id="plan", group=group, **arguments)
        approve = ApproveRecoveryOperator(task_id="approve", plan=plan.output, **(approval or {}))
        RecoverOperator(task_id="recover", group=group, approved=approve.output, **arguments)
    return tasks


def plan_value(plan: Plan) -> dict[str, Any]:
    """Return a plan as XCom, with a text in Markdown for people."""
    return {**json.loads(plan.to_json()), "hash": plan.hash, "summary": plan.summary, "text": _markdown(plan)}


def _markdown(plan: Plan) -> str:
    lines = [f"**{plan.summary}** (plan `{plan.hash}`)", ""]
    lines += ["| step | kind | of | action | gives up |", "|---|---|---|---|---|"] if plan.steps else []
    lines += [
        f"| {number} | {step.kind.value} | {_cell(step.subject)} | {_cell(step.action)} | {_cell(step.loses)} |"
        for number, step in enumerate(plan.steps, 1)
    ]
    for title, losses in (("Gone for good", plan.gone), ("Lost unless you act", plan.kept)):
        if losses:
            lines += ["", f"{title}:", *(f"- {_cell(loss.subject)}: {_cell(loss.message)}" for loss in losses)]
    if plan.remarks:
        lines += ["", "Left alone:", *(f"- {_cell(mark.subject)}: {_cell(mark.message)}" for mark in plan.remarks)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return text that is escaped for a cell of a table in Markdown."""
    return "".join(f"\\{sign}" if sign in "|`*_[]<>\\" else " " if sign in "\r\n" else sign for sign in text)
