"""The steps of an approved plan."""

from __future__ import annotations

import pytest

from coranto.audit import Report
from coranto.audit.report import Depth
from coranto.recovery import NotApproved, StepKind, carry_out, make_plan
from tests.platform.recovery.sick import FakeDoctor


async def audit() -> Report:
    return Report("all", Depth.DEEP, 0, 1)


async def test_only_the_approved_plan_is_carried_out():
    doctor = FakeDoctor("a")
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


async def test_a_failed_step_stops_only_later_steps_of_its_subject():
    heads, shards = FakeDoctor("a", "b"), FakeDoctor("a", "c", kind=StepKind.UNASSIGN_SHARD)
    heads.failing.add("a")
    reported, doing = [], []

    done = await carry_out(
        [heads, shards],
        (await make_plan([heads, shards])).hash,
        verify=audit,
        on_result=reported.append,
        on_progress=doing.append,
    )

    assert heads.taken == ["b"]
    assert shards.taken == ["c"]
    assert [result.problem for result in done.results] == [
        "it does not hold still",
        "",
        "an earlier step of it failed",
        "",
    ]
    assert reported == list(done.results)
    assert doing == [
        "examining everything again",
        *(f"step {number} of 4: heal {name}" for number, name in enumerate("abac", 1)),
        "examining the result",
        "auditing the result",
    ]
    assert not done.succeeded
    assert [step.subject for step in done.remaining.steps] == ["a", "a"]
