"""Gather the current state of journals from brokers and stores, without reading content."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coranto.audit.clocks import CorrectedClock, seconds_ahead
from coranto.audit.gathered_journal import GatheredJournal
from coranto.client import JournalClient
from coranto.client.heads import Heads, JournalHead
from coranto.client.values import JournalInfo
from coranto.effects import Clock
from coranto.errors import CorantoError, InvalidInput, StoreError
from coranto.fragments.forks import folders_of, without_expired_shares
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.telemetry import ProgressReport
from coranto.wire import protocol_pb2 as pb

CONCURRENCY: Final = 16
"""Number of journals examined concurrently."""
_ATTEMPTS: Final = 6
_PAUSE_SECONDS: Final = 0.1


@dataclass(slots=True)
class Gathered:
    """The current state of the selected journals, and the cluster's id in hexadecimal.

    `clock` dates the state: the audit's own clock was `ahead` seconds ahead of it (`coranto.audit.clocks`). If
    nothing is selected, `stores` are the URLs of all journals' stores, which earlier selected journals may have used.
    `others` are the journals that the token covers but the selector does not match.
    """

    cluster: str
    clock: Clock
    ahead: float = 0.0
    journals: list[GatheredJournal] = field(default_factory=list)
    stores: Sequence[str] = ()
    others: Sequence[JournalInfo] = ()


async def gather(
    client: JournalClient,
    stores: StoreRegistry,
    selector: str,
    clock: Clock,
    progress: ProgressReport | None = None,
) -> Gathered:
    """Gather the current state of the journals that a selector matches. Raises the client's errors.

    `progress` counts journals. A `clock` that differs from the brokers' clock is corrected.
    """
    asked = clock.now()
    heads = await client.heads(selector)
    ahead = seconds_ahead(asked, clock.now(), heads.broker_time)
    if ahead:
        clock = CorrectedClock(clock, ahead)
    listing = await client.list(selector)
    everything = listing if not selector else await client.list("")
    names = everything.names
    gate = asyncio.Semaphore(CONCURRENCY)
    cluster = f"{listing.header.etcd.cluster_id:x}"

    if progress is not None:
        progress.expect(len(listing.journals))

    async def one(info: JournalInfo) -> GatheredJournal:
        async with gate:
            present = await gather_journal(client, stores, info, _head(heads, info), cluster, names, clock)
            if progress is not None:
                progress.advance()
            return present

    journals = list(await asyncio.gather(*(one(info) for info in listing.journals)))
    urls = {url for info in everything.journals for url in info.spec.fragment.stores}
    selected = set(listing.names)
    others = [info for info in everything.journals if info.name not in selected]
    return Gathered(cluster, clock, ahead, journals, sorted(urls) if not journals else (), others)


def _head(heads: Heads, info: JournalInfo) -> JournalHead:
    head = heads.by_name.get(info.name)
    if head is not None and head.create_revision == info.create_revision:
        return head
    problem = "it was created a moment ago" if head is None else "it was deleted and created again a moment ago"
    return JournalHead(info.name, pb.NOT_JOURNAL_BROKER, problem, info.create_revision)


async def gather_journal(
    client: JournalClient,
    stores: StoreRegistry,
    info: JournalInfo,
    head: JournalHead,
    cluster: str,
    names: Sequence[str],
    clock: Clock,
) -> GatheredJournal:
    """Return the current state of one journal. `names` are all journals, sorted.
    Files of nested journals are not its own.
    """
    objects: list[Fragment] = []
    unreadable: list[tuple[str, str]] = []
    unlisted: list[tuple[str, str]] = []
    # The stores are listed first, so that fragments persisted in the meantime do not seem unknown to the index.
    for url in info.spec.fragment.stores:
        try:
            for folder in folders_of(info.spec):
                below = _below(names, folder.journal)
                listing = await stores.get(url).listing(folder.journal, lambda below=below: below)  # type: ignore[misc]
                objects += filter(folder.contains, listing.fragments)
                if folder.journal == info.name:
                    unreadable += [(path, reason) for path, reason in listing.unreadable if ".partial-" not in path]
        except (StoreError, InvalidInput) as error:
            unlisted.append((url, str(error)))
    objects = without_expired_shares(info.spec, objects, clock.now())
    index: list[Fragment] = []
    problem = ""
    if head.status == pb.OK:
        try:
            index = await _index(client, info.name, head.head, clock)
        except CorantoError as error:
            problem = str(error)
    gone: list[Fragment] = []
    listed = {(each.backing_store, each.content_path) for each in objects}
    broken = {url for url, _ in unlisted}
    for each in index:
        if not each.backing_store or each.backing_store in broken:
            continue
        if (each.backing_store, each.content_path) in listed:
            continue
        try:
            store = stores.get(each.backing_store)
            (objects if await store.exists(each) else gone).append(each)  # It may have been stored a moment ago.
        except (StoreError, InvalidInput) as error:
            unlisted.append((each.backing_store, str(error)))
            broken.add(each.backing_store)
    return GatheredJournal(
        info, head, clock.now(), cluster, objects, index, gone, unreadable, unlisted, problem=problem
    )


def _below(names: Sequence[str], journal: str) -> Sequence[str]:
    """Return the names that begin with `journal` and a slash. `names` are sorted."""
    return names[bisect_left(names, f"{journal}/") : bisect_left(names, f"{journal}0")]  # "0" follows "/".


async def _index(client: JournalClient, journal: str, head: int, clock: Clock) -> list[Fragment]:
    """Return the fragments that brokers list. Retry briefly until they reach `head`, which was read before.

    A replica learns the end of readable content later than the primary.
    """
    for attempt in range(_ATTEMPTS):
        index = [each.fragment for each in await client.fragments(journal)]
        if max((each.end for each in index), default=0) >= head:
            break
        if attempt == 0:
            await client.head(journal)  # The answer has the route, so the primary is asked next.
        else:
            await clock.sleep(_PAUSE_SECONDS * attempt)
    return index
