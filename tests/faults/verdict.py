"""The verdict after faults: proof that the cluster works again, and the check of observations and final content."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coranto.audit import AuditStatus, JournalAudit, audit_journal
from coranto.client import ClientConfig, JournalClient
from coranto.errors import ClusterError, CorantoError
from coranto.fragments.stores import StoreRegistry
from coranto.testing.histories import Observation, OperationOutcome
from tests.faults.cluster import FaultyCluster
from tests.faults.workload import TIMEOUT_SECONDS, FaultWorkload
from tests.servers.processes import until
from tests.simulation.kit.checker import FinalJournal, check

_TRIES = 5
_PAUSE_SECONDS = 0.25


@dataclass(slots=True)
class FaultVerdict:
    """The result of a run. `problems` is empty if the run was sound."""

    problems: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    contents: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        lengths = ", ".join(f"{journal} {len(content)} bytes" for journal, content in sorted(self.contents.items()))
        return "\n".join([f"{counted}; {lengths}", *(f"  {problem}" for problem in self.problems)])


async def conclude(
    cluster: FaultyCluster, workload: FaultWorkload, journals: Sequence[str], stores: StoreRegistry, store: str
) -> FaultVerdict:
    """Heal the cluster, prove that it works, end the workload, and return the verdict.

    The journals are in the store at the URL `store`.
    """
    verdict = FaultVerdict()
    try:
        await _heal(cluster, journals)
        await _prove_alive(cluster, workload, journals)
        await workload.finish_writing()
        await _catch_up(cluster, workload, journals)
    except CorantoError as error:
        verdict.problems.append(f"does not work after healing: {error}")
    finally:
        await workload.stop()
    verdict.problems += workload.problems
    verdict.outcomes.update(f"{each.kind.value} {each.outcome.value}" for each in workload.history.operations)
    finals = {}
    for journal in journals:
        try:
            finals[journal], problems = await _final(cluster, journal, stores, store)
            verdict.problems += problems
        except CorantoError as error:
            verdict.problems.append(f"{journal} cannot be read back: {error}")
    # A paused or disconnected replica may lag behind until it detects that, so heads may be stale.
    verdict.problems += map(str, check(workload.history, finals, fresh_heads=False))
    verdict.contents = {journal: final.content for journal, final in finals.items()}
    return verdict


async def _heal(cluster: FaultyCluster, journals: Sequence[str]) -> None:
    cluster.heal()
    if cluster.network is not None:
        await cluster.network.heal()
    loop = asyncio.get_running_loop()
    end = loop.time() + TIMEOUT_SECONDS
    while True:
        for broker in cluster.brokers:
            # A broker without its lease exits. A new broker joins soon.
            if broker.is_wanted and broker.is_running and not broker.is_member:
                await until(lambda: broker.is_member or not broker.is_running, f"{broker.name} ends or joins")  # noqa: B023
            if broker.is_wanted and not broker.is_running:
                await broker.start()
        if all(map(cluster.ground.is_whole, journals)):
            return
        if loop.time() > end:
            raise ClusterError(f"journals are not whole; {cluster.state_of(journals)}")
        await asyncio.sleep(0.05)


async def _prove_alive(cluster: FaultyCluster, workload: FaultWorkload, journals: Sequence[str]) -> None:
    """Prove that every journal accepts appends through every single broker. Raises ClusterError if one does not."""
    for broker in cluster.brokers:
        if not broker.is_wanted:
            continue
        config = ClientConfig(broker.own_endpoint, retry_timeout=TIMEOUT_SECONDS, route_cache=0)
        async with JournalClient.of(config) as client:
            for journal in journals:
                for _ in range(_TRIES):
                    operation = await workload.append_plainly(f"prover of {broker.name}", client, journal)
                    if operation.outcome is not OperationOutcome.INFO:
                        break  # INFO: the called broker or the primary exited, so try again.
                if operation.outcome is not OperationOutcome.OK:
                    raise ClusterError(f"{broker.name} takes no appends: {operation}")


async def _catch_up(cluster: FaultyCluster, workload: FaultWorkload, journals: Sequence[str]) -> None:
    """Wait until every reader has reached the write heads."""
    async with JournalClient.of(ClientConfig(cluster.endpoint, retry_timeout=TIMEOUT_SECONDS)) as client:
        heads = {journal: await client.head(journal) for journal in journals}

    def caught_up() -> bool:
        return all(offset >= heads[journal] for (_, journal), offset in workload.read_to.items())

    await until(caught_up, f"readers are at {heads}, but {workload.read_to}")


async def _final(
    cluster: FaultyCluster, journal: str, stores: StoreRegistry, store: str
) -> tuple[FinalJournal, list[str]]:
    """Return a journal's final content and problems, collected while none of its brokers was replaced.

    It tries again if one was: on a stalled machine, a broker may lose its lease at any time.
    """
    for _ in range(_TRIES):
        await _heal(cluster, [journal])
        before = cluster.processes_of(journal)
        try:
            found = await _collect(cluster, journal, stores, store)
        except CorantoError:
            if cluster.processes_of(journal) == before:
                raise
            continue
        if cluster.processes_of(journal) == before:
            return found
    raise ClusterError(f"its brokers never stayed; {cluster.state_of([journal])}")


async def _collect(
    cluster: FaultyCluster, journal: str, stores: StoreRegistry, store: str
) -> tuple[FinalJournal, list[str]]:
    """Return a journal's content as its primary, each replica and the store have it, and the problems found."""
    primary, *_ = members = cluster.members_of(journal)
    final, problems = FinalJournal(b""), list[str]()
    contents: dict[str, bytes] = {}
    for broker in members:
        config = ClientConfig(broker.own_endpoint, retry_timeout=TIMEOUT_SECONDS, route_cache=0)
        async with JournalClient.of(config) as client:
            contents[broker.name] = await _content(client, journal, direct=False)
            if broker is primary:
                final.content = contents[broker.name]
                final.registers = (await client.append(journal, b"")).registers
                final.replicas.append(Observation("a direct reader", journal, 0, await _content(client, journal), 0.0))
                problems += (await settled_audit(client, stores, journal, TIMEOUT_SECONDS)).problems
    final.replicas += [Observation(name, journal, 0, content, 0.0) for name, content in contents.items()]
    for name, content in contents.items():
        if len(content) != len(final.content):
            problems.append(f"{name} has {len(content)} bytes of {journal}, its primary {len(final.content)}")
    opened = stores.get(store)
    final.fragments = [(each, await opened.get(each)) async for each in opened.list(journal)]
    return final, problems


async def settled_audit(
    client: JournalClient, stores: StoreRegistry, journal: str, timeout_seconds: float
) -> JournalAudit:
    """Audit a journal, repeatedly while its only problems are gaps, for at most `timeout_seconds`.

    A new replica knows fragments that exiting brokers have stored only after its next listing of the stores. Reads do
    not wait for that, because they use its peers. Lost content remains a gap.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_seconds
    while True:
        audit = await audit_journal(client, stores, journal, first_offset=0)
        only_gaps = bool(audit.gaps) and all(each.status is AuditStatus.OK for each in audit.fragments)
        if not only_gaps or loop.time() > end:
            return audit
        await asyncio.sleep(_PAUSE_SECONDS)


async def _content(client: JournalClient, journal: str, *, direct: bool = True) -> bytes:
    return b"".join([chunk.content async for chunk in client.read(journal, direct=direct, fail_on_jump=True)])
