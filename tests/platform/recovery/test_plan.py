"""Plans of recoveries: their order and their hashes."""

from __future__ import annotations

import json
from dataclasses import replace

from coranto.recovery import Loss, Plan, StepKind, make_plan
from tests.platform.recovery.sick import Sick


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
