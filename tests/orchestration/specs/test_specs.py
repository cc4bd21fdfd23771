"""The specs asset and its check. The tests of plans are in tests/platform/reconcile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from coranto.errors import EtcdTransactionFailed, InvalidInput
from coranto.testing.fake_broker import CallPoint, FakeBroker
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalGroup, JournalResource, build_journal_specs_asset, build_journal_specs_check
from tests.orchestration.metadata import without_namespace

TREE = """
name: flights/
replication: 1
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 10s}
children:
  - name: flights/events/part-000
  - name: flights/events/part-001
"""
EVENTS = JournalGroup("flights/events")


def shown(metadata: Any) -> dict[str, Any]:
    return {key: getattr(value, "records", value) for key, value in without_namespace(metadata).items()}


def materialize(journals: JournalResource, tree: str = TREE, *, prune: bool = False) -> dict[str, Any]:
    result = dg.materialize(
        [build_journal_specs_asset(tree, prune_groups=[EVENTS])],
        resources={"journals": journals},
        run_config={"ops": {"journal_specs": {"config": {"prune": prune}}}},
    )
    assert result.success
    (materialization,) = result.asset_materializations_for_node("journal_specs")
    return shown(materialization.metadata)


def check(journals: JournalResource, tree: str = TREE) -> tuple[bool, str, dict[str, Any]]:
    """Run only the check. Return its result, its description and its metadata."""
    made = build_journal_specs_check(tree, prune_groups=[EVENTS])
    result = dg.materialize([made], resources={"journals": journals}, selection=dg.AssetSelection.checks(made))
    (evaluation,) = result.get_asset_check_evaluations()
    assert evaluation.description is not None
    return evaluation.passed, evaluation.description, shown(evaluation.metadata)


def rows(metadata: dict[str, Any]) -> Sequence[tuple[str, str, str]]:
    records = [record.data for record in metadata["journals"]]
    return [(str(row["journal"]), str(row["change"]), str(row["differences"])) for row in records]


def test_materializing_applies_the_tree_once(broker: FakeBroker, journals: JournalResource) -> None:
    first = materialize(journals)
    assert (first["created"], first["changed"], first["unchanged"]) == (2, 0, 0)
    assert sorted(broker.journals) == ["flights/events/part-000", "flights/events/part-001"]
    second = materialize(journals)
    assert (second["created"], second["changed"], second["unchanged"]) == (0, 0, 2)
    assert broker.count("Apply") == 1


def test_materializing_reports_the_changes(broker: FakeBroker, journals: JournalResource) -> None:
    materialize(journals)
    changed = materialize(journals, TREE.replace("4194304", "8388608"))
    assert changed["changed"] == 2
    assert rows(changed)[0] == ("flights/events/part-000", "changed", "fragment.length: 4194304 → 8388608")


def test_a_tree_too_large_for_one_transaction_is_applied(broker: FakeBroker, journals: JournalResource) -> None:
    tree = TREE + "".join(f"  - name: flights/events/part-{number:03}\n" for number in range(2, 600))
    metadata = materialize(journals, tree)
    assert (metadata["created"], len(broker.journals), broker.count("Apply")) == (600, 600, 6)
    assert rows(metadata)[-1][0] == "and 500 more"


def test_a_suspended_journal_stays_suspended(broker: FakeBroker, journals: JournalResource) -> None:
    materialize(journals)
    suspended = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=77)
    broker.journals["flights/events/part-000"].spec.suspend.CopyFrom(suspended)
    assert materialize(journals)["unchanged"] == 2
    assert materialize(journals, TREE.replace("4194304", "8388608"))["changed"] == 2
    spec = broker.journals["flights/events/part-000"].spec
    assert (spec.suspend, spec.fragment.length) == (suspended, 8388608)


def test_it_plans_again_after_a_concurrent_change(broker: FakeBroker, journals: JournalResource) -> None:
    broker.at(CallPoint.APPLY, pb.ETCD_TRANSACTION_FAILED)
    assert materialize(journals)["created"] == 2
    assert broker.count("List") == 2
    assert broker.count("Apply") == 2


def test_it_gives_up_after_repeated_concurrent_changes(broker: FakeBroker, journals: JournalResource) -> None:
    broker.at(CallPoint.APPLY, *[pb.ETCD_TRANSACTION_FAILED] * 5)
    with pytest.raises(EtcdTransactionFailed):
        materialize(journals)
    assert broker.count("Apply") == 5


def test_the_prefix_of_the_resource_applies_to_every_journal(broker: FakeBroker, journals: JournalResource) -> None:
    below = JournalResource(endpoint=journals.endpoint, prefix="rerun/")
    broker.create("flights/events/part-002")
    broker.create("rerun/flights/events/part-002")
    assert materialize(below, prune=True)["deleted"] == 1
    names = [f"{prefix}flights/events/part-00{n}" for prefix, n in (("", 2), ("rerun/", 0), ("rerun/", 1))]
    assert sorted(broker.journals) == names


def test_journals_removed_from_the_tree_are_deleted_only_with_prune(
    broker: FakeBroker, journals: JournalResource
) -> None:
    materialize(journals)
    shorter = TREE.replace("  - name: flights/events/part-000\n", "")
    assert materialize(journals, shorter)["deleted"] == 0
    assert check(journals, shorter)[:2] == (False, "1 journal is not in the document")
    assert len(broker.journals) == 2
    assert materialize(journals, shorter, prune=True)["deleted"] == 1
    assert list(broker.journals) == ["flights/events/part-001"]
    assert check(journals, shorter)[0]


def test_pruning_without_groups_to_prune_is_refused(broker: FakeBroker, journals: JournalResource) -> None:
    config = {"ops": {"journal_specs": {"config": {"prune": True}}}}
    with pytest.raises(dg.Failure, match="the asset has no prune_groups"):
        dg.materialize([build_journal_specs_asset(TREE)], resources={"journals": journals}, run_config=config)
    assert broker.count("Apply") == 0


def test_the_check_shows_changes_without_applying_them(broker: FakeBroker, journals: JournalResource) -> None:
    passed, description, metadata = check(journals)
    assert (passed, description) == (False, "2 of 2 journals are not as the document says")
    assert [row[1] for row in rows(metadata)] == ["created", "created"]
    materialize(journals)
    assert check(journals)[:2] == (True, "2 journals are as the document says")
    broker.journals["flights/events/part-001"].spec.replication = 3
    passed, description, metadata = check(journals)
    assert (passed, description) == (False, "1 of 2 journals are not as the document says")
    assert rows(metadata)[0] == ("flights/events/part-001", "changed", "replication: 3 → 1")
    assert broker.count("Apply") == 1


@pytest.mark.parametrize("blocking", [False, True])
def test_drift_blocks_downstream_assets_of_a_blocking_check(
    broker: FakeBroker, journals: JournalResource, blocking: bool
) -> None:
    ran = []

    @dg.asset
    def journal_specs() -> None: ...

    @dg.asset(deps=[journal_specs])
    def downstream() -> None:
        ran.append(1)

    made = build_journal_specs_check(TREE, blocking=blocking)
    assets: list[Any] = [journal_specs, downstream, made]
    result = dg.materialize(assets, resources={"journals": journals}, raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    assert not evaluation.passed
    assert result.success is not blocking
    assert bool(ran) is not blocking


def test_the_check_fails_with_the_reason_while_brokers_are_unavailable(
    journals: JournalResource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_coranto.resources.journals.AUDIT_RETRY_TIMEOUT_S", 0.1)
    for away in (JournalResource(data_dir=str(tmp_path)), JournalResource(endpoint="127.0.0.1:1")):
        passed, description, metadata = check(away)
        assert (passed, description) == (False, "nothing could be compared with the document")
        assert re.search("no cluster runs|127.0.0.1:1", metadata["problem"])
    with pytest.raises(InvalidInput):
        check(journals, "name: [")
