"""Gather the status of a cluster: ask brokers, etcd, stores and sections concurrently, each with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from coranto import labels
from coranto.checkup import etcd as etcd_checks
from coranto.checkup.brokers import advice_for
from coranto.checkup.results import Condition, Examination, absent, problem
from coranto.checkup.status.brokers import (
    AnnouncedBroker,
    BrokerAnswer,
    announced_brokers,
    ask_brokers,
    distinct,
    judge_exits,
    judge_versions,
    list_journals,
)
from coranto.checkup.status.journals import (
    examinations_of,
    head_by_route,
    judge,
    places_of,
    primary_of,
    silent_brokers,
)
from coranto.checkup.status.sections import Section, SectionResult, StatusContext
from coranto.checkup.status.stores import last_audits, probe_stores, stores_of
from coranto.checkup.status.values import AuditState, BrokerState, ClusterSnapshot, ConsumerState, StatusReport
from coranto.client import ClientConfig, JournalClient, JournalInfo, Listing
from coranto.client.heads import JournalHead
from coranto.cluster.embedded import DEFAULT_PREFIX
from coranto.errors import CorantoError
from coranto.fragments.stores import StoreRegistry
from coranto.security.tls import ClientTls

STORE_SECONDS: Final = 60.0
"""The time between probes of stores in repeated reports, because a probe writes a file."""


_MOVED: Final = 500
"""The maximum number of journals that are queried by name."""


@dataclass(frozen=True, slots=True)
class StatusTarget:
    """The cluster to examine. `endpoints` are brokers in addition to the endpoints of `config`."""

    config: ClientConfig
    endpoints: Sequence[str] = ()
    etcd: str = ""
    etcd_tls: ClientTls | None = None
    etcd_prefix: str = DEFAULT_PREFIX
    consumers: Sequence[str] = ()
    timeout: float = 5.0


@dataclass(slots=True)
class _Stores:
    """The last results about stores."""

    at: float = float("-inf")
    health: list[Examination] = field(default_factory=list)
    audits: list[AuditState] = field(default_factory=list)


class StatusGatherer:
    """Reports the status of one cluster, once or repeatedly."""

    def __init__(
        self,
        target: StatusTarget,
        sections: Sequence[Section] = (),
        failures: Sequence[Examination] = (),
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target
        self._sections, self._failures = sections, failures
        self._wall, self._monotonic = wall, monotonic
        self._registry = StoreRegistry(target.config.file_root)
        self._stores = _Stores()

    async def report(self) -> StatusReport:
        """Examine the cluster. Its faults are part of the result; raises InvalidInput for settings that are wrong."""
        target, at, begun = self._target, self._wall(), self._monotonic()
        about_etcd = asyncio.ensure_future(self._etcd())
        try:
            announced = await self._announced()
            endpoints = (each.endpoint for each in announced)
            known = distinct([*target.config.seeds, *target.endpoints, *endpoints])
            found, journals, lister = await self._journals(known)
            config = dataclasses.replace(target.config, endpoint=lister, retry_timeout=target.timeout / 2)
            async with JournalClient.of(config) as client:
                stores = asyncio.ensure_future(self._about_stores(client, journals))
                try:
                    answers = await ask_brokers(
                        target.config, distinct([*known, *_endpoints_of(journals)]), target.timeout
                    )
                    answered = {each.state.name for each in answers if each.state.name}
                    silent = silent_brokers(
                        journals, answered, {each.state.endpoint for each in answers if not each.state.problem}
                    )
                    heads = await _heads_of(client, journals, answers, silent)
                    results = await self._about_consumers(client, journals, heads)
                    await stores
                finally:
                    stores.cancel()
            etcd = await about_etcd
        finally:
            about_etcd.cancel()
        states = tuple(answer.state for answer in answers)
        examinations = [each for answer in answers for each in answer.examinations]
        examinations += judge_versions(states, importlib.metadata.version("coranto"))
        examinations += judge_exits(announced)
        examinations += [*etcd, *self._failures]
        if isinstance(found, Examination):
            examinations.append(found)
        problems = judge(journals, heads, silent, at)
        examinations += examinations_of(problems)
        examinations += self._stores.health
        consumers: list[ConsumerState] = []
        for result in results:
            consumers += result.consumers
            examinations += result.examinations
        snapshot = None
        if isinstance(found, Listing):
            bad = tuple(each.subject for each in examinations if each.condition is Condition.PROBLEM)
            snapshot = _snapshot(at, found, states, bad, announced)
        return StatusReport(
            at,
            self._monotonic() - begun,
            snapshot,
            states,
            tuple(examinations),
            len(journals),
            sum(info.is_asleep for info in journals),
            tuple(problems),
            tuple(sorted(consumers, key=lambda each: (-(each.behind or 0), each.name))),
            tuple(self._stores.audits),
        )

    async def _etcd(self) -> list[Examination]:
        target = self._target
        if not target.etcd:
            return [absent("etcd", "not named", "give --etcd host:port to examine it")]
        work = asyncio.to_thread(etcd_checks.etcd, target.etcd, target.etcd_tls)
        try:
            return await asyncio.wait_for(work, target.timeout)
        except TimeoutError:
            found = f"{target.etcd} did not answer all questions within {target.timeout:g} s"
            return [problem("etcd", found, "see etcd's log: is there a leader, and is its disk fast?")]

    async def _announced(self) -> list[AnnouncedBroker]:
        target = self._target
        if not target.etcd:
            return []
        return await announced_brokers(target.etcd, target.etcd_tls, target.etcd_prefix, target.timeout / 2)

    async def _journals(self, endpoints: Sequence[str]) -> tuple[Listing | Examination, Sequence[JournalInfo], str]:
        """Return the listing or a problem, its journals, and the endpoint that answered (else the first one)."""
        try:
            endpoint, listing = await list_journals(self._target.config, endpoints, self._target.timeout)
        except CorantoError as error:
            return problem("journals", f"no broker lists them: {error}", advice_for(error)), (), endpoints[0]
        return listing, listing.journals, endpoint

    async def _about_stores(self, client: JournalClient, journals: Sequence[JournalInfo]) -> None:
        if self._monotonic() - self._stores.at < STORE_SECONDS or not journals:
            return
        stores, timeout = stores_of(journals), self._target.timeout
        health, (audits, unknown) = await asyncio.gather(
            probe_stores(client, stores, timeout), last_audits(self._registry, stores, timeout)
        )
        # After a failure, the next report probes again.
        fails = any(each.condition is Condition.PROBLEM for each in health)
        self._stores = _Stores(float("-inf") if fails else self._monotonic(), [*health, *unknown], audits)

    async def _about_consumers(
        self, client: JournalClient, journals: Sequence[JournalInfo], heads: Mapping[str, JournalHead]
    ) -> list[SectionResult]:
        target = self._target
        context = StatusContext(
            client,
            {info.name: info for info in journals},
            heads,
            target.etcd,
            target.consumers,
            target.timeout,
        )

        async def one(work: Awaitable[SectionResult]) -> SectionResult:
            try:
                async with asyncio.timeout(2 * target.timeout):
                    return await work
            except TimeoutError:
                found = f"did not answer within {2 * target.timeout:g} s"
                return SectionResult((), [problem("consumers", found, "look at each with `coranto consumer lag NAME`")])
            except (CorantoError, OSError) as error:
                return SectionResult((), [problem("consumers", str(error), "correct the setting that the error names")])

        return await asyncio.gather(*(one(section(context)) for section in self._sections))


def _endpoints_of(journals: Sequence[JournalInfo]) -> Iterator[str]:
    yield from dict.fromkeys(each for info in journals for each in info.route.endpoints if each)


async def _heads_of(
    client: JournalClient, journals: Sequence[JournalInfo], answers: Sequence[BrokerAnswer], silent: Set[str]
) -> dict[str, JournalHead]:
    """Return the heads that brokers reported. Journals whose primary moved since the listing are queried by name."""
    found = {head.journal: head for answer in answers for head in answer.heads}
    lacking = {answer.state.endpoint for answer in answers if not answer.state.name and not answer.state.problem}
    moved = []
    for info in journals:
        if info.name in found or info.is_asleep or info.primary < 0:
            continue
        if info.route.endpoints[info.primary] in lacking:
            found[info.name] = head_by_route(info)
        elif primary_of(info) not in silent:
            moved.append((labels.NAME, info.name))
    if moved:
        with contextlib.suppress(CorantoError):  # Then they have no primary in the report.
            selector = labels.label_selector(include=moved[:_MOVED])
            found.update((await client.heads(selector)).by_name)
    return found


def _snapshot(
    at: float,
    listing: Listing,
    brokers: Sequence[BrokerState],
    problems: tuple[str, ...],
    announced: Sequence[AnnouncedBroker],
) -> ClusterSnapshot:
    etcd = listing.header.etcd
    return ClusterSnapshot(
        at,
        f"{etcd.cluster_id:016x}",
        etcd.revision,
        etcd.raft_term,
        {each.name: each.version for each in brokers if each.name},
        places_of(listing.journals),
        problems,
        {each.name: each.revision for each in announced if not each.exiting},
    )
