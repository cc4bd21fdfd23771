"""Plans of recovery: their hash is of what was read, and only an approved one is carried out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coranto.audit import Report
from coranto.audit.report import Depth
from coranto.errors import CorantoError
from coranto.recovery import Diagnosis, Loss, NotApproved, Plan, RecoveryStep, Remark, StepKind, carry_out, make_plan


class Sick:
    """Things that are sick, and heal when their step is taken."""

    def __init__(self, *names: str, kind: StepKind = StepKind.RESET_HEAD, losses: tuple[Loss, ...] = ()) -> None:
        self.names = list(names)
        self.kind = kind
        self.losses = losses
        self.failing: set[str] = set()
        self.taken: list[str] = []

    async def diagnose(self) -> Diagnosis:
        steps = [RecoveryStep(self.kind, name, f"heal {name}", facts={"n": 1}) for name in self.names]
        return Diagnosis(steps, self.losses, [Remark("weather", "it rains")])

    async def act(self, step: RecoveryStep) -> str:
        if step.subject in self.failing:
            raise CorantoError("it does not hold still")
        self.taken.append(step.subject)
        self.names.remove(step.subject)
        return "healed"


async def audit() -> Report:
    return Report("all", Depth.DEEP, 0, 1)


async def test_a_plan_is_in_the_order_of_its_kinds_and_names_what_is_lost():
    plan = await make_plan(
        [
            Sick("shard", kind=StepKind.UNASSIGN_SHARD),
            Sick("b", "a"),
            Sick("a", kind=StepKind.RESTORE_FRAGMENT, losses=(Loss("a", "gone"),)),
        ]
    )

    assert [(step.kind, step.subject) for step in plan.steps] == [
        (StepKind.RESTORE_FRAGMENT, "a"),
        (StepKind.RESET_HEAD, "a"),
        (StepKind.RESET_HEAD, "b"),
        (StepKind.UNASSIGN_SHARD, "shard"),
    ]
    assert plan.summary == "4 steps; 1 loss for good"
    assert json.loads(plan.to_json())["hash"] == plan.hash
    assert (await make_plan([])).is_empty


async def test_a_hash_changes_with_every_step_and_loss_and_with_nothing_else():
    plan = await make_plan([Sick("a", "b", losses=(Loss("a", "gone"),))])
    step = plan.steps[0]

    others = [
        replace(plan, steps=plan.steps[:1]),
        replace(plan, losses=()),
        replace(plan, steps=(replace(step, facts={"n": 2}), *plan.steps[1:])),
        replace(plan, steps=(replace(step, loses="much"), *plan.steps[1:])),
        replace(plan, losses=(Loss("a", "gone too"),)),
    ]
    assert len({plan.hash, *(each.hash for each in others)}) == 1 + len(others)
    assert (
        replace(plan, remarks=()).hash
        == plan.hash
        == Plan.of([await Sick("a", "b", losses=plan.losses).diagnose()]).hash
    )


async def test_only_the_approved_plan_is_carried_out():
    doctor = Sick("a")
    approved = (await make_plan([doctor])).hash
    doctor.names.append("b")

    with pytest.raises(NotApproved, match=f"and {approved} was approved") as refused:
        await carry_out([doctor], approved, verify=audit)
    assert doctor.taken == []

    done = await carry_out([doctor], refused.value.plan.hash, verify=audit)
    assert doctor.taken == ["a", "b"]
    assert done.succeeded
    assert done.remaining.is_empty
    with pytest.raises(NotApproved, match="there is nothing to recover"):
        await carry_out([doctor], refused.value.plan.hash)  # Approved twice.


async def test_a_step_that_fails_stops_later_steps_of_its_subject_and_no_others():
    heads, shards = Sick("a", "b"), Sick("a", "c", kind=StepKind.UNASSIGN_SHARD)
    heads.failing.add("a")
    told = []

    done = await carry_out([heads, shards], (await make_plan([heads, shards])).hash, on_result=told.append)

    assert heads.taken == ["b"]
    assert shards.taken == ["c"]
    assert [result.problem for result in done.results] == [
        "it does not hold still",
        "",
        "an earlier step of it failed",
        "",
    ]
    assert told == list(done.results)
    assert not done.succeeded
    assert [step.subject for step in done.remaining.steps] == ["a", "a"]
