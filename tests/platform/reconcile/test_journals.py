"""Specs of journals: kept suspensions, nested names, and prefixes."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.labels import FORK_HOLD, label_set
from coranto.reconcile import JOURNALS, at_any_revision, make_plan, under_prefix
from coranto.wire import protocol_pb2 as pb
from tests.platform.reconcile.journal_changes import delete, present, upsert


def test_a_suspended_journal_stays_suspended() -> None:
    """Without its offset, an empty journal would start at 0 again."""
    suspended = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=77)
    there = present(("a/one", 7, {"suspend": suspended}), ("a/two", 8, {"suspend": suspended}))
    woken = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=99)
    wanted = [upsert("a/one", replication=2), upsert("a/two", suspend=woken)]
    one, two = make_plan(JOURNALS, at_any_revision(wanted), there).steps
    assert (one.spec.suspend, one.spec.replication) == (suspended, 2)
    assert one.differences == ("replication: 1 → 2",)
    assert two.spec.suspend == woken


def test_labels_of_forks_are_kept_unless_a_tree_sets_them() -> None:
    known = label_set({FORK_HOLD: "0/b/fork", "region": "eu"})
    there = present(("a/one", 7, {"labels": known}), ("a/two", 8, {"labels": known}))
    wanted = [upsert("a/one", labels=label_set(region="us")), upsert("a/two", labels=label_set({FORK_HOLD: "0/c"}))]
    one, two = make_plan(JOURNALS, at_any_revision(wanted), there).steps
    assert one.spec.labels == label_set({FORK_HOLD: "0/b/fork", "region": "us"})
    assert two.spec.labels == label_set({FORK_HOLD: "0/c"})


@pytest.mark.parametrize(("old", "new"), [("a/b", "a/b/c"), ("a/b/c", "a/b")])
def test_a_journal_that_would_nest_with_a_new_one_is_deleted_first(old: str, new: str) -> None:
    plan = make_plan(JOURNALS, [delete(old), delete("z/last"), upsert(new)], present((old, 1), ("z/last", 2)))
    names = [[step.name for step in steps] for steps in plan.transactions(128)]
    assert names == [[old], [new, "z/last"]]


def test_a_prefix_applies_to_upserts_and_deletions() -> None:
    moved = under_prefix([upsert("a/one"), delete("a/two")], "rerun/")
    assert [change.upsert.name or change.delete for change in moved] == ["rerun/a/one", "rerun/a/two"]
    with pytest.raises(InvalidInput, match="must end with a slash"):
        under_prefix([], "rerun")
