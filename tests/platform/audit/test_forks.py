"""Findings about forks and their sources."""

from __future__ import annotations

from coranto import labels
from coranto.audit.findings import Kind
from coranto.audit.forks import fork_findings
from coranto.forks.choosing import SharedSpan, complete, fork_at, new_spec, with_hold
from coranto.wire import protocol_pb2 as pb

SOURCE = pb.JournalSpec(name="a")
FORK = fork_at(SOURCE, "b", 30, SharedSpan(0, 20))
HELD = with_hold(SOURCE, FORK)
FORMING = new_spec(SOURCE, FORK)
MADE = complete(FORMING, None)


def kinds(selected: list[pb.JournalSpec], others: list[pb.JournalSpec] | None = None) -> list[tuple[str, Kind]]:
    return [(each.subject.name, each.kind) for each in fork_findings(selected, others or [])]


def test_a_consistent_fork_and_source_have_no_finding() -> None:
    assert kinds([HELD, MADE]) == kinds([HELD], [MADE]) == kinds([MADE], [HELD]) == kinds([SOURCE]) == []


def test_forks_without_a_hold_and_holds_without_a_fork_are_reported() -> None:
    assert kinds([HELD, FORMING]) == [("b", Kind.FORK_FORMING)]
    assert kinds([SOURCE, MADE]) == [("b", Kind.FORK_UNHELD)]
    assert kinds([MADE]) == [("b", Kind.FORK_UNHELD)]
    assert kinds([HELD]) == [("a", Kind.FORK_HOLD_STALE)]
    assert kinds([HELD, pb.JournalSpec(name="b")]) == [("a", Kind.FORK_HOLD_STALE)]


def test_unreadable_labels_are_reported() -> None:
    bad = pb.JournalSpec(name="b", labels=labels.label_set({labels.FORK_OF: "a", labels.FORK_BEGIN: "x"}))
    odd = pb.JournalSpec(name="a", labels=labels.label_set({labels.FORK_HOLD: "x"}))
    assert kinds([bad]) == [("b", Kind.FORK_UNHELD)]
    assert kinds([odd]) == [("a", Kind.FORK_HOLD_STALE)]
    assert kinds([HELD, bad]) == [("b", Kind.FORK_UNHELD)]
