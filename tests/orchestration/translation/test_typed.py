"""Columns of journals' messages in Dagster, from a registry of message types."""

from __future__ import annotations

import dagster as dg

from coranto.labels import CONTENT_TYPE, JSON_LINES, MESSAGE_TYPE, label_set
from coranto.types import Catalog, Compatibility, JsonForm, MessageType, TypeVersion, parse_fields
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalGroup, JournalTranslatorData, TypedJournalTranslator
from dagster_coranto.translation.translator import build_group_spec


def types() -> Catalog:
    catalog = Catalog("types/registry")
    for number, text in enumerate(("id INT", "id BIGINT NOT NULL, lines ARRAY<STRING>"), 1):
        definition = MessageType("shop.Order", JsonForm(), parse_fields(text), "Orders.")
        catalog.feed(TypeVersion(number, definition, Compatibility.NONE, 0.0).to_line())
    return catalog


def journal(message_type: str) -> JournalTranslatorData:
    labels = {CONTENT_TYPE: JSON_LINES, **({MESSAGE_TYPE: message_type} if message_type else {})}
    return JournalTranslatorData("shop/orders/one", pb.JournalSpec(name="shop/orders/one", labels=label_set(labels)))


def columns(spec: dg.AssetSpec) -> list[tuple[str, str, bool]]:
    schema = spec.metadata["dagster/column_schema"]
    assert isinstance(schema, dg.TableSchema)
    return [(each.name, each.type, each.constraints.nullable) for each in schema.columns]


def test_a_journal_shows_the_columns_of_the_type_in_its_label() -> None:
    spec = TypedJournalTranslator(types()).get_asset_spec(journal("shop.Order"))
    assert columns(spec) == [("id", "BIGINT", False), ("lines", "ARRAY<STRING>", True)]
    assert spec.metadata["dagster-coranto/message_type"] == "shop.Order@2"
    assert spec.metadata["dagster-coranto/content_type"] == JSON_LINES
    assert spec.description == "Orders."


def test_a_group_shows_the_columns_of_its_given_type() -> None:
    translator = TypedJournalTranslator(types(), {"shop/orders": "shop.Order@1"})
    assert columns(build_group_spec(JournalGroup("shop/orders"), translator)) == [("id", "INT", True)]
    assert "dagster/column_schema" not in build_group_spec(JournalGroup("shop/others"), translator).metadata


def test_journals_without_a_registered_type_are_unchanged() -> None:
    for message_type in ("", "shop.Unknown"):
        spec = TypedJournalTranslator(types()).get_asset_spec(journal(message_type))
        assert "dagster/column_schema" not in spec.metadata
        assert spec.key == dg.AssetKey(["shop", "orders", "one"])
    barred = types()
    barred.feed(b'{"registry":1,"type":"shop.Order","version":3}\n')
    assert "dagster/column_schema" not in TypedJournalTranslator(barred).get_asset_spec(journal("shop.Order")).metadata
