"""Metadata that the library writes for Dagster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import dagster as dg

from coranto.client.positions import vector_digest
from coranto.offsets import JournalOffset, vector_to_json
from dagster_coranto.translation.metadata_set import NAMESPACE, MetadataSet

JournalRow = dict[str, str | int | float | bool | None]
"""A row of a table: the values of its columns."""
SHOWN_JOURNALS: Final = 100
_BACKTICKS: Final = re.compile("`+")


class JournalMetadataSet(MetadataSet):
    """Metadata of a journal, or of a group of journals, when its asset is defined. Namespace `dagster-coranto`."""

    journal: str | None = None
    """The name of the journal or group in the brokers. Its asset key may have other characters."""
    content_type: str | None = None
    codec: str | None = None
    replication: int | None = None
    stores: str | None = None


class GroupMetadataSet(MetadataSet):
    """Metadata of a group of journals when it was published to, or observed. Namespace `dagster-coranto`."""

    messages: int | None = None
    """The messages that were published."""
    transactions: int | None = None
    bytes: int | None = None
    """The growth of the journals in bytes."""
    head: int | None = None
    """The sum of the journals' heads, which Dagster plots over time."""
    heads: dg.JsonMetadataValue | None = None
    journals: dg.TableMetadataValue | None = None
    journal_count: int | None = None
    unknown_journals: int | None = None
    """The number of journals with unknown heads."""
    stored_bytes: int | None = None
    unstored_bytes: int | None = None
    """The bytes that are not in fragment stores yet."""
    last_append: dg.TimestampMetadataValue | None = None
    offsets_read: dg.JsonMetadataValue | None = None
    """For a consumer's output: the offsets through which the consumer has read its sources."""


class ConsumerMetadataSet(MetadataSet):
    """Metadata of a consumer's tables when they were materialised. Namespace `dagster-coranto`."""

    messages: int | None = None
    transactions: int | None = None
    lag_bytes: int | None = None
    """The unprocessed bytes of the source journals."""
    lag_messages: int | None = None
    """The unprocessed messages, for a table without code. An estimate if they are many."""
    last_commit: dg.TimestampMetadataValue | None = None
    """The time when the last processed transaction was committed in its journal, for a table without code."""
    published: int | None = None
    misfits: int | None = None
    """The messages that do not fit the application's columns: dead letters, or nulls."""
    lost_bytes: int | None = None
    """The bytes of lost content that was skipped."""
    lost: dg.TableMetadataValue | None = None
    """The ranges of lost content."""
    fence: int | None = None
    offsets_read: dg.JsonMetadataValue | None = None
    journals: dg.TableMetadataValue | None = None


class IngestMetadataSet(MetadataSet):
    """Metadata of a stream that an ingest writes, when it was materialised or observed. Namespace `dagster-coranto`."""

    rows: int | None = None
    """The rows of a run, or since the ingest began if it was observed."""
    dead_letters: int | None = None
    transactions: int | None = None
    lag: int | None = None
    """The rows or bytes of the source that are not in the stream yet."""
    lost_rows: int | None = None
    """The rows that the source had removed before they were read, since the ingest began."""
    source: str | None = None
    splits: dg.TableMetadataValue | None = None
    """The position and the lag of each split."""


class WindowMetadataSet(MetadataSet):
    """Metadata of a window of a consumer's tables when it was materialised. Namespace `dagster-coranto`."""

    window: str | None = None
    """The name of the window that was read. It is not the partition's name if that was merged into a larger window."""
    stored_from: dg.TimestampMetadataValue | None = None
    """The time when the content before the window was stored: a lower bound for the window's content."""
    stored_until: dg.TimestampMetadataValue | None = None
    """The time when the window's last content was stored: an upper bound for the window's content."""
    messages: int | None = None
    misfits: int | None = None
    """The messages that do not fit the application's columns: dead letters, or nulls."""
    fence: int | None = None
    bytes: int | None = None
    offsets_from: dg.JsonMetadataValue | None = None
    """The window's begin offsets."""
    offsets_read: dg.JsonMetadataValue | None = None
    """The window's end offsets."""
    journals: dg.TableMetadataValue | None = None


def namespaced(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata under names of this library, such as `dagster-coranto/findings`."""
    return {f"{NAMESPACE}/{name}": value for name, value in metadata.items()}


def verbatim(lines: Iterable[str]) -> dg.MarkdownMetadataValue:
    """Return lines of text as a code block, so that links, images and markup have no effect.

    Error texts may quote untrusted texts of stores and brokers, and names of objects.
    """
    text = "\n".join(" ".join(line.split()) for line in lines)
    fence = "`" * max(3, 1 + max((len(found) for found in _BACKTICKS.findall(text)), default=0))
    return dg.MetadataValue.md(f"{fence}text\n{text}\n{fence}")


def vector_version(offsets: Mapping[str, int]) -> dg.DataVersion:
    """Return the data version of an offset vector: a digest, so that it is short for any number of journals."""
    return dg.DataVersion(vector_digest(offsets))


def offsets_metadata(offsets: Mapping[str, int]) -> dg.JsonMetadataValue:
    """Return an offset vector for display, as JSON of `coranto.offsets`.

    Journals after the first hundred are summed up under one name.
    """
    shown = sorted(offsets.items())
    vector = vector_to_json(dict(shown[:SHOWN_JOURNALS]))
    if beyond := shown[SHOWN_JOURNALS:]:
        vector[_beyond(len(beyond))] = sum(offset for _, offset in beyond)
    return dg.MetadataValue.json(vector)


def table(rows: Sequence[JournalRow], columns: Mapping[str, str]) -> dg.TableMetadataValue:
    """Return rows for display. `columns` maps names to Dagster's column types (`string`, `int`, `float`, `bool`).

    Dagster keeps events forever, so the rows after the first hundred are summed up in one row: the sums of numbers,
    with the number of these rows in the first column.
    """
    # `map`, since Dagster reads its caller's variables: CPython 3.13.0 crashes if a later comprehension captures one.
    schema = dg.TableSchema(list(map(dg.TableColumn, columns, columns.values())))
    shown = [{name: _plain(row[name]) for name in columns} for row in rows[:SHOWN_JOURNALS]]
    if beyond := rows[SHOWN_JOURNALS:]:
        summed: JournalRow = {
            name: sum(row[name] or 0 for row in beyond) if kind in ("int", "float") else None  # type: ignore[misc]
            for name, kind in columns.items()
        }
        summed[next(iter(columns))] = _beyond(len(beyond))
        shown.append(summed)
    return dg.MetadataValue.table([dg.TableRecord(row) for row in shown], schema)


def _plain(value: str | int | float | bool | None) -> str | int | float | bool | None:
    """Return an offset as a plain integer, which Dagster can serialise."""
    return int(value) if isinstance(value, JournalOffset) else value


def _beyond(count: int) -> str:
    return f"and {count:,} more"


def lag_table(offsets: Mapping[str, int], heads: Mapping[str, int]) -> dg.TableMetadataValue:
    """Return a consumer's offsets and lag by journal, for display."""
    rows: list[JournalRow] = [
        {"journal": journal, "offset": at, "head": head, "lag_bytes": max(0, head - at)}
        for journal, head in sorted(heads.items())
        for at in (offsets.get(journal, 0),)
    ]
    return table(rows, {"journal": "string", "offset": "int", "head": "int", "lag_bytes": "int"})
