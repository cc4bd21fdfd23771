"""The consumers' part of `coranto status`: shards of consumer processes, and checkpoints in stores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from coranto import labels
from coranto.checkup.results import Examination, problem
from coranto.checkup.status.etcd_members import ask_members
from coranto.checkup.status.sections import SectionResult, StatusContext
from coranto.checkup.status.values import ConsumerState
from coranto.client import ClientConfig
from coranto.client.config import parse_endpoint
from coranto.client.heads import JournalHead
from coranto.cluster.etcd_server import etcd_tls
from coranto.errors import CorantoError, CorruptData, InvalidInput
from coranto.offsets import JournalOffset
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.positions.lag import JournalLag, lag_of_head, selector_of
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.discovery import CONSUMERS_PREFIX, announced
from coranto_consumers.runtime.specs import most_advanced
from coranto_consumers.stores.reading import consumer_names, display_name, read_checkpoint

MAX_CONSUMERS: Final = 500
"""The maximum number of shards of one process, and of consumers of one store, whose lag is reported."""
_CONCURRENCY: Final = 32
_PROCESS_SCHEMES: Final = ("http://", "https://", "unix://")
_VARIABLES: Final = ("CORANTO_CONSUMER", "CORANTO_STORE_URL")


async def consumers(context: StatusContext) -> SectionResult:
    """Return the lag of consumers, and a problem for each consumer that does not work."""
    named = list(context.consumers or filter(None, map(os.environ.get, _VARIABLES)))
    works = {each: _of_store(context, each) if _is_store(each) else _of_process(context, [each]) for each in named}
    if not context.consumers and context.etcd:
        known = {parse_endpoint(each).address for each in named if not _is_store(each)}
        for each in await _announced(context):
            if known.isdisjoint(parse_endpoint(endpoint).address for endpoint in each):
                works[", ".join(each)] = _of_process(context, each)
    results = await asyncio.gather(*(_within(context.timeout, where, work) for where, work in works.items()))
    states = [state for result in results for state in result.consumers]
    return SectionResult(states, [each for result in results for each in result.examinations])


async def _within(timeout: float, where: str, work: Awaitable[SectionResult]) -> SectionResult:
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError:
        shown = display_name(where) if _is_store(where) else where
        found = f"did not answer within {timeout:g} s"
        return SectionResult((), [problem(f"consumer {shown}", found, "is it overloaded, or cut off from here?")])
    except InvalidInput as error:
        return SectionResult((), [problem("consumers", str(error), "correct --consumer")])


def _is_store(where: str) -> bool:
    return "://" in where and not where.startswith(_PROCESS_SCHEMES)


async def _announced(context: StatusContext) -> list[Sequence[str]]:
    try:
        found = await ask_members(context.etcd, etcd_tls(os.environ), context.timeout / 2, announced)
        return list(found.values())
    except DecodeError as error:
        raise CorruptData(f"etcd's keys below {CONSUMERS_PREFIX} are not consumers' processes: {error}") from error


async def _of_process(context: StatusContext, endpoints: Sequence[str]) -> SectionResult:
    """Return the shards of a consumer, from the first of its processes that answers."""
    failure: CorantoError | None = None
    for endpoint in endpoints:
        config = ClientConfig.from_environment(endpoint, retry_timeout=context.timeout / 2)
        try:
            async with ShardClient(config) as client:
                shards = [each for each in await client.list() if not each.spec.disable][:MAX_CONSUMERS]
                gate = asyncio.Semaphore(_CONCURRENCY)
                states = await asyncio.gather(*(_shard(context, client, each, gate) for each in shards))
        except CorantoError as error:
            failure = error
            continue
        return SectionResult(states, list(_judged(states)))
    advice = "is the process up? See its log, and `coranto shards list`"
    return SectionResult((), [problem(f"consumer {', '.join(endpoints)}", str(failure), advice)])


async def _shard(
    context: StatusContext, client: ShardClient, shard: pc.ListResponse.Shard, gate: asyncio.Semaphore
) -> ConsumerState:
    name, home, status = shard.spec.id, client.config.endpoint, most_advanced(shard.status)
    if status.code != pc.ReplicaStatus.PRIMARY:
        reason = f": {status.errors[0]}" if status.errors else ""
        word = pc.ReplicaStatus.Code.Name(status.code).lower()
        return ConsumerState(name, home, None, problem=f"no process reads for it; its status is {word}{reason}")
    try:
        async with gate:
            stat = await client.stat(name)
    except CorantoError as error:
        return ConsumerState(name, home, None, problem=f"its primary does not report its progress: {error}")
    offsets = {
        journal: JournalOffset(read_through, stat.journal_ids.get(journal, ""))
        for journal, read_through in stat.read_through.items()
    }
    return _state(context, name, home, offsets, [source.journal for source in shard.spec.sources])


async def _of_store(context: StatusContext, store: str) -> SectionResult:
    home = display_name(store)
    try:
        names = (await asyncio.to_thread(consumer_names, store))[:MAX_CONSUMERS]
        gate = asyncio.Semaphore(_CONCURRENCY)

        async def one(name: str) -> ConsumerState | None:
            async with gate:
                try:
                    found = await asyncio.to_thread(read_checkpoint, store, name)
                except InvalidInput:
                    return None  # A retired consumer never reads again.
                except CorruptData as error:
                    return ConsumerState(name, home, None, problem=str(error))
            if found is None:
                return None
            checkpoint = found.checkpoint
            journals = {*checkpoint.offsets, *_selected(context, selector_of(checkpoint.identity.sources))}
            return _state(context, name, home, checkpoint.offsets, journals)

        states = [each for each in await asyncio.gather(*map(one, names)) if each is not None]
    except CorantoError as error:
        advice = "correct the URL, or the store's credentials in it"
        return SectionResult((), [problem(f"consumers in {home}", str(error), advice)])
    return SectionResult(states, list(_judged(states)))


def _selected(context: StatusContext, sources: str) -> Iterator[str]:
    if sources:
        matches = labels.matcher(labels.parse_selector(sources))
        for name, info in context.journals.items():
            if matches(labels.with_meta(name, info.spec.labels)):
                yield name


def _state(
    context: StatusContext, name: str, home: str, offsets: Mapping[str, int], journals: Iterable[str]
) -> ConsumerState:
    if not context.journals:
        return ConsumerState(name, home, None)  # No broker listed journals, which is reported separately.
    found = {each: _head(context, each) for each in sorted(journals)}
    silent = {journal for journal, head in found.items() if head is not None and not head.known}
    lags = [lag_of_head(each, offsets.get(each), head) for each, head in found.items() if each not in silent]
    known = [each for each in lags if each.behind is not None]
    most = max(known, key=_behind, default=None)
    return ConsumerState(
        name,
        home,
        sum(map(_behind, known)) if known or not found else None,
        len(found),
        most.journal if most is not None and most.behind else "",
        len(silent),
        next((f"{each.journal}: {each.problem}" for each in lags if each.problem), ""),
    )


def _behind(lag: JournalLag) -> int:
    return lag.behind or 0


def _head(context: StatusContext, journal: str) -> JournalHead | None:
    if (head := context.heads.get(journal)) is not None or (info := context.journals.get(journal)) is None:
        return head
    if info.is_asleep:
        return JournalHead(journal, pb.SUSPENDED, head=info.spec.suspend.offset)
    return JournalHead(journal, pb.NOT_JOURNAL_BROKER, "its primary does not answer")


def _judged(states: Iterable[ConsumerState]) -> Iterator[Examination]:
    for each in states:
        if each.problem:
            advice = f"see its log, and `coranto consumer lag {each.name}`"
            yield problem(f"consumer {each.name}", each.problem, advice)
