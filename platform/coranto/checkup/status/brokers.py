"""Ask each broker for its version, its clock, and the heads of the journals that it leads."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from coranto.checkup.brokers import NONE, advice_for
from coranto.checkup.clock import clock_result
from coranto.checkup.results import Condition, Examination, good, problem, warning
from coranto.checkup.status.etcd_members import ask_members
from coranto.checkup.status.first_answer import first_answer
from coranto.checkup.status.values import BrokerState
from coranto.client import ClientConfig, JournalClient, Listing
from coranto.client.config import parse_endpoint
from coranto.client.heads import Heads, JournalHead
from coranto.coordination.layout import Layout
from coranto.errors import CorantoError, InvalidInput, Unavailable
from coranto.security.tls import ClientTls
from coranto.wire import protocol_pb2 as pb

_CONCURRENCY: Final = 64
_MAX_QUOTAS: Final = 10
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerAnswer:
    """The answer of one broker. `examinations` omit its version, which `judge_versions` compares with others."""

    state: BrokerState
    heads: Sequence[JournalHead] = ()
    examinations: Sequence[Examination] = field(default=())


async def ask_brokers(config: ClientConfig, endpoints: Iterable[str], timeout: float) -> list[BrokerAnswer]:
    """Ask the brokers at these endpoints, each for up to `timeout` seconds, and return their answers by name.

    A broker that answers at several endpoints is returned once.
    """
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def one(endpoint: str) -> BrokerAnswer:
        async with gate:
            return await _ask(config, endpoint, timeout)

    found: dict[str, BrokerAnswer] = {}
    for answer in await asyncio.gather(*(one(endpoint) for endpoint in endpoints)):
        found.setdefault(answer.state.name or answer.state.endpoint, answer)
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True, slots=True)
class AnnouncedBroker:
    """A broker's entry in etcd. `revision` changes when it starts, and when it begins to exit."""

    name: str
    endpoint: str
    revision: int
    exiting: bool


async def announced_brokers(etcd: str, tls: ClientTls | None, prefix: str, timeout: float) -> list[AnnouncedBroker]:
    """Return the brokers that are announced in etcd, also those without a journal.

    Returns none if etcd does not answer, because its examination reports that.
    """
    members = Layout(prefix).members
    try:
        found = await ask_members(etcd, tls, timeout, lambda coordinator: coordinator.range(members))
        return [_announced(each.key.removeprefix(members), each.value, each.mod_revision) for each in found.kvs]
    except (CorantoError, DecodeError) as error:
        _log.debug("status.etcd_unreachable", endpoint=etcd, error=str(error))
        return []


def _announced(name: str, value: bytes, revision: int) -> AnnouncedBroker:
    spec = pb.BrokerSpec.FromString(value)
    return AnnouncedBroker(name, spec.process_spec.endpoint, revision, spec.exiting)


async def list_journals(config: ClientConfig, endpoints: Sequence[str], timeout: float) -> tuple[str, Listing]:
    """Return the endpoint of the first broker that answers, and its listing of journals.

    Raises the error of the last broker, and Unavailable if none answers within `timeout` seconds.
    """
    silence = Unavailable(f"no broker listed the journals within {timeout:g} s")
    return await first_answer([partial(_list, config, endpoint) for endpoint in endpoints], timeout, silence)


async def _list(config: ClientConfig, endpoint: str) -> tuple[str, Listing]:
    async with JournalClient.of(dataclasses.replace(config, endpoint=endpoint, retry_timeout=0.0)) as client:
        return endpoint, await client.list()


def distinct(endpoints: Iterable[str]) -> list[str]:
    """Return endpoints in order, each address once."""
    found: dict[str, str] = {}
    for endpoint in endpoints:
        try:
            address = parse_endpoint(endpoint).address
        except InvalidInput:
            address = endpoint  # The call to it reports the reason.
        found.setdefault(address, endpoint)
    return list(found.values())


def judge_versions(states: Iterable[BrokerState], mine: str) -> Iterator[Examination]:
    """Yield the comparison of the versions of answering brokers with each other and the client's."""
    versions = Counter(each.version for each in states if each.version)
    if set(versions) <= {mine}:
        if versions:
            yield good("versions", f"all brokers and this client have {mine}")
        return
    shown = ", ".join(f"{count} of {version}" for version, count in sorted(versions.items()))
    advice = "during an upgrade this is fine: brokers first, then clients; afterwards give all the same version"
    yield warning("versions", f"brokers: {shown}; this client: {mine}", advice)


def judge_quotas(endpoint: str, heads: Heads) -> Iterator[Examination]:
    """Yield a warning for each quota that a caller exceeded at a broker in the last hour, up to ten."""
    advice = "have the caller slow down, or raise its quota in the brokers' file (--quotas)"
    for each in heads.quota_rejections[:_MAX_QUOTAS]:
        ago = max(0.0, heads.broker_time - each.last_time)
        found = f"{each.caller} exceeded {each.quota}: {each.calls:,} calls rejected, the last one {ago:.0f} s ago"
        yield warning(f"quotas of {endpoint}", found, advice)
    if (more := len(heads.quota_rejections) - _MAX_QUOTAS) > 0:
        yield warning(f"quotas of {endpoint}", f"{more} more callers and quotas", advice)


def judge_exits(announced: Iterable[AnnouncedBroker]) -> Iterator[Examination]:
    """Yield a warning for each broker that is exiting: it hands its journals over to others."""
    for each in announced:
        if each.exiting:
            advice = "if this is not intended, see its log; if it lasts, other brokers lack room for its journals"
            yield warning(f"broker {each.endpoint}", f"{each.name} is exiting", advice)


async def _ask(config: ClientConfig, endpoint: str, timeout: float) -> BrokerAnswer:
    subject = f"broker {endpoint}"
    try:
        async with asyncio.timeout(timeout):
            single = dataclasses.replace(config, endpoint=endpoint, retry_timeout=0.0)
            async with JournalClient.of(single) as client:
                await client.heads_of_broker(NONE)  # Connect before measuring.
                before = time.time()
                first = await client.heads_of_broker(NONE)
                after = time.time()
                own = await client.heads_of_broker() if first is not None else None
    except TimeoutError:
        return _silent(endpoint, Unavailable(f"did not answer within {timeout:g} s"))
    except CorantoError as error:
        return _silent(endpoint, error)
    if first is None or own is None:
        found = "reports no heads of journals"
        advice = "it is one of Gazette's, or an early one of Coranto's: upgrade that"
        return BrokerAnswer(BrokerState(endpoint), (), [warning(subject, found, advice)])
    id = first.header.process_id
    difference = first.broker_time - (before + after) / 2 if first.broker_version else None
    state = BrokerState(endpoint, f"{id.zone}#{id.suffix}", first.broker_version, difference, len(own))
    judged = [good(subject, f"answers, and leads {len(own):,} journals")]
    if difference is not None:
        clock = clock_result(subject, difference, (after - before) / 2)
        if clock.condition is not Condition.OK:
            judged.append(clock)
    judged += judge_quotas(endpoint, own)
    return BrokerAnswer(state, own.journals, judged)


def _silent(endpoint: str, error: CorantoError) -> BrokerAnswer:
    state = BrokerState(endpoint, problem=str(error))
    return BrokerAnswer(state, (), [problem(f"broker {endpoint}", str(error), advice_for(error))])
