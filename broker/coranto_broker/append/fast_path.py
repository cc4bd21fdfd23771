"""The fast path: commits or proposes whole appends in one go if they have nothing to wait for.

This is the common case. The state machine (`coranto_broker.append.fsm`) would take such an append from RESOLVE to its
proposal without suspending, and spend most of its time on the transitions. The fast path takes it only if the pipeline
is ready, and the append extends the fragment within a steady range (`coranto_broker.append.decision`). Otherwise it
changes nothing, and the append goes through the state machine. Only the state machine refuses appends.

A journal with one replica has committed the append then (`commit`). With more replicas, appends of one journal that are
there at the same time are proposed together (`propose`), and commit once all replicas have acknowledged (`gather`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from coranto.effects import Clock
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.specs.durability import NO_DEMAND, Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.append.decision import JournalSnapshot, extend, is_plain, is_torn, steady
from coranto_broker.append.group_commit import MAX_GROUP_APPENDS, MAX_GROUP_BYTES, PROPOSALS_IN_FLIGHT
from coranto_broker.append.states import Way
from coranto_broker.replication.pipeline import Pipeline, SteadyPipeline, Turn
from coranto_broker.replication.resolver import Resolution, Resolver
from coranto_broker.replication.waiting_appends import AppendRange, Whole, commit_of

ALONE: Final = Durability(1, 1)
"""The durability of an append on the fast path: this broker alone has it, and its disk may not."""


class CommittedAppend(NamedTuple):
    """A committed append. Its content is the end of `fragment`, has the SHA-1 `sum`, and came in `chunks` messages."""

    resolution: Resolution
    fragment: Fragment
    begin: int
    sum: bytes
    registers: pb.LabelSet
    chunks: int
    durability: Durability = ALONE

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


class ProposedAppend(NamedTuple):
    """A proposed append: its part `commit` of the fragment, the registers after it, and the messages it came in."""

    commit: Fragment
    registers: pb.LabelSet
    chunks: int


class Proposed(NamedTuple):
    """Appends that were proposed together, in their order, and the turn in which `gather` reads the answers."""

    resolution: Resolution
    pipeline: Pipeline
    proposal: Fragment
    turn: Turn
    appends: list[ProposedAppend]


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

    def proposed(self, way: Way, appends: int) -> None:
        """Note that this many appends are proposed together, to be committed."""
        ...


def candidate(environment: Environment, request: pb.AppendRequest) -> Candidate | None:
    """Return the candidate for an append that has just begun, or None if it already cannot take the fast path.

    A candidate's journal exists, so its name is valid.
    """
    if request.offset or request.at_start or request.suspend or request.HasField("header"):
        return None
    resolution = environment.resolver.known(request.journal, request.min_etcd_revision)
    if resolution is None or resolution.replica is None or resolution.replica.pipeline.at_rest is None:
        return None
    before = resolution.replica.pipeline.at_rest.spool.registers
    after = before if is_plain(request) else of_registers.replaced(request, before)
    return Candidate(resolution, before, after)


def commit(
    environment: Environment, candidate: Candidate, request: pb.AppendRequest, whole: Whole
) -> CommittedAppend | None:
    """Commit a candidate's append at once, or change nothing and return None.

    The append is well-formed, and its sender may append to every journal. Raises RolledBack when it cannot be written.
    """
    resolution = candidate.resolution
    content, pipeline = whole.content, _idle_pipeline(resolution)
    if not content or pipeline is None or not environment.resolver.is_current(resolution):
        return None
    if not pipeline.is_usable(environment.clock.monotonic()) or not _is_steady(environment, resolution, pipeline):
        return None
    if is_torn(content, pipeline.whole_lines):
        return None
    before, registers = pipeline.spool.committed, candidate.after
    if registers is None or before.registers is not candidate.before:  # Registers are never modified in place.
        registers = extend(request, before.registers)
        if registers is None:
            return None
    after = pipeline.commit(content, registers)
    environment.proposed(Way.FAST_PATH, 1)
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return CommittedAppend(resolution, after, before.fragment.end, digest, registers, whole.chunks)


def propose(environment: Environment, appends: Sequence[tuple[Candidate, pb.AppendRequest, Whole]]) -> Proposed | None:
    """Propose as many of these appends as may commit together, from the first on, or change nothing and return None.

    They are well-formed, and their senders may append to every journal. Raises RolledBack when they cannot be written.
    """
    resolution = appends[0][0].resolution
    pipeline = _free_pipeline(resolution)
    if pipeline is None or pipeline.answers_at_once or not pipeline.has_room(PROPOSALS_IN_FLIGHT):
        return None
    if not environment.resolver.is_current(resolution) or not pipeline.is_usable(environment.clock.monotonic()):
        return None
    if pipeline.demand is not NO_DEMAND:
        return None  # Acknowledgements may have to be counted, or replicas to be asked.
    if not _is_steady(environment, resolution, pipeline) or pipeline.steady is None:
        return None
    before, steady_end = pipeline.spool.committed, pipeline.steady.range.end
    end, registers, places = before.fragment.end, before.registers, list[AppendRange]()
    for candidate, request, whole in appends:
        length = len(whole.content)
        if not length or candidate.resolution is not resolution or end > steady_end or len(places) == MAX_GROUP_APPENDS:
            break
        if is_torn(whole.content, pipeline.whole_lines):
            break
        if places and end + length - before.fragment.end > MAX_GROUP_BYTES:
            break
        if candidate.after is None or registers is not candidate.before:  # Registers are never modified in place.
            extended = registers if is_plain(request) else extend(request, registers)
        else:
            extended = candidate.after
        if extended is None:
            break
        places.append(AppendRange(end, end + length, extended))
        end, registers = end + length, extended
    if not places:
        return None
    wholes = [whole for _, _, whole in appends[: len(places)]]
    content = wholes[0].content if len(places) == 1 else b"".join([whole.content for whole in wholes])
    proposal, turn = pipeline.extend(content, registers)
    environment.proposed(Way.FAST_PATH, len(places))
    proposed = [
        ProposedAppend(commit_of(before.fragment, place, whole.content), place.registers, whole.chunks)
        for place, whole in zip(places, wholes, strict=True)
    ]
    return Proposed(resolution, pipeline, proposal, turn, proposed)


async def gather(proposed: Proposed) -> Durability | CorantoError:
    """Read every replica's answer to a proposal. Returns what it survives, or the reason why its outcome is unknown."""
    pipeline = proposed.pipeline
    try:
        await proposed.turn.wait()
        durability = await pipeline.gather_ok(proposed.proposal)
        return pipeline.error or durability
    finally:
        proposed.turn.done()


def _free_pipeline(resolution: Resolution) -> Pipeline | None:
    """Return the pipeline if nobody owns it and it is that of the resolution; otherwise None."""
    replica, invalidated = resolution.replica, resolution.invalidated
    if replica is None or (invalidated is not None and invalidated.fired):
        return None
    pipeline = replica.pipeline.at_rest
    return pipeline if pipeline is not None and pipeline.fits(resolution) else None


def _idle_pipeline(resolution: Resolution) -> Pipeline | None:
    """Return the pipeline if it is free, idle and answers at once; otherwise None."""
    pipeline = _free_pipeline(resolution)
    return pipeline if pipeline is not None and pipeline.answers_at_once and pipeline.is_idle else None


def _is_steady(environment: Environment, resolution: Resolution, pipeline: Pipeline) -> bool:
    """Return True if an append extends the fragment as it is: from what the pipeline remembers, or decided anew."""
    committed, now = pipeline.spool.committed, environment.clock.now()
    changes = resolution.require_replica.index.changes
    found = pipeline.steady
    if found is None or found.changes != changes or not found.range.holds(committed.fragment, now):
        found = pipeline.steady = _decide_steady(environment, resolution, pipeline, now)
        if found is None:
            return False
    return not found.store or environment.is_healthy(resolution.spec.name, found.store)


def _decide_steady(
    environment: Environment, resolution: Resolution, pipeline: Pipeline, now: float
) -> SteadyPipeline | None:
    spec, index = resolution.spec, resolution.require_replica.index
    if environment.limits_rates or spec.max_append_rate:
        return None  # Appends pay for their bytes one at a time.
    found = steady(
        JournalSnapshot(
            spec,
            pipeline.spool.committed,
            index.known,
            now,
            listed=index.refreshed,
            recorded=pipeline.recorded,
            refusal=pipeline.refusal,
        )
    )
    store = spec.fragment.stores[0] if spec.fragment.stores else ""  # New fragments go to the first store.
    return None if found is None else SteadyPipeline(found, index.changes, store)
