"""An asset that applies shard specs from a YAML file, and a check that finds drift from it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import dagster as dg
from pydantic import Field

from coranto.client import ClientConfig
from coranto.labels import parse_selector
from coranto.reconcile import SpecReconciler, at_any_revision
from dagster_coranto.specs.reconciling import OpenReconciler, SpecsText, apply, apply_result, check_drift, text_of

CONSUMER_VARIABLE = "CORANTO_CONSUMER"


class ShardSpecsConfig(dg.Config):
    """The configuration of a run of the asset."""

    prune: bool = Field(
        default=False,
        description="Also delete shards that the asset's `prune_selector` selects and the document does not name. The "
        "drift check lists them.",
    )


def build_shard_specs_asset(
    specs: SpecsText,
    *,
    name: str = "shard_specs",
    consumer: str = "",
    data_dir: str = "",
    prune_selector: str = "",
    group_name: str | None = None,
    description: str | None = None,
) -> dg.AssetsDefinition:
    """Return an asset that applies a document of shard specs, as `build_journal_specs_asset` does for journals.

    `consumer` is any process of the consumer, as host:port. Empty: $CORANTO_CONSUMER, otherwise the only consumer of
    the embedded cluster below `data_dir` (found as by commands). Only a run with `prune: true` in its config deletes
    shards that the document does not name, and only if `prune_selector` (such as `app=totals`) selects them.
    """

    @dg.asset(
        name=name,
        group_name=group_name,
        description=description or "The specs of shards, applied from a YAML document.",
        kinds={"yaml"},
    )
    def shard_specs(context: dg.AssetExecutionContext, config: ShardSpecsConfig) -> dg.MaterializeResult[None]:
        if config.prune and not prune_selector:
            raise dg.Failure("the run asks to prune, but the asset has no prune_selector", allow_retries=False)
        open_reconciler = _reconciler_opener(specs, consumer, data_dir, prune_selector if config.prune else "")
        return apply_result(apply(context.log, open_reconciler))

    return shard_specs


def build_shard_specs_check(
    specs: SpecsText,
    *,
    asset: dg.AssetKey | dg.AssetsDefinition | str = "shard_specs",
    name: str = "shards_are_as_specified",
    consumer: str = "",
    data_dir: str = "",
    prune_selector: str = "",
    blocking: bool = False,
) -> dg.AssetChecksDefinition:
    """Return a check that shards match a document.

    It changes nothing, and warns of drift. With `blocking`, drift is an error, which stops downstream assets. While no
    process of the consumer answers, it fails with an error.
    """

    @dg.asset_check(asset=asset, name=name, blocking=blocking)
    def shards_are_as_specified() -> dg.AssetCheckResult:
        """Compare shards with their specs' document, and report the changes that applying it would make."""
        return check_drift(_reconciler_opener(specs, consumer, data_dir, prune_selector), blocking=blocking)

    return shards_are_as_specified


def _reconciler_opener(specs: SpecsText, consumer: str, data_dir: str, prune: str) -> OpenReconciler:
    # Imported here, because it imports numpy and SQLAlchemy, which loading definitions does not need.
    from coranto_consumers.runtime.client import ShardClient
    from coranto_consumers.runtime.discovery import find_consumer
    from coranto_consumers.runtime.reconcile import SHARDS, ShardSpecs
    from coranto_consumers.runtime.shard_set import parse_shards

    @asynccontextmanager
    async def open_reconciler() -> AsyncIterator[SpecReconciler]:
        wanted = at_any_revision(parse_shards(text_of(specs)))
        endpoint = consumer or os.environ.get(CONSUMER_VARIABLE, "")
        endpoint = endpoint or await find_consumer(Path(data_dir) if data_dir else None)
        selector = parse_selector(prune) if prune else None
        async with ShardClient(ClientConfig.from_environment(endpoint)) as client:
            yield SpecReconciler(SHARDS, ShardSpecs(client), wanted, source="the document of shards", prune=selector)

    return open_reconciler
