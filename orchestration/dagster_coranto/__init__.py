"""Journals as Dagster assets.

::

    journals = JournalResource()                                   # finds the embedded cluster, or takes an endpoint
    specs    = build_journal_specs_asset(Path("journals.yaml"))    # applies journal specs
    check    = build_audit_check(JournalGroup("shop/orders"))      # all content is there
    sensor   = build_journal_polling_sensor(journals=journals, group=JournalGroup("shop/orders"), job=consume)

    @journal_assets(JournalGroup("shop/orders"), deps=[specs])     # a function that publishes
    @spark_consumer_assets(sources=[…], tables=[…], outputs=[…])   # a function that returns a consumer's settings

Importing this package does not import Spark.
"""

from __future__ import annotations

from coranto.extras import with_install_advice

try:
    from dagster_shared.libraries import DagsterLibraryRegistry
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.client.groups import JournalGroup
from dagster_coranto.components import (
    IngestComponent,
    JournalCollectionComponent,
    JournalTableComponent,
    ShardConsumerComponent,
    SparkConsumerComponent,
)
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.consumers.automation import on_new_content
from dagster_coranto.consumers.definition import ConsumerMode, ConsumerSettings
from dagster_coranto.consumers.polling_sensor import build_journal_polling_sensor
from dagster_coranto.consumers.skipped_input import build_left_out_check
from dagster_coranto.consumers.tables import build_table_asset
from dagster_coranto.ingests.assets import build_ingest_asset
from dagster_coranto.ingests.definition import IngestMode
from dagster_coranto.ingests.freshness import build_ingest_check
from dagster_coranto.ingests.sensor import build_ingest_sensor
from dagster_coranto.journals.assets import Publication, PublishContext, journal_assets
from dagster_coranto.journals.compaction import build_compaction_asset
from dagster_coranto.journals.io_manager import JournalIOManager
from dagster_coranto.observation.consumers import (
    ShardConsumerResource,
    build_consumer_observation_sensor,
    build_observed_consumer,
)
from dagster_coranto.observation.journals import build_journal_observation_sensor
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.spark import SparkResource
from dagster_coranto.resources.sql_store import SqlStoreResource
from dagster_coranto.specs.journals import build_journal_specs_asset, build_journal_specs_check
from dagster_coranto.specs.shards import build_shard_specs_asset, build_shard_specs_check
from dagster_coranto.translation.translator import (
    DagsterJournalTranslator,
    JournalTranslatorData,
    build_journal_asset_specs,
)
from dagster_coranto.translation.typed import TypedJournalTranslator
from dagster_coranto.verification.alerts import build_failed_check_sensor
from dagster_coranto.verification.checks import build_audit_check, build_fragment_check
from dagster_coranto.verification.recovery import build_journal_recovery, build_recovery_sensor
from dagster_coranto.verification.schedules import build_verification
from dagster_coranto.verification.tables import build_table_check
from dagster_coranto.version import __version__
from dagster_coranto.windows.as_of import AsOf
from dagster_coranto.windows.assets import build_window_sensor, build_windowed_consumer

DagsterLibraryRegistry.register("dagster-coranto", __version__, is_dagster_package=False)

__all__ = [
    "AsOf",
    "ConsumerMode",
    "ConsumerSettings",
    "DagsterJournalTranslator",
    "IngestComponent",
    "IngestMode",
    "JournalCollectionComponent",
    "JournalGroup",
    "JournalIOManager",
    "JournalResource",
    "JournalTableComponent",
    "JournalTranslatorData",
    "Publication",
    "PublishContext",
    "ShardConsumerComponent",
    "ShardConsumerResource",
    "SparkConsumerComponent",
    "SparkResource",
    "SqlStoreResource",
    "TypedJournalTranslator",
    "build_audit_check",
    "build_compaction_asset",
    "build_consumer_observation_sensor",
    "build_failed_check_sensor",
    "build_fragment_check",
    "build_ingest_asset",
    "build_ingest_check",
    "build_ingest_sensor",
    "build_journal_asset_specs",
    "build_journal_observation_sensor",
    "build_journal_polling_sensor",
    "build_journal_recovery",
    "build_journal_specs_asset",
    "build_journal_specs_check",
    "build_left_out_check",
    "build_observed_consumer",
    "build_recovery_sensor",
    "build_shard_specs_asset",
    "build_shard_specs_check",
    "build_table_asset",
    "build_table_check",
    "build_verification",
    "build_window_sensor",
    "build_windowed_consumer",
    "journal_assets",
    "on_new_content",
    "spark_consumer_assets",
]
