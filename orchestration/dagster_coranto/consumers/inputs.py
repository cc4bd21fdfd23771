"""The inputs of a consumer's assets: their versions, and growth of sources that is not reported yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import dagster as dg

from coranto.client.groups import JournalGroup
from coranto.client.positions import heads_of
from coranto.errors import ClusterError, Unavailable
from dagster_coranto.consumers.definition import AssetState, SparkConsumerDefinition
from dagster_coranto.instance.tags import VERSION_TAG, growth_tags, last_tags, last_versions
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.metadata import GroupMetadataSet, offsets_metadata, vector_version


class Inputs:
    """The versions of the inputs of a consumer's assets.

    If the consumer has read a group of journals up to all heads, the version is the digest of these heads, even if they
    were not reported yet. Otherwise, and for other inputs, it is the last reported version.
    """

    def __init__(
        self, definition: SparkConsumerDefinition, journals: JournalResource, instance: dg.DagsterInstance
    ) -> None:
        self._definition = definition
        self._journals = journals
        self._instance = instance
        self._reported = last_versions(instance, {dep.asset_key for spec in definition.specs for dep in spec.deps})
        self._read: dict[dg.AssetKey, str] = {}

    def of(self, spec: dg.AssetSpec) -> dict[dg.AssetKey, str]:
        """Return the versions of an asset's inputs."""
        keys = [dep.asset_key for dep in spec.deps]
        return {key: self._read.get(key) or self._reported[key] for key in keys}

    def record(self, offsets: Mapping[str, int]) -> Iterator[AssetState]:
        """Record the offsets read so far, and yield growth of sources that is not reported yet."""
        self._read = {}
        for key, group in zip(self._definition.source_keys, self._definition.sources, strict=True):
            heads = self._heads_read(group, offsets)
            if heads is None:
                continue
            version = vector_version(heads)
            self._read[key] = version.value
            last = last_tags(self._instance, key)
            if last.get(VERSION_TAG) != version.value:
                metadata = GroupMetadataSet(head=sum(heads.values()), heads=offsets_metadata(heads))
                yield AssetState(key, version, dict(metadata), tags=growth_tags(version.value, last))

    def next(self) -> None:
        """Read the last reported versions again, for the next `record`."""
        self._reported = last_versions(self._instance, self._reported)

    def _heads_read(self, group: JournalGroup, offsets: Mapping[str, int]) -> dict[str, int] | None:
        """Return the heads of a group if all of its content was read. None otherwise, or if unknown."""
        try:
            heads = heads_of(self._journals.positions(group))
        except (ClusterError, Unavailable):
            return None  # The consumed content is committed, so this must not fail the run.
        read = sum(heads.values()) and all(offsets.get(journal, 0) == head for journal, head in heads.items())
        return heads if read else None
