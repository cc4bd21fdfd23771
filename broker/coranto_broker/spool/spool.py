"""The spool: a replica's transactional memory of its journal, as a pure state machine.

A spool holds the fragment under construction (the *committed* content), the journal's registers, and a *delta* of
content that was received after the last commit. Two kinds of request change it (seed 001 "Components";
ReplicateRequest on the wire):

=====================================================  ==============================================================
content at a content delta                             must continue the present delta, and extends it
proposal of a fragment, with registers                 is compared with what this spool knows, in this order:
1. ends beyond end + delta, or is empty at our end     *roll*: a non-empty fragment completes, an empty one begins at
                                                       the proposed end with the proposed codec; the proposed registers
                                                       are taken when the proposal is strictly greater. Then:
2. equals our fragment and our registers               *keep*: any delta is rolled back
3. equals our fragment extended by the delta           *commit*: the delta joins the fragment, the registers are taken
4. anything else                                       *mismatch*: the answer has our fragment and registers
=====================================================  ==============================================================

Nothing here does I/O. `decide` answers a proposal and changes nothing. The caller makes the decision durable, and only
then calls `adopt`. If making it durable fails, the spool stays as it was.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from coranto.effects import Bytes
from coranto.errors import InvalidInput
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.wire import protocol_pb2 as pb


class Hash(Protocol):
    """A running SHA-1."""

    def update(self, data: Bytes, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> Hash: ...


def new_sum() -> Hash:
    """Return a new SHA-1. It identifies content and detects corruption, but not forgery."""
    return hashlib.sha1(usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class CommittedState:
    """The committed state of a spool. `registers` is never modified in place.

    `first_append_time` is the wall time (seconds since the epoch) of the fragment's first commit, 0 while it is empty.
    """

    fragment: Fragment
    registers: pb.LabelSet
    first_append_time: float = 0.0


class ProposalEffect(enum.Enum):
    """The effect of a proposal on a spool, after a possible roll that comes first."""

    KEEP = "keep"
    ROLL_BACK = "roll back"
    COMMIT = "commit"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class ProposalDecision:
    """A spool's answer to a proposal, before anything has changed.

    `committed` is the state after adoption. `completed` is the non-empty fragment that a roll closes, if any.
    """

    effect: ProposalEffect
    committed: CommittedState
    rolled: bool = False
    completed: CommittedState | None = None

    def response(self) -> pb.ReplicateResponse:
        """Return the acknowledgement for the primary. A mismatch carries our fragment and registers."""
        if self.effect is not ProposalEffect.MISMATCH:
            return pb.ReplicateResponse(status=pb.OK)
        response = pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH, fragment=self.committed.fragment.to_wire())
        response.registers.CopyFrom(self.committed.registers)  # Present on the wire even when empty.
        return response


class Extended(NamedTuple):
    """The state of a spool after content was added to its fragment, and the fragment's running SHA-1."""

    committed: CommittedState
    sum: Hash


class Spool:
    """One replica's spool, for a single owner. The module's table shows its transitions."""

    def __init__(self, journal: str) -> None:
        """Begin with an empty spool at offset zero, without registers."""
        self._committed = CommittedState(_empty(journal, 0, Codec.NONE), pb.LabelSet())
        self._committed_sum = new_sum()
        self._running_sum = new_sum()
        self._delta = 0
        self._next: Fragment | None = None  # The result of `next_fragment`, cached until the delta changes.

    @classmethod
    def restored(cls, committed: CommittedState, running_sum: Hash) -> Spool:
        """Return a recovered spool. `running_sum` has hashed exactly the committed content."""
        spool = cls(committed.fragment.journal)
        spool._committed = committed
        spool._committed_sum = running_sum
        spool._running_sum = running_sum.copy()
        return spool

    @property
    def committed(self) -> CommittedState:
        return self._committed

    @property
    def fragment(self) -> Fragment:
        """The committed extent of the fragment under construction."""
        return self._committed.fragment

    @property
    def registers(self) -> pb.LabelSet:
        """The journal's registers. Do not modify them in place."""
        return self._committed.registers

    @property
    def end(self) -> int:
        """The journal offset of the next committed byte."""
        return self._committed.fragment.end

    @property
    def delta(self) -> int:
        """The number of bytes received after the last commit."""
        return self._delta

    def check_content(self, content_delta: int) -> int:
        """Return the position, relative to the fragment's begin, for content at `content_delta`. Changes nothing.

        Raises InvalidInput if `content_delta` is not the end of the delta.
        """
        if content_delta != self._delta:
            raise InvalidInput(
                f"content is at delta {content_delta} but this spool expects {self._delta}; restart the pipeline",
                field="ReplicateRequest.content_delta",
            )
        return self._committed.fragment.length + self._delta

    def extend(self, content: Bytes) -> None:
        """Add content to the delta. `check_content` has passed, and the content is already written."""
        self._delta += len(content)
        self._next = None
        self._running_sum.update(content)

    def extend_later(self, content: Bytes) -> Callable[[], object]:
        """Add content to the delta, but return the hashing as a job for the caller.

        The caller must run such jobs in order, and before it uses anything that depends on the content's sum. If the
        delta is rolled back, it must not run them.
        """
        self._delta += len(content)
        self._next = None
        return partial(self._running_sum.update, content)

    def next_fragment(self) -> Fragment:
        """Return the fragment that would commit all received content: the current one, extended by the delta."""
        if not self._delta:
            return self._committed.fragment
        if self._next is None:
            current = self._committed.fragment
            end = current.end + self._delta
            self._next = Fragment(current.journal, current.begin, end, self._running_sum.digest(), current.codec)
        return self._next

    def decide(self, proposal: Fragment, registers: pb.LabelSet, now: float) -> ProposalDecision:
        """Return the answer to a proposal. Changes nothing; pass the decision to `adopt` once it is durable."""
        current, delta = self._committed, self._delta
        rolled, completed = False, None
        end = current.fragment.end
        if proposal.end > end + delta or (proposal.end == end and proposal.begin == proposal.end):
            rolled, delta = True, 0
            if current.fragment.length:
                completed = current
            current = CommittedState(
                _empty(current.fragment.journal, proposal.end, proposal.codec),
                registers if proposal.end > end else current.registers,
            )
        if proposal == current.fragment and registers == current.registers:
            effect = ProposalEffect.ROLL_BACK if self._delta else ProposalEffect.KEEP
            return ProposalDecision(effect, current, rolled, completed)
        if delta and proposal == self.next_fragment():
            return self.decide_next(registers, now)
        return ProposalDecision(ProposalEffect.MISMATCH, current, rolled, completed)

    def decide_next(self, registers: pb.LabelSet, now: float) -> ProposalDecision:
        """Return the answer to a proposal of `next_fragment`, while there is a delta."""
        return ProposalDecision(
            ProposalEffect.COMMIT,
            CommittedState(self.next_fragment(), registers, self._committed.first_append_time or now),
        )

    def extended(self, content: Bytes, registers: pb.LabelSet, now: float) -> Extended:
        """Return the state after a commit of `content` in one go. Requires that there is no delta. Changes nothing."""
        sum, current = self._running_sum.copy(), self._committed
        sum.update(content)
        fragment = current.fragment
        after = Fragment(fragment.journal, fragment.begin, fragment.end + len(content), sum.digest(), fragment.codec)
        return Extended(CommittedState(after, registers, current.first_append_time or now), sum)

    def adopt_extended(self, extended: Extended) -> None:
        """Apply the result of `extended` in the current state."""
        self._committed, self._running_sum = extended
        self._committed_sum = self._running_sum.copy()
        self._next = None

    def adopt(self, decision: ProposalDecision) -> None:
        """Apply a decision that was made in the current state."""
        self._committed = decision.committed
        self._next = None
        if decision.effect is ProposalEffect.COMMIT:
            self._committed_sum = self._running_sum.copy()
            self._delta = 0
            return
        if decision.rolled:
            self._committed_sum = new_sum()
        elif decision.effect is ProposalEffect.MISMATCH:
            return  # The delta stays: the primary may still commit or roll it back.
        self._forget_delta()

    def roll_back(self) -> None:
        """Drop the delta, for example when the stream that sent it has broken."""
        if self._delta:
            self._forget_delta()

    def _forget_delta(self) -> None:
        self._running_sum = self._committed_sum.copy()
        self._delta = 0
        self._next = None


def empty_at(fragment: Fragment, offset: int, codec: Codec) -> Fragment:
    """Return the proposal that rolls a spool of `fragment`'s journal to an empty fragment at `offset`."""
    return _empty(fragment.journal, offset, codec)


def _empty(journal: str, offset: int, codec: Codec) -> Fragment:
    return Fragment(journal, offset, offset, ZERO_SUM, codec)
