"""One run: boot, faults under load, recovery, the end of all programs, and a check of the segments' content."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coranto.errors import AppendOutcomeUnknown, CorantoError
from coranto.streams.control.lifecycle import Streams
from coranto.streams.model.events import BytesEvents, JsonEvents
from coranto.streams.model.stream import readers_journal, transactions_journal
from coranto.testing.sim.loop import simulated
from tests.simulation.broker import playing
from tests.simulation.broker.nemesis import Nemesis
from tests.simulation.broker.playing import Tell, play

from .anomalies import Anomaly
from .boundaries import Boundaries
from .checker import check, stands_of
from .follower import Follower, check_delivered
from .members import GROUP, Group, Keeper, Member
from .movers import Mover
from .options import Options, lost_answers_options_of, shared_options_of
from .segments import Segment, Unreadable, parse
from .several import Part, check_several
from .sharing import check_shared
from .workload import Operator, WriterHost
from .world import STREAM, StreamWorld

LIVELINESS_SECONDS = 200.0
"""The seconds after the last fault until every program must be done. Brokers need up to 150 (see their simulation)."""


@dataclass(slots=True)
class Report(playing.SeedReport[Options, Anomaly]):
    command = "python -m tests.simulation.streams"

    @property
    def flags(self) -> str:
        of = {" --groups": shared_options_of, " --lost-answers": lost_answers_options_of}
        return next((flag for flag, make in of.items() if make(self.options.seed) == self.options), "")


def run(options: Options, *, tell: Tell | None = None, prepare: Callable[[StreamWorld], None] | None = None) -> Report:
    """Run one simulation. `tell` is called with events as they happen. `prepare` may change the world beforehand."""
    report = Report(options)
    with simulated(options.seed, shuffle=options.shuffle) as loop:
        world = StreamWorld(loop, options)
        play(world, report, _run, tell=tell, prepare=prepare)
        report.anomalies += [Anomaly(*broken.split(": ", 1)) for broken in world.broken]
        for unit in world.units.units.values():
            report.outcomes[f"{'transaction' if unit.transaction else 'event'} {unit.outcome.value}"] += 1
    return report


async def _run(world: StreamWorld, report: Report) -> None:
    options = world.stream_options
    world.start()
    await world.until(lambda: all(machine.is_up for machine in world.machines), 30.0)
    streams = world.streams(world.journal_client("prover", retry_timeout=LIVELINESS_SECONDS))
    await streams.create(
        STREAM,
        options.segments,
        template=world.template(),
        content_type=(JsonEvents() if options.json_lines else BytesEvents()).content_type,
        max_writers=options.max_writers,
    )
    writers = [WriterHost(world, number, stable=number < options.stable) for number in range(options.writers)]
    followers = [Follower(world, number) for number in range(options.readers)]
    hosts: list[WriterHost | Follower | Mover | Member | Keeper] = [*writers, *followers]
    movers = [Mover(world, number) for number in range(options.movers)]
    group = await Group.of(world, options.members) if options.members else None
    hosts += [*movers, *(group.hosts if group is not None else ())]
    try:
        for host in hosts:
            host.boot(world.rng.uniform(0, 0.2))
        await _write(world, [*writers, *movers], report)
        if group is not None:
            group.calm()
        segments = await _segments(world, streams)
        await _judge(world, segments, writers, followers, group, report)
    except (Unreadable, CorantoError, TimeoutError) as error:
        name = "unreadable" if isinstance(error, Unreadable) else "stuck"
        report.anomalies.append(Anomaly(name, f"the stream cannot be read: {type(error).__name__} {error}"))
    finally:
        for host in hosts:
            host.end()


async def _write(world: StreamWorld, writers: list[WriterHost | Mover], report: Report) -> None:
    """Let the programs write, under faults, until they are done."""
    by_name = {host.name: host for host in writers}

    def strike(name: str, act: str) -> None:
        host = by_name[name]
        if act == "usurp" and isinstance(host, WriterHost):
            host.usurp()
        else:
            host.kill()

    def done() -> bool:
        return all(host.finished for host in writers)

    operator, nemesis, boundaries = Operator(world), Nemesis(world), Boundaries(world, strike)
    boundaries.start()
    if world.stream_options.scale_seconds:
        operator.boot(0.1)
    harm = asyncio.ensure_future(nemesis.run())
    await world.until(done, world.stream_options.seconds)
    harm.cancel()
    await asyncio.gather(harm, return_exceptions=True)
    nemesis.heal()
    boundaries.stop()
    operator.end()
    world.loop.note("healed")
    if not await world.until(done, LIVELINESS_SECONDS):
        left = {host.name: [unit.number for unit in host.left()][:5] for host in writers if not host.finished}
        report.anomalies.append(Anomaly("stuck", f"programs are not done after healing: {left}"))
    for host in writers:
        host.end()


async def _segments(world: StreamWorld, streams: Streams) -> list[Segment]:
    """Return the content of the stream once it is sealed, or once all started changes are finished."""
    options = world.stream_options
    async with asyncio.timeout(LIVELINESS_SECONDS):
        stream = await (streams.seal(STREAM) if options.sealed else streams.resume(STREAM))
        segments = []
        for segment in stream.segments.values():
            content = await _content(world, segment.journal)
            messages = parse(content, json_lines=options.json_lines)
            segments.append(
                Segment(
                    segment.number,
                    segment.range,
                    content,
                    segment.sealed_at,
                    messages,
                    segment.journal,
                    segment.predecessors,
                )
            )
    world.coverage.counts["segments"] += len(segments)
    return segments


async def _judge(
    world: StreamWorld,
    segments: list[Segment],
    writers: list[WriterHost],
    followers: list[Follower],
    group: Group | None,
    report: Report,
) -> None:
    several: dict[int, list[Part]] = {}
    if world.stream_options.movers:
        decisions = await _content(world, transactions_journal(STREAM))
        anomalies, several = check_several(world.units, segments, decisions, json_lines=world.stream_options.json_lines)
        report.anomalies += anomalies
        _note_ends(world, several)
    anomalies, places = check(world.units, segments, {host.name for host in writers if host.stable}, several)
    report.anomalies += anomalies
    if report.anomalies:
        return
    stands = stands_of(world.units, places, several)
    expected = sum(len(stand.indexes) for each in stands.values() for stand in each)
    await world.until(lambda: all(follower.events >= expected for follower in followers), LIVELINESS_SECONDS)
    lost = world.coverage.counts["a lease ran out"] > 0
    for follower in followers:
        report.anomalies += check_delivered(world.units, places, follower, may_see_uncommitted=lost, several=several)
    if group is not None:
        await world.until(lambda: len(group.notes.events) >= expected, LIVELINESS_SECONDS)
        if world.stream_options.sealed and not await world.until(group.is_finished, LIVELINESS_SECONDS):
            report.anomalies.append(Anomaly("stuck", "a reader group has not finished a sealed stream"))
        group.end()
        content = await _content(world, readers_journal(STREAM, GROUP))
        anomalies, ledger = check_shared(world.units, segments, stands, group.notes, content, may_see_uncommitted=lost)
        report.anomalies += anomalies
        group.cover(ledger)


def _note_ends(world: StreamWorld, several: Mapping[int, Sequence[Part]]) -> None:
    """Note the outcomes of transactions whose writers died during them."""
    for unit in world.units.units.values():
        if unit.keys and unit.attempts and unit.attempts[0].returned == math.inf:
            there = "committed" if unit.number in several else "dropped"
            world.coverage.sometimes(f"several keys: the writer died, and it was {there}")


async def _content(world: StreamWorld, journal: str) -> bytes:
    """Return a journal's content up to a barrier."""
    client = world.journal_client("prover", retry_timeout=LIVELINESS_SECONDS)
    while True:
        try:
            barrier = await client.append(journal, b"")
            break
        except AppendOutcomeUnknown:
            await asyncio.sleep(0.5)
    content = bytearray()
    # A broker that took over a sealed segment has no local content of it, but it knows the stored content.
    if end := max(barrier.end, await client.head(journal)):
        async for chunk in client.read(journal, 0, end_offset=end, block=True, direct=False, fail_on_jump=True):
            content += chunk.content
    return bytes(content)
