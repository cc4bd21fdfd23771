"""Whole appends for which nothing has to be waited for: they commit in one go.

That is the common case of a journal with one replica. The state machine (`coranto_broker.append_fsm`) would take such
an append from RESOLVE to FINISHED without suspending, and spend most of its time on the way from one state to the next.
Here the conditions of all those states are looked at together. Where one does not hold (yet), nothing has happened, and
the append goes through the state machine, which is also who refuses it.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol

from coranto.effects import Clock
from coranto.fragments import Fragment
from coranto.specs import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker import preconditions
from coranto_broker.group_commit import Whole, is_plain
from coranto_broker.pipeline import Pipeline
from coranto_broker.resolver import Resolution, Resolver


class Committed(NamedTuple):
    """An append that has committed: its content, of SHA-1 `sum`, ends `fragment`, and came in so many `chunks`."""

    resolution: Resolution
    fragment: Fragment
    begin: int
    sum: bytes
    registers: pb.LabelSet
    chunks: int

    @property
    def length(self) -> int:
        """Bytes of its content."""
        return self.fragment.end - self.begin


class Environment(Protocol):
    """What these appends need of their broker."""

    clock: Clock
    resolver: Resolver

    @property
    def limits_rates(self) -> bool:
        """Whether every journal's rate of appends is limited."""
        ...

    def is_healthy(self, url: str) -> bool:
        """Whether a fragment store is known to work."""
        ...

    def grouped(self, appends: int) -> None:
        """So many whole appends are being proposed together."""
        ...


def is_known(environment: Environment, request: pb.AppendRequest) -> bool:
    """Whether the first message of an append is valid for sure: it names a journal that is known, and nothing else."""
    resolver = environment.resolver
    return is_plain(request) and resolver.known(request.journal, may_proxy=not request.do_not_proxy) is not None


def candidate(environment: Environment, request: pb.AppendRequest) -> Resolution | None:
    """The resolution with which an append that was just begun may commit at once, as far as can be told by now."""
    if request.min_etcd_revision or request.HasField("header"):
        return None
    resolution = environment.resolver.known(request.journal, may_proxy=not request.do_not_proxy)
    return resolution if resolution is not None and _pipeline(resolution) is not None else None


def commit(environment: Environment, request: pb.AppendRequest, whole: Whole) -> Committed | None:
    """Commit the append of a `candidate`, whose sender may append to every journal, or do nothing (None).

    Raises ReplicationFailed when it cannot be written.
    """
    content = whole.content
    resolution = environment.resolver.known(request.journal, may_proxy=not request.do_not_proxy)
    if resolution is None or not content or environment.limits_rates:
        return None
    pipeline = _pipeline(resolution)
    if pipeline is None or pipeline.error is not None or environment.clock.monotonic() >= pipeline.renew_at:
        return None
    spec, replica = resolution.spec, resolution.require_replica
    index, now = replica.index, environment.clock.now()
    if spec.max_append_rate or not may_write(spec) or not index.refreshed:
        return None
    if not all(environment.is_healthy(url) for url in spec.fragment.stores[:1]):
        return None
    before = pipeline.spool.committed
    if not preconditions.may_have_content(request):
        return None
    if preconditions.check(request, spec, before, index.known, now) != preconditions.GO:
        return None
    if preconditions.propose(before, 0, spec.fragment, now) is not before.fragment:
        return None  # The fragment is to be completed first.
    registers = preconditions.next_registers(before.registers, request)
    fragment = pipeline.commit(content, registers)
    environment.grouped(1)
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return Committed(resolution, fragment, before.fragment.end, digest, registers, whole.chunks)


def _pipeline(resolution: Resolution) -> Pipeline | None:
    """The pipeline of an append that does not have to wait for it, nor it for others."""
    replica, invalidated = resolution.replica, resolution.invalidated
    if replica is None or (invalidated is not None and invalidated.fired):
        return None
    pipeline = replica.pipeline.at_rest
    if pipeline is None or not pipeline.answers_at_once or not pipeline.fits(resolution) or not pipeline.is_idle:
        return None
    return pipeline
