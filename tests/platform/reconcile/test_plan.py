"""Plans: new, changed, unchanged and removed journals."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.labels import MANAGED_BY, MESSAGE_TYPES, PUBLICATIONS, STREAM, STREAM_PART, label_set, parse_selector
from coranto.reconcile import JOURNALS, SpecAction, at_any_revision, make_plan
from coranto.wire import protocol_pb2 as pb
from tests.platform.reconcile.journal_changes import delete, present, upsert


def test_a_plan_distinguishes_new_changed_and_unchanged_journals() -> None:
    there = present(("a/same", 3), ("a/other", 4, {"replication": 2}), ("b/elsewhere", 5))
    plan = make_plan(JOURNALS, at_any_revision([upsert("a/new"), upsert("a/same"), upsert("a/other")]), there)
    assert [(step.name, step.action) for step in plan.steps] == [
        ("a/new", SpecAction.CREATE),
        ("a/same", SpecAction.NONE),
        ("a/other", SpecAction.UPDATE),
    ]
    assert plan.steps[2].differences == ("replication: 2 → 1",)
    assert [step.name for step in plan.due] == ["a/new", "a/other"]
    assert plan.conflicts == ()


def test_every_change_expects_the_compared_revision() -> None:
    there = present(("a/one", 7), ("a/two", 8))
    plan = make_plan(JOURNALS, [upsert("a/one", revision=-1, replication=2), delete("a/two"), upsert("a/new")], there)
    assert [step.change.expect_mod_revision for step in plan.steps] == [7, 8, 0]


def test_a_revision_other_than_the_present_one_is_a_conflict() -> None:
    there = present(("a/one", 7), ("a/two", 8))
    wanted = [upsert("a/one", replication=2), upsert("a/two", revision=5, replication=2), upsert("a/new", revision=5)]
    assert make_plan(JOURNALS, wanted, there).conflicts == (
        "a/one exists already, at revision 7: give that as its `revision` to update it, or -1 for any",
        "a/two is at revision 8, not 5",
        "a/new is at revision none, not 5",
    )


def test_specs_already_in_effect_need_no_change_at_any_revision() -> None:
    """So a document can be applied again after an interruption."""
    plan = make_plan(
        JOURNALS,
        [upsert("a/one"), upsert("a/two", revision=5), delete("a/gone", 3)],
        present(("a/one", 7), ("a/two", 8)),
    )
    assert [step.action for step in plan.steps] == [SpecAction.NONE, SpecAction.NONE, SpecAction.GONE]
    assert (plan.due, plan.conflicts) == ((), ())


def test_a_spec_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a/one is given twice"):
        make_plan(JOURNALS, [upsert("a/one"), delete("a/one")], {})


def test_the_digest_depends_only_on_the_wanted_specs() -> None:
    wanted = [upsert("a/one"), upsert("a/two")]
    suspended = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=77)
    there = present(("a/one", 3, {"suspend": suspended}), ("a/two", 4))
    fresh, repeated = make_plan(JOURNALS, wanted, {}), make_plan(JOURNALS, wanted[::-1], there)
    assert fresh.digest == repeated.digest
    assert fresh.digest != make_plan(JOURNALS, [upsert("a/one"), upsert("a/two", replication=2)], {}).digest


def test_journals_that_the_document_does_not_name_change_only_with_pruning() -> None:
    there = present(("shop/kept", 3), ("shop/left", 4), ("other/one", 5))
    assert make_plan(JOURNALS, [upsert("shop/kept")], there).due == ()
    plan = make_plan(JOURNALS, [upsert("shop/kept")], there, prune=parse_selector("name:prefix=shop/"))
    (step,) = plan.due
    assert (step.name, step.action, step.pruned) == ("shop/left", SpecAction.DELETE, True)
    assert step.change == delete("shop/left", 4)


def test_pruning_can_select_by_labels() -> None:
    there = present(("a/one", 3, {"labels": label_set({"app": "shop"})}), ("a/two", 4))
    plan = make_plan(JOURNALS, [upsert("b/one")], there, prune=parse_selector("app=shop"))
    assert [step.name for step in plan.due if step.pruned] == ["a/one"]


def test_pruning_skips_journals_that_programs_manage() -> None:
    of_programs = [
        {MANAGED_BY: PUBLICATIONS},
        {MANAGED_BY: MESSAGE_TYPES},
        {STREAM: "shop/orders"},
        {STREAM_PART: "shop/orders"},
    ]
    there = present(
        *((f"shop/{number}", 3, {"labels": label_set(its)}) for number, its in enumerate(of_programs)),
        ("shop/left", 4, {"labels": label_set({MANAGED_BY: "somebody"})}),
    )
    plan = make_plan(JOURNALS, [upsert("shop/kept")], there, prune=parse_selector("name:prefix=shop/"))
    assert [step.name for step in plan.due if step.pruned] == ["shop/left"]


def test_pruning_everything_is_refused() -> None:
    there = present(("a/one", 3))
    for selector in ("", "!draft"):
        with pytest.raises(InvalidInput, match="would delete all journals that the document does not name"):
            make_plan(JOURNALS, [upsert("b/one")], there, prune=parse_selector(selector))
    with pytest.raises(InvalidInput, match="an empty document would delete all selected journals"):
        make_plan(JOURNALS, [], there, prune=parse_selector("name:prefix=a/"))


def test_few_changes_are_one_transaction_and_many_are_several_with_deletions_last() -> None:
    there = present(("a/0-old", 1), ("a/5-changed", 2, {"replication": 3}))
    wanted = [delete("a/0-old"), *(upsert(f"a/new-{n}") for n in range(3)), upsert("a/5-changed", revision=-1)]
    plan = make_plan(JOURNALS, wanted, there)
    assert len(plan.transactions(5)) == 1
    names = [[step.name for step in steps] for steps in plan.transactions(2)]
    assert names == [["a/new-0", "a/new-1"], ["a/new-2", "a/5-changed"], ["a/0-old"]]
