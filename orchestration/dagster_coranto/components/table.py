"""A component for a table without code: the table as an asset, its job, its audit as a check, and a sensor."""

from collections.abc import Iterator
from typing import Annotated, Any

import dagster as dg
from pydantic import Field

from coranto.client.groups import JournalGroup
from coranto.errors import InvalidInput
from dagster_coranto.components.cluster import ClusterModel, resolve_cluster, shared_resource
from dagster_coranto.components.scaffolding import TableScaffolder
from dagster_coranto.consumers.polling_sensor import build_journal_polling_sensor
from dagster_coranto.consumers.tables import TABLES, TableStep, build_table_asset
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.translator import ComponentTranslator
from dagster_coranto.verification.tables import build_table_check


@dg.scaffold_with(TableScaffolder)
class JournalTableComponent(dg.Component, dg.Model, dg.Resolvable):
    """Messages of journals or of a stream as rows of a table in a database or in Iceberg, each once.

    Loading definitions contacts neither the store nor a broker, and does not import Spark.
    """

    table: str | dict[str, Any] = Field(
        description="The file of the table for `coranto table run`, in the folder of defs.yaml; or the fields of that "
        "file.",
        examples=["table.yaml", {"name": "shop-orders", "input": {"stream": "shop/orders"}, "table": "orders"}],
    )
    key: str = Field(default="", description="The asset's key. Empty: the name of the table.", examples=["db/orders"])
    sensor_seconds: int = Field(
        default=0,
        ge=0,
        description="Seconds between checks for new content, which start a run. 0: no sensor.",
    )
    cluster: Annotated[JournalResource, dg.Resolver(resolve_cluster, model_field_type=ClusterModel)] = Field(
        default_factory=JournalResource, description="The cluster of brokers. Default: from the environment."
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="A table of Coranto: messages of journals as rows, each once, without code.",
            tags=["integration", "streaming"],
        )

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset spec of the table, or of its stream. Override this for other keys, groups or owners.

        Of the stream, or the folder of journals, only the key is used.
        """
        return spec

    def execute(self, context: dg.AssetExecutionContext, table: TableStep) -> Iterator[dg.MaterializeResult[None]]:
        """Write the table, and yield its result. Override this to add work before or after it."""
        yield from table.run()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        resource_key, journals = shared_resource("journals", self.cluster)
        resources = {resource_key: journals}
        asset = build_table_asset(
            context.path / self.table if isinstance(self.table, str) else self.table,
            key=self.key,
            resource_key=resource_key,
            dagster_journal_translator=ComponentTranslator(self.get_asset_spec),
            change=self.get_asset_spec,
            execute=self.execute,
        )
        check = build_table_check(asset, resource_key=resource_key)
        job = dg.define_asset_job(
            f"{asset.op.name}_job",
            selection=dg.AssetSelection.assets(asset.key).without_checks(),
            executor_def=dg.in_process_executor,  # The job has one step, which needs no separate process.
        )
        return dg.Definitions(
            assets=dg.with_resources([asset], resources),
            asset_checks=dg.with_resources([check], resources),
            jobs=[job],
            sensors=[self._sensor(TABLES.of(asset).names.input.folder, job)] if self.sensor_seconds else [],
        )

    def _sensor(self, folder: str, job: Any) -> dg.SensorDefinition:
        if not folder:
            raise InvalidInput(
                "the table's input is not below one folder, which a sensor needs: leave sensor_seconds out, and "
                "use a schedule",
                field="sensor_seconds",
            )
        return build_journal_polling_sensor(
            journals=self.cluster,
            group=JournalGroup(folder),
            job=job,
            name=f"{job.name.removesuffix('_job')}_sensor",
            minimum_interval_seconds=self.sensor_seconds,
        )
