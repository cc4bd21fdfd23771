"""The definition of an ingest in Dagster, and the metadata of its stream."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dagster as dg

from coranto.client import ClientConfig, JournalClient
from coranto.client.loop import run_blocking
from coranto.errors import StreamNotFound
from coranto.ingest.opening import lag_of
from coranto.ingest.progress import IngestProgress, load
from coranto.ingest.spec import IngestNames, IngestSpec, read_names, read_spec
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from dagster_coranto.instance.requests import digest_of
from dagster_coranto.resources.journals import JournalResource
from dagster_coranto.translation.documents import read_document
from dagster_coranto.translation.metadata import IngestMetadataSet, JournalRow, table


class IngestMode(enum.Enum):
    """The condition that ends an ingest's run."""

    DRAIN = "drain"
    """The source has no more rows."""
    SERVICE = "service"
    """The run is stopped. Until then, it reports materialisations regularly."""


@dataclass(frozen=True, slots=True)
class IngestDefinition:
    """An ingest that a file describes. Environment variables are resolved when it runs."""

    file: Path
    names: IngestNames
    key: dg.AssetKey
    resource_key: str

    @staticmethod
    def names_of(file: Path) -> IngestNames:
        """Return the names in a file. Raises InvalidInput, with the file and the line."""
        return read_document(file, read_names, "file")

    def spec(self, journals: JournalResource) -> IngestSpec:
        """Return the spec in the file, with the prefix of the resource. Raises InvalidInput, with the line."""
        spec = read_document(self.file, read_spec, "file")
        return replace(spec, stream=journals.name(spec.stream))

    def state(self, journals: JournalResource) -> IngestState:
        """Return the progress and the lag, with the short timeout of audits. Raises Unavailable and InvalidInput."""
        spec, config = self.spec(journals), journals.audit_config()
        return run_blocking(self._state(spec, config))

    async def _state(self, spec: IngestSpec, config: ClientConfig) -> IngestState:
        async with JournalClient.of(config) as client:
            try:
                async with BatchWriter[Any](client, spec.stream) as writer:
                    _, progress = await load(writer, spec.name)
            except StreamNotFound:
                if spec.create is None:
                    raise
                progress = IngestProgress()
        return IngestState(progress, await lag_of(spec, progress.splits))


@dataclass(frozen=True, slots=True)
class IngestState:
    """The committed part of an ingest, and its lag."""

    progress: IngestProgress
    behind: Mapping[str, int]
    """The unread rows or bytes of each split."""

    @property
    def lag(self) -> int:
        """The unread rows or bytes of all splits."""
        return sum(self.behind.values())

    @property
    def version(self) -> str:
        """The digest of the positions: the data version of the stream."""
        return digest_of(json.dumps(self.progress.splits, sort_keys=True))

    @property
    def digest(self) -> str:
        """A digest of the positions and of the lag."""
        return digest_of(json.dumps([self.progress.splits, dict(self.behind)], sort_keys=True))

    def metadata(self, **more: Any) -> dict[str, Any]:
        """Return metadata of the stream."""
        progress = self.progress
        rows: list[JournalRow] = [
            {
                "split": split,
                "position": _shown(progress.splits.get(split)),
                "behind": self.behind.get(split, 0),
                "lost": progress.lost.get(split, 0),
            }
            for split in sorted({*progress.splits, *self.behind})
        ]
        given = {"rows": progress.rows, "dead_letters": progress.dead_letters} | more
        return dict(
            IngestMetadataSet(
                **given,
                lag=self.lag,
                lost_rows=sum(progress.lost.values()),
                source=progress.source,
                splits=table(rows, {"split": "string", "position": "string", "behind": "int", "lost": "int"}),
            )
        )


def _shown(position: object) -> str:
    return "" if position is None else position if isinstance(position, str) else json.dumps(position)
