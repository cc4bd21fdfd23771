"""The journals whose recovery resolves an audit's findings about a fork."""

from __future__ import annotations

from coranto.audit import Depth, Fact, Finding, Kind, Report, Severity, Subject
from coranto.fragments.forks import Share
from coranto.fragments.fragment import MAX_OFFSET, Codec, Fragment
from coranto.recovery import RecoveryStep, StepKind
from coranto.recovery.losses import files_to_set_aside, is_repaired, owners_elsewhere

STORE = "s3://b/"
SHARED = Fragment("a/source", 0, 100, bytes(20), Codec.NONE, STORE, 1)
FOLDERS = {
    "a/source": (Share("a/source", 0, MAX_OFFSET),),
    "b/fork": (Share("b/fork", 100, MAX_OFFSET), Share("a/source", 0, 100)),
}
ALONE = {"b/fork": FOLDERS["b/fork"]}


def finding(kind: Kind, begin: int, end: int, fragment: Fragment | None = None, journal: str = "b/fork") -> Finding:
    facts: dict[str, Fact] = {"span": [begin, end]}
    if fragment is not None:
        facts |= {"fragment": fragment.content_path, "store": fragment.backing_store}
    return Finding(kind, Severity.ERROR, Subject.journal(journal), "damage", facts)


def restore(fragment: Fragment) -> RecoveryStep:
    facts: dict[str, Fact] = {
        "begin": fragment.begin,
        "end": fragment.end,
        "sum": fragment.sum.hex(),
        "codec": fragment.codec.value,
        "store": fragment.backing_store,
        "postfix": "",
    }
    return RecoveryStep(StepKind.RESTORE_FRAGMENT, fragment.journal, "put it back", facts=facts)


def test_a_step_for_the_source_resolves_findings_of_the_fork() -> None:
    for kind in (Kind.CONTENT_LOST, Kind.FRAGMENT_MISSING, Kind.CONTENT_DIFFERS):
        assert is_repaired(finding(kind, 0, 100, SHARED), [restore(SHARED)], FOLDERS)
    own = Fragment("a/source", 100, 200, bytes(20), Codec.NONE, STORE, 1)
    lost = finding(Kind.CONTENT_LOST, 100, 200)  # Offsets that both have, with separate content.
    assert not is_repaired(lost, [restore(own)], FOLDERS)
    assert not is_repaired(finding(Kind.CONTENT_LOST, 0, 150), [restore(SHARED)], FOLDERS)


def test_recovery_of_a_fork_neither_sets_aside_nor_accepts_loss_of_shared_content() -> None:
    other = Fragment("b/fork", 100, 200, bytes(20), Codec.NONE, STORE, 1)
    errors = [finding(Kind.CONTENT_DIFFERS, 0, 100, SHARED), finding(Kind.CONTENT_DIFFERS, 100, 200, other)]
    report = Report("name=b/fork", Depth.DEEP, 0, 1, findings=errors)
    assert [(step.subject, step.facts["begin"]) for step in files_to_set_aside(report, [])] == [("b/fork", 100)]
    lost = finding(Kind.CONTENT_LOST, 20, 30)
    assert owners_elsewhere(lost, ALONE) == ["a/source"]
    assert owners_elsewhere(lost, FOLDERS) == []
    assert owners_elsewhere(finding(Kind.CONTENT_LOST, 20, 130), ALONE) == []  # Part of it is the fork's own.
    assert owners_elsewhere(finding(Kind.CONTENT_LOST, 120, 130), ALONE) == []
    assert owners_elsewhere(finding(Kind.HEAD_FELL, 120, 130, journal="c/gone"), ALONE) == []
