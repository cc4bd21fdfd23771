"""Options of assets, the same for every builder, and their combination with a translator's specs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypedDict, cast

import dagster as dg


class SpecOptions(TypedDict, total=False):
    """Options that fill an asset's spec. They are documented at `dg.AssetSpec`.

    A translator's spec takes precedence: an option fills only empty fields. Owners, tags and kinds are added.
    """

    group_name: str | None
    description: str | None
    owners: Sequence[str]
    tags: Mapping[str, str]
    kinds: set[str]
    code_version: str | None
    automation_condition: dg.AutomationCondition[Any] | None
    freshness_policy: dg.FreshnessPolicy | None
    partitions_def: dg.PartitionsDefinition[str] | None


class OpOptions(TypedDict, total=False):
    """Options of the step that makes assets. They are documented at `dg.multi_asset`."""

    pool: str | None
    op_tags: Mapping[str, Any]
    retry_policy: dg.RetryPolicy | None
    backfill_policy: dg.BackfillPolicy | None
    hooks: Set[dg.HookDefinition]


class AssetOptions(SpecOptions, OpOptions):
    """All options of a builder of assets."""


def spec_options(options: AssetOptions) -> SpecOptions:
    """Return the options that fill a spec."""
    return cast(SpecOptions, _chosen(options, SpecOptions))


def op_options(options: AssetOptions) -> OpOptions:
    """Return the options of the step."""
    return cast(OpOptions, _chosen(options, OpOptions))


def _chosen(options: Mapping[str, Any], of: type) -> dict[str, Any]:
    return {name: options[name] for name in of.__annotations__ if name in options}


def with_options(spec: dg.AssetSpec, options: SpecOptions) -> dg.AssetSpec:
    """Return a spec with options in its empty fields, and with their owners, tags and kinds added."""
    added_tags = {name: value for name, value in options.get("tags", {}).items() if name not in spec.tags}
    added_owners = [owner for owner in options.get("owners", ()) if owner not in spec.owners]
    merged = spec.merge_attributes(owners=added_owners, tags=added_tags, kinds=options.get("kinds", set()))
    single = ("group_name", "description", "code_version", "automation_condition", "freshness_policy", "partitions_def")
    missing: dict[str, Any] = {
        name: options.get(name) for name in single if getattr(spec, name) is None and options.get(name) is not None
    }
    return merged.replace_attributes(**missing)


def with_deps(spec: dg.AssetSpec, deps: Iterable[Any]) -> dg.AssetSpec:
    """Return a spec that also depends on `deps`, in any form that Dagster accepts."""
    has = {dep.asset_key for dep in spec.deps}
    wanted = dg.AssetSpec(spec.key, deps=deps).deps
    return spec.merge_attributes(deps=[dep for dep in wanted if dep.asset_key not in has])
