"""The fast path: commits a whole append in one go if it has nothing to wait for.

This is the common case of a journal with one replica. The state machine (`coranto_broker.append.fsm`) would take such
an append from RESOLVE to FINISHED without suspending, and spend most of its time on the transitions. The fast path
checks the conditions of all those states together. If one does not hold (yet), it changes nothing, and the append goes
through the state machine. Only the state machine refuses appends.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, NamedTuple, Protocol

from coranto.effects import Clock
from coranto.fragments.fragment import Fragment
from coranto.specs.validation import may_write
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import preconditions
from coranto_broker.append.group_commit import is_plain
from coranto_broker.replication.pipeline import FitConditions, Pipeline
from coranto_broker.replication.resolver import Resolution, Resolver
from coranto_broker.replication.waiting_appends import Whole
from coranto_broker.spool import spool


class Committed(NamedTuple):
    """A committed append. Its content is the end of `fragment`, has the SHA-1 `sum`, and came in `chunks` messages."""

    resolution: Resolution
    fragment: Fragment
    begin: int
    sum: bytes
    registers: pb.LabelSet
    chunks: int

    @property
    def length(self) -> int:
        """Length of its content in bytes."""
        return self.fragment.end - self.begin


class Candidate(NamedTuple):
    """An append that may commit at once.

    `before` are the registers when the append began, `after` the registers once it commits. With `after` None, neither
    the result nor whether the request is well-formed is known.
    """

    resolution: Resolution
    before: pb.LabelSet
    after: pb.LabelSet | None


class Environment(Protocol):
    """The part of the broker that the fast path uses."""

    clock: Clock
    resolver: Resolver

    @property
    def limits_rates(self) -> bool:
        """True if every journal's append rate is limited."""
        ...

    def is_healthy(self, journal: str, url: str) -> bool:
        """Return True if the store is known to work and its backlog does not hold the journal back."""
        ...

    def grouped(self, appends: int) -> None:
        """Note that this many whole appends are proposed together."""
        ...


_PLAIN: Final = pb.AppendRequest()


def candidate(environment: Environment, request: pb.AppendRequest) -> Candidate | None:
    """Return the candidate for an append that has just begun, or None if it already cannot take the fast path.

    A candidate's journal exists, so its name is valid.
    """
    if request.offset or request.suspend or request.HasField("header"):
        return None
    resolution = environment.resolver.known(request.journal, request.min_etcd_revision)
    if resolution is None or resolution.replica is None or resolution.replica.pipeline.at_rest is None:
        return None
    before = resolution.replica.pipeline.at_rest.spool.registers
    after = before if is_plain(request) else preconditions.foresee(request, before)
    return Candidate(resolution, before, after)


def commit(environment: Environment, candidate: Candidate, request: pb.AppendRequest, whole: Whole) -> Committed | None:
    """Commit a candidate's append at once, or change nothing and return None.

    The append is well-formed, and its sender may append to every journal. Raises RolledBack when it cannot be written.
    """
    resolution = candidate.resolution
    content, clock, pipeline = whole.content, environment.clock, _pipeline(resolution)
    if not content or pipeline is None or not environment.resolver.is_current(resolution):
        return None
    if pipeline.error is not None or clock.monotonic() >= pipeline.renew_at:
        return None
    before, changes, now = pipeline.spool.committed, resolution.require_replica.index.changes, clock.now()
    fragment, fit = before.fragment, pipeline.fit
    if (
        fit is None
        or fit.begin != fragment.begin
        or fit.end < fragment.end
        or fit.until <= now
        or fit.changes != changes
    ):
        fit = pipeline.fit = _stand(environment, resolution, before, now)
        if fit is None:
            return None
    if fit.store and not environment.is_healthy(resolution.spec.name, fit.store):
        return None
    registers = candidate.after
    if registers is None or before.registers is not candidate.before:  # Registers are never modified in place.
        if not preconditions.registers_match(request, before.registers):
            return None
        registers = preconditions.next_registers(before.registers, request)
        if preconditions.outgrown(before.registers, registers) is not None:
            return None
    after = pipeline.commit(content, registers)
    environment.grouped(1)
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return Committed(resolution, after, fragment.end, digest, registers, whole.chunks)


def _pipeline(resolution: Resolution) -> Pipeline | None:
    """Return the pipeline if it is free, idle and answers at once; otherwise None."""
    replica, invalidated = resolution.replica, resolution.invalidated
    if replica is None or (invalidated is not None and invalidated.fired):
        return None
    pipeline = replica.pipeline.at_rest
    if pipeline is None or not pipeline.answers_at_once or not pipeline.fits(resolution) or not pipeline.is_idle:
        return None
    return pipeline


def _stand(
    environment: Environment, resolution: Resolution, before: spool.CommittedState, now: float
) -> FitConditions | None:
    """Return the conditions under which plain appends may extend the present fragment without a roll, or None."""
    spec, index, fragment = resolution.spec, resolution.require_replica.index, before.fragment
    if environment.limits_rates or spec.max_append_rate or not may_write(spec) or not index.refreshed:
        return None
    known = index.known
    if known.empty or preconditions.check(_PLAIN, spec, before, known, now) != preconditions.GO:
        return None
    if preconditions.propose(before, 0, spec.fragment, now) is not fragment:
        return None  # The fragment must be completed first.
    interval = spec.fragment.flush_interval.ToSeconds()
    until = (int(now) // interval + 1) * interval if interval > 0 else math.inf
    store = spec.fragment.stores[0] if spec.fragment.stores else ""  # New fragments go to the first store.
    return FitConditions(fragment.begin, fragment.begin + spec.fragment.length, until, index.changes, store)
