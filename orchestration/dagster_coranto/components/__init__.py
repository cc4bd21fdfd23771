"""Components: definitions in YAML (`dg scaffold defs dagster_coranto.…`)."""

from __future__ import annotations

from dagster_coranto.components.collection import JournalCollectionComponent
from dagster_coranto.components.ingest import IngestComponent
from dagster_coranto.components.shard_consumer import ShardConsumerComponent
from dagster_coranto.components.spark_consumer import SparkConsumerComponent
from dagster_coranto.components.table import JournalTableComponent

__all__ = [
    "IngestComponent",
    "JournalCollectionComponent",
    "JournalTableComponent",
    "ShardConsumerComponent",
    "SparkConsumerComponent",
]
