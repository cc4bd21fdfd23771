"""The heads of many journals: one call for all of them, and single reads for journals of Gazette's brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import grpc.aio

from coranto.client.responses import check_answer
from coranto.client.values import JournalInfo
from coranto.errors import CorantoError, CorruptData, StatusError, Unavailable
from coranto.offsets import JournalOffset
from coranto.security.tokens import Capability
from coranto.specs.validation import effective_replication
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsRequest, QuotaRejections
from coranto.wire.heads_pb2 import JournalHead as WireHead

if TYPE_CHECKING:
    from coranto.client.client import JournalClient
    from coranto.client.dispatch import ChosenConnection

_SINGLE_READS: Final = 32
_SINGLE_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class JournalHead:
    """The state of one journal at a broker. Offsets and sizes are bytes, times are Unix seconds (0: unknown or never).

    If `status` is OK, `begin` (the first offset with content), `persisted_head` (the end of stored content) and `head`
    (the begin of the next append) are known. If it is SUSPENDED, only `head` is known. Otherwise nothing is known, and
    `problem` is the reason.
    """

    journal: str
    status: pb.Status.ValueType
    problem: str = ""
    create_revision: int = 0
    mod_revision: int = 0
    replication: int = 0
    """Replicas that the journal should have."""
    replicas: int = 0
    """Replicas that are assigned."""
    in_sync: bool = False
    """True if all assigned replicas agree."""
    suspended: int = pb.JournalSpec.Suspend.NONE
    broker: str = ""
    """The broker that reported this, as `zone#id`; empty after a single read."""
    is_primary: bool = False
    begin: int = 0
    persisted_head: int = 0
    head: int = 0
    last_append_time: float = 0.0
    """The time of the last append. After a restart of the broker, it may be the time of an earlier one."""
    unpersisted_bytes: int = 0
    unpersisted_since: float = 0.0
    """The time of the first append that is not stored."""
    listed: bool = True
    """False if the stores were not listed yet, so that `begin` and `persisted_head` are not known."""
    registers: pb.LabelSet | None = None
    append_status: pb.Status.ValueType = pb.OK
    """The answer to the primary's last empty append, if `append_status_time` is not 0."""
    append_status_time: float = 0.0
    store_problem: str = ""
    """The reason for delaying appends because of the fragment store; empty if they are not delayed."""
    ask_alone: bool = False
    """True if the journal needs a single read, because its primary is a Gazette broker."""
    demand_unmet: str = ""
    """The reason why acknowledgements are, or would be, below the demand of the journal's labels; empty if not."""
    acknowledged_below_demand: int = 0
    """Appends that its broker has acknowledged below the demand since it became primary."""
    keeps_forks: bool = False
    """True if its broker keeps and lists the shared content of forks. Gazette's and early versions do not."""
    journal_id: str = ""
    """The journal's id, empty if unknown. Offsets of a journal with another id belong to other content."""

    @property
    def offset(self) -> JournalOffset:
        """`head`, with the journal's id."""
        return JournalOffset(self.head, self.journal_id)

    @property
    def known(self) -> bool:
        """True if `head` is known."""
        return self.status in (pb.OK, pb.SUSPENDED)

    @property
    def is_end(self) -> bool:
        """True if `head` is the end of the journal.

        The head may be below the end for a primary that refuses appends because it lacks content of other brokers, for
        a primary before its first empty append, and for a replica that answers for its primary.
        """
        if self.status == pb.SUSPENDED:
            return True
        has_appended = self.append_status_time > 0 or not self.broker
        return self.known and self.is_primary and self.append_status == pb.OK and has_appended

    @classmethod
    def of(cls, wire: WireHead) -> JournalHead:
        """Return the value of a message. Raises CorruptData for inconsistent offsets."""
        known = wire.status == pb.OK
        if known and not 0 <= wire.begin <= wire.persisted_head <= wire.head:
            raise CorruptData(
                f"heads: the broker violated the protocol: {wire.journal} has begin {wire.begin}, persisted head "
                f"{wire.persisted_head} and head {wire.head}"
            )
        return cls(
            wire.journal,
            wire.status,
            wire.problem,
            wire.create_revision,
            wire.mod_revision,
            wire.replication,
            wire.replicas,
            wire.in_sync,
            wire.suspended,
            f"{wire.broker.zone}#{wire.broker.suffix}",
            wire.is_primary,
            wire.begin,
            wire.persisted_head,
            wire.head,
            wire.last_append_time,
            wire.unpersisted_bytes,
            wire.unpersisted_since,
            wire.listed,
            wire.registers if known else None,
            wire.append_status,
            wire.append_status_time,
            wire.store_problem,
            wire.ask_alone,
            wire.demand_unmet,
            wire.acknowledged_below_demand,
            wire.keeps_forks,
            wire.journal_id,
        )


@dataclass(frozen=True)
class Heads:
    """The heads of the journals that a selector matches, ordered by name."""

    header: pb.Header
    journals: tuple[JournalHead, ...]
    broker_version: str = ""
    """The version of the answering broker; empty for Gazette's brokers and early versions of Coranto."""
    broker_time: float = 0.0
    """The answering broker's clock, in Unix seconds; 0 if the version is empty."""
    quota_rejections: tuple[QuotaRejections, ...] = ()
    """The callers that quotas of the answering broker have rejected in the last hour, the latest first."""

    def __iter__(self) -> Iterator[JournalHead]:
        return iter(self.journals)

    def __len__(self) -> int:
        return len(self.journals)

    @cached_property
    def by_name(self) -> Mapping[str, JournalHead]:
        return {each.journal: each for each in self.journals}

    @property
    def unknown(self) -> list[JournalHead]:
        """The journals whose heads are unknown."""
        return [each for each in self.journals if not each.known]

    def all_known(self) -> Heads:
        """Return these heads. Raises Unavailable if the head of one of the journals is unknown."""
        for each in self.unknown:
            raise Unavailable(f"the head of {each.journal} is unknown: {each.problem}")
        return self


async def ask(chosen: ChosenConnection, request: HeadsRequest) -> Heads | None:
    """Return the answer of one broker; None if it does not support the call. Raises the client's errors."""
    subject = "heads of journals"
    header: pb.Header | None = None
    version, time, rejections = "", 0.0, tuple[QuotaRejections, ...]()
    found: dict[str, JournalHead] = {}
    call = chosen.connection.heads_stub.Heads(
        request, metadata=await chosen.for_selector(Capability.READ, request.selector)
    )
    with chosen.calling(subject, call):
        try:
            async for response in call:
                if header is None:
                    header = check_answer(response, subject)
                    version, time, rejections = response.version, response.time, tuple(response.quota_rejections)
                for head in map(JournalHead.of, response.heads):
                    found[head.journal] = head
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
    if header is None:
        raise CorruptData(f"{subject}: the broker violated the protocol: it answered nothing")
    return Heads(header, tuple(found[name] for name in sorted(found)), version, time, rejections)


async def complete(client: JournalClient, selector: str | pb.LabelSelector, heads: Heads | None) -> Heads:
    """Add single reads for journals of Gazette's brokers, or for all journals if `heads` is None."""
    if heads is not None and not any(each.ask_alone for each in heads):
        return heads
    listing = await client.list(selector)
    found = {each.journal: each for each in heads if not each.ask_alone} if heads is not None else {}
    gate = asyncio.Semaphore(_SINGLE_READS)

    async def one(info: JournalInfo) -> JournalHead:
        async with gate:
            return await _single(client, info)

    single = await asyncio.gather(*(one(info) for info in listing.journals if info.name not in found))
    found.update((each.journal, each) for each in single)
    journals = tuple(found[name] for name in sorted(found))
    return Heads(listing.header, journals) if heads is None else replace(heads, journals=journals)


async def _single(client: JournalClient, info: JournalInfo) -> JournalHead:
    """Return the head of one journal by single reads. It is unknown whether replicas agree."""
    status: pb.Status.ValueType = pb.OK
    problem, begin, persisted, head, journal_id, is_primary = "", 0, 0, 0, "", False
    try:
        async with asyncio.timeout(_SINGLE_SECONDS):
            reported = await client.reported_head(info.name)
            head, journal_id, is_primary = reported.head, reported.journal_id, reported.is_primary
            fragments = [each.fragment for each in await client.fragments(info.name)]
        begin = min((each.begin for each in fragments), default=head)
        persisted = max((each.end for each in fragments if each.backing_store), default=begin)
        head = max([head, *(each.end for each in fragments)])
    except StatusError as error:
        status, problem = error.status, str(error)
        head = info.spec.suspend.offset if error.status == pb.SUSPENDED else 0
    except TimeoutError:
        status, problem = pb.NOT_JOURNAL_BROKER, f"no broker reported its head within {_SINGLE_SECONDS:g} s"
    except CorantoError as error:
        status, problem = pb.NOT_JOURNAL_BROKER, str(error)
    return JournalHead(
        info.name,
        status,
        problem,
        info.create_revision,
        info.mod_revision,
        effective_replication(info.spec),
        len(info.route.members),
        suspended=info.spec.suspend.level,
        begin=begin,
        persisted_head=persisted,
        head=head,
        unpersisted_bytes=max(0, head - persisted),
        is_primary=is_primary,
        journal_id=journal_id,
    )
