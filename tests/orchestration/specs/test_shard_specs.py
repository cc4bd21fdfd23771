"""The asset of shard specs and its check, with a real consumer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.cluster import locate
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from dagster_coranto import build_shard_specs_asset, build_shard_specs_check
from tests.orchestration.metadata import without_namespace

SHARDS = """
common: {max_txn_duration: 1s, disable: true, labels: [{name: app, value: totals}]}
shards:
- {id: totals-000, sources: [{journal: sales/part-000}]}
- {id: totals-001, sources: [{journal: sales/part-001}]}
"""


class Idle(Application[Any]):
    """An application with disabled shards, which never gets a store."""

    def new_store(self, shard: Any) -> Any:
        raise AssertionError(shard)

    def consume_message(self, shard: Any, store: Any, message: Any, publisher: Any) -> None:
        raise AssertionError(message)


@pytest.fixture(scope="module", autouse=True)
def consumer(cluster_dir: Path) -> Iterator[None]:
    """A consumer process registered in the cluster's etcd."""
    info = locate(cluster_dir)
    settings = ConsumerProcessSettings(
        etcd=info.etcd, etcd_prefix="/gazette/consumers/idle", id="idle-a", lease_seconds=60
    )
    client = JournalClient(info.endpoint)
    process = ConsumerProcess(settings, Idle(), client)
    run_blocking(process.__aenter__())
    yield
    run_blocking(process.__aexit__(None, None, None))
    run_blocking(client.close())


def materialize(document: str, *, prune: bool = False) -> dict[str, Any]:
    result = dg.materialize(
        [build_shard_specs_asset(document, prune_selector="app=totals")],
        run_config={"ops": {"shard_specs": {"config": {"prune": prune}}}},
    )
    (materialization,) = result.asset_materializations_for_node("shard_specs")
    return {key: value for key, value in without_namespace(materialization.metadata).items() if key != "shards"}


def check(document: str) -> tuple[bool, str | None]:
    made = build_shard_specs_check(document, prune_selector="app=totals")
    result = dg.materialize([made], selection=dg.AssetSelection.checks(made))
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation.passed, evaluation.description


def test_shards_are_applied_checked_for_drift_and_pruned() -> None:
    assert check(SHARDS) == (False, "2 of 2 shards are not as the document says")
    assert materialize(SHARDS) == {"created": 2, "changed": 0, "deleted": 0, "unchanged": 0}
    assert check(SHARDS) == (True, "2 shards are as the document says")
    shorter = SHARDS.replace("1s", "2s").partition("- {id: totals-001")[0]
    assert check(shorter) == (
        False,
        "1 of 1 shards are not as the document says; 1 shard is not in the document",
    )
    assert materialize(shorter) == {"created": 0, "changed": 1, "deleted": 0, "unchanged": 0}
    assert materialize(shorter, prune=True) == {"created": 0, "changed": 0, "deleted": 1, "unchanged": 1}
    assert check(shorter) == (True, "1 shard is as the document says")
