"""Asset checks that audit journals: cheap ones to run often, and deep ones that read content."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import dagster as dg

from coranto.audit import AuditOptions, Check, Depth, Finding, Kind, Report, Severity, audit_journals
from coranto.audit.journals import DEFAULT_BUDGET
from coranto.client import JournalClient
from coranto.client.groups import JournalGroup
from coranto.client.loop import run_blocking
from coranto.errors import CorantoError
from coranto.fragments.stores import StoreRegistry
from coranto.telemetry import amount
from dagster_coranto.instance.evaluations import last_evaluation
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.metadata import JournalRow, namespaced, table, verbatim
from dagster_coranto.translation.metadata_set import NAMESPACE
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec

_COLUMNS = {
    "journal": "string",
    "first": "int",
    "persisted_head": "int",
    "head": "int",
    "fragments": "int",
    "live_bytes": "int",
    "problems": "int",
}
_SHOWN_FINDINGS: Final = 50

MoreChecks = Callable[[JournalClient, StoreRegistry], Sequence[Check]]
"""Returns additional checks for the same report, such as a check of a consumer's tables."""


def build_audit_check(
    group: JournalGroup,
    *,
    depth: Depth = Depth.CHEAP,
    name: str = "",
    budget: int | None = DEFAULT_BUDGET,
    memory: str = "",
    allow_empty: bool = False,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
    more: MoreChecks | None = None,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
) -> dg.AssetChecksDefinition:
    """Return an audit of every journal of a group as a check of the group's asset, as by `coranto audit`.

    It compares the journals with the last audit, which may be from another run, another Dagster home or the command. So
    a loss fails this check and all later ones, until the content is back or a person accepts the loss
    (`coranto audit --accept`). It also fails if the group has no journals, unless `allow_empty`.

    A CHEAP audit, named `audit` by default, reads no content, and suits an hourly schedule. A DEEP one, `deep_audit`,
    reads stored content up to `budget` bytes (None: all of it), least recently read content first, and all spools.
    `memory` is the URL of the store with the records of audits, by default each journal's first store.
    """
    key = build_group_spec(group, dagster_journal_translator).key
    options = AuditOptions(depth, budget, memory, allow_empty=allow_empty)
    check_name = name or ("deep_audit" if depth is Depth.DEEP else "audit")

    @dg.asset_check(
        asset=key,
        name=check_name,
        blocking=blocking,
        description="All content of the journals is there"
        + (", and agrees with its SHA-1." if depth is Depth.DEEP else ", according to listings."),
        required_resource_keys={resource_key},
    )
    def audit(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource: JournalResource = getattr(context.resources, resource_key)
        try:
            report = run_blocking(_audit(resource, resource.group(group), options, more))
        except CorantoError as error:
            # Not an error of the step: the check fails because nothing was examined.
            return dg.AssetCheckResult(
                passed=False,
                severity=severity,
                description="the journals could not be examined",
                metadata=namespaced({"findings": verbatim([f"- {error}"])}),
            )
        missing = _missing_records(report, _examined_before(context.instance, dg.AssetCheckKey(key, check_name)))
        return as_result(report.joined(missing) if missing is not None else report, severity)

    return audit


def _examined_before(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> set[str]:
    """Return the journals that the last evaluation of a check examined, from this instance."""
    last = last_evaluation(instance, check)
    shown = last.metadata.get(f"{NAMESPACE}/journals") if last is not None else None
    return (
        {str(each.data.get("journal")) for each in shown.records} if isinstance(shown, dg.TableMetadataValue) else set()
    )


def _missing_records(report: Report, before: set[str]) -> Report | None:
    """Return findings about journals that were examined before and whose audit record is missing, if any.

    Only the first evaluation after the loss can detect this, because it creates a new record.
    """
    findings = [
        Finding(
            Kind.MEMORY_DAMAGED,
            Severity.ERROR,
            each.subject,
            "an earlier evaluation of this check examined it, and its record is gone, so losses before this evaluation "
            "cannot be found. Restore the store of the records, or read earlier evaluations about the journal",
        )
        for each in report.findings
        if each.kind is Kind.FIRST_AUDIT and each.subject.name in before
    ]
    return replace(report, subjects={}, findings=findings, coverage=()) if findings else None


def build_fragment_check(
    group: JournalGroup,
    *,
    name: str = "fragments_agree",
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    resource_key: str = "journals",
) -> dg.AssetChecksDefinition:
    """Return a deep audit of every journal of a group that always reads all content (see `build_audit_check`)."""
    return build_audit_check(
        group,
        depth=Depth.DEEP,
        name=name,
        budget=None,
        severity=severity,
        blocking=blocking,
        dagster_journal_translator=dagster_journal_translator,
        resource_key=resource_key,
    )


async def _audit(
    resource: JournalResource, group: JournalGroup, options: AuditOptions, more: MoreChecks | None
) -> Report:
    stores = resource.stores()
    async with JournalClient.of(resource.audit_config()) as client:
        checks = more(client, stores) if more is not None else ()
        return await audit_journals(client, stores, group.selector_text, options, checks=checks)


def as_result(report: Report, severity: dg.AssetCheckSeverity) -> dg.AssetCheckResult:
    """Return the check's result. Errors fail it with `severity`, and warnings alone fail it as a warning."""
    problems = [*report.errors, *report.warnings]
    rows = [_row(report, name) for name in sorted(report.subjects)]
    rows.sort(key=lambda row: not row["problems"])  # `table` shows the first rows only.
    metadata: dict[str, dg.MetadataValue[Any] | int | str] = {
        "journals": table(rows, _COLUMNS),
        "stored_bytes": sum(_number(facts.get("stored_bytes")) for facts in report.subjects.values()),
        "live_bytes": sum(_number(facts.get("live_bytes")) for facts in report.subjects.values()),
        "fragments": sum(_number(facts.get("fragments")) for facts in report.subjects.values()),
        "problems": len(problems),
        "coverage": verbatim(
            [
                f"- {each.check}: {_count(each.examined, each.unit)} examined"
                + (f", {_count(each.left_out, each.unit)} left out: {each.reason}" if each.left_out else "")
                for each in report.coverage
            ]
        ),
    }
    if problems:
        shown = [f"- {each.severity} {each.kind}: {each}" for each in problems[:_SHOWN_FINDINGS]]
        if len(problems) > _SHOWN_FINDINGS:
            shown.append(f"- and {len(problems) - _SHOWN_FINDINGS} more")
        metadata["findings"] = verbatim(shown)
        metadata["kinds"] = ", ".join(sorted({str(each.kind) for each in problems}))
    return dg.AssetCheckResult(
        passed=not problems,
        severity=severity if report.errors else dg.AssetCheckSeverity.WARN,
        metadata=namespaced(metadata),
        description=str(problems[0]) if problems else _sound(len(report.subjects)),
    )


def _sound(journals: int) -> str:
    return "1 journal is sound" if journals == 1 else f"{journals} journals are sound"


def _row(report: Report, name: str) -> JournalRow:
    facts = report.subjects[name]
    row: JournalRow = {column: _number(facts.get(column)) for column in _COLUMNS}
    row["journal"] = name
    row["problems"] = sum(1 for each in (*report.errors, *report.warnings) if each.subject.name == name)
    return row


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _count(count: int, unit: str) -> str:
    return amount(count, unit) if unit == "bytes" else f"{count} {unit}"
