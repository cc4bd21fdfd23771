"""Losses of journals: audits find them, nothing undoes them, and an approved plan accepts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from coranto.audit import AuditOptions, Depth, Fact, Finding, Kind, Report, audit_journals
from coranto.audit.losses import merged, within
from coranto.client import JournalClient, JournalInfo
from coranto.errors import CorantoError, InvalidInput
from coranto.fragments.forks import Share, folders_of
from coranto.fragments.fragment import MAX_OFFSET, parse_content_path
from coranto.fragments.stores import StoreRegistry
from coranto.recovery.content import ContentDoctor, file_of, set_aside
from coranto.recovery.heads import HeadDoctor
from coranto.recovery.plan import Diagnosis, Loss, RecoveryStep, Remark, StepKind

_LOSSES: Final[Mapping[Kind, str]] = {
    Kind.CONTENT_LOST: "content is gone, and retention did not allow that",
    Kind.CONTENT_MISSING: "no fragment covers content",
    Kind.CONTENT_REPLACED: "content was replaced by other content",
    Kind.FRAGMENT_MISSING: "a fragment is missing from its store",
    Kind.BEGINNING_UNEXPLAINED: "it does not begin at 0, and nobody knows why",
    Kind.HEAD_FELL: "its head fell: acknowledged content and registers behind it are gone",
    Kind.REGISTERS_LOST: "its registers are gone",
    Kind.JOURNAL_GONE: "it does not exist any more",
    Kind.JOURNAL_RECREATED: "it was deleted and created again",
    Kind.MEMORY_DAMAGED: "records of audits contradict what brokers know of them, so later losses may be unknown",
}
_MENDED_BY_RESET: Final = (Kind.CONSISTENCY_LOST,)
_UNKNOWN: Final = (Kind.MEMORY_UNREACHABLE, Kind.STORE_UNREACHABLE, Kind.UNANSWERED)
"""Findings that keep an audit from recording what it found."""
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
        self._approved: list[Finding] = []
        self._content = ContentDoctor(client, stores, ())
        self._heads = HeadDoctor(client, ())

    async def audit(self, accept: str = "") -> Report:
        """Audit the journals, and read all of their content. With `accept`, take them as they are for that reason."""
        options = AuditOptions(Depth.DEEP, None, self._memory, accept=accept)
        return await audit_journals(self._client, self._stores, self._selector, options)

    async def diagnose(self) -> Diagnosis:
        """Find damage. Raises InvalidInput if the selector matches no journal, now or in the records of audits."""
        journals = (await self._client.list(self._selector)).journals
        report = await self.audit()
        strays = _strays(report)
        self._content = ContentDoctor(
            self._client, self._stores, journals, strays=[str(each.facts["fragment"]) for each in strays]
        )
        self._heads = HeadDoctor(self._client, [each for each in journals if each.name not in _subjects(strays)])
        content, heads = await self._content.diagnose(), await self._heads.diagnose()
        steps = [*content.steps, *heads.steps]
        steps += files_to_set_aside(report, steps)
        folders = {info.name: _folders(info) for info in journals}
        errors = [each for each in report.errors if not is_mended(each, steps, folders)]
        lost = self._approved = [each for each in errors if _is_loss(each) and not owners_elsewhere(each, folders)]
        # An accepted loss does not count any more, although the content is still gone.
        blamed = _subjects(each for each in report.errors if each.kind in (*_LOSSES, Kind.SPOOL_DIFFERS))
        losses = [loss for loss in content.losses if loss.subject in blamed]
        losses += [Loss(each.subject.name, _text(each)) for each in lost]
        remarks = [*content.remarks, *heads.remarks]
        told, named = {each.subject for each in remarks}, {each.subject for each in losses}
        for each in errors:
            name, is_named = each.subject.name, each.kind is Kind.SPOOL_DIFFERS and each.subject.name in named
            if _is_loss(each) and (owners := owners_elsewhere(each, folders)):
                remarks.append(Remark(name, f"{each.message}. It shares that: recover {', '.join(owners)} with it"))
            elif not _is_loss(each) and name not in told and not is_named:
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
    """Return True for a finding that an acceptance ends. Records that only cannot be read are no such loss."""
    return finding.kind in _LOSSES and (finding.kind is not Kind.MEMORY_DAMAGED or "files" in finding.facts)


def is_mended(finding: Finding, steps: Sequence[RecoveryStep], folders: Mapping[str, Sequence[Share]]) -> bool:
    """Return True if a step mends the damage that a finding is about.

    `folders` are those of journals, by name. A step for a file of a source mends the journals that share the file.
    """
    name = finding.subject.name
    here = [step for step in steps if step.subject == name]
    if finding.kind in _MENDED_BY_RESET:
        return any(step.kind in (StepKind.RESET_HEAD, StepKind.SET_ASIDE_FRAGMENT) for step in here)
    if finding.kind in (Kind.CONTENT_DIFFERS, Kind.OBJECT_UNKNOWN) and _file(finding) in map(file_of, steps):
        return True
    spans = _spans(finding.facts)
    own = (Share(name, 0, MAX_OFFSET),)
    restored = [
        (begin, end)
        for step in steps
        if step.kind is StepKind.RESTORE_FRAGMENT
        and isinstance(begin := step.facts["begin"], int)
        and isinstance(end := step.facts["end"], int)
        and any(each.journal == step.subject and each.covers(begin, end) for each in folders.get(name, own))
    ]
    return bool(spans) and all(any(low <= begin and end <= high for low, high in restored) for begin, end in spans)


def owners_elsewhere(finding: Finding, folders: Mapping[str, Sequence[Share]]) -> list[str]:
    """Return the journals whose content a finding of a fork is about, if that is the fork's own in no part.

    Return nothing if one of them is in `folders` itself: then its content is examined along with the fork's.
    """
    name, spans = finding.subject.name, _spans(finding.facts)
    shares = folders.get(name, ())
    owners = {each.journal for each in shares for begin, end in spans if begin < each.end and each.begin < end}
    return sorted(owners) if not owners & folders.keys() else []


def _is_among(finding: Finding, approved: Sequence[Finding]) -> bool:
    """Return True if a finding is no loss, or one that was approved: the same, or of content that is gone by those."""
    if not _is_loss(finding):
        return True
    same = [each for each in approved if each.subject == finding.subject]
    if spans := _spans(finding.facts):
        gone = merged(span for each in same for span in _spans(each.facts))
        return all(within(span, gone) for span in spans)
    return any(each.kind is finding.kind for each in same)


def _strays(report: Report) -> list[Finding]:
    return [each for each in report.errors if each.kind is Kind.OBJECT_UNKNOWN and each.facts.get("stray")]


def _subjects(findings: Iterable[Finding]) -> set[str]:
    return {each.subject.name for each in findings}


def _file(finding: Finding) -> tuple[str, str]:
    return str(finding.facts.get("store")), str(finding.facts.get("fragment"))


def files_to_set_aside(report: Report, steps: Sequence[RecoveryStep]) -> list[RecoveryStep]:
    """Return steps for files that are none of their journal's content, and of which no other step is.

    Files that a fork shares are left to the recovery of the journal whose they are.
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
            found.append(set_aside(fragment, "is not what its name says"))
    return found


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
    text = f"{_LOSSES[finding.kind]}{where}{f' ({rest})' if rest else ''}"
    if finding.facts.get("spec_changed"):
        return f"{text}. Its spec changed before: shortening and lengthening its retention again would explain that"
    return text
