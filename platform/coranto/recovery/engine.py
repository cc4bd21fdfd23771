"""The engine of recovery: diagnose, plan, execute approved steps, verify. Independent of orchestrators.

`make_plan` changes nothing. `carry_out` diagnoses again, and acts only if the plan still has the approved hash. It may
be interrupted at any point: each step is safe to repeat, and later plans omit completed steps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from coranto.audit import Report
from coranto.errors import CorantoError
from coranto.recovery.plan import Diagnosis, Plan, RecoveryStep

_log = structlog.get_logger(__name__)

Verify = Callable[[], Awaitable[Report]]


class Doctor(Protocol):
    """Finds damage of one kind, and repairs it."""

    async def diagnose(self) -> Diagnosis:
        """Find damage, and the steps that repair it. Changes nothing that readers or writers could notice.

        Raises CorantoError only if nothing at all can be examined.
        """
        ...

    async def act(self, step: RecoveryStep) -> str:
        """Execute a step of this doctor's diagnosis, and return a short description. Safe to repeat.

        Raises CorantoError when the step cannot be executed.
        """
        ...


class NotApproved(CorantoError):
    """The plan is not the approved plan. `plan` is the current plan."""

    def __init__(self, approved: str, plan: Plan) -> None:
        super().__init__(
            f"{approved or 'nothing'} was approved, and there is nothing to recover (any more)"
            if plan.is_empty
            else f"the plan now has the hash {plan.hash}, and {approved or 'nothing'} was approved: the damage changed "
            "since. Read the current plan, and approve that"
        )
        self.plan = plan


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. `problem` is empty if the step succeeded."""

    step: RecoveryStep
    done: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of carrying out a plan: the results of its steps, a new diagnosis, and a final audit."""

    plan: Plan
    results: tuple[StepResult, ...]
    remaining: Plan
    report: Report | None

    @property
    def succeeded(self) -> bool:
        """True if every step succeeded, the new diagnosis has no steps, and the audit is sound."""
        failed = any(result.problem for result in self.results)
        return not failed and not self.remaining.steps and (self.report is None or self.report.sound)


async def make_plan(doctors: Sequence[Doctor]) -> Plan:
    """Diagnose, and return the plan. Changes nothing."""
    return Plan.of([await doctor.diagnose() for doctor in doctors])


async def carry_out(
    doctors: Sequence[Doctor],
    approved: str,
    *,
    verify: Verify | None = None,
    on_result: Callable[[StepResult], None] = lambda result: None,
    on_progress: Callable[[str], None] = lambda doing: None,
) -> Recovery:
    """Execute the plan with the hash `approved`, diagnose again, and verify by an audit.

    Raises NotApproved, without any change, when the current plan has another hash. A failed step stops the later steps
    of its subject, and no others. `on_progress` is called when each part begins; a part may take minutes.
    """
    on_progress("examining everything again")
    diagnoses = [(doctor, await doctor.diagnose()) for doctor in doctors]
    plan = Plan.of([diagnosis for _, diagnosis in diagnoses])
    if plan.hash != approved:
        raise NotApproved(approved, plan)
    owners = {id(step): doctor for doctor, diagnosis in diagnoses for step in diagnosis.steps}
    failed: set[str] = set()
    results: list[StepResult] = []
    for number, step in enumerate(plan.steps, 1):
        on_progress(f"step {number} of {len(plan.steps)}: {step.action}")
        result = await _take(owners[id(step)], step, failed)
        if result.problem:
            failed.add(step.subject)
        results.append(result)
        on_result(result)
    on_progress("examining the result")
    remaining = await make_plan(doctors)
    if verify is not None:
        on_progress("auditing the result")
    report = await verify() if verify is not None else None
    return Recovery(plan, tuple(results), remaining, report)


async def _take(doctor: Doctor, step: RecoveryStep, failed: set[str]) -> StepResult:
    if step.subject in failed:
        return StepResult(step, problem="an earlier step of it failed")
    try:
        done = await doctor.act(step)
    except CorantoError as error:
        _log.warning("recovery.step_failed", step=step.kind.value, subject=step.subject, error=str(error))
        return StepResult(step, problem=str(error))
    _log.info("recovery.step_done", step=step.kind.value, subject=step.subject, done=done)
    return StepResult(step, done=done)
