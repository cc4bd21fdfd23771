"""Steps, losses and remarks about fragments, and the fragment of a step. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from coranto.audit import AuditStatus, FragmentAudit, Kind
from coranto.client import JournalInfo
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment
from coranto.recovery.plan import Loss, RecoveryStep, Remark, StepKind

ASIDE: Final = ".coranto-damaged"
"""The folder of a store for damaged files."""


def set_aside(fragment: Fragment, why: str, loses: str = "", *, stray: bool = False) -> RecoveryStep:
    """Return the step that moves a file to a folder that nothing reads. The content of a `stray` matches its name."""
    where = f"[{fragment.begin}, {fragment.end})"
    action = f"move the file of {where}, which {why}, to {ASIDE}/ of {fragment.backing_store}, where nothing reads it"
    step = _step(StepKind.SET_ASIDE_FRAGMENT, fragment, action)
    return replace(step, loses=loses, facts={**step.facts, "stray": stray})


def shared_remark(info: JournalInfo, found: FragmentAudit) -> Remark:
    fragment = found.fragment
    return Remark(
        info.name,
        f"its content [{fragment.begin}, {fragment.end}) is in a fragment that it shares, and that is "
        f"{found.status.value}: recover {fragment.journal}, which has it",
    )


def unserved_loss(info: JournalInfo, fragment: Fragment) -> Loss:
    store = next(iter(info.spec.fragment.stores), "a fragment store of the journal")
    return Loss(
        info.name,
        Kind.SPOOL_DIFFERS,
        f"content [{fragment.begin}, {fragment.end}) is damaged on the disk of each broker that has it, and is not "
        f"stored. It cannot be read, and the journal continues after it. A file {fragment.content_path} in {store}, "
        f"whose content has the SHA-1 {fragment.sum.hex()}, would bring it back. Keep the disk: `coranto broker "
        "set-aside` shows how much of it is sound",
        begin=fragment.begin,
        end=fragment.end,
        store=store,
        file=fragment.content_path,
        sum=fragment.sum.hex(),
    )


def fragment_loss(fragment: Fragment, why: str, kept_at: str = "") -> Loss:
    """Return the loss of a fragment's content. `kept_at` is the place that still has it, if any."""
    return Loss(
        fragment.journal,
        Kind.CONTENT_LOST,
        f"content [{fragment.begin}, {fragment.end}) is gone: {why}",
        begin=fragment.begin,
        end=fragment.end,
        store=fragment.backing_store,
        file=fragment.content_path,
        sum=fragment.sum.hex(),
        detail="kept" if kept_at else "",
        kept_at=kept_at,
    )


def unreadable(journal: str, found: Sequence[FragmentAudit]) -> list[Remark]:
    """Return a remark for each store whose fragments cannot be read now, or whose brokers do not serve them."""
    first: dict[str, FragmentAudit] = {}
    for each in found:
        if each.status is AuditStatus.UNREADABLE and each.fragment.backing_store:
            first.setdefault(each.fragment.backing_store, each)
    return [
        Remark(journal, f"its content in {url} cannot be examined now, so plan again later: {each.problem}")
        for url, each in first.items()
    ]


def file_of(step: RecoveryStep) -> tuple[str, str]:
    """Return the store and the path of a step's file; empty texts for a step without a file."""
    if step.kind not in (StepKind.RESTORE_FRAGMENT, StepKind.SET_ASIDE_FRAGMENT):
        return "", ""
    fragment = fragment_of(step)
    return fragment.backing_store, fragment.content_path


def restore(fragment: Fragment, source: str, *, missing: bool) -> RecoveryStep:
    problem = "is missing from" if missing else "is damaged in"
    return _step(
        StepKind.RESTORE_FRAGMENT,
        fragment,
        f"put [{fragment.begin}, {fragment.end}), which {problem} {fragment.backing_store}, back from {source}",
    )


def _step(kind: StepKind, fragment: Fragment, action: str) -> RecoveryStep:
    return RecoveryStep(
        kind,
        fragment.journal,
        action,
        facts={
            "begin": fragment.begin,
            "end": fragment.end,
            "sum": fragment.sum.hex(),
            "codec": fragment.codec.value,
            "store": fragment.backing_store,
            "postfix": fragment.path_postfix,
        },
    )


def fragment_of(step: RecoveryStep) -> Fragment:
    facts = step.facts
    begin, end, codec = facts["begin"], facts["end"], facts["codec"]
    if not (isinstance(begin, int) and isinstance(end, int) and isinstance(codec, int)):
        raise InvalidInput(f"step for {step.subject} names no fragment", field="facts")
    return Fragment(
        step.subject,
        begin,
        end,
        bytes.fromhex(str(facts["sum"])),
        Codec.from_wire(codec),
        backing_store=str(facts["store"]),
        path_postfix=str(facts["postfix"]),
    )
