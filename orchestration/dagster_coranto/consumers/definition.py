"""The definition of a Spark consumer in Dagster: its sources, its assets, and the settings of its runs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import dagster as dg

from coranto.client.groups import JournalGroup
from coranto.errors import InvalidInput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from dagster_coranto.instance.tags import result_tags

if TYPE_CHECKING:
    from coranto_consumers.spark.application.outputs import SparkApplication
    from coranto_consumers.spark.outputs.iceberg import IcebergStore


class ConsumerMode(enum.Enum):
    """The condition that ends a consumer's run."""

    DRAIN = "drain"
    """The run reaches the heads that its journals had at its start."""
    SERVICE = "service"
    """The run is stopped. Until then, it reports materialisations regularly."""


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of one run: the application, its store, and all options of a `SparkConsumer`.

    The store is a database, by its URL, or an `IcebergStore`.
    """

    application: SparkApplication
    store: str | IcebergStore = field(repr=False)  # It may hold a password.
    options: ConsumerOptions = field(default_factory=ConsumerOptions)

    @property
    def database_url(self) -> str:
        """The URL of the database. Raises InvalidInput for an `IcebergStore`."""
        if not isinstance(self.store, str):
            raise InvalidInput(f"{self.store.name} is not a database, which windows need; give a URL", field="store")
        return self.store


@dataclass(frozen=True, slots=True)
class SparkConsumerDefinition:
    """The arguments of `spark_consumer_assets`."""

    name: str
    settings: Callable[..., ConsumerSettings]
    sources: tuple[JournalGroup, ...]
    source_keys: tuple[dg.AssetKey, ...]
    tables: tuple[dg.AssetSpec, ...]
    outputs: tuple[tuple[dg.AssetSpec, JournalGroup], ...]
    mode: ConsumerMode
    report_seconds: float
    resource_key: str
    spark_resource_key: str

    @property
    def specs(self) -> list[dg.AssetSpec]:
        """The assets that the consumer maintains."""
        return [*self.tables, *(spec for spec, _ in self.outputs)]

    @property
    def keys(self) -> list[dg.AssetKey]:
        """The keys of the assets."""
        return [spec.key for spec in self.specs]


@dataclass(frozen=True, slots=True)
class AssetState:
    """A new state of one asset of a consumer, or of a source that has grown."""

    key: dg.AssetKey
    version: dg.DataVersion
    metadata: Mapping[str, Any]
    tags: Mapping[str, str]
    """The versions of the asset and of its inputs (`instance.tags`)."""

    def as_result(self) -> dg.MaterializeResult[None]:
        """Return the result of a step."""
        return dg.MaterializeResult(
            asset_key=self.key, data_version=self.version, metadata=self.metadata, tags=result_tags(self.tags)
        )

    def as_event(self) -> dg.AssetMaterialization:
        """Return an event: for a running step, for an asset that was not requested, or without a run."""
        return dg.AssetMaterialization(asset_key=self.key, metadata=self.metadata, tags=dict(self.tags))


_definitions: WeakKeyDictionary[dg.OpDefinition, SparkConsumerDefinition] = WeakKeyDictionary()


def register_consumer(assets: dg.AssetsDefinition, definition: SparkConsumerDefinition) -> None:
    """Register the definition of a consumer's assets for `consumers_of`."""
    _definitions[assets.op] = definition


def consumers_of(assets: Sequence[object]) -> Iterator[SparkConsumerDefinition]:
    """Yield the Spark consumers among assets."""
    for each in assets:
        if isinstance(each, dg.AssetsDefinition) and each.is_executable and each.op in _definitions:
            yield _definitions[each.op]


def consumer_of(assets: Sequence[object], name: str = "") -> SparkConsumerDefinition:
    """Return the Spark consumer with a name, or the only one. Raises InvalidInput if there is none."""
    found = {consumer.name: consumer for consumer in consumers_of(assets)}
    if name in found:
        return found[name]
    if not name and len(found) == 1:
        return next(iter(found.values()))
    known = ", ".join(sorted(found)) or "none"
    raise InvalidInput(f"{name!r} is not a Spark consumer of these definitions; they have: {known}", field="consumer")
