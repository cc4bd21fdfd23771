from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from coranto.errors import ApplyOutcomeUnknown, CorantoError, EtcdTransactionFailed, InvalidInput
from coranto.labels import parse_selector
from coranto.reconcile import JOURNALS, PresentSpec, SpecPlan, SpecReconciler, SpecStep, at_any_revision
from coranto.wire import protocol_pb2 as pb

Change = pb.ApplyRequest.Change
SpecAction = Callable[[], None]


class MemorySpecs:
    """Specs as in etcd. `before` and `after` have actions around each transaction, by its number from 0."""

    def __init__(self) -> None:
        self.journals: dict[str, PresentSpec] = {}
        self.revision = 1
        self.transactions: list[list[str]] = []
        self.before: dict[int, SpecAction] = {}
        self.after: dict[int, SpecAction] = {}
        self.tried = 0

    def put(self, name: str, replication: int = 1) -> None:
        self.revision += 1
        self.journals[name] = PresentSpec(pb.JournalSpec(name=name, replication=replication), self.revision)

    async def present(self) -> Mapping[str, PresentSpec]:
        return dict(self.journals)

    async def apply(self, changes: Sequence[Change]) -> None:
        assert 0 < len(changes) <= 128
        number, self.tried = self.tried, self.tried + 1
        self.before.get(number, lambda: None)()
        for change in changes:
            found = self.journals.get(change.delete or change.upsert.name)
            if change.expect_mod_revision != (found.revision if found is not None else 0):
                raise EtcdTransactionFailed("apply")
        self.revision += 1
        for change in changes:
            if change.delete:
                del self.journals[change.delete]
            else:
                self.journals[change.upsert.name] = PresentSpec(change.upsert, self.revision)
        self.transactions.append([change.delete or change.upsert.name for change in changes])
        self.after.get(number, lambda: None)()


def upsert(name: str, replication: int = 1, revision: int = 0) -> Change:
    return Change(upsert=pb.JournalSpec(name=name, replication=replication), expect_mod_revision=revision)


def tree(count: int, replication: int = 1) -> list[Change]:
    return at_any_revision([upsert(f"a/{number:04}", replication) for number in range(count)])


def fail(error: Exception) -> SpecAction:
    def action() -> None:
        raise error

    return action


class Run:
    """A reconciler, and the steps that it reported."""

    def __init__(self, specs: MemorySpecs, wanted: Sequence[Change], size: int = 0, prune: str = "") -> None:
        selector = parse_selector(prune) if prune else None
        self.reconciler = SpecReconciler(JOURNALS, specs, wanted, source="the tree", size=size, prune=selector)
        self.reported: list[str] = []

    async def __call__(self) -> SpecPlan:
        def report(steps: Sequence[SpecStep]) -> None:
            self.reported += [f"{step.action.value} {step.name}" for step in steps]

        return await self.reconciler.apply(await self.reconciler.plan(), report)


async def test_more_changes_than_a_transaction_holds_are_applied_in_several() -> None:
    specs = MemorySpecs()
    run = Run(specs, tree(300))
    plan = await run()
    assert [len(each) for each in specs.transactions] == [100, 100, 100]
    assert len(run.reported) == len(plan.due) == len(specs.journals) == 300
    await Run(specs, tree(300))()
    assert len(specs.transactions) == 3, "no change was left"


async def test_after_an_interruption_the_same_tree_continues_with_the_rest() -> None:
    specs = MemorySpecs()
    specs.before[1] = fail(InvalidInput("the broker refuses"))
    with pytest.raises(CorantoError, match=r"The first 100 of 300 changes were applied\. Apply again"):
        await Run(specs, tree(300))()
    assert len(specs.journals) == 100
    rest = Run(specs, tree(300))
    await rest()
    assert [len(each) for each in specs.transactions] == [100, 100, 100]
    assert rest.reported[0] == "create a/0100"


async def test_concurrent_changes_are_compared_again() -> None:
    specs = MemorySpecs()
    specs.put("a/0001", replication=3)
    specs.before[0] = lambda: specs.put("a/0001", replication=5)
    run = Run(specs, tree(3))
    plan = await run()
    (changed,) = (step for step in plan.steps if step.name == "a/0001")
    assert changed.differences == ("replication: 5 → 1",)
    assert sorted(run.reported) == ["create a/0000", "create a/0002", "update a/0001"]


async def test_a_suspension_between_comparison_and_apply_is_kept() -> None:
    specs = MemorySpecs()
    specs.put("a/0000", replication=3)

    def suspend() -> None:
        specs.put("a/0000", replication=3)
        specs.journals["a/0000"].spec.suspend.offset = 77  # type: ignore[attr-defined]

    specs.before[0] = suspend
    await Run(specs, tree(1))()
    assert specs.journals["a/0000"].spec == pb.JournalSpec(
        name="a/0000", replication=1, suspend=pb.JournalSpec.Suspend(offset=77)
    )


async def test_a_concurrently_created_journal_is_a_conflict_if_it_must_be_new() -> None:
    specs = MemorySpecs()
    specs.before[1] = lambda: specs.put("a/0", replication=3)
    run = Run(specs, [upsert("b/0"), upsert("a/0")], size=1)
    with pytest.raises(CorantoError, match=r"a/0 exists already, at revision .* The first 1 of 2 changes were applied"):
        await run()
    assert run.reported == ["create b/0"]


async def test_a_conflict_known_at_the_start_is_reported_before_anything_is_applied() -> None:
    specs = MemorySpecs()
    for number in range(20):
        specs.put(f"b/{number}", replication=3)
    run = Run(specs, [upsert("a/0"), *(upsert(f"b/{number}") for number in range(20))])
    with pytest.raises(EtcdTransactionFailed, match=r"apply of the tree.*b/9 exists already.*; and 10 more\)"):
        await run()
    assert specs.transactions == []


async def test_a_lost_answer_is_resolved_by_comparing_again() -> None:
    specs = MemorySpecs()
    specs.after[0] = fail(ApplyOutcomeUnknown("apply: connection lost"))
    run = Run(specs, tree(200))
    plan = await run()
    assert [len(each) for each in specs.transactions] == [100, 100]
    assert len(run.reported) == len(plan.due) == 200


async def test_reconciling_gives_up_after_repeated_concurrent_changes() -> None:
    specs = MemorySpecs()
    specs.put("a/0000", replication=3)
    specs.before = {number: lambda: specs.put("a/0000", replication=5) for number in range(100)}
    with pytest.raises(EtcdTransactionFailed):
        await Run(specs, tree(1))()
    assert specs.tried == 5


async def test_pruned_journals_are_in_the_result_although_not_in_the_tree() -> None:
    specs = MemorySpecs()
    specs.put("a/left", replication=3)
    specs.put("b/left", replication=3)
    specs.before[0] = fail(EtcdTransactionFailed("apply"))
    run = Run(specs, tree(1), prune="name:prefix=a/")
    plan = await run()
    assert run.reported == ["create a/0000", "delete a/left"]
    assert [step.name for step in plan.due if step.pruned] == ["a/left"]
    assert sorted(specs.journals) == ["a/0000", "b/left"]
