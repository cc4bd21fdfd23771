"""A component for a Spark consumer: its tables and output journals as assets, its job, and a sensor that starts it."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import dagster as dg
from dagster.components.resolved.base import resolve_fields
from pydantic import Field

from coranto.client.groups import JournalGroup
from coranto.errors import InvalidInput
from coranto.fragments.windows import DEFAULT_MAX_WINDOWS, DEFAULT_WINDOW_BYTES
from dagster_coranto.components.cluster import ClusterModel, resolve_cluster, shared_resource
from dagster_coranto.components.consumer_options import ConsumerOptionsModel
from dagster_coranto.components.scaffolding import SparkConsumerScaffolder
from dagster_coranto.consumers.assets import ConsumerStep, spark_consumer_assets
from dagster_coranto.consumers.definition import ConsumerMode, ConsumerSettings
from dagster_coranto.consumers.polling_sensor import build_journal_polling_sensor
from dagster_coranto.consumers.skipped_input import build_left_out_check
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.sql_store import STORE_VARIABLE, SqlStoreResource
from dagster_coranto.translation.translator import ComponentTranslator
from dagster_coranto.windows.assets import WindowStep, build_window_sensor, build_windowed_consumer


class SparkModel(dg.Model, dg.Resolvable):
    """Spark's settings, in YAML."""

    master: str = Field(default="local[2]", description="Spark's master URL.")
    settings: dict[str, str] = Field(default={}, description="Spark settings.")


class WindowsModel(dg.Model, dg.Resolvable):
    """Windows of offsets, in YAML."""

    window_bytes: int = Field(default=DEFAULT_WINDOW_BYTES, gt=0, description="Stored bytes that fill a window.")
    max_windows: int = Field(default=DEFAULT_MAX_WINDOWS, gt=1, description="Maximum windows; old ones are merged.")
    sensor_seconds: int = Field(default=60, gt=0, description="Seconds between checks for new windows.")
    launch: bool = Field(default=False, description="Request a run for each window that is not materialised.")


def _resolve_spark(context: dg.ResolutionContext, model: Any) -> SparkResource:
    return SparkResource(**resolve_fields(model, SparkModel, context))


@dg.scaffold_with(SparkConsumerScaffolder)
class SparkConsumerComponent(dg.Component, dg.Model, dg.Resolvable):
    """A Spark consumer that writes exactly once from journals to tables of its store, and to other journals.

    Loading definitions imports neither Spark nor the application.
    """

    name: str = Field(description="Name of the step that consumes. The job is called <name>_job.")
    application: str = Field(
        description="The application's class, as module:Class. It is imported when the consumer runs.",
        examples=["shop.application:Revenue"],
    )
    sources: list[str] = Field(description="Folders of journals that the consumer reads.", examples=[["shop/orders"]])
    tables: list[dg.ResolvedAssetSpec] = Field(description="Assets of the tables that the consumer maintains.")
    outputs: list[str] = Field(default=[], description="Folders of journals that the consumer publishes to.")
    store_url_variable: str = Field(
        default=STORE_VARIABLE,
        description="The environment variable with the URL of the store: SQLAlchemy's, which may hold a password, or "
        "iceberg://CATALOG/namespace.table.",
    )
    mode: Literal["drain", "service"] = Field(
        default="drain", description="When a run ends: once it has caught up (drain), or when terminated (service)."
    )
    options: ConsumerOptionsModel = Field(
        default_factory=ConsumerOptionsModel,
        description="Options of the consumer.",
        examples=[{"misfits": {"table": "dead_letters"}}],
    )
    sensor_seconds: int = Field(
        default=0, description="Seconds between checks for new content, which start a run. 0: no sensor."
    )
    windows: WindowsModel | None = Field(
        default=None,
        description="Partition the tables by windows of offsets, for backfills. Such a consumer cannot publish.",
        examples=[{"window_bytes": 268435456, "launch": True}],
    )
    cluster: Annotated[JournalResource, dg.Resolver(resolve_cluster, model_field_type=ClusterModel)] = Field(
        default_factory=JournalResource, description="The cluster of brokers. Default: from the environment."
    )
    spark: Annotated[SparkResource, dg.Resolver(_resolve_spark, model_field_type=SparkModel)] = Field(
        default_factory=SparkResource, description="Spark. Default: two threads of this machine."
    )

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(
            description="Coranto's exactly-once Spark consumer, as assets.", tags=["integration", "streaming", "spark"]
        )

    def settings(self, context: dg.AssetExecutionContext) -> ConsumerSettings:
        """Return the settings of a run. Override this for an application with arguments."""
        from coranto_consumers.loading import load_target

        url = os.environ.get(self.store_url_variable)
        if not url:
            raise InvalidInput(
                f"the environment variable {self.store_url_variable} has no URL of the SQL store of {self.name}; "
                "set it where runs are started, such as to postgresql://user:password@host/database",
                field="store_url_variable",
            )
        application = load_target(self.application)
        options = self.options.to_options(by_window=self.windows is not None)
        if url.startswith("iceberg://"):
            from coranto_consumers.spark.outputs.iceberg import IcebergStore

            return ConsumerSettings(application, IcebergStore.at(url), options)
        return ConsumerSettings(application, url, options)

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the asset spec of a table or folder of journals. Override this for changes that YAML cannot express.

        `spec` is the spec from YAML. Of `sources`, only the key is used.
        """
        return spec

    def execute(
        self, context: dg.AssetExecutionContext, consumer: ConsumerStep | WindowStep
    ) -> Iterator[dg.MaterializeResult[None]]:
        """Run the consumer, and yield a result for each asset. Override this to add work before or after it."""
        yield from consumer.run()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        sources = [JournalGroup(name) for name in self.sources]
        journals_key, journals = shared_resource("journals", self.cluster)
        spark_key, spark = shared_resource("spark", self.spark)
        resources = {journals_key: journals, spark_key: spark}
        if self.windows is not None:
            return self._by_windows(self.windows, sources, journals_key, spark_key, resources)
        assets = spark_consumer_assets(
            name=self.name,
            sources=sources,
            tables=[self.get_asset_spec(spec) for spec in self.tables],
            outputs=[JournalGroup(name) for name in self.outputs],
            dagster_journal_translator=ComponentTranslator(self.get_asset_spec),
            resource_key=journals_key,
            spark_resource_key=spark_key,
            mode=ConsumerMode(self.mode),
            execute=self.execute,
        )(self.settings)
        check = build_left_out_check(assets)
        job = dg.define_asset_job(
            f"{self.name}_job",
            selection=dg.AssetSelection.assets(*assets.keys),
            executor_def=dg.in_process_executor,  # The job has one step, which needs no separate process.
        )
        return dg.Definitions(
            assets=dg.with_resources([assets], resources),
            asset_checks=[check],
            jobs=[job],
            sensors=[self._sensor(sources, job)] if self.sensor_seconds else [],
        )

    def _by_windows(
        self,
        windows: WindowsModel,
        sources: list[JournalGroup],
        journals_key: str,
        spark_key: str,
        resources: dict[str, Any],
    ) -> dg.Definitions:
        contrary = {"outputs": self.outputs, "sensor_seconds": self.sensor_seconds, "mode": self.mode != "drain"}
        for name, given in contrary.items():
            if given:
                raise InvalidInput(
                    f"{self.name} has windows, so {name} has no meaning; leave it out, and make another component "
                    "for the continuous consumer",
                    field=name,
                )
        windowed = build_windowed_consumer(
            name=self.name,
            settings=self.settings,
            sources=sources,
            tables=[self.get_asset_spec(spec) for spec in self.tables],
            dagster_journal_translator=ComponentTranslator(self.get_asset_spec),
            resource_key=journals_key,
            spark_resource_key=spark_key,
            execute=self.execute,
        )
        sensor = build_window_sensor(
            windowed,
            journals=self.cluster,
            store=SqlStoreResource(url=dg.EnvVar(self.store_url_variable)),
            window_bytes=windows.window_bytes,
            max_windows=windows.max_windows,
            launch=windows.launch,
            minimum_interval_seconds=windows.sensor_seconds,
            default_status=dg.DefaultSensorStatus.RUNNING,
        )
        return dg.Definitions(
            assets=[*dg.with_resources([windowed.assets], resources), windowed.windows], sensors=[sensor]
        )

    def _sensor(self, sources: list[JournalGroup], job: Any) -> dg.SensorDefinition:
        return build_journal_polling_sensor(
            journals=self.cluster,
            group=sources,
            job=job,
            name=f"{self.name}_sensor",
            minimum_interval_seconds=self.sensor_seconds,
        )
