from __future__ import annotations

import dagster as dg
import pytest

from coranto.client.values import JournalInfo
from coranto.errors import InvalidInput
from coranto.labels import label_set, matches, with_meta
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import (
    DagsterJournalTranslator,
    JournalGroup,
    JournalMetadataSet,
    JournalTranslatorData,
    build_group_spec,
    build_journal_asset_specs,
)


def listed(name: str) -> JournalInfo:
    spec = pb.JournalSpec(
        name=name,
        replication=2,
        labels=label_set({"content-type": "application/x-ndjson"}),
        fragment=pb.JournalSpec.Fragment(compression_codec=pb.GZIP, stores=["file:///", "s3://bucket/"]),
    )
    return JournalInfo(spec, 2, 1, pb.Route(primary=-1))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("flights/events", ["flights", "events"]),
        ("flights/events/part-000", ["flights", "events", "part-000"]),
        ("clicks/region=eu/v1.2", ["clicks", "region_eu", "v1.2"]),
        ("a+b/ü%20/x", ["a_b", "__20", "x"]),
    ],
)
def test_a_name_becomes_the_parts_of_a_key(name: str, parts: list[str]) -> None:
    assert DagsterJournalTranslator().get_asset_key(JournalTranslatorData(name)) == dg.AssetKey(parts)


def test_any_translated_key_can_be_depended_upon() -> None:
    upstream = build_journal_asset_specs([listed("clicks/region=eu/part-000")])[0]

    @dg.asset(deps=[upstream])
    def downstream() -> None: ...

    graph = dg.Definitions(assets=[upstream, downstream]).resolve_asset_graph()
    assert graph.get(downstream.key).parent_keys == {upstream.key}


def test_metadata_keeps_the_name_that_brokers_know_and_what_the_spec_says() -> None:
    spec = build_journal_asset_specs([listed("clicks/region=eu")])[0]
    assert spec.kinds == {"journal"}
    known = JournalMetadataSet.extract(spec.metadata)
    assert known.journal == "clicks/region=eu"
    assert known.content_type == "application/x-ndjson"
    assert known.codec == "GZIP"
    assert known.replication == 2
    assert known.stores == "file:///, s3://bucket/"
    assert set(spec.metadata) >= {"dagster-coranto/journal", "dagster-coranto/codec"}


def test_journals_that_would_be_one_asset_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"clicks/region=eu and clicks/region_eu are both asset clicks/region_eu"):
        build_journal_asset_specs([listed("clicks/region=eu"), listed("clicks/region_eu")])


def test_a_translator_of_ones_own_decides_key_and_kinds() -> None:
    class Upper(DagsterJournalTranslator):
        def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
            spec = super().get_asset_spec(data)
            return spec.replace_attributes(key=dg.AssetKey(["ours", *spec.key.path])).merge_attributes(kinds={"flink"})

    spec = build_group_spec(JournalGroup("flights/events"), Upper())
    assert spec.key == dg.AssetKey(["ours", "flights", "events"])
    assert spec.kinds == {"journal", "flink"}


def test_a_group_selects_its_journals_and_no_others() -> None:
    selector = JournalGroup("flights/events").under("rerun/").selector
    chosen = [
        name
        for name in ("rerun/flights/events/part-000", "flights/events/part-000", "rerun/flights/events2/part-000")
        if matches(selector, with_meta(name, pb.LabelSet()))
    ]
    assert chosen == ["rerun/flights/events/part-000"]


@pytest.mark.parametrize("name", ["", "flights/", "/flights", "a//b", "with space"])
def test_names_that_no_journal_can_have_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        JournalGroup(name)


def test_a_prefix_must_end_with_a_slash() -> None:
    with pytest.raises(InvalidInput, match="must end with a slash, such as 'rerun/'"):
        JournalGroup("flights/events").under("rerun")
    assert JournalGroup("flights/events").under("") == JournalGroup("flights/events")
