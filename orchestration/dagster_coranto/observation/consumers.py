"""Consumers that run outside Dagster, such as shards (`coranto consumer serve`), as assets with their lag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Protocol, Unpack

import dagster as dg
from pydantic import BaseModel, Field

from coranto.client import ClientConfig
from coranto.client.groups import JournalGroup
from coranto.errors import ClusterError, SqlStoreError, Unavailable
from dagster_coranto.instance.underway import CONSUMER_TAG
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.resources.typed import initialize_resource
from dagster_coranto.translation.metadata import ConsumerMetadataSet, lag_table, offsets_metadata, vector_version
from dagster_coranto.translation.options import SpecOptions, with_deps, with_options
from dagster_coranto.translation.translator import DagsterJournalTranslator, build_group_spec


class OffsetsSource(Protocol):
    """A resource that returns consumers' committed offsets: SqlStoreResource or ShardConsumerResource."""

    def offsets(self, consumer: str) -> Mapping[str, int] | None:
        """Return the offsets through which a consumer has committed. None if it has never committed."""
        ...


class ShardConsumerResource(dg.ConfigurableResource):  # type: ignore[type-arg]  # its value is itself
    """Consumer processes, which report their shards. Tokens and certificates come from the environment."""

    endpoint: str = Field(description="A consumer process, as host:port or a URL; several are separated by commas.")

    def offsets(self, consumer: str) -> Mapping[str, int] | None:
        """Return the committed offsets of the shards of a selector, such as `app=sums` (`ShardClient.offsets`).

        None before their first transaction. Raises Unavailable when a shard has no primary.
        """
        from coranto_consumers.runtime.sync_client import SyncShardClient

        with SyncShardClient(ClientConfig.from_environment(self.endpoint)) as client:
            return client.offsets(consumer)


@dataclass(frozen=True, slots=True)
class ObservedConsumer:
    """A consumer outside Dagster. `name` is the argument of `offsets`: a selector of shards, or a name in a store."""

    name: str
    offsets: OffsetsSource
    sources: tuple[JournalGroup, ...]
    specs: tuple[dg.AssetSpec, ...]


def build_observed_consumer(
    name: str,
    offsets: OffsetsSource,
    *,
    sources: Iterable[JournalGroup],
    tables: Sequence[dg.AssetSpec] = (),
    outputs: Sequence[JournalGroup] = (),
    dagster_journal_translator: DagsterJournalTranslator | None = None,
    **options: Unpack[SpecOptions],
) -> ObservedConsumer:
    """Return a consumer that runs outside Dagster, with external assets for its tables and for its journal groups.

    Add its `specs` to the assets of the definitions, and give it to `build_consumer_observation_sensor`.
    """
    groups = tuple(sources)
    deps = [build_group_spec(group, dagster_journal_translator).key for group in groups]
    tag = "".join(each if each.isalnum() or each in "._-" else "_" for each in name)
    added: SpecOptions = {**options, "tags": {CONSUMER_TAG: tag, **options.get("tags", {})}}
    specs = [*tables, *(build_group_spec(group, dagster_journal_translator) for group in outputs)]
    return ObservedConsumer(name, offsets, groups, tuple(with_deps(with_options(spec, added), deps) for spec in specs))


class ReportedConsumerState(BaseModel, frozen=True):
    """The last event about a consumer: its time in seconds since 1970, the version of its offsets, and its lag."""

    at: float
    version: str
    lag: int


class ConsumerObservationSensorCursor(BaseModel, frozen=True):
    """The last event about each consumer, by its name."""

    consumers: Mapping[str, ReportedConsumerState]


def build_consumer_observation_sensor(
    *,
    journals: JournalResource,
    consumers: Sequence[ObservedConsumer],
    name: str = "consumer_observation_sensor",
    minimum_interval_seconds: int = 30,
    report_seconds: float = 60.0,
    default_sensor_status: dg.DefaultSensorStatus | None = None,
    wall: Callable[[], float] = time,
) -> dg.SensorDefinition:
    """Return a sensor that reports the offsets and the lag of consumers outside Dagster.

    After a consumer's commits, its assets get a materialisation, whose data version is a digest of its offsets. If only
    its lag has changed, they get an observation. There is at most one report in `report_seconds`. If the offsets of a
    consumer cannot be read, this is logged, and the other consumers are reported.
    """

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_sensor_status or dg.DefaultSensorStatus.RUNNING,
        description="Reports offsets and lag of consumers that run outside Dagster.",
    )
    def observation_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        kept = ConsumerObservationSensorCursor
        cursor = kept.model_validate_json(context.cursor) if context.cursor else None
        seen = dict(cursor.consumers) if cursor is not None else {}
        resource = initialize_resource(journals)
        events: list[dg.AssetMaterialization | dg.AssetObservation] = []
        for each in consumers:
            before = seen.get(each.name)
            if before is not None and 0 <= wall() - before.at < report_seconds:
                continue
            try:
                offsets = initialize_resource(each.offsets).offsets(each.name)
                heads = {
                    journal: at.head for group in each.sources for journal, at in resource.positions(group).items()
                }
            except (ClusterError, Unavailable, SqlStoreError) as error:
                context.log.warning(f"The offsets of {each.name} cannot be read: {error}")
                continue
            if offsets is None:
                continue
            lag = sum(max(0, head - offsets.get(journal, 0)) for journal, head in heads.items())
            version = vector_version(offsets).value
            if before is None or (before.version, before.lag) != (version, lag):
                kind = dg.AssetObservation if before and before.version == version else dg.AssetMaterialization
                metadata = dict(
                    ConsumerMetadataSet(
                        lag_bytes=lag, offsets_read=offsets_metadata(offsets), journals=lag_table(offsets, heads)
                    )
                )
                tags = {"dagster/data_version": version}
                events += [kind(spec.key, metadata=metadata, tags=tags) for spec in each.specs]
                seen[each.name] = ReportedConsumerState(at=wall(), version=version, lag=lag)
        return dg.SensorResult(asset_events=events, cursor=kept(consumers=seen).model_dump_json())

    return observation_sensor
