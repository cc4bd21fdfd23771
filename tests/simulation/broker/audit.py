"""Checks that need a simulation: replicas' disks when an append is acknowledged, and etcd's history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from coranto.coordination.entities import implied_route
from coranto.coordination.etcd import Delete, Op, Put
from coranto.coordination.layout import AssignmentKey
from coranto.fragments.stores import verified_content
from coranto.specs.durability import Durability, demand_of
from coranto.specs.validation import effective_replication, routes_equivalent
from coranto.testing.histories import Observation, Operation
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import commit_log, in_sync
from coranto_broker.spool.durable_spool import SpoolFolder, folder_of
from coranto_broker.spool.in_sync import InSyncRecord, Judgement
from coranto_broker.spool.recovery import Recovered, recover
from tests.simulation.broker.world import JOURNAL_BACKLOG_BYTES, LAYOUT, BrokerHost, World, synced
from tests.simulation.kit.checker import Anomaly


def check_acknowledged(world: World, operation: Operation, route: pb.Route) -> None:
    """Check I1: every replica of the Route holds an acknowledged append, on its disk or already in the store.

    With fsync at commits, the append must also survive a crash of the machine.
    """
    durable = world.options.syncs_commits
    for member in route.members:
        machine = world.machine_of(member)
        journal, begin, content = operation.journal, operation.begin, operation.content
        if world.is_damaged(machine, journal, begin):
            continue
        if not _has(world, machine, journal, begin, content, durable=durable):
            world.anomalies.append(
                Anomaly("under-replicated-ack", operation.journal, f"{machine.name} does not hold {operation}")
            )


def check_claims(world: World, operation: Operation, claimed: Durability) -> None:
    """Check the durability that was reported to the client of an append: replicas and zones, and synced ones."""
    journal, begin, content = operation.journal, operation.begin, operation.content
    stored = _stored(world, journal, begin, content)
    if claimed.stored and not stored:
        world.anomalies.append(Anomaly("overclaimed-ack", journal, f"{operation} is not in the store"))
    if stored:
        return
    holders, synced = (
        [
            machine
            for machine in world.machines
            if world.is_damaged(machine, journal, begin)
            or _held(world, machine, journal, begin, content, durable=durable)
        ]
        for durable in (False, True)
    )
    found = Durability(len(holders), _zones(holders), len(synced), _zones(synced))
    world.coverage.sometimes("an append was told to be on disks", claimed.synced_replicas > 0)
    if any(getattr(claimed, each) > getattr(found, each) for each in _CLAIMS):
        world.anomalies.append(Anomaly("overclaimed-ack", journal, f"{operation} is {found}, claimed to be {claimed}"))


_CLAIMS = ("replicas", "zones", "synced_replicas", "synced_zones")


def _zones(machines: Sequence[BrokerHost]) -> int:
    return len({machine.zone for machine in machines})


def check_demand(world: World, operation: Operation, claimed: Durability) -> None:
    """Check that an acknowledged append meets the journal's labels, unless they accept less."""
    demand = demand_of(world.new_spec(operation.journal).labels)
    world.coverage.sometimes("an append was acknowledged below its demand", not claimed.meets(demand))
    if demand.refuses and not claimed.meets(demand):
        world.anomalies.append(Anomaly("below-demand-ack", operation.journal, f"{operation} is {claimed}: {demand}"))


def check_backlog(world: World, operation: Operation, route: pb.Route) -> None:
    """Check that a journal's backlog is within its bound, plus one completing fragment and those being stored."""
    if not world.bounds_backlog or not world.exists(operation.journal):
        return  # Without its item the journal's spool is unknown: etcd is being restored.
    machine, journal = world.machine_of(route.members[route.primary]), operation.journal
    folder = spool_path(world, machine, journal)
    stored = {each.fragment.begin for each in world.store.objects.values() if each.fragment.journal == journal}
    sizes = {
        int(name[:16], 16): machine.disk.size(folder / name)
        for name in machine.disk.names(folder)
        if name.endswith(".content")
    }
    growing = max(sizes, default=0)
    waiting = [size for begin, size in sizes.items() if begin != growing and begin not in stored]
    bound = JOURNAL_BACKLOG_BYTES + 3 * max(waiting, default=0)
    world.coverage.sometimes("much of a journal waited for the store", sum(waiting) > JOURNAL_BACKLOG_BYTES)
    if sum(waiting) > bound:
        what = f"{machine.name} has {sum(waiting)} bytes in {len(waiting)} complete fragments that are not stored"
        world.anomalies.append(Anomaly("unbounded-backlog", journal, what))


def _has(world: World, machine: BrokerHost, journal: str, offset: int, content: bytes, *, durable: bool) -> bool:
    held = _held(world, machine, journal, offset, content, durable=durable)
    return held or _stored(world, journal, offset, content)


def _held(world: World, machine: BrokerHost, journal: str, offset: int, wanted: bytes, *, durable: bool) -> bool:
    # A journal that is recreated after etcd was emptied first has its content in the former journal's folder.
    parent = folder_of(machine.settings.data_dir / "spools", journal, 0).parent
    revisions = machine.disk.names(parent)
    return any(_holds(machine, parent / each, offset, wanted, durable=durable) for each in revisions)


def _holds(machine: BrokerHost, folder: Path, offset: int, wanted: bytes, *, durable: bool) -> bool:
    # The commit log bounds the valid content. A log may be empty after a roll on a full disk.
    ends: dict[int, int] = {}
    read = machine.disk.durable if durable else machine.disk.content
    for name in machine.disk.names(folder):
        if name.endswith(".commits"):
            log = read(folder / name)
            last = commit_log.decode(log).last if log is not None else None
            if last is not None:
                begin = int(name[:16], 16)
                ends[begin] = max(ends.get(begin, 0), last.fragment.end)
    begin = max((each for each in ends if each <= offset), default=-1)
    if begin < 0 or ends[begin] < offset + len(wanted):
        return False
    content = read(folder / f"{begin:016x}.content")
    position = offset - begin
    return content is not None and content[position : position + len(wanted)] == wanted


def _stored(world: World, journal: str, offset: int, wanted: bytes) -> bool:
    for stored in world.store.objects.values():
        fragment = stored.fragment
        if fragment.journal == journal and fragment.begin <= offset < fragment.end:
            content = verified_content(fragment, stored.data, source="the store")
            position = offset - fragment.begin
            if content[position : position + len(wanted)] == wanted:
                return True
    return False


def spool_path(world: World, machine: BrokerHost, journal: str) -> Path:
    return folder_of(machine.settings.data_dir / "spools", journal, world.create_revision(journal))


def watch_allocator(world: World) -> Callable[[Sequence[Op]], None]:
    """Return a check of I7: no transaction removes a consistent assignment if fewer than R would remain."""

    def before_txn(ops: Sequence[Op]) -> None:
        removed: dict[str, list[AssignmentKey]] = {}
        put: set[tuple[str, object]] = set()
        for op in ops:
            if not op.key.startswith(LAYOUT.assignments):
                continue
            key = LAYOUT.decode(op.key)
            assert isinstance(key, AssignmentKey)
            if isinstance(op, Put):
                put.add((key.item, key.member))
            elif isinstance(op, Delete):
                removed.setdefault(key.item, []).append(key)
        for item, keys in removed.items():
            gone = [key for key in keys if (item, key.member) not in put]  # It moved.
            if gone:
                _check_removal(world, item, gone)

    return before_txn


def _check_removal(world: World, item: str, gone: Sequence[AssignmentKey]) -> None:
    if not world.exists(item):
        return
    found = world.assignments(item)
    route = implied_route([key for key, _ in found])
    consistent = all(routes_equivalent(synced(kv), route) for _, kv in found)
    world.coverage.sometimes("the allocator removed an assignment")
    if consistent and len(found) - len(gone) < effective_replication(world.spec(item), 9):
        world.anomalies.append(
            Anomaly("unsafe-removal", item, f"{[str(key.member) for key in gone]} of {len(found)} consistent replicas")
        )


def replica_contents(world: World, journal: str) -> Iterator[Observation]:
    """Yield the readable local content of the running brokers' replicas of a journal."""
    for machine in world.machines:
        if not machine.is_up:
            continue
        assert machine.broker is not None
        for replica in machine.broker.resolver.local_replicas:
            if replica.journal != journal:
                continue
            for entry in replica.index.entries:
                if entry.content is not None and not entry.content.discarded and not entry.content.is_quarantined:
                    data = machine.disk.content(entry.content.path) or b""
                    by = f"replica of {machine.name}"
                    yield Observation(by, journal, entry.begin, data[: entry.end - entry.begin], world.loop.time())


def record_of(world: World, journal: str) -> InSyncRecord | None:
    kv = world.etcd.kvs.get(LAYOUT.in_sync_key(journal))
    return in_sync.decode(kv.value) if kv is not None else None


def recovered(world: World, machine: BrokerHost, journal: str) -> Recovered:
    """Recover a journal's spool on a machine whose broker is dead, as a new process would.

    The result excludes content that the process would set aside because it has diverged.
    """
    process = Process(world.loop, f"auditor of {machine.name}")
    folder = SpoolFolder(
        spool_path(world, machine, journal),
        journal,
        world.create_revision(journal),
        machine.disk.for_process(process),
        SimClock(world.loop),
    )
    record, me = record_of(world, journal), str(machine.member)
    found = recover(folder)
    if in_sync.judge(record, found.stamp, found.spool.end, me) is Judgement.DIVERGED:
        found = found.without_spool(folder)
    kept = [
        sealed
        for sealed in found.sealed
        if sealed.settled or in_sync.judge(record, sealed.stamp, sealed.fragment.end, me) is not Judgement.DIVERGED
    ]
    return replace(found, sealed=kept)


def disk_contents(machine: BrokerHost, found: Recovered) -> Iterator[Observation]:
    fragments = [(sealed.fragment, sealed.content.path) for sealed in found.sealed]
    current = found.spool.fragment
    if current.length and found.log is not None:
        fragments.append((current, found.log.path.parent / f"{current.begin:016x}.content"))
    for fragment, path in fragments:
        data = (machine.disk.content(path) or b"")[: fragment.length]
        yield Observation(f"disk of {machine.name}", fragment.journal, fragment.begin, data, 0.0)
