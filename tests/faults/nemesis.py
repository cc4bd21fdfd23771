"""The faults. Each is applied to a run under load, waits until it has an effect, and is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coranto.client import ClientConfig, JournalClient
from coranto.errors import ClusterError
from coranto.testing.histories import OperationOutcome
from tests.faults.cluster import BrokerNode
from tests.faults.links import ProxiedLink
from tests.faults.namespaces import Namespaces
from tests.faults.run import FaultRun
from tests.servers.processes import until

Fault = Callable[[FaultRun], Awaitable[None]]

_DELAY_SECONDS = 0.03
_DROPPED_PACKETS = 30
"""The number of packets, mostly retransmissions, that a cut drops before it ends."""
_POLL_SECONDS = 0.1


async def victim_of(run: FaultRun) -> BrokerNode:
    """Return the primary of a journal, so that the fault has an effect."""
    await run.whole()
    primary, *_ = run.cluster.members_of(run.rng.choice(run.journals))
    return primary


async def kill_and_restart(run: FaultRun) -> None:
    """Kill a broker (SIGKILL) and restart it immediately: it resumes its lease and its spools."""
    broker = await victim_of(run)
    await broker.kill()
    await broker.start()
    await run.workload.progress()


async def kill_for_long(run: FaultRun) -> None:
    """Kill a broker (SIGKILL) and restart it when others have taken over."""
    broker = await victim_of(run)
    await broker.kill()
    await broker.gone()
    await _taken_over(run, broker)
    await run.workload.progress()
    await broker.start()
    await run.workload.progress()


async def pause_briefly(run: FaultRun) -> None:
    """Pause a broker (SIGSTOP) and resume it (SIGCONT) within its lease."""
    broker = await victim_of(run)
    await broker.pause()
    await asyncio.sleep(min(1.0, run.options.lease_seconds / 4))
    broker.resume()
    broker.is_harmed = False
    await run.workload.progress()


async def pause_beyond_lease(run: FaultRun) -> None:
    """Pause a broker (SIGSTOP) and resume it when others have taken over: a zombie, which must exit."""
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
    """Cut two brokers off from each other: their common journals stall, and continue afterwards."""

    def cut(there: ProxiedLink, back: ProxiedLink) -> None:
        there.cut()
        back.cut()

    await _between_replicas(run, cut, lambda link: link.refused, 3, "the primary tries to reach its replica")


async def hold_brokers(run: FaultRun) -> None:
    """Hold traffic from the primary to a replica for a while."""
    await _between_replicas(run, lambda there, _: there.hold(), lambda link: link.held, 1, "the link holds traffic")


async def delay_brokers(run: FaultRun) -> None:
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
    """Cut a broker off from etcd until its lease has expired: it must exit, and others take over."""
    await _without_etcd(run, lambda broker: broker.to_etcd.cut())


async def hold_etcd(run: FaultRun) -> None:
    """Do what `cut_etcd` does, but keep the connections to etcd open and silent."""
    await _without_etcd(run, lambda broker: broker.to_etcd.hold())


async def drop_one_way(run: FaultRun) -> None:
    """Drop all packets from a primary to a replica, so that proposals are lost without a closed connection."""
    await _drop(run, both_ways=False)


async def drop_both_ways(run: FaultRun) -> None:
    """Drop all packets between a primary and a replica."""
    await _drop(run, both_ways=True)


async def isolate(run: FaultRun) -> None:
    """Drop all packets of a broker until others have taken over: it is then a zombie, and must exit."""
    broker, network = await victim_of(run), _network(run)
    await broker.seize()
    await network.isolate(broker.name)
    await broker.gone()
    await _taken_over(run, broker)
    await network.heal()
    await broker.ended()
    await broker.start()
    await run.workload.progress()


async def roll(run: FaultRun) -> None:
    """Stop every broker gracefully and restart it, one after the other."""
    for broker in run.cluster.brokers:
        if broker.is_wanted:
            await broker.stop()
            await broker.start()
            await run.whole()
            await run.workload.progress(5)


async def scale(run: FaultRun, up_to: int = 5) -> None:
    """Add brokers until there are `up_to`, and replicas to journals; then undo both."""
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


async def _without_etcd(run: FaultRun, harm: Callable[[BrokerNode], None]) -> None:
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
    run: FaultRun,
    harm: Callable[[ProxiedLink, ProxiedLink], None],
    felt: Callable[[ProxiedLink], int],
    times: int,
    what: str,
) -> None:
    """Apply a fault to the links between a primary and a replica until the primary's traffic was hit `times` times.

    `felt` counts the hits of a link.
    """
    journal, has_happened = run.journals[-1], False
    while not has_happened:
        await run.whole()
        primary, replica, *_ = members = run.cluster.members_of(journal)
        there, back = run.cluster.between(primary, replica)
        harm(there, back)
        goal = felt(there) + times
        # If a broker exits because the machine stalled, try again with the new members.
        await until(lambda: felt(there) >= goal or run.cluster.members_of(journal) != members, what)  # noqa: B023
        has_happened = felt(there) >= goal
        there.heal()
        back.heal()
    await run.workload.progress()


async def _drop(run: FaultRun, *, both_ways: bool) -> None:
    """Drop packets from a primary to a replica, and back with `both_ways`, until the kernel has dropped several."""
    journal, network, dropped = run.journals[-1], _network(run), 0
    while dropped < _DROPPED_PACKETS:
        await run.whole()
        primary, replica, *_ = members = run.cluster.members_of(journal)
        before = await network.dropped(replica.name)
        await network.cut(primary.name, replica.name)
        if both_ways:
            await network.cut(replica.name, primary.name)
        # If a broker exits because the machine stalled, try again with the new members.
        while dropped < _DROPPED_PACKETS and run.cluster.members_of(journal) == members:
            await asyncio.sleep(_POLL_SECONDS)
            dropped = await network.dropped(replica.name) - before
        await network.heal()
    await run.workload.progress()


def _network(run: FaultRun) -> Namespaces:
    if run.cluster.network is None:
        raise ClusterError("this fault needs brokers in network namespaces (--namespaces)")
    return run.cluster.network


async def _taken_over(run: FaultRun, lost: BrokerNode) -> None:
    """Wait until every journal accepts an append without the lost broker. Old clients may still wait for it."""
    others = [broker for broker in run.cluster.brokers if broker.is_wanted and broker is not lost]
    endpoint = ",".join(broker.own_endpoint for broker in others)
    async with JournalClient.of(ClientConfig(endpoint)) as client:
        for journal in run.journals:
            for _ in range(20):
                operation = await run.workload.append_plainly("successor", client, journal)
                if operation.outcome is OperationOutcome.OK:
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
"""The faults that do not change the number of brokers."""

NAMESPACE_FAULTS: tuple[Fault, ...] = (
    kill_and_restart,
    kill_for_long,
    pause_briefly,
    pause_beyond_lease,
    drop_one_way,
    drop_both_ways,
    isolate,
    hold_etcd,
    roll,
    scale,
)
"""The faults of brokers in network namespaces."""

EXPIRING = (kill_for_long, pause_beyond_lease, cut_etcd, hold_etcd)
"""The faults that wait for a lease to expire."""

LASTING = (*EXPIRING, roll)
"""The faults where journals continue without one broker, so that no journal may need all brokers."""
