"""What the library writes into Dagster's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final

import dagster as dg
from dagster._core.definitions.metadata.metadata_set import NamespacedMetadataSet

_BACKTICKS: Final = re.compile("`+")


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


def verbatim(lines: Iterable[str]) -> dg.MarkdownMetadataValue:
    """Lines of text as they are: no link, picture or markup in them takes effect.

    Errors repeat what stores and brokers say, and names of objects that others chose.
    """
    text = "\n".join(" ".join(line.split()) for line in lines)
    fence = "`" * max(3, 1 + max((len(found) for found in _BACKTICKS.findall(text)), default=0))
    return dg.MetadataValue.md(f"{fence}text\n{text}\n{fence}")


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
