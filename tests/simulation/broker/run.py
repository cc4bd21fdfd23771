"""One run: boot, faults under load, recovery, liveness checks, and a check of all observations and the final state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from coranto.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import AppendOutcomeUnknown, CorantoError
from coranto.testing.histories import OperationKind, OperationOutcome
from coranto.testing.sim.loop import simulated
from coranto.wire import protocol_pb2 as pb
from tests.simulation.broker import audit, playing
from tests.simulation.broker.nemesis import Nemesis
from tests.simulation.broker.options import Options
from tests.simulation.broker.playing import Tell, play
from tests.simulation.broker.workload import Workload
from tests.simulation.broker.world import World
from tests.simulation.kit.checker import Anomaly, FinalJournal, check

LIVELINESS_SECONDS = 150.0
"""Time after the last fault until everything must work again. A pulse may be up to a minute away."""
_NOT_FRESH = frozenset(
    {
        "pause",
        "long pause",
        "long outage",
        "cut etcd",
        "cut one way",
        "break watches",
        "compact",
        "exit gracefully",
        "change spec",
        "restore etcd",
    }
)
"""Faults after which a broker may serve stale reads, until it learns that it lost a journal, or until the brokers that
have the journal's end are back."""


@dataclass(slots=True)
class RunReport(playing.SeedReport[Options, Anomaly]):
    command = "python -m tests.simulation.broker"


def run(options: Options, *, tell: Tell | None = None, prepare: Callable[[World], None] | None = None) -> RunReport:
    """Run one simulation. `tell` is called with events as they happen. `prepare` may change the world beforehand."""
    report = RunReport(options)
    with simulated(options.seed, shuffle=options.shuffle) as loop:
        world = World(loop, options)
        play(world, report, _run, tell=tell, prepare=prepare)
        report.anomalies = world.anomalies + report.anomalies
        report.coverage += world.count_faults()
        report.outcomes = Counter(
            f"{operation.kind.value} {operation.outcome.value}" for operation in world.history.operations
        )
    return report


async def _run(world: World, report: RunReport) -> None:
    world.etcd.before_txn.append(audit.watch_allocator(world))
    world.start()
    booted = await world.until(lambda: all(map(world.is_consistent, world.journals)), 30.0)
    if not booted:
        report.anomalies.append(Anomaly("stuck", "all journals", "they were not assigned and synchronized at first"))
        return
    workload, nemesis = Workload(world), Nemesis(world)
    harm = asyncio.ensure_future(nemesis.run())
    await workload.run()
    harm.cancel()
    await asyncio.gather(harm, return_exceptions=True)
    nemesis.heal()
    world.loop.note("healed")
    if not await world.until(lambda: nemesis.is_done, LIVELINESS_SECONDS):
        report.anomalies.append(Anomaly("stuck", "all journals", "the operator does not get etcd adopted"))
    await _prove_alive(world, workload, report)
    await workload.stop()
    # A commit of a disconnected client may still be in flight. It must arrive before its journal is read back.
    await asyncio.sleep(2 * world.network.delays.congested[1])
    if report.anomalies or world.problems:
        return  # No content can be read back reliably.
    finals = {journal: await _read_back(world, journal, report) for journal in world.journals}
    if not report.anomalies:
        await _end(world, finals, report)
    fresh = not _NOT_FRESH.intersection(world.options.faults)
    report.anomalies += check(world.history, finals, fresh_heads=fresh)
    _note_resolutions(world, finals)


async def _prove_alive(world: World, workload: Workload, report: RunReport) -> None:
    """Check that all journals are complete and take appends through every broker, and that readers reach the end."""

    def whole() -> bool:
        return all(machine.is_up for machine in world.machines) and all(map(world.is_whole, world.journals))

    if not await world.until(whole, LIVELINESS_SECONDS):
        down = [machine.name for machine in world.machines if not machine.is_up]
        torn = [journal for journal in world.journals if not world.is_whole(journal)]
        report.anomalies.append(Anomaly("stuck", ", ".join(torn) or "-", f"not whole after healing; down: {down}"))
        return
    for journal in world.journals:
        for machine in world.machines:
            client = world.client("prover", machine, retry_timeout=LIVELINESS_SECONDS)
            until = world.loop.time() + LIVELINESS_SECONDS
            while True:
                operation = await workload.append("prover", client, journal, plain=True)
                if operation.outcome is OperationOutcome.OK or world.loop.time() > until:
                    break
                await asyncio.sleep(0.5)
            if operation.outcome is not OperationOutcome.OK:
                report.anomalies.append(
                    Anomaly("stuck", journal, f"after healing, through {machine.name}: {operation}")
                )
    # A head may count an append in flight that then fails. Only acknowledged content must be seen.
    acknowledged = [each for each in world.history.operations if each.kind is not OperationKind.HEAD]
    ends = {
        journal: max((each.end for each in acknowledged if each.journal == journal), default=0)
        for journal in world.journals
    }

    def read() -> bool:
        return all(position >= ends[journal] for (_, journal), position in workload.read_to.items())

    if not await world.until(read, LIVELINESS_SECONDS):
        report.anomalies.append(Anomaly("unseen", "all journals", f"readers got to {workload.read_to} of {ends}"))


async def _read_back(world: World, journal: str, report: RunReport) -> FinalJournal:
    """Read a journal's content and registers through a client, and its replicas' local content."""
    client = world.client("prover", world.rng.choice(world.machines), retry_timeout=60.0)
    content = bytearray()
    registers: pb.LabelSet | None = None
    try:
        async with asyncio.timeout(LIVELINESS_SECONDS):
            barrier = await _barrier(world, client, journal)
            registers = barrier.registers
            if barrier.end:
                async for chunk in client.read(
                    journal, 0, end_offset=barrier.end, block=True, direct=False, fail_on_jump=True
                ):
                    content += chunk.content
    except (CorantoError, TimeoutError) as error:
        at = f"at offset {len(content)}"
        report.anomalies.append(Anomaly("stuck", journal, f"cannot be read {at}: {type(error).__name__} {error}"))
    return FinalJournal(bytes(content), registers, list(audit.replica_contents(world, journal)))


async def _barrier(world: World, client: JournalClient, journal: str) -> AppendResult:
    """Append nothing, and repeat it if its outcome is unknown, as when a broker exits before its handover."""
    while True:
        try:
            return await client.append(journal, b"")
        except AppendOutcomeUnknown:
            await asyncio.sleep(0.5)


async def _end(world: World, finals: dict[str, FinalJournal], report: RunReport) -> None:
    """Shut down, and check the content on disks and in the store."""
    if world.options.stored_at_end:
        for machine in world.machines:
            machine.stays_down = True
            machine.stop_requested.set()
        ended = await world.until(lambda: not any(machine.is_up for machine in world.machines), 120.0)
        if not ended:
            report.anomalies.append(Anomaly("stuck", "all journals", "brokers do not end on request"))
    for machine in world.machines:
        machine.end()
    for journal, final in finals.items():
        final.fully_stored = world.options.stored_at_end
        final.fragments = [
            (stored.fragment, stored.data)
            for stored in world.store.objects.values()
            if stored.fragment.journal == journal
        ]
        _check_disks(world, journal, final, report)
    if world.options.stored_at_end and not report.anomalies:
        await _prove_replaceable(world, finals, report)


async def _prove_replaceable(world: World, finals: dict[str, FinalJournal], report: RunReport) -> None:
    """Check that brokers with empty disks continue after a graceful exit of all brokers, without an operator."""
    for machine in world.machines:
        machine.replace_disk()
        machine.stays_down = False
        machine.boot(world.rng.uniform(0, 0.3))
    world.loop.note("new disks")
    for journal, final in finals.items():
        client = world.client("successor", world.rng.choice(world.machines), retry_timeout=LIVELINESS_SECONDS)
        try:
            async with asyncio.timeout(LIVELINESS_SECONDS):
                barrier = await _barrier(world, client, journal)
        except (CorantoError, TimeoutError) as error:
            what = f"brokers with new disks do not continue: {type(error).__name__} {error}"
            report.anomalies.append(Anomaly("stuck", journal, what))
            continue
        if barrier.end != len(final.content):
            what = f"brokers with new disks continue at {barrier.end} of {len(final.content)}"
            report.anomalies.append(Anomaly("lost-write", journal, what))
        elif barrier.registers != final.registers:
            what = f"brokers with new disks have {barrier.registers}, not {final.registers}"
            report.anomalies.append(Anomaly("register-drift", journal, what))


def _check_disks(world: World, journal: str, final: FinalJournal, report: RunReport) -> None:
    """Check I13: disks and store together have all content, and the registers."""
    spans = [(fragment.begin, fragment.end) for fragment, _ in final.fragments]
    newest: tuple[int, pb.LabelSet] = (0, pb.LabelSet())
    for machine in world.machines:
        found = audit.recovered(world, machine, journal)
        seen = list(audit.disk_contents(machine, found))
        final.replicas += seen
        spans += [(each.offset, each.offset + len(each.content)) for each in seen]
        if found.spool.end > newest[0]:
            newest = found.spool.end, found.spool.registers
    covered = 0
    for begin, end in sorted(spans):
        if begin > covered:
            break
        covered = max(covered, end)
    if covered < len(final.content):
        report.anomalies.append(
            Anomaly("lost-write", journal, f"disks and store cover only [0, {covered}) of {len(final.content)}")
        )
    if newest[0] == len(final.content) and newest[0] and newest[1] != final.registers:
        report.anomalies.append(Anomaly("register-drift", journal, f"the disk's registers are {newest[1]}"))


def _note_resolutions(world: World, finals: dict[str, FinalJournal]) -> None:
    for operation in world.history.operations:
        if operation.outcome is OperationOutcome.INFO and operation.content:
            there = operation.content in finals[operation.journal].content
            world.coverage.sometimes(f"an unknown append was {'applied' if there else 'not applied'}")
