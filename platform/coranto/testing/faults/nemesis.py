"""The faults. Each happens to a run under load, is seen to have its effect, and is made good again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coranto.client import ClientConfig, JournalClient
from coranto.errors import ClusterError
from coranto.testing.faults.cluster import Broker
from coranto.testing.faults.links import Link
from coranto.testing.faults.run import FaultRun
from coranto.testing.laboratory.processes import until
from coranto.testing.sim.history import Outcome

Fault = Callable[[FaultRun], Awaitable[None]]

_DELAY_SECONDS = 0.03


async def victim_of(run: FaultRun) -> Broker:
    """The primary of a journal, so that it is missed."""
    await run.whole()
    primary, *_ = run.cluster.members_of(run.rng.choice(run.journals))
    return primary


async def kill_and_restart(run: FaultRun) -> None:
    """SIGKILL, and a new process at once, which takes up its lease and its spools."""
    broker = await victim_of(run)
    await broker.kill()
    await broker.start()
    await run.workload.progress()


async def kill_for_long(run: FaultRun) -> None:
    """SIGKILL, and a new process when others have long taken over."""
    broker = await victim_of(run)
    await broker.kill()
    await broker.gone()
    await _taken_over(run, broker)
    await run.workload.progress()
    await broker.start()
    await run.workload.progress()


async def pause_briefly(run: FaultRun) -> None:
    """SIGSTOP, and SIGCONT within the lease."""
    broker = await victim_of(run)
    await broker.pause()
    await asyncio.sleep(min(1.0, run.options.lease_seconds / 4))
    broker.resume()
    broker.is_harmed = False
    await run.workload.progress()


async def pause_beyond_lease(run: FaultRun) -> None:
    """SIGSTOP, and SIGCONT when others have taken over and gone on: a zombie, which has to end by itself."""
    broker = await victim_of(run)
    await broker.pause()
    await broker.gone()
    await _taken_over(run, broker)
    broker.resume()
    await broker.ended()
    await run.workload.progress()
    await broker.start()
    await run.workload.progress()


async def cut_brokers(run: FaultRun) -> None:
    """Two brokers cannot reach one another: what both have a replica of waits, and goes on afterwards."""

    def cut(there: Link, back: Link) -> None:
        there.cut()
        back.cut()

    await _between_replicas(run, cut, lambda link: link.refused, 3, "the primary tries to reach its replica")


async def hold_brokers(run: FaultRun) -> None:
    """What the primary sends to a replica does not arrive, for a while."""
    await _between_replicas(run, lambda there, _: there.hold(), lambda link: link.held, 1, "something is held up")


async def delay_brokers(run: FaultRun) -> None:
    """All that brokers send one another takes its time."""
    links = [
        link
        for one in run.cluster.brokers
        for other in run.cluster.brokers
        if one is not other
        for link in run.cluster.between(one, other)
    ]
    for link in links:
        link.delay(_DELAY_SECONDS)
    await run.workload.progress()
    for link in links:
        link.heal()
    await run.workload.progress()


async def cut_etcd(run: FaultRun) -> None:
    """A broker loses etcd beyond its lease: it has to end by itself, and others take over."""
    await _without_etcd(run, lambda broker: broker.to_etcd.cut())


async def hold_etcd(run: FaultRun) -> None:
    """As `cut_etcd`, but its connections stand and say nothing."""
    await _without_etcd(run, lambda broker: broker.to_etcd.hold())


async def roll(run: FaultRun) -> None:
    """Every broker is stopped politely and started anew, one after the other."""
    for broker in run.cluster.brokers:
        if broker.is_wanted:
            await broker.stop()
            await broker.start()
            await run.whole()
            await run.workload.progress(5)


async def scale(run: FaultRun, up_to: int = 5) -> None:
    """Brokers join until there are `up_to`, journals get more replicas; then all of it back."""
    before = sum(broker.is_wanted for broker in run.cluster.brokers)
    replications = dict(zip(run.journals, run.options.replications, strict=True))
    joined = [run.cluster.add() for _ in range(up_to - before)]
    await asyncio.gather(*(broker.start() for broker in joined))
    await run.replicate(dict.fromkeys(run.journals, min(3, up_to)))
    await run.workload.progress()
    await run.replicate(replications)
    for broker in reversed(joined):
        await broker.stop()
    await run.whole()
    await run.workload.progress()


async def _without_etcd(run: FaultRun, harm: Callable[[Broker], None]) -> None:
    broker = await victim_of(run)
    await broker.seize()
    harm(broker)
    await broker.gone()
    await broker.ended()
    await run.workload.progress()
    broker.to_etcd.heal()
    await broker.start()
    await run.workload.progress()


async def _between_replicas(
    run: FaultRun, harm: Callable[[Link, Link], None], felt: Callable[[Link], int], times: int, what: str
) -> None:
    """Harm the links from a primary to a replica and back, until that was felt so often by what the primary sends."""
    journal, has_happened = run.journals[-1], False
    while not has_happened:
        await run.whole()
        primary, replica, *_ = members = run.cluster.members_of(journal)
        there, back = run.cluster.between(primary, replica)
        harm(there, back)
        goal = felt(there) + times
        # One that ends by itself, on a machine that stands still, leaves another pair.
        await until(lambda: felt(there) >= goal or run.cluster.members_of(journal) != members, what)  # noqa: B023
        has_happened = felt(there) >= goal
        there.heal()
        back.heal()
    await run.workload.progress()


async def _taken_over(run: FaultRun, lost: Broker) -> None:
    """Return once every journal took an append without the broker that was lost. Old clients may still wait for it."""
    others = [broker for broker in run.cluster.brokers if broker.is_wanted and broker is not lost]
    endpoint = ",".join(broker.own_endpoint for broker in others)
    async with JournalClient.of(ClientConfig(endpoint)) as client:
        for journal in run.journals:
            for _ in range(20):
                operation = await run.workload.append_plainly("successor", client, journal)
                if operation.outcome is Outcome.OK:
                    break
            else:
                raise ClusterError(f"{journal} was not taken over from {lost.name}: {operation}")


FAULTS: tuple[Fault, ...] = (
    kill_and_restart,
    kill_for_long,
    pause_briefly,
    pause_beyond_lease,
    cut_brokers,
    hold_brokers,
    delay_brokers,
    cut_etcd,
    hold_etcd,
    roll,
)
"""Faults that leave as many brokers as there were."""

EXPIRING = (kill_for_long, pause_beyond_lease, cut_etcd, hold_etcd)
"""Those that wait for a lease to run out."""

LASTING = (*EXPIRING, roll)
"""Those in which journals go on while a broker is gone, so that none may need all of them."""
