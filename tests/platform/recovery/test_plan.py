"""Plans of recoveries: their order and their hashes."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from coranto.recovery import Loss, Plan, StepKind, make_plan
from tests.platform.recovery.sick import FakeDoctor


async def test_a_plan_is_ordered_by_kind_and_names_losses():
    plan = await make_plan(
        [
            FakeDoctor("shard", kind=StepKind.UNASSIGN_SHARD),
            FakeDoctor("b", "a"),
            FakeDoctor("a", kind=StepKind.RESTORE_FRAGMENT, losses=(Loss("a", "content_lost", "gone"),)),
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


async def test_a_hash_depends_on_steps_and_losses_but_not_on_texts():
    loss = Loss("a", "content_lost", "gone", begin=3, end=7, file="a/3-7", sum="0a")
    plan = await make_plan([FakeDoctor("a", "b", losses=(loss,))])
    step = plan.steps[0]

    others = [
        replace(plan, steps=plan.steps[:1]),
        replace(plan, losses=()),
        replace(plan, steps=(replace(step, facts={"n": 2}), *plan.steps[1:])),
        replace(plan, steps=(replace(step, kind=StepKind.ACCEPT_LOSS), *plan.steps[1:])),
        *(
            replace(plan, losses=(replace(loss, **{name: 9 if isinstance(value, int) else "other"}),))
            for name, value in loss.identity.items()
        ),
    ]
    assert len({plan.hash, *(each.hash for each in others)}) == 1 + len(others)
    assert loss.identity.keys() == {each.name for each in fields(Loss)} - {"message", "kept_at"}
    reworded = replace(plan, steps=(replace(step, action="do it", loses="much"), *plan.steps[1:]))
    assert reworded.hash == replace(plan, losses=(replace(loss, message="gone at 12:03"),)).hash == plan.hash
    assert (
        replace(plan, remarks=()).hash
        == plan.hash
        == Plan.of([await FakeDoctor("a", "b", losses=plan.losses).diagnose()]).hash
    )
