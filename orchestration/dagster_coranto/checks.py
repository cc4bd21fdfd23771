"""An asset check: fragment stores agree with the brokers' index, and fragments cover every byte."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg

from coranto.audit import AuditStatus, FragmentAudit, JournalAudit, audit_journal
from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.client.values import JournalInfo
from coranto.errors import CorruptFragment, StoreError
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.labels import label_selector
from dagster_coranto.groups import JournalGroup
from dagster_coranto.metadata import table, verbatim
from dagster_coranto.resource import JournalResource
from dagster_coranto.translator import DagsterJournalTranslator, build_group_spec

_COLUMNS = {
    "journal": "string",
    "first": "int",
    "persisted_head": "int",
    "head": "int",
    "persisted_fragments": "int",
    "live_bytes": "int",
    "problems": "int",
}
_SHOWN_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class FragmentFindings:
    """The findings for one journal: the audit of its index, and stored objects that no fragment of the index covers.

    `contradictions` are objects, in the index or not, whose content differs from their names.
    """

    audit: JournalAudit
    unindexed: tuple[Fragment, ...]
    contradictions: tuple[FragmentAudit, ...]

    @property
    def errors(self) -> list[str]:
        return [
            *self.audit.problems,
            *(f"{found.fragment.content_path}: {found.problem}" for found in self.contradictions),
        ]

    @property
    def warnings(self) -> list[str]:
        return [
            f"{fragment.content_path}: {fragment.backing_store} holds it, but the brokers' index covers none of it"
            for fragment in self.unindexed
        ]


def outside_index(objects: Iterable[Fragment], index: Iterable[Fragment]) -> tuple[list[Fragment], list[Fragment]]:
    """Return the objects that the index does not name: those within one of its fragments, and all others.

    Objects of the first kind are usual. An index forgets fragments that a larger one covers, and shows a fragment as
    local to a broker until it has listed the store again.
    """
    fragments = list(index)
    named = {(fragment.backing_store, fragment.content_path) for fragment in fragments}
    covered: list[Fragment] = []
    beyond: list[Fragment] = []
    for candidate in objects:
        if (candidate.backing_store, candidate.content_path) in named:
            continue
        within = any(fragment.begin <= candidate.begin and candidate.end <= fragment.end for fragment in fragments)
        (covered if within else beyond).append(candidate)
    return covered, beyond


async def examine(client: JournalClient, stores: StoreRegistry, journal: JournalInfo) -> FragmentFindings:
    """Audit a journal from its index to its stores, and from its stores to its index."""
    below = (await client.list(label_selector(include=[("name:prefix", f"{journal.name}/")]))).names
    # The stores are listed first, so that fragments persisted meanwhile do not seem unknown to the index.
    objects = [
        fragment
        for url in journal.spec.fragment.stores
        async for fragment in stores.get(url).list(journal.name, lambda: below)
    ]
    audit = await audit_journal(client, stores, journal.name)
    covered, beyond = outside_index(objects, [found.fragment for found in audit.fragments])
    contradictions = []
    for fragment in (*covered, *beyond):
        try:
            await stores.get(fragment.backing_store).read(fragment)
        except CorruptFragment as error:
            contradictions.append(FragmentAudit(fragment, AuditStatus.CORRUPT, str(error)))
        except StoreError as error:
            contradictions.append(FragmentAudit(fragment, AuditStatus.UNREADABLE, str(error)))
    return FragmentFindings(audit, tuple(beyond), tuple(contradictions))


def build_fragment_check(
    group: JournalGroup,
    *,
    name: str = "fragments_agree",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
) -> dg.AssetChecksDefinition:
    """Return a check of every journal of a group, on the group's asset.

    The check passes when

    * each object that the index names is in its store, with the length and SHA-1 of its name,
    * these objects and the brokers' live spools cover the journal without a gap, from its first retained offset to its
      head, and
    * no object in the stores contradicts its own name.

    Objects that the index does not cover are reported as a warning. The check reads all content, so do not run it more
    often than necessary.
    """
    key = build_group_spec(group, dagster_journal_translator).key

    @dg.asset_check(
        asset=key,
        name=name,
        blocking=blocking,
        description="Persisted fragments and live spools cover the journals, and agree with the brokers' index.",
        required_resource_keys={resource_key},
    )
    def fragments_agree(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource: JournalResource = getattr(context.resources, resource_key)
        return as_result(run_blocking(_examine_all(resource, resource.group(group))), severity)

    return fragments_agree


async def _examine_all(resource: JournalResource, group: JournalGroup) -> list[FragmentFindings]:
    stores = resource.stores()
    async with JournalClient.of(resource.client_config()) as client:
        journals = (await client.list(group.selector)).journals
        return [await examine(client, stores, journal) for journal in journals]


def as_result(findings: list[FragmentFindings], severity: dg.AssetCheckSeverity) -> dg.AssetCheckResult:
    """Return the check's result. With errors it fails with `severity`, and with only warnings it fails as a warning."""
    errors = [problem for found in findings for problem in found.errors]
    warnings = [problem for found in findings for problem in found.warnings]
    audits = [found.audit for found in findings]
    rows: list[dict[str, str | int | float | bool | None]] = [
        {
            "journal": found.audit.journal,
            "first": found.audit.first,
            "persisted_head": found.audit.persisted_head,
            "head": found.audit.head,
            "persisted_fragments": sum(1 for a in found.audit.fragments if a.fragment.backing_store),
            "live_bytes": found.audit.live_bytes,
            "problems": len(found.errors) + len(found.warnings),
        }
        for found in findings
    ]
    metadata: dict[str, dg.MetadataValue[Any] | int] = {
        "journals": table(rows, _COLUMNS),
        "persisted_bytes": sum(audit.persisted_head - audit.first for audit in audits),
        "live_bytes": sum(audit.live_bytes for audit in audits),
        "fragments": sum(len(audit.fragments) for audit in audits),
    }
    problems = errors + warnings
    if problems:
        shown = [f"- {problem}" for problem in problems[:_SHOWN_PROBLEMS]]
        if len(problems) > _SHOWN_PROBLEMS:
            shown.append(f"- and {len(problems) - _SHOWN_PROBLEMS} more")
        metadata["findings"] = verbatim(shown)
    return dg.AssetCheckResult(
        passed=not problems,
        severity=severity if errors else dg.AssetCheckSeverity.WARN,
        metadata=metadata,
        description=problems[0] if problems else f"{len(findings)} journals are sound",
    )
