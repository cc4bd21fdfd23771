"""A component for a consumer of shards: its shard specs from YAML, and its tables as assets.

The consumer's processes run outside of Dagster (`coranto consumer serve`). Loading definitions does not call them.
"""

import dagster as dg
from pydantic import Field

from coranto.client.groups import JournalGroup
from dagster_coranto.components.scaffolding import ShardConsumerScaffolder
from dagster_coranto.specs.shards import build_shard_specs_asset, build_shard_specs_check
from dagster_coranto.translation.options import with_deps
from dagster_coranto.translation.translator import ComponentTranslator, build_group_spec


@dg.scaffold_with(ShardConsumerScaffolder)
class ShardConsumerComponent(dg.Component, dg.Model, dg.Resolvable):
    """A consumer of shards, whose processes run outside of Dagster: its shard specs, and its tables as assets."""

    specs: str = Field(description="File with shard specs, in the folder of defs.yaml.", examples=["shards.yaml"])
    specs_asset: str = Field(default="shard_specs", description="The key of the asset that applies `specs`.")
    sources: list[str] = Field(description="Folders of journals that the shards read.", examples=[["shop/orders"]])
    tables: list[dg.ResolvedAssetSpec] = Field(default=[], description="Assets of the tables that the shards maintain.")
    outputs: list[str] = Field(default=[], description="Folders of journals that the shards publish to.")
    consumer: str = Field(
        default="",
        description="Any process of the consumer, as host:port. Empty: $CORANTO_CONSUMER at run time, otherwise "
        "the only consumer of the embedded cluster.",
    )
    data_dir: str = Field(
        default="", description="Folder of an embedded cluster. Empty: $CORANTO_DATA, otherwise ./.coranto."
    )
    prune_selector: str = Field(
        default="",
        description="The shards that this document manages. A run with `prune: true` in its config deletes managed "
        "shards that the document does not name.",
        examples=["app=totals"],
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="A consumer of shards of Coranto: shard specs from YAML, and its tables.",
            tags=["integration", "streaming"],
        )

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset spec of a table or folder of journals. Override this for changes that YAML cannot express.

        `spec` is the spec from YAML. Of `sources`, only the key is used.
        """
        return spec

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        document = context.path / self.specs
        applying = build_shard_specs_asset(
            document,
            name=self.specs_asset,
            consumer=self.consumer,
            data_dir=self.data_dir,
            prune_selector=self.prune_selector,
        )
        check = build_shard_specs_check(
            document,
            asset=applying.key,
            consumer=self.consumer,
            data_dir=self.data_dir,
            prune_selector=self.prune_selector,
        )
        translator = ComponentTranslator(self.get_asset_spec)
        sources = [build_group_spec(JournalGroup(name), translator).key for name in self.sources]
        outputs = [build_group_spec(JournalGroup(name), translator) for name in self.outputs]
        tables = [self.get_asset_spec(spec) for spec in self.tables]
        maintained = [with_deps(spec, [*sources, applying.key]) for spec in (*tables, *outputs)]
        return dg.Definitions(assets=[applying, *maintained], asset_checks=[check])
