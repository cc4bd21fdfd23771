"""Whole appends that wait for a replica's pipeline, and the line in which they stand.

An append is *whole* once its client has sent everything up to the end of the stream, and that is little. While it
waits, another one that has the pipeline may take it along (`coranto_broker.append.group_commit`).
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
from coranto.wire import protocol_pb2 as pb
from coranto_broker.ownership import Signal

GATHER_SECONDS = 0.002
"""For how long a whole append lets others come, while there are any that are being received."""

MAX_IN_VAIN = 6
"""Of so many waits in which nobody came, each makes that twice as many of those that follow are not waited for."""


class TakenAlong(Exception):
    """The append need not wait for the pipeline any more: it goes along with another. Internal to the broker."""


class Whole(NamedTuple):
    """All that an append's client has sent: its content, and in how many messages it came."""

    content: Bytes
    chunks: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where an admitted append goes, [begin, end), and the registers once it has committed."""

    begin: int
    end: int
    registers: pb.LabelSet


@dataclass(frozen=True, slots=True)
class Refusal:
    """What an append is refused with, and the registers that this rests on."""

    status: pb.Status.ValueType
    registers: pb.LabelSet


class Resolved(Protocol):
    """What a member knows of its journal (a `Resolution`)."""

    @property
    def spec(self) -> pb.JournalSpec: ...
    @property
    def invalidated(self) -> Signal | None: ...


class Member:
    """A whole append in the line, and what becomes of it once it has been taken along.

    It waits on `waiter` for the pipeline; `outcome` then says what its group came to: None, or what went wrong.
    """

    def __init__(self, request: pb.AppendRequest, whole: Whole, resolution: Resolved) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.whole = whole
        self.resolution = resolution
        self.waiter: asyncio.Future[object] = loop.create_future()
        self.outcome: asyncio.Future[CorantoError | None] = loop.create_future()
        self.answer: Place | Refusal | None = None
        self.commit: Fragment | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it may be taken along: its client is there, and it has not been told anything else."""
        return not self.waiter.done()

    def take_along(self, answer: Place | Refusal) -> None:
        """Go along with the leader; nothing keeps this append out of the journal but a failure of the group."""
        self.answer = answer
        self.waiter.set_exception(TakenAlong())
        self.waiter.exception()  # Its client may have gone in this very moment, and then nobody looks at it.

    def commit_to(self, fragment: Fragment) -> None:
        """Its content goes to this fragment, at its place."""
        assert isinstance(self.answer, Place)
        self.commit = commit_of(fragment, self.answer, self.whole.content)

    def settle(self, problem: CorantoError | None) -> None:
        """Say what the group came to."""
        if not self.outcome.done():
            self.outcome.set_result(problem)


class Line:
    """The whole appends that wait for one replica's pipeline, in the order in which they came."""

    def __init__(self) -> None:
        self._members: dict[Member, None] = {}
        self.coming = 0
        """Appends that are being received and may stand here soon."""
        self._leader: asyncio.Future[None] | None = None  # Waits for them, with the pipeline.
        self._in_vain = 0  # How often in a row nobody came, be it that a client is slow; and
        self._passes = 0  # how many leaders are not to wait for that reason.

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members))

    def expect(self) -> None:
        """An append is being received that may soon stand here. Call `came` once it is received, come what may."""
        self.coming += 1

    def came(self) -> None:
        """It is about to stand here, or never will."""
        self.coming -= 1
        if not self.coming:
            self._let_go()

    async def gathered(self) -> None:
        """Let those that are as good as here come: for whoever has the pipeline, before it proposes.

        Without load this takes no time. Under load it makes groups, of which one that is twice as large costs less
        than two.
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

    def join(self, member: Member) -> None:
        self._members[member] = None

    def leave(self, member: Member) -> None:
        """It has the pipeline, was taken along, or has been given up."""
        self._members.pop(member, None)


def commit_of(fragment: Fragment, place: Place, content: Bytes) -> Fragment:
    """What an append that goes to `fragment` is answered with. Its sum is that of its content, also of none."""
    digest = hashlib.sha1(content, usedforsecurity=False).digest()
    return Fragment(fragment.journal, place.begin, place.end, digest, fragment.codec)
