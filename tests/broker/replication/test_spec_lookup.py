"""Specs of journals in the key space: deleted, recreated, unreadable."""

from __future__ import annotations

from typing import Any

import pytest

from coranto.errors import InvalidInput
from coranto_broker.replication.spec_lookup import SpecLookup
from tests.broker.replication.test_resolver import LAYOUT, OTHER, SELF, Cluster

J = "a/journal"


def made(cluster: Cluster) -> SpecLookup:
    keyspace: Any = cluster
    return SpecLookup(keyspace, SELF)


def test_a_recreated_journal_has_another_spec() -> None:
    cluster = Cluster()
    specs = made(cluster)
    assert specs.present_spec(J) is specs.successor_of(J) is None
    cluster.journal(J)
    first = cluster.kvs[LAYOUT.item_key(J)].create_revision
    read = specs.reader(J, first)
    assert (found := read()) is not None
    assert found.name == J
    cluster.delete(LAYOUT.item_key(J))
    assert read() is None
    cluster.journal(J, stores=("s3://other/",))
    assert (read(), specs.spec_to_store(J, first)) == (None, None)
    specs.adopt(J, first)
    stored, successor = specs.spec_to_store(J, first), specs.successor_of(J)
    assert stored is not None
    assert successor is not None
    assert list(stored.fragment.stores) == ["s3://other/"]
    assert successor[1] == cluster.kvs[LAYOUT.item_key(J)].create_revision > first


def test_an_unreadable_spec_is_not_a_deletion() -> None:
    cluster = Cluster()
    cluster.put(LAYOUT.item_key(J), b"\xff")
    specs = made(cluster)
    with pytest.raises(InvalidInput, match="cannot be read"):
        specs.spec_of(J, cluster.revision)
    assert specs.present_spec(J) is None
    assert specs.names_below("a") == [J]


def test_the_primary_is_the_first_of_the_route() -> None:
    cluster = Cluster()
    cluster.journal(J)
    specs = made(cluster)
    assert not specs.is_primary(J)
    cluster.assign(OTHER, 0, J)
    cluster.assign(SELF, 1, J)
    assert not specs.is_primary(J)
    assert sorted(specs.route_of(J)) == sorted(f"{each.zone}#{each.suffix}" for each in (SELF, OTHER))
    cluster.unassign(OTHER, 0, J)
    cluster.assign(SELF, 0, J)
    assert specs.is_primary(J)
