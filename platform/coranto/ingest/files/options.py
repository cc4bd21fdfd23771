"""The options of files: `source: {files: …}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml

from coranto.errors import InvalidInput
from coranto.fragments.store_urls import parse_store_url
from coranto.ingest.option_fields import checked, choice, pairs, required, seconds, text
from coranto.specs.yaml_fields import entries_of, line_error, line_of

COLUMN_TYPES: Final = ("text", "integer", "number", "boolean", "json")
_FIELDS: Final = ("url", "pattern", "format", "columns", "delimiter", "changed", "look")


@dataclass(frozen=True, slots=True)
class FileOptions:
    """The location of files, and their format."""

    url: str
    pattern: str = "*"
    format: str = "json"
    columns: Mapping[str, str] = field(default_factory=dict)
    """The types of CSV columns that are not text."""
    delimiter: str = ","
    ignores_changes: bool = False
    poll_seconds: float = 10.0
    """The time between two listings for new files."""

    @property
    def without_schema(self) -> str:
        """The name of files without a schema in errors; empty if the files have a schema."""
        return "files of JSON" if self.format == "json" else ""


def read_files(node: yaml.Node) -> FileOptions:
    """Read the options of files. Raises InvalidInput, with the line."""
    entries = entries_of(node, _FIELDS)
    required(node, entries, "url")
    columns = pairs(entries, "columns")
    for name, kind in columns.items():
        if kind not in COLUMN_TYPES:
            raise line_error(
                line_of(entries["columns"]), f"column {name} has the type {kind!r}; it may be {', '.join(COLUMN_TYPES)}"
            )
    return FileOptions(
        checked(entries["url"], _url),
        text(entries, "pattern", "*"),
        choice(entries, "format", ("json", "csv", "parquet")),
        columns,
        checked(entries["delimiter"], _delimiter) if "delimiter" in entries else ",",
        choice(entries, "changed", ("fail", "ignore")) == "ignore",
        seconds(entries, "look", 10.0),
    )


def _url(given: str) -> str:
    parse_store_url(given)
    return given


def _delimiter(given: str) -> str:
    given = {"tab": "\t", "\\t": "\t"}.get(given, given)
    if len(given) != 1 or given in '"\r\n':
        raise InvalidInput(f"{given!r} is not a delimiter; give one character, or tab")
    return given
