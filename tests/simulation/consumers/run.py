"""One run: boot, faults under load, recovery, liveness checks, and a check of the contents of stores and journals."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from coranto.client import JournalClient
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator
from coranto.testing.sim.loop import simulated
from coranto.testing.sim.timeline import Process
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.recoverylog import EtcdAuthority, HintKeys, HintStore, Player
from coranto_consumers.stores.json_file import STATE_FILE, decode_state
from coranto_consumers.stores.sqlite_file import DATABASE_FILE
from tests.simulation.broker import audit, playing
from tests.simulation.broker.playing import Tell, play
from tests.simulation.kit.checker import Anomaly

from . import tables
from .application import load_book, read_database
from .checker import check
from .history import Book, FinalShard
from .nemesis import ConsumerNemesis
from .options import Options
from .workload import Workload
from .world import HINTS, LOGS, ConsumerWorld, apply_shards, has_log

EXPLAINED = ("SqlStoreError", "CommitOutcomeUnknown", "IndexHasGreaterOffset", "Unavailable", "Fenced")
"""Errors that may fail a shard permanently: long outages of stores and brokers, and a replaced owner."""
CORRUPT = "CorruptFragment"
"""The error of a shard that has read a damaged replica. The sum is only verified at the end of the fragment."""
LIVELINESS_SECONDS = 200.0
"""The time after the last fault until everything must work again."""


@dataclass(slots=True)
class Report(playing.SeedReport[Options, Anomaly]):
    command = "python -m tests.simulation.consumers"

    failures: list[str] = field(default_factory=list)
    """Reasons of shards that were FAILED. Faults may be the cause. An operator reassigns them."""

    @property
    def remarks(self) -> list[str]:
        return [f"a shard failed: {each}" for each in self.failures]


Prepare = Callable[[ConsumerWorld], None]


def run(options: Options, *, tell: Tell | None = None, prepare: Prepare | None = None) -> Report:
    """Run one simulation. `tell` is called with events as they happen. `prepare` may change the world beforehand."""
    report = Report(options)
    with tempfile.TemporaryDirectory(prefix="coranto-simulation-") as folder:
        with simulated(options.seed, shuffle=options.brokers.shuffle) as loop:
            world = ConsumerWorld(loop, options, Path(folder))
            play(world, report, _run, tell=tell, prepare=prepare, machines=world.consumers)
            report.anomalies = world.anomalies + report.anomalies
            report.failures = world.failures
    return report


async def _run(world: ConsumerWorld, report: Report) -> None:
    world.etcd.before_txn.append(audit.watch_allocator(world))
    world.start()
    if not await world.until(lambda: all(map(world.is_consistent, world.journals)), 30.0):
        report.anomalies.append(Anomaly("stuck", "all journals", "they were not assigned and synchronized at first"))
        return
    async with asyncio.timeout(30.0):
        await apply_shards(world)
    workload, nemesis = Workload(world), ConsumerNemesis(world)
    harm = asyncio.ensure_future(nemesis.run())
    published = asyncio.ensure_future(workload.run())
    operator = asyncio.ensure_future(_reassign_failed_shards(world))
    await asyncio.wait([published], timeout=2.0 * world.of_consumers.seconds)
    for task in (harm, operator):
        task.cancel()
    await asyncio.gather(harm, operator, return_exceptions=True)
    nemesis.heal()
    world.loop.note("healed")
    if not await _prove_alive(world, workload, published, report):
        return
    await _end_consumers(world, report)
    client = world.journal_client("auditor")
    inputs = {journal: await _read_back(client, journal) for journal in world.inputs}
    outputs = {journal: await _read_back(client, journal) for journal in world.outputs}
    _check_reads(world, inputs | {log: await _read_back(client, log) for log in world.logs}, report)
    shards = [FinalShard(shard, tuple(world.sources_of(shard)), await _book(world, shard)) for shard in world.shards]
    report.anomalies += check(world.record, inputs, outputs, shards)
    explained = {*EXPLAINED, CORRUPT} if "flip a bit" in world.of_consumers.brokers.faults else {*EXPLAINED}
    for failure in world.failures:
        if failure.partition(": ")[2].partition(":")[0] not in explained:
            report.anomalies.append(Anomaly("unexplained-failure", failure.partition(" ")[0], failure))
    _note(world, report, shards)


async def _reassign_failed_shards(world: ConsumerWorld) -> None:
    """Act as an operator who reassigns shards that have failed for a while."""
    while True:
        await asyncio.sleep(world.rng.uniform(1.0, 6.0))
        with contextlib.suppress(grpc.aio.AioRpcError):  # The process may be down.
            await world.any_stub().Unassign(pc.UnassignRequest(shards=world.shards, only_failed=True))


async def _prove_alive(
    world: ConsumerWorld, workload: Workload, published: asyncio.Future[None], report: Report
) -> bool:
    """Check that journals are complete again, and that every shard reads to the end of the published content."""

    def whole() -> bool:
        machines = (*world.machines, *world.consumers)
        return all(machine.is_up for machine in machines) and all(map(world.is_whole, world.journals))

    if not await world.until(whole, LIVELINESS_SECONDS):
        down = [machine.name for machine in (*world.machines, *world.consumers) if not machine.is_up]
        torn = [journal for journal in world.journals if not world.is_whole(journal)]
        report.anomalies.append(Anomaly("stuck", ", ".join(torn) or "-", f"not whole after healing; down: {down}"))
        return False
    try:
        async with asyncio.timeout(LIVELINESS_SECONDS):
            await published
            await workload.close()
    except TimeoutError:
        report.anomalies.append(Anomaly("stuck", "all inputs", "nothing can be appended after healing"))
        return False
    for shard in world.shards:
        offsets = {journal: workload.closing[journal] for journal in world.sources_of(shard)}
        try:
            async with asyncio.timeout(LIVELINESS_SECONDS):
                await _read_through(world, shard, offsets)
        except TimeoutError:
            report.anomalies.append(Anomaly("stuck", shard, f"does not read through {offsets} after healing"))
            return False
    return True


async def _read_through(world: ConsumerWorld, shard: str, offsets: dict[str, int]) -> None:
    """Return once a shard reports that it has read this far. A failed one is reassigned, as operators do."""
    while True:
        try:
            response = await world.any_stub().Stat(pc.StatRequest(shard=shard, read_through=offsets))
            if response.status == pc.OK:
                return
            world.coverage.sometimes(f"stat: {pc.Status.Name(response.status)}")
            request = pc.UnassignRequest(shards=[shard], only_failed=True)
            if (await world.any_stub().Unassign(request)).shards:
                world.coverage.sometimes("an operator had a failed shard assigned anew")
        except grpc.aio.AioRpcError as error:
            world.coverage.sometimes(f"stat: {error.code().name}")
        await asyncio.sleep(0.5)


async def _end_consumers(world: ConsumerWorld, report: Report) -> None:
    """End all consumers, gracefully or not. Everything they have read through is committed and acknowledged."""
    gracefully = world.rng.random() < 0.5
    for machine in world.consumers:
        machine.stays_down = True
        if gracefully:
            machine.stop_requested.set()
        else:
            machine.kill()
    if not await world.until(lambda: not any(machine.is_up for machine in world.consumers), 60.0):
        report.anomalies.append(Anomaly("stuck", "consumers", "they do not end on request"))


async def _read_back(client: JournalClient, journal: str) -> bytes:
    async with asyncio.timeout(LIVELINESS_SECONDS):
        end = (await client.append(journal, b"", retry_unknown=True)).end
        content = bytearray()
        if end:
            async for chunk in client.read(journal, 0, end_offset=end, block=True, fail_on_jump=True):
                content += chunk.content
    return bytes(content)


async def _book(world: ConsumerWorld, shard: str) -> Book:
    """Return the content of a shard's store, as a new owner would find it."""
    if shard.startswith("tables-"):
        return tables.read(world.tables_of(shard))
    if not has_log(shard):
        return world.database.row(shard).book
    process = Process(world.loop, f"auditor of {shard}")
    clock = SimClock(world.loop, process)
    coordinator = SimCoordinator(world.etcd, world.network, "auditor", process, clock)
    keys = HintKeys(HINTS, shard, 1)
    log = f"{LOGS}/{shard}"
    hints = (await HintStore(coordinator, keys).fetch()).pick(log)
    folder = world.folder / f"audit-{shard}"
    client = world.journal_client("auditor", process, clock)
    async with Player(client, hints, folder, authority=EtcdAuthority(coordinator, keys, log)) as player:
        await player.finish()
    if shard.startswith("json-"):
        return load_book(decode_state((folder / STATE_FILE).read_text())[0])
    return read_database(folder / DATABASE_FILE)


def _check_reads(world: ConsumerWorld, finals: dict[str, bytes], report: Report) -> None:
    """Check that brokers gave consumers the content of the journals."""
    for seen in world.history.observations:
        if seen.journal not in finals:
            continue
        if finals[seen.journal][seen.offset : seen.offset + len(seen.content)] == seen.content:
            continue
        report.anomalies.append(
            Anomaly("inconsistent-offsets", seen.journal, f"{seen.by} read other content at {seen.offset}")
        )


def _note(world: ConsumerWorld, report: Report, shards: list[FinalShard]) -> None:
    record, coverage = world.record, world.coverage
    entries = sum(len(shard.book.entries) for shard in shards)
    report.outcomes = Counter(
        {
            "messages": len(record.sent),
            "owners": len(record.owners),
            "transactions": sum(len(shard.book.tokens) for shard in shards),
            "effects": entries,
            "deliveries": len(record.deliveries),
            "acknowledgements": len(record.acknowledgements),
        }
    )
    coverage.sometimes("a message was delivered again", len(record.deliveries) > entries)
    for shard in shards:
        kind = shard.name.partition("-")[0]
        owners = [owner for owner in record.owners if owner.shard == shard.name and owner.found]
        coverage.sometimes(f"{kind}: a later owner restored what an earlier one had committed", len(owners))
        known = {token for owner in record.owners for token in owner.confirmed}
        coverage.sometimes("a commit took place and its owner never knew", set(shard.book.tokens) - known)
