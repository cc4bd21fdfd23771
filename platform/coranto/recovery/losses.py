"""Permanent losses of journals: audits find them, and an approved plan accepts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coranto.audit import AuditOptions, Depth, Finding, Kind, Report, audit_journals
from coranto.audit.losses import merged, within
from coranto.client import ClientConfig, JournalClient, JournalInfo
from coranto.errors import CorantoError, InvalidInput
from coranto.fragments.forks import Share, folders_of
from coranto.fragments.fragment import MAX_OFFSET, Fragment, parse_content_path
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.content import ContentDoctor
from coranto.recovery.finding_losses import (
    CONTENT,
    LOSSES,
    explained,
    loss_of,
    losses_of,
    missed_fragments,
    restored,
    spans_of,
    subjects_of,
)
from coranto.recovery.fragment_steps import file_of, set_aside
from coranto.recovery.heads import HeadDoctor, reset_step
from coranto.recovery.plan import Diagnosis, Loss, RecoveryStep, Remark, StepKind
from coranto.telemetry import ProgressReport

_REPAIRED_BY_RESET: Final = (Kind.CONSISTENCY_LOST,)
_UNKNOWN: Final = (Kind.MEMORY_UNREACHABLE, Kind.STORE_UNREACHABLE, Kind.UNANSWERED)
"""Findings that prevent an audit from recording its findings."""


class JournalDoctor:
    """Finds all damage of the journals of a selector, with the other doctors of journals and a deep audit.

    Its steps come from `ContentDoctor` and `HeadDoctor`. Findings of the audit that no step repairs are losses. The
    last step accepts all losses in the memory of audits, so that later ones report only new losses.
    """

    def __init__(
        self,
        client: JournalClient,
        stores: StoreRegistry,
        selector: str,
        *,
        memory: str = "",
        progress: ProgressReport | None = None,
        connect: Callable[[ClientConfig], JournalClient] = JournalClient.of,
    ) -> None:
        """`memory` is the URL of the store with the records of audits; by default each journal's first store.

        `progress` counts the journals of audits. `connect` creates clients of single brokers.
        """
        self._connect = connect
        self._progress = progress
        self._client = client
        self._stores = stores
        self._selector = selector
        self._memory = memory
        self._approved: list[Finding] = []
        self._content = ContentDoctor(client, stores, ())
        self._heads = HeadDoctor(client, ())

    async def audit(self, accept: str = "") -> Report:
        """Audit the journals, and read all of their content. `accept` is the reason to accept their state, if any."""
        options = AuditOptions(Depth.DEEP, None, self._memory, accept=accept)
        return await audit_journals(self._client, self._stores, self._selector, options, progress=self._progress)

    async def diagnose(self) -> Diagnosis:
        """Find damage. Raises InvalidInput if the selector matches no journal, now or in the records of audits."""
        journals = (await self._client.list(self._selector)).journals
        report = await self.audit()
        strays = _strays(report)
        self._content = ContentDoctor(
            self._client,
            self._stores,
            journals,
            strays=[str(each.facts["fragment"]) for each in strays],
            missed=missed_fragments(each for each in report.errors if each.kind in CONTENT),
            connect=self._connect,
        )
        self._heads = HeadDoctor(self._client, [each for each in journals if each.name not in subjects_of(strays)])
        content, heads = await self._content.diagnose(), await self._heads.diagnose()
        steps = [*content.steps, *(with_restored_head(step, content.steps) for step in heads.steps)]
        steps += files_to_set_aside(report, steps)
        folders = {info.name: _folders(info) for info in journals}
        errors = [each for each in report.errors if not is_repaired(each, steps, folders)]
        lost = self._approved = [each for each in errors if _is_loss(each) and not owners_elsewhere(each, folders)]
        # Accepted losses are omitted, although the content is still gone.
        blamed = subjects_of(each for each in report.errors if each.kind in (*LOSSES, Kind.SPOOL_DIFFERS))
        losses = [loss for loss in content.losses if loss.subject in blamed]
        losses = explained([*losses, *losses_of(lost, losses, steps)], lost)
        gone = [each for each in lost if each.kind is Kind.JOURNAL_GONE]
        losses += [await self._gone(each) for each in gone]
        remarks = [*content.remarks, *heads.remarks]
        remarked, named = {each.subject for each in remarks}, {each.subject for each in losses}
        for each in errors:
            name, is_named = each.subject.name, each.kind is Kind.SPOOL_DIFFERS and each.subject.name in named
            if _is_loss(each) and (owners := owners_elsewhere(each, folders)):
                remarks.append(Remark(name, f"{each.message}. It shares that: recover {', '.join(owners)} with it"))
            elif not _is_loss(each) and name not in remarked and not is_named:
                remarks.append(Remark(name, each.message))
        if not journals and not losses:
            raise InvalidInput(f"no journal matches {self._selector!r}, so nothing was examined", field="selector")
        if lost:
            steps.append(
                RecoveryStep(
                    StepKind.ACCEPT_LOSS,
                    self._selector or "all journals",
                    "remember the losses as accepted, and take the journals as they are then",
                    loses="audits do not report these losses again",
                )
            )
        return Diagnosis(steps, losses, remarks)

    async def _gone(self, finding: Finding) -> Loss:
        """Return the loss of a journal that does not exist any more, with the content that brokers still have."""
        name, head = finding.subject.name, finding.facts["head"]
        kept: dict[str, str] = {}
        without_copy: list[Fragment] = []
        for fragment in missed_fragments([finding]).get(name, ()):
            with contextlib.suppress(CorantoError):
                if (found := await self._client.kept_content(fragment)) is not None:
                    kept[f"[{fragment.begin}, {fragment.end})"] = found.broker
                    continue
            without_copy.append(fragment)
        text = f"it does not exist any more. It ended at {head}"
        text += "".join(f"; broker {broker} keeps {where}" for where, broker in kept.items())
        text += "".join(
            f"; no broker has [{each.begin}, {each.end}) any more, which a file {each.content_path}, whose content has "
            f"the SHA-1 {each.sum.hex()}, would bring back"
            for each in without_copy
        )
        text += (
            ". To have it back, create it again with its name and stores, and plan again: it has the stores' content"
            + (", and the plan puts the rest into the store" if kept else "")
            + ". `coranto broker set-aside list` shows content appended after the last audit"
        )
        loss = loss_of(finding)
        return replace(
            loss,
            message=text,
            detail=f"{loss.detail}, kept" if kept else loss.detail,
            kept_at=", ".join(sorted({*kept.values()})),
        )

    async def act(self, step: RecoveryStep) -> str:
        match step.kind:
            case StepKind.RESTORE_FRAGMENT | StepKind.SET_ASIDE_FRAGMENT:
                return await self._content.act(step)
            case StepKind.RESET_HEAD:
                return await self._heads.act(step)
            case _:
                folders = {info.name: _folders(info) for info in (await self._client.list(self._selector)).journals}
                found = [each for each in (await self.audit()).errors if not owners_elsewhere(each, folders)]
                more = [each for each in found if not _is_among(each, self._approved)]
                if more:
                    raise CorantoError(f"more was lost since the plan was approved, so plan again: {more[0]}")
                report = await self.audit(accept="a plan of recovery was approved")
                for each in report.errors:
                    if each.kind in _UNKNOWN:
                        raise CorantoError(f"not all losses could be accepted: {each}")
                return "accepted"


def _folders(info: JournalInfo) -> Sequence[Share]:
    try:
        return folders_of(info.spec)
    except InvalidInput:
        return (Share(info.name, 0, MAX_OFFSET),)


def _is_loss(finding: Finding) -> bool:
    """Return True for a finding that can be accepted. Records of audits that merely cannot be read are not lost."""
    return finding.kind in LOSSES and (finding.kind is not Kind.MEMORY_DAMAGED or "files" in finding.facts)


def is_repaired(finding: Finding, steps: Sequence[RecoveryStep], folders: Mapping[str, Sequence[Share]]) -> bool:
    """Return True if a step repairs the damage of a finding.

    `folders` has each journal's shares by name. A step for a file of a source repairs the journals that share it.
    """
    name = finding.subject.name
    here = [step for step in steps if step.subject == name]
    if finding.kind in _REPAIRED_BY_RESET:
        return any(step.kind in (StepKind.RESET_HEAD, StepKind.SET_ASIDE_FRAGMENT) for step in here)
    if finding.kind in (Kind.CONTENT_DIFFERS, Kind.OBJECT_UNKNOWN) and _file(finding) in map(file_of, steps):
        return True
    spans = spans_of(finding.facts)
    if finding.kind is Kind.HEAD_FELL:
        spans = [(int(str(finding.facts["head"])), int(str(finding.facts["head_before"])))]
    own = (Share(name, 0, MAX_OFFSET),)
    back = merged(
        span
        for step, span in restored(steps)
        if any(each.journal == step.subject and each.covers(*span) for each in folders.get(name, own))
    )
    return bool(spans) and all(within(span, back) for span in spans)


def with_restored_head(step: RecoveryStep, others: Sequence[RecoveryStep]) -> RecoveryStep:
    """Return the step with the head at the end of the content that other steps restore."""
    head = int(str(step.facts["head"]))
    for begin, end in sorted(span for each, span in restored(others) if each.subject == step.subject):
        head = end if begin <= head < end else head
    return reset_step(step.subject, head)


def owners_elsewhere(finding: Finding, folders: Mapping[str, Sequence[Share]]) -> list[str]:
    """Return the journals that own the content of a fork's finding, if none of them is examined itself.

    Returns nothing if one of them is in `folders`, such as the fork itself.
    """
    name, spans = finding.subject.name, spans_of(finding.facts)
    shares = folders.get(name, ())
    owners = {each.journal for each in shares for begin, end in spans if begin < each.end and each.begin < end}
    return sorted(owners) if not owners & folders.keys() else []


def _is_among(finding: Finding, approved: Sequence[Finding]) -> bool:
    """Return True if a finding is not a loss, or if the approved losses include it or all of its content."""
    if not _is_loss(finding):
        return True
    same = [each for each in approved if each.subject == finding.subject]
    if spans := spans_of(finding.facts):
        gone = merged(span for each in same for span in spans_of(each.facts))
        return all(within(span, gone) for span in spans)
    return any(each.kind is finding.kind for each in same)


def _strays(report: Report) -> list[Finding]:
    return [each for each in report.errors if each.kind is Kind.OBJECT_UNKNOWN and each.facts.get("stray")]


def _file(finding: Finding) -> tuple[str, str]:
    return str(finding.facts.get("store")), str(finding.facts.get("fragment"))


def files_to_set_aside(report: Report, steps: Sequence[RecoveryStep]) -> list[RecoveryStep]:
    """Return steps for files that are not their journal's content, and that no other step covers.

    Files that a fork shares are left to the recovery of their journal.
    """
    found, planned = [], {file_of(step) for step in steps}
    for each in report.errors:
        url, path = _file(each)
        is_stray = each.kind is Kind.OBJECT_UNKNOWN and bool(each.facts.get("stored"))
        if (url, path) in planned or not (is_stray or each.kind is Kind.CONTENT_DIFFERS):
            continue
        journal = each.subject.name
        if not path.startswith(f"{journal}/"):
            continue
        fragment = parse_content_path(journal, path.removeprefix(f"{journal}/"), backing_store=url)
        if is_stray:
            why = "no audit knows, and which begins far above all other content"
            found.append(
                set_aside(fragment, why, "its content, should brokers that are gone have stored it", stray=True)
            )
        else:
            found.append(set_aside(fragment, "does not match its name"))
    return found
