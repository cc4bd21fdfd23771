from __future__ import annotations

from datetime import timedelta

import dagster as dg
import pytest

from coranto.client.values import JournalInfo
from coranto.errors import InvalidInput
from coranto.labels import label_set, matches, with_meta
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import (
    DagsterJournalTranslator,
    JournalGroup,
    JournalResource,
    JournalTranslatorData,
    Publication,
    PublishContext,
    SparkResource,
    build_fragment_check,
    build_journal_asset_specs,
)
from dagster_coranto.consumers.assets import spark_consumer_assets
from dagster_coranto.journals.assets import build_journal_group_asset
from dagster_coranto.translation.metadata import JournalMetadataSet
from dagster_coranto.translation.translator import build_group_spec


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


def test_any_translated_key_can_be_a_dependency() -> None:
    upstream = build_journal_asset_specs([listed("clicks/region=eu/part-000")])[0]

    @dg.asset(deps=[upstream])
    def downstream() -> None: ...

    graph = dg.Definitions(assets=[upstream, downstream]).resolve_asset_graph()
    assert graph.get(downstream.key).parent_keys == {upstream.key}


def test_metadata_has_the_journals_name_and_spec() -> None:
    spec = build_journal_asset_specs([listed("clicks/region=eu")])[0]
    assert spec.kinds == {"journal"}
    known = JournalMetadataSet.extract(spec.metadata)
    assert known.journal == "clicks/region=eu"
    assert known.content_type == "application/x-ndjson"
    assert known.codec == "GZIP"
    assert known.replication == 2
    assert known.stores == "file:///, s3://bucket/"
    assert set(spec.metadata) >= {"dagster-coranto/journal", "dagster-coranto/codec"}


def test_journals_with_the_same_key_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"clicks/region=eu and clicks/region_eu are both asset clicks/region_eu"):
        build_journal_asset_specs([listed("clicks/region=eu"), listed("clicks/region_eu")])


def test_a_custom_translator_can_change_key_and_kinds() -> None:
    class Upper(DagsterJournalTranslator):
        def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
            spec = super().get_asset_spec(data)
            return spec.replace_attributes(key=dg.AssetKey(["ours", *spec.key.path])).merge_attributes(kinds={"flink"})

    spec = build_group_spec(JournalGroup("flights/events"), Upper())
    assert spec.key == dg.AssetKey(["ours", "flights", "events"])
    assert spec.kinds == {"journal", "flink"}


def test_a_group_selects_only_its_journals() -> None:
    selector = JournalGroup("flights/events").under("rerun/").selector
    chosen = [
        name
        for name in ("rerun/flights/events/part-000", "flights/events/part-000", "rerun/flights/events2/part-000")
        if matches(selector, with_meta(name, pb.LabelSet()))
    ]
    assert chosen == ["rerun/flights/events/part-000"]


@pytest.mark.parametrize("name", ["", "flights/", "/flights", "a//b", "with space"])
def test_invalid_journal_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        JournalGroup(name)


def test_a_prefix_must_end_with_a_slash() -> None:
    with pytest.raises(InvalidInput, match="must end with a slash, such as 'rerun/'"):
        JournalGroup("flights/events").under("rerun")
    assert JournalGroup("flights/events").under("") == JournalGroup("flights/events")


class Full(DagsterJournalTranslator):
    """A translator that sets every field."""

    def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
        spec = super().get_asset_spec(data)
        return spec.replace_attributes(
            key=dg.AssetKey(["ours", *spec.key.path]),
            deps=["upstream"],
            description=f"Ours: {data.name}",
            metadata={**spec.metadata, "ours": True},
            skippable=True,
            group_name="ours",
            code_version="7",
            automation_condition=dg.AutomationCondition.eager(),
            owners=["team:ours"],
            tags={"ours": "yes"},
            kinds={"journal", "kafka"},
            partitions_def=dg.StaticPartitionsDefinition(["eu", "us"]),
            freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=1)),
        )


FIELDS = set(dg.AssetSpec._fields) - {"legacy_freshness_policy", "is_virtual"}
GROUP = JournalGroup("shop/orders")


def publish(context: PublishContext) -> Publication:
    return Publication(messages=0)


def test_a_group_asset_has_every_field_of_the_translator() -> None:
    asset = build_journal_group_asset(GROUP, publish, dagster_journal_translator=Full(), group_name="other")
    made, said = asset.get_asset_spec(), build_group_spec(GROUP, Full())
    for field in FIELDS:
        assert getattr(made, field) == getattr(said, field), field


def test_options_extend_the_translators_spec() -> None:
    asset = build_journal_group_asset(
        GROUP,
        publish,
        deps=["upstream", "more"],
        dagster_journal_translator=Full(),
        owners=["team:ours", "team:more"],
        tags={"ours": "no", "more": "yes"},
        kinds={"python"},
    )
    made = asset.get_asset_spec()
    assert {dep.asset_key.to_user_string() for dep in made.deps} == {"upstream", "more"}
    assert made.owners == ["team:ours", "team:more"]
    assert {tag: value for tag, value in made.tags.items() if "/" not in tag} == {"ours": "yes", "more": "yes"}
    assert made.kinds == {"journal", "kafka", "python"}


def test_consumers_have_every_field_of_translator_and_tables() -> None:
    table = dg.AssetSpec("revenue", owners=["team:tables"], group_name="tables", code_version="3", kinds={"sql"})
    consumer = spark_consumer_assets(
        name="consume",
        sources=[GROUP],
        tables=[table.replace_attributes(partitions_def=dg.StaticPartitionsDefinition(["eu", "us"]))],
        outputs=[JournalGroup("shop/alerts")],
        dagster_journal_translator=Full(),
        group_name="rest",
        owners=["team:rest"],
    )(lambda context: pytest.fail("the function was called"))
    source = build_group_spec(GROUP, Full()).key
    made, said = (
        consumer.get_asset_spec(dg.AssetKey(["ours", "shop", "alerts"])),
        build_group_spec(JournalGroup("shop/alerts"), Full()),
    )
    for field in FIELDS - {"deps", "owners", "tags"}:
        assert getattr(made, field) == getattr(said, field), field
    assert {dep.asset_key for dep in made.deps} == {dg.AssetKey("upstream"), source}
    assert made.owners == ["team:ours", "team:rest"]
    assert made.kinds == {"journal", "kafka", "spark"}
    revenue = consumer.get_asset_spec(dg.AssetKey("revenue"))
    assert (revenue.group_name, revenue.code_version, revenue.kinds) == ("tables", "3", {"sql", "spark"})
    assert revenue.owners == ["team:tables", "team:rest"]
    assert {dep.asset_key for dep in revenue.deps} == {source}


def test_a_changed_key_applies_to_group_check_and_consumer() -> None:
    class Moved(DagsterJournalTranslator):
        def get_asset_spec(self, data: JournalTranslatorData) -> dg.AssetSpec:
            return super().get_asset_spec(data).replace_attributes(key=["a", "b", "c"])

    translator = Moved()
    definitions = dg.Definitions(
        assets=[
            build_journal_group_asset(GROUP, publish, dagster_journal_translator=translator),
            spark_consumer_assets(
                name="consume",
                sources=[GROUP],
                tables=[dg.AssetSpec("revenue")],
                dagster_journal_translator=translator,
            )(lambda context: pytest.fail("the function was called")),
        ],
        asset_checks=[build_fragment_check(GROUP, dagster_journal_translator=translator)],
        resources={"journals": JournalResource(), "spark": SparkResource()},
    )
    graph = definitions.resolve_asset_graph()
    key = dg.AssetKey(["a", "b", "c"])
    assert graph.get_all_asset_keys() == {key, dg.AssetKey("revenue")}
    assert {check.asset_key for check in graph.asset_check_keys} == {key}
    assert graph.get(dg.AssetKey("revenue")).parent_keys == {key}
