"""Losses of journals: audits find them, nothing undoes them, and an approved plan accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from coranto.audit import AuditOptions, Depth, Fact, Finding, Kind, Report, audit_journals
from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.content import ContentDoctor
from coranto.recovery.heads import HeadDoctor
from coranto.recovery.plan import Diagnosis, Loss, RecoveryStep, Remark, StepKind

_LOSSES: Final[Mapping[Kind, str]] = {
    Kind.CONTENT_LOST: "content is gone, and retention did not allow that",
    Kind.CONTENT_MISSING: "no fragment covers content",
    Kind.CONTENT_DIFFERS: "the content of a stored fragment is not the one of its name",
    Kind.CONTENT_REPLACED: "content was replaced by other content",
    Kind.FRAGMENT_MISSING: "a fragment is missing from its store",
    Kind.BEGINNING_UNEXPLAINED: "it does not begin at 0, and nobody knows why",
    Kind.HEAD_FELL: "its head fell: acknowledged content and registers behind it are gone",
    Kind.REGISTERS_LOST: "its registers are gone",
    Kind.JOURNAL_GONE: "it does not exist any more",
    Kind.JOURNAL_RECREATED: "it was deleted and created again",
}
_MENDED_BY_RESET: Final = (Kind.CONSISTENCY_LOST,)
_STABLE_FACTS: Final = (
    *("span", "spans", "fragment", "head", "head_before", "sum_before", "sums"),
    *("create_revision", "create_revision_before"),
)
"""The facts that do not change from one audit to the next, so that a plan's hash does not change either."""


class JournalDoctor:
    """Finds all damage of the journals of a selector: with the other doctors of journals, and by a deep audit.

    Its steps are those of `ContentDoctor` and `HeadDoctor`. Findings of the audit that no step mends are losses. The
    last step accepts all losses in the memory of audits, so that later ones report only what is new.
    """

    def __init__(self, client: JournalClient, stores: StoreRegistry, selector: str, *, memory: str = "") -> None:
        """`memory` is the URL of the store with the records of audits; by default each journal's first store."""
        self._client = client
        self._stores = stores
        self._selector = selector
        self._memory = memory
        self._content = ContentDoctor(client, stores, ())
        self._heads = HeadDoctor(client, ())

    async def audit(self, accept: str = "") -> Report:
        """Audit the journals, and read all of their content. With `accept`, take them as they are for that reason."""
        options = AuditOptions(Depth.DEEP, None, self._memory, accept=accept)
        return await audit_journals(self._client, self._stores, self._selector, options)

    async def diagnose(self) -> Diagnosis:
        """Find damage. Raises InvalidInput if the selector matches no journal, now or in the records of audits."""
        journals = (await self._client.list(self._selector)).journals
        self._content = ContentDoctor(self._client, self._stores, journals)
        self._heads = HeadDoctor(self._client, journals)
        content, heads = await self._content.diagnose(), await self._heads.diagnose()
        report = await self.audit()
        steps = [*content.steps, *heads.steps]
        blamed = {each.subject.name for each in report.errors if each.kind in _LOSSES}
        # An accepted loss does not count any more, although the content is still gone.
        losses = [loss for loss in content.losses if loss.subject in blamed]
        remarks = [*content.remarks, *heads.remarks]
        told = {remark.subject for remark in remarks}
        for finding in report.findings:
            if not finding.is_error or _is_mended(finding, steps):
                continue
            if finding.kind in _LOSSES:
                losses.append(Loss(finding.subject.name, _text(finding)))
            elif finding.subject.name not in told:
                remarks.append(Remark(finding.subject.name, finding.message))
        if not journals and not losses:
            raise InvalidInput(f"no journal matches {self._selector!r}, so nothing was examined", field="selector")
        if losses:
            steps.append(
                RecoveryStep(
                    StepKind.ACCEPT_LOSS,
                    self._selector or "all journals",
                    "remember the losses as accepted, and take the journals as they are then",
                    loses="audits do not report these losses again",
                )
            )
        return Diagnosis(steps, losses, remarks)

    async def act(self, step: RecoveryStep) -> str:
        match step.kind:
            case StepKind.RESTORE_FRAGMENT | StepKind.SET_ASIDE_FRAGMENT:
                return await self._content.act(step)
            case StepKind.RESET_HEAD:
                return await self._heads.act(step)
            case _:
                await self.audit(accept="a plan of recovery was approved")
                return "accepted"


def _is_mended(finding: Finding, steps: Sequence[RecoveryStep]) -> bool:
    """Return True if a step mends the damage that a finding is about."""
    here = [step for step in steps if step.subject == finding.subject.name]
    if finding.kind in _MENDED_BY_RESET:
        return any(step.kind is StepKind.RESET_HEAD for step in here)
    spans = _spans(finding.facts)
    restored = [
        (begin, end)
        for step in here
        if step.kind is StepKind.RESTORE_FRAGMENT
        and isinstance(begin := step.facts["begin"], int)
        and isinstance(end := step.facts["end"], int)
    ]
    return bool(spans) and all(any(low <= begin and end <= high for low, high in restored) for begin, end in spans)


def _spans(facts: Mapping[str, Fact]) -> list[tuple[int, int]]:
    found: object = facts.get("spans", [facts["span"]] if "span" in facts else [])
    pairs = found if isinstance(found, list) else []
    return [(int(pair[0]), int(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def _text(finding: Finding) -> str:
    """Return the loss in words that are the same at each audit."""
    facts = {name: finding.facts[name] for name in _STABLE_FACTS if name in finding.facts}
    spans = _spans(facts)
    where = f" at {', '.join(f'[{begin}, {end})' for begin, end in spans)}" if spans else ""
    rest = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("span", "spans"))
    return f"{_LOSSES[finding.kind]}{where}{f' ({rest})' if rest else ''}"
