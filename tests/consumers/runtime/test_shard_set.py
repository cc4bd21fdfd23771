"""Sets of shards in YAML."""

from __future__ import annotations

import pytest

from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.shard_set import parse_shards, render_shards


def shard(id: str = "shard-one", *, journals: tuple[str, ...] = ("a/journal",), **fields: object) -> pc.ShardSpec:
    spec = pc.ShardSpec(id=id, **fields)  # type: ignore[arg-type]
    spec.max_txn_duration.FromSeconds(1)
    for journal in journals:
        spec.sources.add(journal=journal)
    return spec


def test_shards_inherit_common_fields():
    changes = parse_shards(
        """
common:
  max_txn_duration: 1s
  min_txn_duration: 100ms
  disable_wait_for_ack: true
  labels:
  - {name: app, value: sums}
  - {name: tier, value: low}
shards:
- id: sums-001
  sources: [{journal: b/journal}, {journal: a/journal, min_offset: 17}]
  max_txn_duration: 5s
  labels: [{name: tier, value: high}]
  revision: 12
- {id: sums-002, delete: true, revision: -1}
"""
    )

    spec = changes[0].upsert
    assert [(source.journal, source.min_offset) for source in spec.sources] == [("a/journal", 17), ("b/journal", 0)]
    assert (spec.max_txn_duration.seconds, spec.min_txn_duration.nanos) == (5, 100_000_000)
    assert spec.disable_wait_for_ack
    assert spec.labels == label_set({"app": "sums", "tier": "high"})
    assert changes[0].expect_mod_revision == 12
    assert (changes[1].delete, changes[1].expect_mod_revision) == ("sums-002", -1)


def test_rendered_yaml_is_parsed_to_the_same_specs():
    specs = [
        shard(
            f"sums-{number:03}",
            journals=(f"a/part-{number:03}",),
            hot_standbys=1,
            disable=number == 2,
            labels=label_set({"app": "sums", "number": str(number)}),
        )
        for number in range(3)
    ]
    text = render_shards([(spec, 7 + number) for number, spec in enumerate(specs)])

    changes = parse_shards(text)
    assert [change.upsert for change in changes] == specs
    assert [change.expect_mod_revision for change in changes] == [7, 8, 9]
    assert text.count("hot_standbys") == 1
    assert text.count("value: sums") == 1
    assert (parse_shards(""), render_shards([])) == ([], "")


def test_errors_in_yaml_name_their_line():
    for text, problem in (
        ("shards:\n- id: sums-001\n  color: red\n", r"line 3: there is no field 'color'"),
        ("shards:\n- id: sums-001\n", r"line 2: sums-001: max_txn_duration: 0 s is not above 0"),
        ("common: {id: x}\n", "line 1: there is no field 'id'"),
        (
            "common: {max_txn_duration: 1s}\nshards:\n- id: sums-001\n- id: sums-001\n",
            "line 4: sums-001 was already given in line 3",
        ),
        ("shards: [", "this is not YAML"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            parse_shards(text)
