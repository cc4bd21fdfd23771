"""What the library writes into Dagster's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping

import dagster as dg
from dagster._core.definitions.metadata.metadata_set import NamespacedMetadataSet


class JournalMetadataSet(NamespacedMetadataSet):
    """What is known of a journal, or of a group of journals, when its asset is defined. Namespace `dagster-coranto`."""

    journal: str | None = None
    """Name of the journal or group as brokers know it: asset keys may have had to replace some of its characters."""
    content_type: str | None = None
    codec: str | None = None
    replication: int | None = None
    stores: str | None = None

    @classmethod
    def namespace(cls) -> str:
        return "dagster-coranto"


def offsets_text(offsets: Mapping[str, int]) -> str:
    """An offset vector as JSON, ordered by journal: equal vectors are equal texts, so it serves as a data version."""
    return json.dumps(dict(sorted(offsets.items())), separators=(",", ":"))


def offsets_metadata(offsets: Mapping[str, int]) -> dg.JsonMetadataValue:
    """An offset vector for display."""
    return dg.MetadataValue.json(dict(sorted(offsets.items())))


def table(rows: list[dict[str, str | int | float | bool | None]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """Rows for display. `columns` maps names to Dagster's column types (`string`, `int`, `float`, `bool`)."""
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table([dg.TableRecord({name: row[name] for name in columns}) for row in rows], schema)
