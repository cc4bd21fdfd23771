"""An asset that applies journal specs from a YAML file, and a check that finds drift from it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from coranto.client import JournalClient
from coranto.client.loop import run_blocking, run_reporting
from coranto.labels import NAME, label_selector
from coranto.reconcile import (
    JOURNALS,
    JournalSpecs,
    SpecAction,
    SpecPlan,
    SpecReconciler,
    SpecStep,
    at_any_revision,
    under_prefix,
)
from coranto.specs.journal_tree import parse_tree
from coranto.telemetry import progress
from coranto.wire import protocol_pb2 as pb
from dagster_coranto.groups import JournalGroup
from dagster_coranto.log import DagsterLog
from dagster_coranto.metadata import JournalRow, table
from dagster_coranto.resource import JournalResource

SpecsText = str | Path | Callable[[], str]

_LOGGED_JOURNALS = 100
"""Most journals of a run that are logged one by one. Beyond that, each transaction is."""
_COLUMNS = {
    "journal": "string",
    "change": "string",
    "replication": "string",
    "codec": "string",
    "fragment_length": "string",
    "stores": "string",
    "differences": "string",
}
_CHANGES = {
    SpecAction.CREATE: "created",
    SpecAction.UPDATE: "changed",
    SpecAction.DELETE: "deleted",
    SpecAction.NONE: "unchanged",
    SpecAction.GONE: "absent",
}


class JournalSpecsConfig(dg.Config):
    """The configuration of a run of the specs asset."""

    prune: bool = Field(
        default=False,
        description="Also delete journals of the asset's `prune_groups` that the tree does not name. The drift check "
        "lists them.",
    )


def build_journal_specs_asset(
    specs: SpecsText,
    *,
    name: str = "journal_specs",
    key_prefix: str | list[str] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    prune_groups: Sequence[JournalGroup] = (),
    resource_key: str = "journals",
) -> dg.AssetsDefinition:
    """Return an asset that applies a tree of journal specs.

    `specs` is the path of a YAML file, its text, or a function that returns the text. Applying is idempotent: the tree
    is compared with the existing journals, and only differences are applied, in transactions of at most 128 journals.
    A run that was interrupted goes on when it is repeated. If somebody else changes one of the journals meanwhile, the
    comparison is repeated. Suspended journals stay suspended. Journals outside the tree are not changed: a run deletes
    those of `prune_groups` only when its config says `prune: true`.

    Metadata: counts, and a table of journals, those that change first. The data version is a digest of the tree.
    """

    @dg.asset(
        name=name,
        key_prefix=key_prefix,
        group_name=group_name,
        description=description or "The specs of journals, kept as a tree of YAML says.",
        kinds={"journal", "yaml"},
        required_resource_keys={resource_key},
    )
    def journal_specs(context: dg.AssetExecutionContext, config: JournalSpecsConfig) -> dg.MaterializeResult[None]:
        journals: JournalResource = getattr(context.resources, resource_key)
        if config.prune and not prune_groups:
            raise dg.Failure("the run asks to prune, but the asset has no prune_groups", allow_retries=False)
        plan = _apply(context.log, journals, specs, prune_groups if config.prune else ())
        return dg.MaterializeResult(data_version=dg.DataVersion(plan.digest), metadata=plan_metadata(plan))

    return journal_specs


def build_journal_specs_check(
    specs: SpecsText,
    *,
    asset: dg.AssetKey | dg.AssetsDefinition | str = "journal_specs",
    name: str = "journals_are_as_specified",
    prune_groups: Sequence[JournalGroup] = (),
    blocking: bool = False,
    resource_key: str = "journals",
) -> dg.AssetChecksDefinition:
    """Return a check that journals are as a tree says. It changes nothing: run it to see what applying would do.

    It fails with a warning when journals differ from the tree, or when there are journals of `prune_groups` that the
    tree does not name. Metadata: the plan, as of the specs asset.
    """

    @dg.asset_check(asset=asset, name=name, blocking=blocking, required_resource_keys={resource_key})
    def journals_are_as_specified(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Compare journals with their specs' tree: what would applying it do?"""
        journals: JournalResource = getattr(context.resources, resource_key)
        plan = _plan(journals, specs, prune_groups)
        pruned = sum(step.pruned for step in plan.due)
        drifted = len(plan.due) - pruned
        parts = [f"{drifted} of {len(plan.steps) - pruned} journals are not as the tree says"] if drifted else []
        parts += [f"{pruned} journals are not in the tree"] if pruned else []
        return dg.AssetCheckResult(
            passed=not plan.due and not plan.conflicts,
            severity=dg.AssetCheckSeverity.WARN,
            description="; ".join([*parts, *plan.conflicts]) or f"{len(plan.steps)} journals are as the tree says",
            metadata=plan_metadata(plan),
        )

    return journals_are_as_specified


def plan_metadata(plan: SpecPlan) -> dict[str, Any]:
    """Return a plan as metadata: counts, and a table of journals, those that change first."""
    steps = sorted(plan.steps, key=lambda step: not step.due)
    counts: dict[str, Any] = {word: plan.count(action) for action, word in _CHANGES.items()}
    del counts["absent"]
    return {**counts, "journals": table([_row(step) for step in steps], _COLUMNS)}


def _plan(journals: JournalResource, specs: SpecsText, prune: Sequence[JournalGroup]) -> SpecPlan:
    async def work() -> SpecPlan:
        async with JournalClient.of(journals.client_config()) as client:
            return await _reconciler(client, journals, specs, prune).plan()

    return run_blocking(work())


def _apply(
    log: dg.DagsterLogManager, journals: JournalResource, specs: SpecsText, prune: Sequence[JournalGroup]
) -> SpecPlan:
    """Apply the tree and return what was done. Logs each change, and how far it is."""

    async def work(report: Callable[[SpecPlan | Sequence[SpecStep]], None]) -> SpecPlan:
        async with JournalClient.of(journals.client_config()) as client:
            reconciler = _reconciler(client, journals, specs, prune)
            plan = await reconciler.plan()
            report(plan)
            return await reconciler.apply(plan, report)

    with progress("Applying specs", unit="journals", log=DagsterLog(log)) as bar:
        due = 0

        def show(report: SpecPlan | Sequence[SpecStep]) -> None:
            nonlocal due
            if isinstance(report, SpecPlan):
                due = len(report.due)
                bar.expect(due)
                return
            bar.advance(len(report))
            if due > _LOGGED_JOURNALS:
                log.info(f"applied {len(report)} journals, from {report[0].name} to {report[-1].name}")
                return
            for step in report:
                log.info(f"{step.name}: {_CHANGES[step.action]} {'; '.join(step.differences)}".rstrip())

        return run_reporting(work, show)


def _reconciler(
    client: JournalClient, journals: JournalResource, specs: SpecsText, prune: Sequence[JournalGroup]
) -> SpecReconciler:
    wanted = under_prefix(at_any_revision(parse_tree(_text(specs))), journals.prefix)
    groups = [(f"{NAME}:prefix", f"{journals.group(group).name}/") for group in prune]
    selector = label_selector(include=groups) if groups else None
    return SpecReconciler(JOURNALS, JournalSpecs(client), wanted, source="the tree of specs", prune=selector)


def _text(specs: SpecsText) -> str:
    if callable(specs):
        return specs()
    return specs.read_text() if isinstance(specs, Path) else specs


def _row(step: SpecStep) -> JournalRow:
    spec = step.spec if step.spec is not None else pb.JournalSpec()
    return {
        "journal": step.name,
        "change": _CHANGES[step.action],
        "replication": str(spec.replication),
        "codec": pb.CompressionCodec.Name(spec.fragment.compression_codec),
        "fragment_length": str(spec.fragment.length),
        "stores": ", ".join(spec.fragment.stores),
        "differences": "; ".join(step.differences),
    }
