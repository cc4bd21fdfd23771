"""The queue ("line") of whole appends that wait for a replica's pipeline.

A small append is *whole* once its client has sent everything up to the end of the stream. While it waits, an append
that has the pipeline may commit it together with itself (`coranto_broker.append.group_commit`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from coranto.effects import Bytes
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.ownership import Signal

GATHER_SECONDS = 0.002
"""The longest time that a whole append waits for others that are being received, to commit with them."""

MAX_IN_VAIN = 6
"""A limit on backoff. Each wait in vain in a row, up to this number, about doubles how many waits are then skipped."""


class TakenAlong(Exception):
    """The append stops waiting for the pipeline, because it commits together with another. Internal to the broker."""


class Whole(NamedTuple):
    """Everything that an append's client has sent: the content, and the number of messages that it came in."""

    content: Bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class AppendRange:
    """The range [begin, end) of an admitted append, and the registers after its commit."""

    begin: int
    end: int
    registers: pb.LabelSet


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status that refuses an append, and the registers on which this is based."""

    status: pb.Status.ValueType
    registers: pb.LabelSet


class Resolved(Protocol):
    """The part of a `Resolution` that a member needs."""

    @property
    def spec(self) -> pb.JournalSpec: ...
    @property
    def invalidated(self) -> Signal | None: ...


class WaitingAppend:
    """A whole append in the line, and its result once another append has taken it along.

    It waits on `waiter` for the pipeline. `outcome` is the result of its group: None for success, or the error.
    """

    def __init__(self, request: pb.AppendRequest, whole: Whole, resolution: Resolved) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.whole = whole
        self.resolution = resolution
        self.waiter: asyncio.Future[object] = loop.create_future()
        self.outcome: asyncio.Future[CorantoError | None] = loop.create_future()
        self.answer: AppendRange | Refusal | None = None
        self.commit: Fragment | None = None
        self.durability = Durability(0, 0)
        """Its durability, once it has committed."""

    @property
    def is_waiting(self) -> bool:
        """True if it may be taken along: its client is still there, and its wait has not ended otherwise."""
        return not self.waiter.done()

    def take_along(self, answer: AppendRange | Refusal) -> None:
        """Join the leader's group. From now on, an append that was admitted fails only if the group fails."""
        self.answer = answer
        self.waiter.set_exception(TakenAlong())
        self.waiter.exception()  # Marks it as retrieved. If its client has just gone, nobody else retrieves it.

    def commit_to(self, fragment: Fragment) -> None:
        """Note that its content goes to this fragment, at its place."""
        assert isinstance(self.answer, AppendRange)
        self.commit = commit_of(fragment, self.answer, self.whole.content)

    def settle(self, problem: CorantoError | None) -> None:
        """Report the group's result to this append: None for success, or the error."""
        if not self.outcome.done():
            self.outcome.set_result(problem)


class Line:
    """The whole appends that wait for one replica's pipeline, in order of arrival."""

    def __init__(self) -> None:
        self._members: dict[WaitingAppend, None] = {}
        self.coming = 0
        """The number of appends that are being received and may join the line soon."""
        self._leader: asyncio.Future[None] | None = None  # The append that owns the pipeline waits on this for them.
        self._in_vain = 0  # The number of waits in a row in which nobody came, for example because a client is slow.
        self._passes = 0  # The number of leaders that must not wait, for this reason.

    def __iter__(self) -> Iterator[WaitingAppend]:
        return iter(tuple(self._members))

    def expect(self) -> None:
        """Note that an append is being received that may join soon. Call `came` afterwards in any case."""
        self.coming += 1

    def came(self) -> None:
        """Note that an expected append is about to join, or never will."""
        self.coming -= 1
        if not self.coming:
            self._let_go()

    async def gathered(self) -> None:
        """Wait briefly for expected appends to join. For the append that owns the pipeline, before it proposes.

        Without load this takes no time. Under load it makes groups larger, and one large group costs less than two
        small ones.
        """
        if not self.coming:
            return
        if self._passes:
            self._passes -= 1
            return
        before = len(self._members)
        loop = asyncio.get_running_loop()
        self._leader = loop.create_future()
        timer = loop.call_later(GATHER_SECONDS, self._let_go)
        try:
            await self._leader
        finally:
            self._leader = None
            timer.cancel()
        self._in_vain = 0 if len(self._members) > before else min(self._in_vain + 1, MAX_IN_VAIN)
        self._passes = (1 << self._in_vain) - 1

    def _let_go(self) -> None:
        if self._leader is not None and not self._leader.done():
            self._leader.set_result(None)

    def join(self, member: WaitingAppend) -> None:
        self._members[member] = None

    def leave(self, member: WaitingAppend) -> None:
        """Remove an append that has the pipeline, was taken along, or has been given up."""
        self._members.pop(member, None)


def commit_of(fragment: Fragment, place: AppendRange, content: Bytes) -> Fragment:
    """Return the answer to an append that goes to `fragment`. Its sum is that of its content, even if that is empty."""
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return Fragment(fragment.journal, place.begin, place.end, digest, fragment.codec)
