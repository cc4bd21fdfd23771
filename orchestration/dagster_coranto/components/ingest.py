"""A component for an ingest: the stream that it writes as an asset, its job, a check of freshness, and a sensor."""

from collections.abc import Iterator
from typing import Annotated, Literal

import dagster as dg
from pydantic import Field

from dagster_coranto.components.cluster import ClusterModel, resolve_cluster, shared_resource
from dagster_coranto.components.scaffolding import IngestScaffolder
from dagster_coranto.ingests.assets import IngestStep, build_ingest_asset
from dagster_coranto.ingests.definition import IngestMode
from dagster_coranto.ingests.freshness import FRESH_SECONDS, build_ingest_check
from dagster_coranto.ingests.sensor import build_ingest_sensor
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.translator import ComponentTranslator


@dg.scaffold_with(IngestScaffolder)
class IngestComponent(dg.Component, dg.Model, dg.Resolvable):
    """Rows of Kafka topics, files or tables of PostgreSQL as events of a stream, each once.

    `file` is a file for `coranto ingest run`. Loading definitions contacts neither the source nor a broker.
    """

    file: str = Field(description="The file of the ingest, in the folder of defs.yaml.", examples=["orders.yaml"])
    mode: Literal["drain", "service"] = Field(
        default="drain", description="When a run ends: once the source has no more rows, or when terminated."
    )
    sensor_seconds: int = Field(
        default=30, ge=0, description="Seconds between checks of the source; a run starts if rows wait. 0: no sensor."
    )
    fresh_seconds: float = Field(
        default=FRESH_SECONDS,
        ge=0,
        description="The check is_fresh fails if rows wait and nothing was materialised for this long. 0: no check.",
    )
    cluster: Annotated[JournalResource, dg.Resolver(resolve_cluster, model_field_type=ClusterModel)] = Field(
        default_factory=JournalResource, description="The cluster of brokers. Default: from the environment."
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="An ingest of Coranto: rows of Kafka, files and PostgreSQL in a stream, each once.",
            tags=["integration", "streaming", "kafka"],
        )

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset spec of the stream. Override this for other keys, groups, owners or dependencies."""
        return spec

    def execute(self, context: dg.AssetExecutionContext, ingest: IngestStep) -> Iterator[dg.MaterializeResult[None]]:
        """Run the ingest, and yield its result. Override this to add work before or after it."""
        yield from ingest.run()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        key, journals = shared_resource("journals", self.cluster)
        resources = {key: journals}
        asset = build_ingest_asset(
            context.path / self.file,
            resource_key=key,
            mode=IngestMode(self.mode),
            dagster_journal_translator=ComponentTranslator(self.get_asset_spec),
            execute=self.execute,
        )
        checks = [build_ingest_check(asset, fresh_seconds=self.fresh_seconds, resource_key=key)]
        job = dg.define_asset_job(
            f"{asset.op.name}_job",
            selection=dg.AssetSelection.assets(asset.key).without_checks(),
            executor_def=dg.in_process_executor,  # The job has one step, which needs no separate process.
        )
        sensor = build_ingest_sensor(
            asset,
            journals=self.cluster,
            job=job,
            minimum_interval_seconds=self.sensor_seconds or 30,
            fresh_seconds=self.fresh_seconds or None,
        )
        return dg.Definitions(
            assets=dg.with_resources([asset], resources),
            asset_checks=dg.with_resources(checks, resources) if self.fresh_seconds else [],
            jobs=[job],
            sensors=[sensor] if self.sensor_seconds else [],
        )
