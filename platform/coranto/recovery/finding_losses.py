"""Losses in an audit's findings, described by fields that are the same in each audit. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coranto.audit import Fact, Finding, Kind, uncovered
from coranto.fragments.fragment import Fragment, parse_content_path
from coranto.recovery.plan import Loss, RecoveryStep, StepKind

LOSSES: Final[Mapping[Kind, str]] = {
    Kind.CONTENT_LOST: "content is gone, and retention did not allow that",
    Kind.CONTENT_MISSING: "no fragment covers content",
    Kind.CONTENT_REPLACED: "content was replaced by other content",
    Kind.FRAGMENT_MISSING: "a fragment is missing from its store",
    Kind.BEGINNING_UNEXPLAINED: "it does not begin at 0, and the cause is unknown",
    Kind.HEAD_FELL: "its head fell: acknowledged content and registers after it are gone",
    Kind.REGISTERS_LOST: "its registers are gone",
    Kind.JOURNAL_GONE: "it does not exist any more",
    Kind.JOURNAL_RECREATED: "it was deleted and created again",
    Kind.MEMORY_DAMAGED: "records of audits contradict what brokers know of them, so later losses may be unknown",
}
CONTENT: Final = (Kind.CONTENT_LOST, Kind.CONTENT_MISSING, Kind.FRAGMENT_MISSING)
"""Findings about content that is gone. Audits may report the same loss as different kinds, so losses do not distinguish
these."""


def restored(steps: Iterable[RecoveryStep]) -> Iterator[tuple[RecoveryStep, tuple[int, int]]]:
    """Yield the steps that restore content, each with its offsets."""
    for step in steps:
        if step.kind is StepKind.RESTORE_FRAGMENT:
            yield step, (int(str(step.facts["begin"])), int(str(step.facts["end"])))


def missed_fragments(findings: Iterable[Finding]) -> dict[str, list[Fragment]]:
    """Return the fragments that findings report as missing, by journal. Fragments without a file have no store."""
    missed: dict[str, list[Fragment]] = {}
    for finding in findings:
        files, stores = finding.facts.get("files"), finding.facts.get("stores")
        if not isinstance(files, list) or not isinstance(stores, list):
            continue
        name = finding.subject.name
        missed.setdefault(name, []).extend(
            parse_content_path(name, str(path).removeprefix(f"{name}/"), backing_store=str(store))
            for path, store in zip(files, stores, strict=True)
        )
    return missed


def losses_of(findings: Sequence[Finding], known: Sequence[Loss], steps: Sequence[RecoveryStep]) -> list[Loss]:
    """Return the losses in findings, without content of `known` losses and content that steps restore."""
    found: list[Loss] = []
    for each in findings:
        name = each.subject.name
        if each.kind in CONTENT:
            covered = [(loss.begin, loss.end) for loss in (*known, *found) if loss.subject == name]
            covered += [span for step, span in restored(steps) if step.subject == name]
            found += [
                Loss(name, Kind.CONTENT_LOST, f"{LOSSES[each.kind]} at [{low}, {high})", begin=low, end=high)
                for begin, end in spans_of(each.facts)
                for low, high in uncovered(covered, begin, end)
            ]
        elif each.kind is not Kind.JOURNAL_GONE:
            found.append(loss_of(each))
    return found


def loss_of(finding: Finding) -> Loss:
    """Return the loss of a finding whose kind is not in `CONTENT`."""
    facts = finding.facts

    def number(fact: str) -> int:
        return int(str(facts[fact]))

    loss = Loss(finding.subject.name, finding.kind, LOSSES[finding.kind])
    match finding.kind:
        case Kind.CONTENT_REPLACED:
            ((begin, end),) = spans_of(facts)
            sums = ", ".join(map(str, facts["sums"])) if isinstance(facts["sums"], list) else ""
            text = f"{loss.message} at [{begin}, {end}): it has the SHA-1 {sums}"
            before = str(facts.get("sum_before", ""))
            return replace(loss, message=text, begin=begin, end=end, sum=before, detail=sums)
        case Kind.HEAD_FELL:
            text = f"{loss.message} (head {facts['head']}, and was {facts['head_before']})"
            return replace(loss, message=text, end=number("head_before"))
        case Kind.JOURNAL_RECREATED:
            detail = f"{facts['create_revision_before']}, {facts['create_revision']}"
            text = f"{loss.message} (create revisions {detail}). It ended at {facts['head_before']}"
            return replace(loss, message=text, end=number("head_before"), detail=detail)
        case Kind.JOURNAL_GONE:
            return replace(loss, end=number("head"), detail=str(facts["create_revision"]))
        case Kind.BEGINNING_UNEXPLAINED:
            return replace(loss, message=f"{loss.message}: it begins at {facts['begin']}", end=number("begin"))
        case Kind.MEMORY_DAMAGED:
            files = ", ".join(map(str, facts["files"])) if isinstance(facts["files"], list) else ""
            return replace(loss, message=f"{loss.message}: {files}", detail=files)
        case _:
            return loss


def explained(losses: Sequence[Loss], findings: Sequence[Finding]) -> list[Loss]:
    """Return the losses, with the likely cause where content was lost after a change of its spec."""
    changed = subjects_of(each for each in findings if each.facts.get("spec_changed"))
    text = "Its spec changed before: shortening and lengthening its retention again would explain that"
    return [
        replace(loss, message=f"{loss.message}. {text}")
        if loss.subject in changed and loss.kind == Kind.CONTENT_LOST
        else loss
        for loss in losses
    ]


def spans_of(facts: Mapping[str, Fact]) -> list[tuple[int, int]]:
    found: object = facts.get("spans", [facts["span"]] if "span" in facts else [])
    pairs = found if isinstance(found, list) else []
    return [(int(pair[0]), int(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def subjects_of(findings: Iterable[Finding]) -> set[str]:
    return {each.subject.name for each in findings}
