"""Dagster shows the progress of shards."""

from __future__ import annotations

import asyncio
from typing import Any

import dagster as dg
import pytest

from coranto.errors import Unavailable
from coranto.labels import label_set
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.testing import shard_spec
from dagster_coranto import (
    JournalGroup,
    JournalResource,
    ShardConsumerResource,
    build_consumer_observation_sensor,
    build_observed_consumer,
)


@pytest.fixture
def store_url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/store.db"


class Watched:
    """The sensor of one consumer, with a controlled clock."""

    def __init__(self, consumers: str, brokers: str) -> None:
        self.resource = ShardConsumerResource(endpoint=consumers)
        self.observed = build_observed_consumer(
            "app=sums", self.resource, sources=[JournalGroup("in")], tables=[dg.AssetSpec("sums")], owners=["team:sums"]
        )
        self.now = 0.0
        self.sensor = build_consumer_observation_sensor(
            journals=JournalResource(endpoint=brokers), consumers=[self.observed], wall=lambda: self.now
        )
        self.cursor: str | None = None

    async def tick(self) -> list[Any]:
        def evaluate() -> list[Any]:
            with dg.DagsterInstance.ephemeral() as instance:
                result = self.sensor.evaluate_tick(dg.build_sensor_context(instance=instance, cursor=self.cursor))
            self.cursor = result.cursor
            return list(result.asset_events)

        return await asyncio.to_thread(evaluate)


async def test_shards_are_assets_with_their_lag(journals, consumer, sums):
    process = await consumer.start(sums)
    shard = shard_spec("shard-sums", ["in/one"], max_seconds=600, labels=label_set({"app": "sums"}))
    assert (await consumer.apply(process, shard)).status == pc.OK
    watched = Watched(process.endpoint, journals.fake.endpoint)
    (spec,) = watched.observed.specs
    assert spec.owners == ["team:sums"]
    assert [dep.asset_key for dep in spec.deps] == [dg.AssetKey("in")]
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)

    (made,) = await watched.tick()
    assert isinstance(made, dg.AssetMaterialization)
    assert made.asset_key == dg.AssetKey("sums")
    assert made.metadata["dagster-coranto/lag_bytes"].value == 0
    assert made.metadata["dagster-coranto/offsets_read"].value == {"in/one": head}
    assert await watched.tick() == []
    watched.now += 61
    assert await watched.tick() == [], "nothing has changed"

    more = await journals.publish("in/one", {"key": "a", "n": 2})
    await consumer.stat(process, one=more)
    (again,) = await watched.tick()
    assert isinstance(again, dg.AssetMaterialization)
    assert again.metadata["dagster-coranto/offsets_read"].value == {"in/one": more}
    assert again.tags != made.tags


async def test_offsets_of_shards_have_the_ids_of_their_journals(journals, consumer, sums):
    journals.fake.has_ids = True
    journals.create("in/one")
    process = await consumer.start(sums)
    shard = shard_spec("shard-sums", ["in/one"], max_seconds=600, labels=label_set({"app": "sums"}))
    assert (await consumer.apply(process, shard)).status == pc.OK
    head = await journals.publish("in/one", {"key": "a", "n": 1})
    await consumer.stat(process, one=head)
    (made,) = await Watched(process.endpoint, journals.fake.endpoint).tick()
    known = {"offset": head, "journal_id": journals.fake.journals["in/one"].journal_id}
    assert made.metadata["dagster-coranto/offsets_read"].value == {"in/one": known}


async def test_a_shard_without_a_primary_is_not_shown_without_lag(journals, consumer, sums):
    process = await consumer.start(sums)
    shard = shard_spec("shard-sums", ["in/one"], labels=label_set({"app": "sums"}), disable=True)
    assert (await consumer.apply(process, shard)).status == pc.OK
    watched = Watched(process.endpoint, journals.fake.endpoint)
    with pytest.raises(Unavailable, match="shard shard-sums has no primary"):
        await asyncio.to_thread(watched.resource.offsets, "app=sums")
    assert await watched.tick() == []
