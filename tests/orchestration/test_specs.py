from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg
import pytest

from coranto.client.values import JournalInfo
from coranto.errors import EtcdTransactionFailed, InvalidInput
from coranto.testing.fake_broker import CallPoint, FakeBroker
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalResource, build_journal_specs_asset
from dagster_coranto.specs import ChangeKind, differences, plan_specs, under_prefix

TREE = """
name: flights/
replication: 1
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 10s}
children:
  - name: flights/events/part-000
  - name: flights/events/part-001
"""


def spec(name: str, **fields: Any) -> pb.JournalSpec:
    return pb.JournalSpec(name=name, replication=fields.pop("replication", 1), **fields)


def upsert(name: str, *, revision: int = 0, **fields: Any) -> pb.ApplyRequest.Change:
    return pb.ApplyRequest.Change(expect_mod_revision=revision, upsert=spec(name, **fields))


def listed(name: str, revision: int, **fields: Any) -> JournalInfo:
    return JournalInfo(spec(name, **fields), revision, 1, pb.Route(primary=-1))


def test_a_plan_tells_new_changed_and_unchanged_journals_apart_and_asks_only_for_what_changes() -> None:
    there = [listed("a/new-not", 3), listed("a/other", 4, replication=2), listed("b/elsewhere", 5)]
    plan = plan_specs([upsert("a/fresh"), upsert("a/new-not"), upsert("a/other")], there)
    assert [(entry.journal, entry.change) for entry in plan.entries] == [
        ("a/fresh", ChangeKind.CREATED),
        ("a/new-not", ChangeKind.UNCHANGED),
        ("a/other", ChangeKind.CHANGED),
    ]
    assert plan.entries[2].differences == ("replication: 2 → 1",)
    assert [(change.upsert.name, change.expect_mod_revision) for change in plan.request] == [
        ("a/fresh", 0),
        ("a/other", 4),
    ]


def test_deletions_are_asked_for_only_where_there_is_something_to_delete() -> None:
    wanted = [pb.ApplyRequest.Change(delete="a/gone", expect_mod_revision=-1), pb.ApplyRequest.Change(delete="a/there")]
    plan = plan_specs(wanted, [listed("a/there", 7)])
    assert [entry.change for entry in plan.entries] == [ChangeKind.ABSENT, ChangeKind.DELETED]
    assert list(plan.request) == [pb.ApplyRequest.Change(delete="a/there", expect_mod_revision=7)]


def test_a_revision_that_the_author_states_is_kept() -> None:
    plan = plan_specs([upsert("a/one", revision=-1, replication=2)], [listed("a/one", 7)])
    assert [change.expect_mod_revision for change in plan.request] == [-1]


def test_a_journal_named_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="names a/one twice"):
        plan_specs([upsert("a/one"), pb.ApplyRequest.Change(delete="a/one")], [])


def test_the_version_is_that_of_the_wanted_specs_alone() -> None:
    wanted = [upsert("a/one"), upsert("a/two")]
    fresh, repeated = plan_specs(wanted, []), plan_specs(wanted[::-1], [listed("a/one", 3), listed("a/two", 4)])
    assert fresh.version == repeated.version
    assert fresh.version != plan_specs([upsert("a/one"), upsert("a/two", replication=2)], []).version


def test_differences_name_the_fields_that_differ() -> None:
    old = spec("a/one", fragment=pb.JournalSpec.Fragment(length=1024, compression_codec=pb.GZIP, stores=["file:///"]))
    new = spec("a/one", fragment=pb.JournalSpec.Fragment(length=2048, compression_codec=pb.ZSTANDARD), replication=3)
    new.fragment.flush_interval.FromSeconds(60)
    assert list(differences(old, new)) == [
        "replication: 1 → 3",
        "fragment.length: 1024 → 2048",
        "fragment.compression_codec: GZIP → ZSTANDARD",
        "fragment.stores: file:/// → none",
        "fragment.flush_interval: none → seconds: 60",
    ]


def test_a_prefix_moves_upserts_and_deletions() -> None:
    moved = under_prefix([upsert("a/one"), pb.ApplyRequest.Change(delete="a/two")], "rerun/")
    assert [change.upsert.name or change.delete for change in moved] == ["rerun/a/one", "rerun/a/two"]


def materialize(journals: JournalResource, tree: str = TREE) -> dict[str, Any]:
    result = dg.materialize([build_journal_specs_asset(tree)], resources={"journals": journals})
    assert result.success
    (materialization,) = result.asset_materializations_for_node("journal_specs")
    metadata: dict[str, Any] = {key: value.value for key, value in materialization.metadata.items()}
    shown: Any = materialization.metadata["journals"]
    return {**metadata, "journals": shown.records}


def rows(metadata: dict[str, Any]) -> Sequence[tuple[str, str, str]]:
    records = [record.data for record in metadata["journals"]]
    return [(str(row["journal"]), str(row["change"]), str(row["differences"])) for row in records]


def test_materializing_applies_the_tree_once_and_then_finds_nothing_to_do(
    broker: FakeBroker, journals: JournalResource
) -> None:
    first = materialize(journals)
    assert (first["created"], first["changed"], first["unchanged"]) == (2, 0, 0)
    assert sorted(broker.journals) == ["flights/events/part-000", "flights/events/part-001"]
    second = materialize(journals)
    assert (second["created"], second["changed"], second["unchanged"]) == (0, 0, 2)
    assert broker.count("Apply") == 1


def test_materializing_reports_what_changed(broker: FakeBroker, journals: JournalResource) -> None:
    materialize(journals)
    changed = materialize(journals, TREE.replace("4194304", "8388608"))
    assert changed["changed"] == 2
    assert rows(changed)[0] == ("flights/events/part-000", "changed", "fragment.length: 4194304 → 8388608")


def test_it_compares_again_when_somebody_else_was_faster(broker: FakeBroker, journals: JournalResource) -> None:
    broker.at(CallPoint.APPLY, pb.ETCD_TRANSACTION_FAILED)
    assert materialize(journals)["created"] == 2
    assert broker.count("List") == 2
    assert broker.count("Apply") == 2


def test_it_gives_up_when_others_keep_changing_the_same_journals(broker: FakeBroker, journals: JournalResource) -> None:
    broker.at(CallPoint.APPLY, *[pb.ETCD_TRANSACTION_FAILED] * 5)
    with pytest.raises(EtcdTransactionFailed):
        materialize(journals)
    assert broker.count("Apply") == 5


def test_the_prefix_of_the_resource_is_in_front_of_every_journal(broker: FakeBroker, journals: JournalResource) -> None:
    below = JournalResource(endpoint=journals.endpoint, prefix="rerun/")
    assert materialize(below)["created"] == 2
    assert sorted(broker.journals) == ["rerun/flights/events/part-000", "rerun/flights/events/part-001"]
