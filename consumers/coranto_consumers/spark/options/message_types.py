"""Registered message types for Spark: their framing, and the type of the journals that are read.

A type replaces a schema and the options of a framing. Its version is resolved when a read, a query or a consumer's
first run begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from coranto.client import JournalInfo, SyncJournalClient
from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines
from coranto.types.blocking import SyncTypeRegistry
from coranto.types.catalog import TypeVersion
from coranto.types.definitions import CsvForm, FixedForm, JsonForm, MessageType
from coranto_consumers.journals.discovery import ANY_LABELS, JournalLabels
from coranto_consumers.journals.framings import AnyLines, CsvRecords, FixedRecords, ReadFraming, as_tolerant
from coranto_consumers.spark.decoding.rows import FIELDS, PARSED_PREFIX
from coranto_consumers.spark.decoding.type_columns import spark_schema
from coranto_consumers.spark.options.source_options import SourceOptions


def read_framing(definition: MessageType) -> ReadFraming:
    match definition.form:
        case JsonForm(uuid_pointer):
            return JsonLines(uuid_pointer)
        case CsvForm(uuid_column):
            return CsvRecords(len(definition.fields) + (uuid_column is not None), uuid_column)
        case FixedForm(descriptors, message, uuid_field) if message:
            return FixedRecords(descriptors, message, uuid_field)
        case FixedForm():
            return FixedRecords()
    return AnyLines()


@dataclass(frozen=True, slots=True)
class ResolvedType:
    """The version of a read's message type. `by_labels` is True if the journals' labels name the type."""

    version: TypeVersion
    by_labels: bool

    @property
    def schema(self) -> StructType:
        return spark_schema(self.version.definition.fields)

    @property
    def framing(self) -> ReadFraming:
        return read_framing(self.version.definition)

    @property
    def labels(self) -> JournalLabels:
        """The labels that journals must have to be read as this type, including journals that are found later."""
        name = self.version.name if self.by_labels else None
        return JournalLabels(self.version.definition.content_type or None, name)


def resolve_type(
    client: SyncJournalClient, registry: str, journals: Sequence[JournalInfo], reference: str | None
) -> ResolvedType:
    """Return the type that `reference` names, or else the type that all journals' labels name. Raises InvalidInput."""
    with SyncTypeRegistry(client, registry) as types:
        return ResolvedType(types.find_for(journals, reference or ""), not reference)


def find_type(client: SyncJournalClient, options: SourceOptions) -> ResolvedType:
    """Return the message type of a read or a write with a registry. Raises as `resolve_type` does."""
    journals = options.selected.list(client, ANY_LABELS)
    assert options.registry is not None  # Otherwise there is no type to find.
    return resolve_type(client, options.registry, journals, options.type_reference)


def with_type(options: SourceOptions, found: ResolvedType) -> SourceOptions:
    framing = found.framing
    if options.framing.tolerant:
        framing = as_tolerant(framing)
    return replace(options, framing=framing, labels=found.labels)


def registered_schema(found: ResolvedType, options: SourceOptions) -> StructType:
    """Return a registered type's columns and the source's requested columns. Raises InvalidInput for equal names."""
    own = {PARSED_PREFIX + name: field for name, field in FIELDS.items()}
    taken = [name for name in found.schema.names if name in own or name == options.text_column]
    if taken:
        raise InvalidInput(
            f"{found.version} has a field {taken[0]}, and so has the source: give a schema without it, or another "
            "columnNameOfCorruptRecord",
            field="option registry",
        )
    content = BinaryType() if isinstance(found.framing, FixedRecords) else StringType()
    kinds = {name: field.dataType for name, field in own.items() if field.name != "value"}
    added = [StructField(name, kinds.get(name, content)) for name in options.metadata]
    return StructType([*found.schema.fields, *added])
