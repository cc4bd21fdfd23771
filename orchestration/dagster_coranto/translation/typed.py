"""A translator that adds the columns of journals' messages, from a registry of message types."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg

from coranto.errors import CorruptData, MessageTypeNotFound
from coranto.labels import MESSAGE_TYPE, value_of
from coranto.types import Catalog, TypeVersion, parse_reference
from coranto.types.kinds import format_kind
from dagster_coranto.translation.metadata import namespaced
from dagster_coranto.translation.metadata_set import TableMetadata
from dagster_coranto.translation.translator import DagsterJournalTranslator, JournalTranslatorData


class TypedJournalTranslator(DagsterJournalTranslator):
    """A translator that adds `dagster/column_schema` and the version of the message type to asset specs.

    `types` are the registry's types when definitions were loaded. A journal's label names its type; `groups` names the
    types of groups, such as `{"shop/orders": "shop.Order"}`. Journals without a registered type are translated as by
    the base class.
    """

    def __init__(self, types: Catalog, groups: Mapping[str, str] | None = None) -> None:
        self._types = types
        self._groups = dict(groups or {})

    def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
        spec = super().get_asset_spec(data)
        found = self._find(data)
        if found is None:
            return spec
        columns = [
            dg.TableColumn(
                each.name, format_kind(each.kind), constraints=dg.TableColumnConstraints(nullable=each.nullable)
            )
            for each in found.definition.fields
        ]
        facts = TableMetadata(column_schema=dg.TableSchema(columns=columns))
        described = spec.replace_attributes(description=spec.description or found.definition.description or None)
        return described.merge_attributes(metadata={**dict(facts), **namespaced({"message_type": str(found)})})

    def _find(self, data: JournalTranslatorData) -> TypeVersion | None:
        label = "" if data.spec is None else value_of(data.spec.labels, MESSAGE_TYPE)
        reference = label or self._groups.get(data.name, "")
        try:
            return self._types.find(parse_reference(reference)) if reference else None
        except (MessageTypeNotFound, CorruptData):
            return None
