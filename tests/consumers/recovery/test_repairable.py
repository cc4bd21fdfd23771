"""Recovery of a consumer's Iceberg store: a proven checkpoint is restored, and its rows count once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto.audit import Depth, Kind, Report, run_checks
from coranto.errors import CorantoError, CorruptData
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import Envelope
from coranto.recovery import StepKind, carry_out, make_plan
from coranto.testing.cluster import Cluster
from coranto.testing.sim.clocks import SimClock
from coranto_consumers.audit import ConsumerCheck, parse_expectation
from coranto_consumers.audit.iceberg import IcebergEvidence
from coranto_consumers.recovery import StoreDoctor, repairable_store
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.iceberg import IcebergShardStore
from coranto_consumers.stores.iceberg.state import key_of
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.reading import read_checkpoint
from tests.consumers.audit.conftest import Scene
from tests.consumers.stores.iceberg.named_catalog import named_catalog
from tests.platform.recovery.in_time import assert_succeeded, plans_at_all_times, play

URL, SHARD = "iceberg://lake/shop.orders", "shard-orders"


class LakeOrders(Application[IcebergShardStore]):
    """An application that stores each order as a row of an Iceberg table."""

    def __init__(self, catalog: SqlCatalog) -> None:
        self.catalog = catalog

    def new_store(self, shard: Shard) -> IcebergShardStore:
        return IcebergShardStore(self.catalog, "shop.orders", pa.schema([("cents", pa.int64())]))

    def consume_message(
        self, shard: Shard, store: IcebergShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        store.append([{"cents": message.message["cents"]}])


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlCatalog:
    return named_catalog(tmp_path, monkeypatch)


SET_BACK = [str(Kind.CHECKPOINT_GONE), str(Kind.CHECKPOINT_SET_BACK), str(Kind.CHECKPOINT_SET_BACK)]


@pytest.mark.parametrize(
    ("damage", "steps", "losses"),
    [
        ("deleted", [StepKind.RESTORE_CHECKPOINT], []),
        ("unreadable", [StepKind.RESTORE_CHECKPOINT], []),
        ("set back", [StepKind.ACCEPT_LOSS], SET_BACK),
    ],
)
def test_a_plan_for_an_iceberg_store_is_stable_over_time(
    catalog: SqlCatalog, tmp_path: Path, damage: str, steps: list[StepKind], losses: list[str]
) -> None:
    async def story() -> None:
        async with Cluster(brokers=1) as cluster:
            scene = Scene(
                cluster.client(retry_timeout=3), f"sqlite:///{tmp_path}/unused.db", SimClock(cluster._world.timeline)
            )
            scene.app = LakeOrders(catalog)  # type: ignore[assignment]
            for name in ("in/one", "in/two", "out/one"):
                await cluster.create(name, labels={CONTENT_TYPE: JSON_LINES})
            await scene.publish(10)
            await scene.consume()
            old = catalog.load_table("shop.orders").properties[key_of(SHARD)]
            await scene.publish(10)
            await scene.consume()

            def check(accept: bool, deep: bool = True) -> ConsumerCheck:
                return ConsumerCheck(
                    "orders",
                    scene.client,
                    IcebergEvidence(IcebergHome.at(URL)),
                    [SHARD],
                    expectations=[parse_expectation("SELECT COUNT(*) FROM shop.orders == messages")],
                    memory=scene.memory,
                    accept=accept,
                    deep=deep,
                    timeout_s=0.2,
                )

            async def audits() -> None:
                await check(False, deep=False).run()
                await check(False).run()

            await audits()  # Both audits prove the checkpoint.
            now = read_checkpoint(URL, SHARD)
            with catalog.load_table("shop.orders").transaction() as change:
                if damage == "deleted":
                    change.remove_properties(key_of(SHARD))
                else:
                    change.set_properties({key_of(SHARD): "{" if damage == "unreadable" else old})
            await scene.publish(4)

            doctor = StoreDoctor(scene.client, repairable_store(URL), check)
            plan = await plans_at_all_times(lambda: make_plan([doctor]), (steps, losses), listed=40, before_each=audits)

            async def verify() -> Report:
                return await run_checks("orders", [check(False)], depth=Depth.DEEP)

            assert_succeeded(await carry_out([doctor], plan.hash, verify=verify))
            restored = read_checkpoint(URL, SHARD)
            assert now is not None
            assert restored is not None
            assert restored.fence > now.fence
            await scene.consume()
            assert (await verify()).sound
            rows = catalog.load_table("shop.orders").scan().count()
            if losses:
                assert rows == 34, "messages that are read again count twice, as the plan says"
            else:
                assert rows == 24

    play(story())


def test_repairs_that_a_catalog_does_not_support_are_refused(catalog: SqlCatalog) -> None:
    rows = pa.table({"cents": pa.array([1], pa.int64())})
    table = catalog.create_table("shop.orders", rows.schema)
    table.append(rows)
    store, first = repairable_store(URL), catalog.load_table("shop.orders").metadata.current_snapshot_id
    fence, checkpoint = store.raise_fence(SHARD)
    assert (fence, checkpoint.sources) == (1, {})
    with pytest.raises(CorantoError, match="has no stage tables"):
        store.delete_staged(SHARD, "coranto_stage")
    assert first is not None
    catalog.load_table("shop.orders").manage_snapshots().set_current_snapshot(first).commit()
    with pytest.raises(CorruptData, match="was rolled back behind the checkpoint"):
        repairable_store(URL).write_checkpoint(SHARD, 1, checkpoint)
