"""Contract tests for coordinators: etcd, its twin in simulations, and custom ones.

In a test module, with pytest::

    from coranto.testing.contracts.coordinator import CoordinatorContract, Scenario

    class TestMyCoordinator(CoordinatorContract):
        def run(self, scenario: Scenario) -> None:
            asyncio.run(scenario(MyCoordinator(...)))
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeAlias

import pytest

from coranto.coordination.etcd import (
    Compare,
    CompareTarget,
    Coordinator,
    Delete,
    Put,
    Relation,
    WatchEvent,
    absent,
    unmodified,
)
from coranto.errors import CoordinationError
from coranto.wire import protocol_pb2 as pb

Scenario: TypeAlias = Callable[[Coordinator], Coroutine[Any, Any, None]]


class CoordinatorContract:
    """Subclass it as `Test…`, with `run`. Each test writes below a prefix of its own."""

    def run(self, scenario: Scenario) -> None:
        """Run a scenario with a coordinator."""
        raise NotImplementedError("a subclass provides the coordinator to test")

    @pytest.fixture
    def root(self, request: pytest.FixtureRequest) -> str:
        """The prefix of this test's keys."""
        return f"/contract/{request.node.name}/"

    def test_a_range_has_one_revision_and_reports_it(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            first = await coordinator.txn([], [Put(f"{root}{i:03}", b"x" * i) for i in range(100)])
            assert first.succeeded
            await coordinator.txn([], [Put(f"{root}050", b"later"), Delete(f"{root}001")])
            old = await coordinator.range(root, revision=first.header.revision)
            assert [kv.value for kv in old.kvs] == [b"x" * i for i in range(100)]
            assert (old.count, old.header.revision) == (100, first.header.revision)
            header = old.header
            assert min(header.cluster_id, header.member_id, header.raft_term) > 0
            wire = pb.Header.Etcd.FromString(header.to_wire().SerializeToString())
            assert wire.cluster_id == header.cluster_id
            now = await coordinator.range(root, min_mod_revision=first.header.revision + 1, limit=1, keys_only=True)
            assert [(kv.key, kv.value) for kv in now.kvs] == [(f"{root}050", b"")]
            assert now.count == 99, "the count is of the range, whatever the filter"
            assert len((await coordinator.range(root, limit=7)).kvs) == 7

        self.run(scenario)

    def test_transactions_compare_everything(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            key = root + "key"
            assert (await coordinator.txn([absent(key)], [Put(key, b"one")])).succeeded
            refused = await coordinator.txn([absent(key)], [Put(key, b"two")], otherwise=[key, key + "-none"])
            assert not refused.succeeded
            found, nothing = refused.found
            assert nothing is None
            assert found is not None
            assert (found.value, found.version, found.create_revision) == (b"one", 1, found.mod_revision)

            async def holds(*compares: Compare) -> bool:
                return (await coordinator.txn(compares, [])).succeeded

            assert await holds(unmodified(found))
            same = (CompareTarget.VALUE, b"one"), (CompareTarget.VERSION, 1), (CompareTarget.LEASE, 0)
            assert await holds(*(Compare(key, target, operand) for target, operand in same))
            assert await holds(Compare(key, CompareTarget.VALUE, b"zzz", Relation.LESS))
            assert await holds(Compare(key, CompareTarget.MOD_REVISION, 1, Relation.GREATER))
            assert not await holds(
                Compare(key, CompareTarget.CREATE_REVISION, found.create_revision, Relation.NOT_EQUAL)
            )
            assert (await coordinator.txn([unmodified(found)], [Delete(root, prefix=True)])).succeeded
            assert (await coordinator.get(key))[1] is None

        self.run(scenario)

    def test_a_comparison_of_a_prefix_holds_for_every_key_in_it(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            none_below = Compare(f"{root}a/", CompareTarget.CREATE_REVISION, 0, prefix=True)
            assert (await coordinator.txn([none_below], [Put(f"{root}a", b""), Put(f"{root}ab", b"")])).succeeded
            assert (await coordinator.txn([none_below], [Put(f"{root}a/b", b"")])).succeeded
            assert not (await coordinator.txn([none_below], [Put(f"{root}a/c", b"")])).succeeded

        self.run(scenario)

    def test_one_transaction_writes_a_key_once(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            with pytest.raises(CoordinationError):
                await coordinator.txn([], [Put(root, b""), Put(root, b"")])
            with pytest.raises(CoordinationError):
                await coordinator.txn([], [Put(root, b"", lease=12345)])
            assert (await coordinator.get(root))[1] is None

        self.run(scenario)

    def test_a_watch_delivers_whole_revisions_from_the_past_on(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            first = await coordinator.txn([], [Put(root + "a", b"1"), Put(root + "b", b"2")])
            second = await coordinator.txn([], [Delete(root + "a"), Put(root + "c", b"3" * 100)])
            async with aclosing(coordinator.watch(root, first.header.revision)) as batches:
                events: list[WatchEvent] = []
                async for batch in batches:
                    events += batch.events
                    assert batch.header.revision == batch.events[-1].kv.mod_revision
                    if batch.header.revision >= second.header.revision:
                        break
            assert [(e.kv.key[-1], e.deleted) for e in events] == [
                ("a", False),
                ("b", False),
                ("a", True),
                ("c", False),
            ]
            assert events[2].kv.mod_revision == second.header.revision

        self.run(scenario)

    def test_a_lease_takes_its_keys_with_it(self, root: str) -> None:
        async def scenario(coordinator: Coordinator) -> None:
            lease = await coordinator.lease_grant(60)
            assert lease.ttl_seconds == 60
            key = root + "leased"
            await coordinator.txn([], [Put(key, b"1", lease=lease.id)])
            await coordinator.txn([], [Put(key, b"2", keep_lease=True)])
            assert await coordinator.lease_keepalive(lease.id) == 60
            status = await coordinator.lease_status(lease.id)
            assert (status.granted, status.keys) == (60, (key,))
            await coordinator.lease_revoke(lease.id)
            await coordinator.lease_revoke(lease.id)
            assert (await coordinator.get(key))[1] is None
            assert await coordinator.lease_keepalive(lease.id) == 0
            assert (await coordinator.lease_status(lease.id)).remaining == 0

        self.run(scenario)
