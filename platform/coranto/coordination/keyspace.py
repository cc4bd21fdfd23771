"""A local mirror of the cluster's key space.

`KeySpace` keeps the current `KeySpaceState` up to date from a watch.

Two revisions matter. `KeySpaceState.header.revision` is the last that *changed* something under the prefix. A broker
sends it to its peers, and they can always reach it by watching. (Only a state that was just loaded has the revision of
the load. So members announce themselves after it.) `KeySpace.known_revision` may be larger: nothing under the prefix
changed between the two. `wait_for_revision` accepts either. The watch never announces a revision that did
not touch the prefix, so a waiter requests a proof: a range of keys modified after the mirror's revision, together with
the count of all keys. If there is no such key and the count is the same, then all current keys existed unmodified at
the mirror's revision and none was deleted, so the mirror is current. (etcd's own progress requests would be cheaper,
but before 3.4.25 and 3.5.8 their answers may overtake events.)

For a proof, etcd scans every key of the prefix. So all waiters share one proof, and the next one follows after a pause.
Otherwise the waiters for a lagging mirror would delay the changes that they wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Generic

import structlog

from coranto.coordination.entities import AssignT, Entities, ItemT, MemberT
from coranto.coordination.etcd import Coordinator, EtcdHeader, KeyValue, Snapshot, WatchBatch, WatchEvent
from coranto.coordination.keyspace_state import Assignment, Entries, Item, KeySpaceState, Member
from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberKey
from coranto.coordination.mirror_check import MirrorCheck, require_equal
from coranto.effects import Clock, SystemClock
from coranto.errors import CoordinationError, InvalidInput, Unavailable, WatchReset

_log = structlog.get_logger(__name__)

_TIMEOUT_SECONDS = 0.05
"""The wait for the watch before the first proof. Further proofs for the same waiters have exponential backoff."""
_LONGEST_PAUSE_SECONDS = 2.0
_REST = 4.0
"""The pause after a proof, as a multiple of its duration."""


class KeySpace(Generic[ItemT, MemberT, AssignT]):
    """A mirror of a layout's prefix. Call `start` once; it then follows until `close`, or until it fails.

    Changes that arrive within `apply_delay_seconds` after the first one are merged. A cancelled wait leaves the
    mirror as it is.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        layout: Layout,
        entities: Entities[ItemT, MemberT, AssignT],
        *,
        apply_delay_seconds: float = 0.01,
        clock: Clock | None = None,
    ) -> None:
        self.layout = layout
        self.entities = entities
        self._coordinator = coordinator
        self._apply_delay = apply_delay_seconds
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._state: KeySpaceState[ItemT, MemberT, AssignT] | None = None
        self._known_revision = 0
        self._observers: list[Callable[[KeySpaceState[ItemT, MemberT, AssignT]], None]] = []
        self._pending: list[WatchBatch | Snapshot] = []
        self._arrived = asyncio.Event()
        self._moved: asyncio.Future[None] | None = None
        self._waited_for: list[int] = []  # Revisions that the watch may never announce.
        self._waiter_added = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: CoordinationError | None = None
        self._check_mirror = MirrorCheck(coordinator, layout.root, self._clock)

    @property
    def state(self) -> KeySpaceState[ItemT, MemberT, AssignT]:
        """The current state."""
        if self._state is None:
            raise CoordinationError("the key space is not started; start() it first")
        return self._state

    @property
    def header(self) -> EtcdHeader:
        return self.state.header

    @property
    def known_revision(self) -> int:
        """The revision through which the state holds all changes. It is at least the state's own."""
        return max(self._known_revision, self._state.revision if self._state else 0)

    async def start(self, at_revision: int = 0) -> KeySpaceState[ItemT, MemberT, AssignT]:
        """Load the prefix as of `at_revision` (0 = now; an old one may be compacted) and follow it from there."""
        if self._state is not None:
            raise CoordinationError("the key space was started before; make another one")
        snapshot = await self._coordinator.range(self.layout.root, revision=at_revision)
        self._apply([snapshot])
        self._tasks = [
            asyncio.create_task(self._run(self._follow), name="keyspace.follow"),
            asyncio.create_task(self._run(self._apply_arrivals), name="keyspace.apply"),
            asyncio.create_task(self._run(self._prove_for_waiters), name="keyspace.prove"),
            asyncio.create_task(self._run(self._check_mirror.run), name="keyspace.check"),
        ]
        return self.state

    async def close(self) -> None:
        """Stop following. Pending waits raise CoordinationError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail(CoordinationError("the key space was closed; make another one"))

    def observe(self, observer: Callable[[KeySpaceState[ItemT, MemberT, AssignT]], None]) -> Callable[[], None]:
        """Call `observer` with each new state, in order, before waiters wake. Return a function that stops the calls.

        It is not called for the current state. It must not block. An exception that it raises is logged.
        """
        self._observers.append(observer)

        def stop() -> None:
            if observer in self._observers:
                self._observers.remove(observer)

        return stop

    async def wait_for_revision(
        self, revision: int, timeout: float | None = None
    ) -> KeySpaceState[ItemT, MemberT, AssignT]:
        """Return the first state known to hold all changes through `revision`.

        Raises TimeoutError after `timeout` seconds, and CoordinationError when the mirror failed or was closed.
        """
        async with asyncio.timeout(timeout):
            if self.known_revision < revision:
                self._waited_for.append(revision)
                self._waiter_added.set()
                try:
                    while self.known_revision < revision:
                        await self._next_move()
                finally:
                    self._waited_for.remove(revision)
            self._check()
            return self.state

    async def wait_for_change(
        self, since: KeySpaceState[ItemT, MemberT, AssignT], timeout: float | None = None
    ) -> KeySpaceState[ItemT, MemberT, AssignT]:
        """Return the first state other than `since`. Raises as `wait_for_revision` does."""
        async with asyncio.timeout(timeout):
            while self.state is since:
                await self._next_move()
            self._check()
            return self.state

    async def wait_until(
        self, condition: Callable[[KeySpaceState[ItemT, MemberT, AssignT]], bool], timeout: float | None = None
    ) -> KeySpaceState[ItemT, MemberT, AssignT]:
        """Return the first state, from the current one on, that meets `condition`. Raises as `wait_for_revision`."""
        async with asyncio.timeout(timeout):
            while not condition(self.state):
                await self.wait_for_change(self.state)
            return self.state

    async def wait_failed(self) -> CoordinationError:
        """Wait until the mirror stops following, and return the reason."""
        while self._failure is None:
            if self._moved is None or self._moved.done():
                self._moved = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._moved)
        return self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise CoordinationError(str(self._failure)) from self._failure

    async def _next_move(self) -> None:
        """Wait until the state or the known revision moves."""
        self._check()
        if self._moved is None or self._moved.done():
            self._moved = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._moved)
        self._check()

    def _wake(self) -> None:
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)

    def _fail(self, failure: CoordinationError) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    async def _run(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except CoordinationError as error:
            _log.warning("keyspace.failed", prefix=self.layout.prefix, error=str(error))
            self._fail(error)
        except Exception as error:  # noqa: BLE001  Fail, because a mirror that stopped must not look alive.
            _log.exception("keyspace.failed", prefix=self.layout.prefix)
            self._fail(CoordinationError(f"the mirror of {self.layout.prefix} failed: {error!r}"))

    async def _follow(self) -> None:
        """Queue batches of the watch as arrivals. Load the prefix again when the watch cannot continue."""
        next_revision = self.state.revision + 1
        while True:
            try:
                async with aclosing(self._coordinator.watch(self.layout.root, next_revision)) as batches:
                    async for batch in batches:
                        next_revision = batch.header.revision + 1
                        self._arrive(batch)
                raise CoordinationError("the watch ended")
            except WatchReset as reset:
                _log.warning("keyspace.reload", prefix=self.layout.prefix, reason=str(reset))
            snapshot = await self._load_again()
            next_revision = snapshot.header.revision + 1
            self._arrive(snapshot)

    async def _load_again(self) -> Snapshot:
        while True:
            try:
                return await self._coordinator.range(self.layout.root)
            except Unavailable as error:
                _log.warning("keyspace.reload_failed", prefix=self.layout.prefix, error=str(error))
                await self._clock.sleep(0.5)

    def _arrive(self, arrival: WatchBatch | Snapshot) -> None:
        self._pending.append(arrival)
        self._arrived.set()

    async def _apply_arrivals(self) -> None:
        while True:
            await self._arrived.wait()
            if self._apply_delay:
                await self._clock.sleep(self._apply_delay)
            self._arrived.clear()
            arrivals, self._pending = self._pending, []
            self._apply(arrivals)

    def _apply(self, arrivals: Sequence[WatchBatch | Snapshot]) -> None:
        """Apply arrivals as one new state, and notify observers and waiters."""
        state = self._state
        header = state.header if state else None
        entries = state.entries if state else Entries([], [])
        events: list[WatchEvent] = []
        changed: set[str] | None = set()
        known = self._known_revision
        for arrival in arrivals:
            if header is not None and arrival.header.cluster_id != header.cluster_id:
                raise CoordinationError(
                    f"etcd's cluster id changed from {header.cluster_id:#x} to {arrival.header.cluster_id:#x}: "
                    "this is another etcd; restart the process"
                )
            if isinstance(arrival, Snapshot):
                seen = max(known, header.revision if header is not None else 0)
                if arrival.header.revision < seen:
                    raise CoordinationError(
                        f"etcd went back from revision {seen} to {arrival.header.revision}: it was restored from a "
                        "backup, or lost acknowledged changes when it was killed, as 3.5.0 to 3.5.2 do; see 'An etcd "
                        "that was restored' in docs/operations.md"
                    )
                known = arrival.header.revision
                entries = entries.merge(events, self._decode) if events else entries
                events.clear()
                if header is not None:
                    differing = entries.differences(arrival.kvs, through=header.revision)
                    require_equal(self.layout.prefix, arrival.header.revision, differing)
                # If nothing changed, keep the revision: peers that only watch might never reach the snapshot's.
                if header is None or not entries.are_current(arrival, header.revision):
                    entries, header = Entries.load(arrival.kvs, self._decode), arrival.header
                    changed = None
            elif arrival.events:
                events.extend(arrival.events)
                header = arrival.header
                if changed is not None:
                    changed.update(filter(None, (self.layout.item_of(event.kv.key) for event in arrival.events)))
            else:
                known = max(known, arrival.header.revision)
                if arrival.reconnected:
                    entries = entries.merge(events, self._decode) if events else entries
                    events.clear()
                    self._check_mirror.request(entries, arrival.header.revision)
        assert header is not None
        if events:
            entries = entries.merge(events, self._decode)
        self._known_revision = known
        if state is None or entries is not state.entries:
            self._state = KeySpaceState(
                header,
                entries,
                self.layout,
                self.entities,
                changed=frozenset(changed) if changed is not None else None,
            )
            for observer in tuple(self._observers):
                try:
                    observer(self._state)
                except Exception:  # noqa: BLE001  A failing observer must not keep the state from the others.
                    _log.exception("keyspace.observer_failed", prefix=self.layout.prefix)
        self._wake()

    def _decode(self, kv: KeyValue) -> object | None:
        try:
            key = self.layout.decode(kv.key)
            match key:
                case ItemKey():
                    return Item(key.item, self.entities.decode_item(key.item, kv.value), kv)
                case MemberKey():
                    return Member(key.member, self.entities.decode_member(key.member, kv.value), kv)
                case AssignmentKey():
                    return Assignment(key, self.entities.decode_assignment(key, kv.value), kv)
        except InvalidInput as error:
            _log.warning("keyspace.bad_entry", key=kv.key, mod_revision=kv.mod_revision, error=str(error))
            return None

    async def _prove_for_waiters(self) -> None:
        """Prove that the mirror is current, repeatedly while there are waiters for a revision."""
        pause = _TIMEOUT_SECONDS
        while True:
            if not self._waited_for or await self._wait_for_waiter(pause):
                await self._waiter_added.wait()
                self._waiter_added.clear()
                pause = _TIMEOUT_SECONDS
                await self._clock.sleep(pause)
            began = self._clock.monotonic()
            if not self._pending and any(each > self.known_revision for each in self._waited_for):
                await self._prove()
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await self._clock.sleep(_REST * (self._clock.monotonic() - began))

    async def _wait_for_waiter(self, seconds: float) -> bool:
        """Wait for `seconds`, or for another waiter for a revision. Return True in the latter case."""
        try:
            async with asyncio.timeout(seconds):
                await self._waiter_added.wait()
        except TimeoutError:
            return False
        return True

    async def _prove(self) -> None:
        """Advance the known revision if a range proves that the state is current (see the module's docstring)."""
        state = self.state
        try:
            newer = await self._coordinator.range(
                self.layout.root, min_mod_revision=state.revision + 1, limit=1, keys_only=True
            )
        except (Unavailable, CoordinationError) as error:
            _log.debug("keyspace.proof_failed", error=str(error))
            return
        if self.state is state and not newer.kvs and newer.count == len(state.entries):
            self._known_revision = max(self._known_revision, newer.header.revision)
            self._wake()
