"""Metadata that the library writes for Dagster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

import dagster as dg
from dagster._core.definitions.metadata.metadata_set import NamespacedMetadataSet

_BACKTICKS: Final = re.compile("`+")


class JournalMetadataSet(NamespacedMetadataSet):
    """Metadata of a journal, or of a group of journals, when its asset is defined. Namespace `dagster-coranto`."""

    journal: str | None = None
    """The name of the journal or group in the brokers. Its asset key may have other characters."""
    content_type: str | None = None
    codec: str | None = None
    replication: int | None = None
    stores: str | None = None

    @classmethod
    def namespace(cls) -> str:
        return "dagster-coranto"


def verbatim(lines: Iterable[str]) -> dg.MarkdownMetadataValue:
    """Return lines of text without any markup: links, pictures and markup in them take no effect.

    This is needed because errors repeat texts of stores and brokers, and names of objects that others chose.
    """
    text = "\n".join(" ".join(line.split()) for line in lines)
    fence = "`" * max(3, 1 + max((len(found) for found in _BACKTICKS.findall(text)), default=0))
    return dg.MetadataValue.md(f"{fence}text\n{text}\n{fence}")


def offsets_text(offsets: Mapping[str, int]) -> str:
    """Return an offset vector as JSON, ordered by journal. Equal vectors give equal texts, as data versions need."""
    return json.dumps(dict(sorted(offsets.items())), separators=(",", ":"))


def offsets_metadata(offsets: Mapping[str, int]) -> dg.JsonMetadataValue:
    """Return an offset vector for display."""
    return dg.MetadataValue.json(dict(sorted(offsets.items())))


def table(rows: list[dict[str, str | int | float | bool | None]], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """Return rows for display. `columns` maps names to Dagster's column types (`string`, `int`, `float`, `bool`)."""
    schema = dg.TableSchema([dg.TableColumn(name, kind) for name, kind in columns.items()])
    return dg.MetadataValue.table([dg.TableRecord({name: row[name] for name in columns}) for row in rows], schema)
