from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from coranto.errors import InvalidInput, JournalNotFound
from coranto.offsets import vector_of_json
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalGroup, JournalResource, Publication, PublishContext, journal_assets
from dagster_coranto.translation.metadata import vector_version

EVENTS = JournalGroup("shop/orders")


class Shop(dg.ConfigurableResource):  # type: ignore[type-arg]  # it hands out itself
    currency: str


@journal_assets(EVENTS, deps=["specs"], group_name="shop")
def orders(context: PublishContext) -> Publication:
    """Orders, as they are placed."""
    for index, journal in enumerate(context.journals):
        context.client.append(journal, b"x" * (index + 1))
    return Publication(messages=len(context.journals), metadata={"note": context.group.name})


def materialize(journals: JournalResource) -> dg.AssetMaterialization:
    result = dg.materialize([orders], resources={"journals": journals})
    (materialization,) = result.asset_materializations_for_node("shop__orders")
    return materialization


def test_the_asset_is_the_one_of_the_group() -> None:
    spec = orders.get_asset_spec()
    assert spec.key == dg.AssetKey(["shop", "orders"])
    assert spec.kinds == {"journal"}
    assert spec.group_name == "shop"
    assert spec.description == "Orders, as they are placed."
    assert spec.metadata["dagster-coranto/journal"] == "shop/orders"
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("specs")]


def test_metadata_reports_the_published_content(broker: FakeBroker, journals: JournalResource) -> None:
    for name in ("shop/orders/b", "shop/orders/a", "shop/other/a"):
        broker.create(name)
    materialize(journals)
    materialization = materialize(journals)
    metadata: dict[str, Any] = {key: value.value for key, value in materialization.metadata.items()}
    assert metadata["dagster-coranto/messages"] == 2
    assert metadata["dagster-coranto/bytes"] == 3
    heads = vector_of_json(metadata["dagster-coranto/heads"], "heads")
    assert heads == {"shop/orders/a": 2, "shop/orders/b": 4}
    assert metadata["note"] == "shop/orders"
    shown: Any = materialization.metadata["dagster-coranto/journals"]
    rows = [dict(record.data) for record in shown.records]
    assert rows == [
        {"journal": "shop/orders/a", "head_before": 1, "head": 2, "bytes": 1},
        {"journal": "shop/orders/b", "head_before": 2, "head": 4, "bytes": 2},
    ]
    version = vector_version({"shop/orders/b": 4, "shop/orders/a": 2})
    assert (materialization.tags or {})["dagster/data_version"] == version.value


def test_the_prefix_of_the_resource_selects_other_journals(broker: FakeBroker, journals: JournalResource) -> None:
    for name in ("shop/orders/a", "rerun/shop/orders/a"):
        broker.create(name)
    materialization = materialize(JournalResource(endpoint=journals.endpoint, prefix="rerun/"))
    assert materialization.metadata["dagster-coranto/heads"].value == {"rerun/shop/orders/a": 1}
    assert broker.journals["shop/orders/a"].head == 0


def test_a_group_without_journals_fails_the_run(broker: FakeBroker, journals: JournalResource) -> None:
    with pytest.raises(JournalNotFound, match=r"no journal shop/orders/… exists.*coranto journals apply"):
        materialize(journals)


def test_publishing_functions_get_resources_by_their_class(broker: FakeBroker, journals: JournalResource) -> None:
    broker.create("shop/orders/a")

    @journal_assets(EVENTS)
    def sales(context: PublishContext, shop: Shop) -> Publication:
        context.client.append(context.journals[0], shop.currency.encode())
        return Publication(messages=1)

    assert sales.required_resource_keys >= {"journals", "shop"}
    assert dg.materialize([sales], resources={"journals": journals, "shop": Shop(currency="EUR")}).success
    assert broker.journals["shop/orders/a"].head == 3


def test_the_error_names_a_resource_of_the_wrong_class() -> None:
    with pytest.raises(InvalidInput, match="the resource 'journals' is a str; bind a JournalResource to it"):
        dg.materialize([orders], resources={"journals": "127.0.0.1:1"})


def test_options_of_the_step_are_passed_to_dagster() -> None:
    @journal_assets(
        EVENTS,
        pool="shop",
        op_tags={"team": "sales"},
        retry_policy=dg.RetryPolicy(max_retries=3),
        partitions_def=dg.StaticPartitionsDefinition(["eu", "us"]),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def sales(context: PublishContext) -> Publication:
        return Publication(messages=0)

    assert sales.op.pool == "shop"
    assert sales.op.tags["team"] == "sales"
    assert sales.op.retry_policy == dg.RetryPolicy(max_retries=3)
    assert sales.partitions_def == dg.StaticPartitionsDefinition(["eu", "us"])
    assert sales.backfill_policy == dg.BackfillPolicy.single_run()
