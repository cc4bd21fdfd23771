"""An asset that applies journal specs from a YAML file, and a check that finds drift from it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import dagster as dg
from pydantic import Field

from coranto.client import JournalClient
from coranto.client.groups import JournalGroup
from coranto.reconcile import SpecReconciler, tree_reconciler
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.specs.reconciling import OpenReconciler, SpecsText, apply, apply_result, check_drift, text_of


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
    is compared with the existing journals, and only differences are applied, in transactions of at most `BATCH_CHANGES`
    journals. Repeating an interrupted run continues it. If a journal is changed concurrently, the comparison is
    repeated. Suspended journals stay suspended. Journals outside the tree are not changed; only a run with
    `prune: true` in its config deletes those in `prune_groups`.

    Metadata: counts, and a table of journals, changed ones first. The data version is a digest of the tree.
    """

    @dg.asset(
        name=name,
        key_prefix=key_prefix,
        group_name=group_name,
        description=description or "The specs of journals, applied from a YAML tree.",
        kinds={"journal", "yaml"},
        required_resource_keys={resource_key},
    )
    def journal_specs(context: dg.AssetExecutionContext, config: JournalSpecsConfig) -> dg.MaterializeResult[None]:
        journals: JournalResource = getattr(context.resources, resource_key)
        if config.prune and not prune_groups:
            raise dg.Failure("the run asks to prune, but the asset has no prune_groups", allow_retries=False)
        return apply_result(
            apply(context.log, _reconciler_opener(journals, specs, prune_groups if config.prune else ()))
        )

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
    """Return a check that journals match a tree. It changes nothing, and previews the changes of the specs asset.

    It fails with a warning if journals differ from the tree, or if `prune_groups` have journals that the tree does not
    name. With `blocking`, it fails with an error, which stops downstream assets. Metadata: the plan, as for the specs
    asset. While no broker answers, it fails with an error.
    """

    @dg.asset_check(asset=asset, name=name, blocking=blocking, required_resource_keys={resource_key})
    def journals_are_as_specified(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """Compare journals with their specs' tree, and report the changes that applying it would make."""
        journals: JournalResource = getattr(context.resources, resource_key)
        return check_drift(_reconciler_opener(journals, specs, prune_groups, patient=False), blocking=blocking)

    return journals_are_as_specified


def _reconciler_opener(
    journals: JournalResource, specs: SpecsText, prune: Sequence[JournalGroup], *, patient: bool = True
) -> OpenReconciler:
    @asynccontextmanager
    async def open_reconciler() -> AsyncIterator[SpecReconciler]:
        config = journals.client_config() if patient else journals.audit_config()
        async with JournalClient.of(config) as client:
            yield tree_reconciler(client, text_of(specs), prefix=journals.prefix, prune=prune)

    return open_reconciler
