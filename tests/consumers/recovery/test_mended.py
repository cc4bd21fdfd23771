"""Recovery of a consumer's Iceberg store: a proven checkpoint is written back, and its rows count once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto.errors import CorantoError, CorruptData
from coranto.messages import Envelope
from coranto.recovery import StepKind, carry_out, make_plan
from coranto_consumers.audit import ConsumerCheck, parse_expectation
from coranto_consumers.audit.iceberg import IcebergEvidence
from coranto_consumers.recovery import StoreDoctor, mended_store
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.iceberg import IcebergShardStore
from coranto_consumers.stores.iceberg.state import key_of
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.stores.reading import read_checkpoint
from tests.consumers.audit.conftest import Scene
from tests.consumers.stores.iceberg.named_catalog import named_catalog

URL, SHARD = "iceberg://lake/shop.orders", "shard-orders"


class LakeOrders(Application[IcebergShardStore]):
    """Keeps each order as a row of an Iceberg table."""

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


@pytest.mark.parametrize("damage", ["deleted", "unreadable"])
async def test_a_proven_checkpoint_is_written_back_to_its_home(scene: Scene, catalog: SqlCatalog, damage: str) -> None:
    scene.app = LakeOrders(catalog)  # type: ignore[assignment]
    await scene.publish(10)
    await scene.consume()
    await scene.publish(10)
    await scene.consume()

    def check(accept: bool) -> ConsumerCheck:
        return ConsumerCheck(
            "orders",
            scene.client,
            IcebergEvidence(IcebergHome.at(URL)),
            [SHARD],
            expectations=[parse_expectation("SELECT COUNT(*) FROM shop.orders == messages")],
            memory=scene.memory,
            accept=accept,
            patience_s=0.2,
        )

    await check(False).run()  # It proves the checkpoint.
    now = read_checkpoint(URL, SHARD)
    with catalog.load_table("shop.orders").transaction() as change:
        if damage == "deleted":
            change.remove_properties(key_of(SHARD))
        else:
            change.set_properties({key_of(SHARD): "{"})
    await scene.publish(4)

    doctor = StoreDoctor(scene.client, mended_store(URL), check)
    plan = await make_plan([doctor])
    assert [step.kind for step in plan.steps] == [StepKind.RESTORE_CHECKPOINT], plan
    done = await carry_out([doctor], plan.hash)
    assert done.succeeded, done
    restored = read_checkpoint(URL, SHARD)
    assert now is not None
    assert restored is not None
    assert restored.checkpoint.sources == now.checkpoint.sources
    assert restored.fence > now.fence
    await scene.consume()
    assert catalog.load_table("shop.orders").scan().count() == 24


def test_what_cannot_be_mended_in_a_catalog_is_refused(catalog: SqlCatalog) -> None:
    rows = pa.table({"cents": pa.array([1], pa.int64())})
    table = catalog.create_table("shop.orders", rows.schema)
    table.append(rows)
    store, first = mended_store(URL), catalog.load_table("shop.orders").metadata.current_snapshot_id
    fence, checkpoint = store.raise_fence(SHARD)
    assert (fence, checkpoint.sources) == (1, {})
    with pytest.raises(CorantoError, match="has no stage tables"):
        store.delete_staged(SHARD, "coranto_stage")
    assert first is not None
    catalog.load_table("shop.orders").manage_snapshots().set_current_snapshot(first).commit()
    with pytest.raises(CorruptData, match="was rolled back behind the checkpoint"):
        mended_store(URL).write_checkpoint(SHARD, 1, checkpoint)
