"""A member's life cycle. Its effects are parameters, real in `coranto.member.process` and simulated in simulations.

A member goes through four phases, in this order. It never returns to an earlier phase, and may skip DRAINING.

========  ==========================================================================================================
STARTING  It has no lease, or has not loaded the key space. It may wait here for an older process of its name to exit.
SERVING   Its key is announced and the key space is loaded. It serves assigned items, and takes part in allocation.
DRAINING  It was asked to exit. Its key is marked, so the allocator moves its items to other members. It still serves.
EXITING   It stops its remaining items, and releases its lease. After a loss (of the lease, the key space, the allocator
          or the data directory) this phase follows SERVING directly.
========  ==========================================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from coranto.coordination.allocator import AllocatorLoop, may_drain
from coranto.coordination.etcd import Coordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import MemberId
from coranto.coordination.lease import LeaseRecord, MemberSession, open_session
from coranto.effects import Clock
from coranto.errors import CoordinationError, CorantoError
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)

Seen = tuple[int, tuple[str, ...]]
"""The latest known revision of etcd, and the names of the existing members."""


class MemberPhase(enum.Enum):
    """A phase of a member's life; see above."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    EXITING = "exiting"


class MemberWork(Protocol):
    """The work of a member on the items that are assigned to it: journals of a broker, shards of a consumer."""

    def member_spec(self, endpoint: str) -> pb.BrokerSpec | pc.ConsumerSpec:
        """Return the spec to announce. Raises InvalidInput."""
        ...

    def start(self, session: MemberSession) -> None:
        """Serve assigned items while `session` lives. The key space is loaded, and holds the member's key."""
        ...

    async def stop(self) -> None:
        """Stop serving, in bounded time. A second call does nothing."""
        ...

    async def exit(self) -> None:
        """Stop serving like `stop`, and let other members continue where this member ends."""
        ...


class DataDirectory(Protocol):
    """A member's claim to its data directory, which is recorded in etcd."""

    async def claim(self) -> None:
        """Mark the directory as used by this process. Raises WrongCluster."""
        ...

    async def watch(self, clock: Clock, seen: Callable[[], Seen]) -> str:
        """Wait until the directory and etcd no longer match, and return the reason."""
        ...

    async def refresh(self, revision: int, brokers: tuple[str, ...]) -> bool:
        """Record the last seen state in the directory."""
        ...


class Membership:
    """One member: its lease, its key, its allocator, and its `work`."""

    def __init__(
        self,
        member: MemberId,
        work: MemberWork,
        *,
        coordinator: Coordinator,
        keyspace: KeySpace[Any, Any, Any],
        clock: Clock,
        exit_seconds: float,
        residence: DataDirectory | None = None,
    ) -> None:
        """Create a membership. `exit_seconds` limits DRAINING. `residence` is for members whose data outlives them."""
        self.member = member
        self.phase = MemberPhase.STARTING
        self.session: MemberSession
        self._work = work
        self._coordinator = coordinator
        self._keyspace = keyspace
        self._clock = clock
        self._exit_seconds = exit_seconds
        self._residence = residence
        self._allocator = AllocatorLoop(keyspace, coordinator, member, clock=clock)
        self._allocation: asyncio.Task[None]
        self._stopped = False
        self._undo = contextlib.AsyncExitStack()

    async def join(
        self,
        endpoint: str,
        *,
        lease_seconds: float,
        record: LeaseRecord | None = None,
        takeover_timeout: float | None = None,
    ) -> None:
        """Load the key space, announce the member at `endpoint` and start the work. Then the phase is SERVING.

        With `record`, a lease that an earlier process left is resumed. `MemberSession.announce` explains
        `takeover_timeout`. Raises Unavailable, LeaseLost, MemberInUse and WrongCluster. After an error or a
        cancellation, call `close`.
        """
        self.session = await open_session(
            self._coordinator, ttl_seconds=lease_seconds, record=record, clock=self._clock
        )
        self._undo.push_async_callback(self._close_session)
        spec = self._work.member_spec(endpoint).SerializeToString(deterministic=True)
        # The revision of a load may belong to a key outside the prefix, which no watch reports: Gazette's processes
        # would wait for it. So announce afterwards, and start at the revision of the announcement.
        self._undo.push_async_callback(self._keyspace.close)
        await self._keyspace.start()
        key = self._keyspace.layout.member_key(self.member)
        announced = await self.session.announce(key, spec, takeover_timeout=takeover_timeout)
        await self._keyspace.wait_for_revision(announced)
        if self._residence is not None:
            await self._residence.claim()
        self._work.start(self.session)
        self._allocation = asyncio.create_task(self._allocate(), name="allocator")
        self._undo.push_async_callback(self._stop)
        self.phase = MemberPhase.SERVING

    async def serve_until(self, stop: asyncio.Event) -> int:
        """Serve until `stop`, or until a failure ends the member. Returns an exit code.

        At `stop` it exits gracefully and returns 0. It returns 1 when its lease is lost, its key space or its allocator
        fails, or its data directory and etcd no longer match. A cancellation leaves the member serving.
        """
        waits = [
            asyncio.ensure_future(stop.wait()),
            asyncio.ensure_future(self.session.lost.wait()),
            asyncio.ensure_future(self._keyspace.wait_failed()),
        ]
        if self._residence is not None:
            waits.append(asyncio.ensure_future(self._watch(self._residence)))
        try:
            await asyncio.wait([*waits, self._allocation], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if stop.is_set():
            await self.exit_gracefully()
            return 0
        _log.error("member.cannot_go_on", member=str(self.member))
        await self._stop()
        return 1

    async def exit_gracefully(self) -> None:
        """Hand items over to members that can take them, then stop the remaining items."""
        _log.info("member.exiting", member=str(self.member))
        self.phase = MemberPhase.DRAINING
        await self._hand_over()
        self.phase = MemberPhase.EXITING
        await self._work.exit()
        self._stopped = True
        await self._end_allocation()
        if self._residence is not None:
            try:
                await self._residence.refresh(*self._seen())
            except (CorantoError, OSError) as error:
                _log.warning("member.last_use_not_noted", error=str(error))

    async def close(self) -> None:
        """Stop the work, and release the lease and the key space. If cancelled, the lease is left to expire."""
        await self._undo.aclose()

    @property
    def is_announced(self) -> bool:
        """True if the loaded key space holds the member's key."""
        return self.phase is not MemberPhase.STARTING and self._keyspace.state.member(self.member) is not None

    async def _hand_over(self) -> None:
        """Mark the member as exiting, and wait until others have its items, or no other can take them over."""
        state = self._keyspace.state
        member = state.member(self.member)
        if member is None or not may_drain(state, self.member):
            return
        spec = type(member.spec)()
        spec.CopyFrom(member.spec)
        spec.exiting = True
        try:
            await self.session.update(spec.SerializeToString(deterministic=True))
            # Also ends if all others exit, too, as when a whole cluster stops: no member is left to take over.
            await self._keyspace.wait_until(
                lambda now: not now.by_member.get(self.member) or not may_drain(now, self.member),
                timeout=self._exit_seconds,
            )
        except TimeoutError:
            remaining = len(self._keyspace.state.by_member.get(self.member, ()))
            _log.warning("member.handover_timed_out", items=remaining, seconds=self._exit_seconds)
        except CorantoError as error:
            _log.warning("member.handover_failed", error=str(error))

    async def _stop(self) -> None:
        self.phase = MemberPhase.EXITING
        if not self._stopped:
            await self._work.stop()
            self._stopped = True
        await self._end_allocation()

    async def _end_allocation(self) -> None:
        self._allocation.cancel()
        await asyncio.gather(self._allocation, return_exceptions=True)

    async def _close_session(self) -> None:
        # A lost lease may still exist in etcd. If so, the next process can resume this member's assignments with it.
        await self.session.close(revoke=not self.session.lost.is_set())

    async def _allocate(self) -> None:
        """Run the allocator. When it ends, the member exits: if a leader stayed, no other member could allocate."""
        try:
            await self._allocator.run()
        except CoordinationError as error:
            _log.warning("member.allocator_ended", error=str(error))
        except Exception:  # noqa: BLE001  Any error ends the member.
            _log.exception("member.allocator_failed")

    async def _watch(self, residence: DataDirectory) -> None:
        reason = await residence.watch(self._clock, self._seen)
        _log.error("member.data_directory_mismatch", reason=reason)

    def _seen(self) -> Seen:
        return self._keyspace.known_revision, tuple(str(each.id) for each in self._keyspace.state.members)
