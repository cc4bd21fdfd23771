"""Model of one large cluster: the load of etcd, the leader and each broker with 100,000 and with 1,000,000 journals.

The mirror of the key space and the allocator are the real ones. Their etcd answers from memory, so that no other
process shares the processors. Only the proof that a mirror is current uses a real etcd. Each size runs in a separate
process, whose memory is measured. The floor is the size with FEW: a ratio of 1 means that the cost grows in proportion
to the number of journals.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runner import Figure
from coranto.cluster import EtcdServer
from coranto.coordination.allocator import StatePlanner, transactions
from coranto.coordination.entities import JournalEntities, implied_route
from coranto.coordination.etcd import (
    MAX_TXN_OPS,
    EtcdHeader,
    KeyValue,
    Put,
    Snapshot,
    WatchBatch,
    WatchEvent,
    unmodified,
)
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.coordination.planning import AddAssignment, PlanItem, PlanMember, Planner
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import InSyncRecord

FEW, MANY = (100_000, 60), (1_000_000, 600)
"""Journals and brokers. Each broker has 5,000 replicas in both."""
REPLICATION = 3
ZONES = 3
LIMIT = 10_000
LAYOUT = Layout("/gazette/cluster")
REVISION = 1_000
_FLOOR = f"the same with {FEW[0]:,} journals on {FEW[1]} brokers"


def _name(number: int) -> str:
    return f"acme/events/region-{number % 10}/topic-{number // 10 % 1000:03}/part-{number:07}"


def _spec(name: str) -> pb.JournalSpec:
    labels = label_set(**{"app.gazette.dev/message-type": "acme.Event", "content-type": "application/x-ndjson"})
    spec = pb.JournalSpec(name=name, replication=REPLICATION, labels=labels, flags=pb.JournalSpec.O_RDWR)
    spec.fragment.length = 1 << 28
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.stores.append("s3://acme-journals/events/")
    spec.fragment.refresh_interval.FromSeconds(300)
    spec.fragment.flush_interval.FromSeconds(3600)
    return spec


def _members(count: int) -> list[PlanMember]:
    return [
        PlanMember(MemberId(f"zone-{number % ZONES}", f"broker-{number:03}"), LIMIT, create_revision=number + 1)
        for number in range(count)
    ]


def _member_value(member: MemberId) -> bytes:
    id = pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix)
    endpoint = f"https://{member.suffix}.brokers.example:8080"
    return pb.BrokerSpec(process_spec=pb.ProcessSpec(id=id, endpoint=endpoint), journal_limit=LIMIT).SerializeToString()


class _Etcd:
    """Answers one range request, and then reports the changes passed to `change`."""

    def __init__(self, kvs: Sequence[KeyValue]) -> None:
        self._snapshot = Snapshot(EtcdHeader(1, 1, REVISION, 1), tuple(kvs), len(kvs))
        self._batches: asyncio.Queue[WatchBatch] = asyncio.Queue()
        self._revision = REVISION

    async def range(self, prefix: str, **_: object) -> Snapshot:
        return self._snapshot

    def watch(self, prefix: str, revision: int) -> AsyncIterator[WatchBatch]:
        return self._reported()

    async def _reported(self) -> AsyncIterator[WatchBatch]:
        while True:
            yield await self._batches.get()

    def change(self, changes: Sequence[tuple[str, bytes | None]]) -> int:
        """Change keys, or delete those without a value. Return the revision."""
        self._revision += 1
        events = [
            WatchEvent(KeyValue(key, value or b"", 1, self._revision), deleted=value is None) for key, value in changes
        ]
        self._batches.put_nowait(WatchBatch(EtcdHeader(1, 1, self._revision, 1), tuple(events)))
        return self._revision


def _used_since(begun: float) -> float:
    """Return the seconds of this process's processor time since `begun`."""
    return time.process_time() - begun


async def measure(journals: int, brokers: int) -> dict[str, float]:
    """Return all measures of one size, by name: bytes of etcd, and seconds of processor time."""
    found: dict[str, float] = {}
    members = _members(brokers)
    begun = time.process_time()
    plan = Planner().plan([PlanItem(_name(number), REPLICATION) for number in range(journals)], members, [])
    found["leader: plan from scratch, s"] = _used_since(begun)

    kvs = _key_values(journals, members, plan.items, found)
    del plan
    before = psutil.Process().memory_info().rss
    etcd: Any = _Etcd(kvs)
    keyspace: KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route] = KeySpace(
        etcd, LAYOUT, JournalEntities(), apply_delay_seconds=0
    )
    begun = time.process_time()
    state = await keyspace.start()
    found["each broker: decode the key space at its start, s"] = _used_since(begun)
    found["each broker: memory of decoded entries, MB"] = (psutil.Process().memory_info().rss - before) / 1e6
    kvs.clear()

    begun = time.process_time()
    assert len(state.by_member[members[0].id]) * brokers >= journals
    found["each broker: find its replicas at its start, s"] = _used_since(begun)

    planner: StatePlanner[pb.JournalSpec, pb.BrokerSpec, pb.Route] = StatePlanner()
    begun = time.process_time()
    assert not planner.plan(state).items
    found["a new leader: first plan, s"] = _used_since(begun)

    one = state.items[journals // 2]
    begun = time.process_time()
    state = await keyspace.wait_for_revision(etcd.change([(one.kv.key, one.kv.value)]))
    found["each broker: one change, s"] = _used_since(begun)
    begun = time.process_time()
    assert not planner.plan(state).items
    found["the leader: plan after one change, s"] = _used_since(begun)

    await _broker_dies(keyspace, etcd, planner, members[brokers // 2].id, found)
    await keyspace.close()
    return found


def _key_values(
    journals: int, members: Sequence[PlanMember], changes: Sequence[Any], found: dict[str, float]
) -> list[KeyValue]:
    """Return all keys below the prefix in key order, and record the bytes of each kind of key in etcd."""
    sizes = dict.fromkeys(("specs", "assignments", "in-sync records", "members"), 0)
    kvs: list[KeyValue] = []

    def put(kind: str, key: str, value: bytes, lease: int = 0) -> None:
        sizes[kind] += len(key) + len(value)
        kvs.append(KeyValue(key, value, 1, REVISION, 1, lease))

    for item in changes:
        adds = [change for change in item.changes if isinstance(change, AddAssignment)]
        keys = sorted(
            (AssignmentKey(item.item, add.member, add.slot) for add in adds), key=lambda key: (key.member, key.slot)
        )
        route = implied_route(keys).SerializeToString(deterministic=True)
        for key in keys:
            put("assignments", LAYOUT.assignment_key(key.item, key.member, key.slot), route, lease=1)
        names = tuple(sorted(str(key.member) for key in keys))
        record = in_sync.encode(InSyncRecord(1, names))
        sizes["in-sync records"] += len(LAYOUT.in_sync_key(item.item)) + len(record)
    for number in range(journals):
        name = _name(number)
        put("specs", LAYOUT.item_key(name), _spec(name).SerializeToString())
    for member in members:
        put("members", LAYOUT.member_key(member.id), _member_value(member.id), lease=1)
    for kind, size in sizes.items():
        found[f"etcd: {kind}, MB"] = size / 1e6
    kvs.sort(key=lambda kv: kv.key)
    return kvs


async def _broker_dies(
    keyspace: KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route],
    etcd: _Etcd,
    planner: StatePlanner[pb.JournalSpec, pb.BrokerSpec, pb.Route],
    dead: MemberId,
    found: dict[str, float],
) -> None:
    """Expire a broker's lease, and record the leader's plan and the events that every broker receives."""
    gone = [assignment.kv.key for assignment in keyspace.state.by_member[dead]]
    events = len(gone) + 1
    size = sum(map(len, gone))
    begun = time.process_time()
    state = await keyspace.wait_for_revision(
        etcd.change([*((key, None) for key in gone), (LAYOUT.member_key(dead), None)])
    )
    found["each broker: a broker dies, apply, s"] = _used_since(begun)
    begun = time.process_time()
    changes = planner.plan(state)
    found["the leader: a broker dies, plan, s"] = _used_since(begun)
    leader = state.leader
    assert leader is not None
    planned = list(transactions(state, changes, unmodified(leader.kv)))
    found["the leader: a broker dies, transactions"] = len(planned)
    for transaction in planned:
        events += len(transaction.ops)
        size += sum(len(op.key) + len(getattr(op, "value", b"")) for op in transaction.ops)
    for item in changes.items:  # When the replicas agree, their primary writes the new Route to each assignment.
        assignments = state.assignments_in_key_order(item.item)
        events += REPLICATION
        size += REPLICATION * (len(assignments[0].kv.key) + len(assignments[0].kv.value))
    found["each broker: a broker dies, events until all is settled"] = events
    found["each broker: a broker dies, MB of events"] = size / 1e6


def _proof(keys: int) -> float:
    """Return the seconds that a real etcd with `keys` keys takes to prove that a mirror is current."""

    async def once(endpoint: str) -> float:
        async with EtcdCoordinator(endpoint) as coordinator:
            for first in range(0, keys, MAX_TXN_OPS):
                numbers = range(first, min(first + MAX_TXN_OPS, keys))
                await coordinator.txn([], [Put(LAYOUT.item_key(_name(number)), b"x" * 150) for number in numbers])
            revision = (await coordinator.get("/"))[0].revision
            begun = time.perf_counter()
            for _ in range(5):
                proof = await coordinator.range(LAYOUT.root, min_mod_revision=revision + 1, limit=1, keys_only=True)
                assert proof.count == keys
            return (time.perf_counter() - begun) / 5

    with tempfile.TemporaryDirectory() as folder, EtcdServer(Path(folder), fsync=False) as etcd:
        return asyncio.run(once(etcd.endpoint))


def _in_subprocess(size: tuple[int, int]) -> dict[str, float]:
    """Measure one size in a separate process."""
    command = [sys.executable, "-m", "benchmarks.large_cluster", *map(str, size)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def run(rounds: int) -> list[Figure]:
    """Measure each size once, regardless of `rounds`: the measures are counts and processor time."""
    few, many = _in_subprocess(FEW), _in_subprocess(MANY)
    few["etcd: a proof over 40,000 and 400,000 keys, s"] = _proof(FEW[0] * 4 // 10)
    many["etcd: a proof over 40,000 and 400,000 keys, s"] = _proof(MANY[0] * 4 // 10)
    figures = []
    for name, value in many.items():
        title = f"{name}: {few[name]:,.4g} and {value:,.4g}"
        # Invert costs: one that grows in proportion has the ratio 1, and one that grows faster has a lower ratio.
        subject, floor = MANY[0] / max(value, 1e-9), FEW[0] / max(few[name], 1e-9)
        figures.append(Figure(title, "journals / unit", [subject], [floor], _FLOOR))
    return figures


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))))
