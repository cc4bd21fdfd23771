"""A local mirror of the cluster's key space.

`Entries` is the pure part: sorted, immutable, and merged with the changes of a batch in one pass. `KeySpaceState` is an
immutable view of it in terms of items, members and assignments: the key space as it was at one revision. `KeySpace`
keeps the current `KeySpaceState` up to date from a watch.

Two revisions matter. `KeySpaceState.header.revision` is the last that *changed* something under the prefix. A broker
tells it to its peers, and they can always reach it by watching. (Only a state that was just loaded has the revision of
the load. So members announce themselves after it.) `KeySpace.known_revision` may be larger: nothing under the prefix
changed between the two. `wait_for_revision` accepts either. The watch never announces a revision that did
not touch the prefix, so a waiter asks for proof: a range of keys modified after the mirror's revision, together with
the count of all keys. If there is no such key and the count is the same, then all present keys existed unmodified at
the mirror's revision and none was deleted, so the mirror is current. (etcd's own progress requests would be cheaper,
but before 3.4.25 and 3.5.8 their answers may overtake events.)
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, cast

import structlog

from coranto.coordination.entities import AssignT, Entities, ItemT, MemberT, implied_route
from coranto.coordination.etcd import Coordinator, EtcdHeader, KeyValue, Snapshot, WatchBatch, WatchEvent
from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberId, MemberKey
from coranto.effects import Clock, SystemClock
from coranto.errors import CoordinationError, InvalidInput, Unavailable, WatchReset
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Item(Generic[ItemT]):
    id: str
    spec: ItemT
    kv: KeyValue

    @property
    def create_revision(self) -> int:
        return self.kv.create_revision

    @property
    def mod_revision(self) -> int:
        return self.kv.mod_revision


@dataclass(frozen=True, slots=True)
class Member(Generic[MemberT]):
    id: MemberId
    spec: MemberT
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Assignment(Generic[AssignT]):
    key: AssignmentKey
    value: AssignT
    kv: KeyValue

    @property
    def item(self) -> str:
        return self.key.item

    @property
    def member(self) -> MemberId:
        return self.key.member

    @property
    def slot(self) -> int:
        return self.key.slot


@dataclass(frozen=True, slots=True)
class KeySpaceEntry:
    """A key-value and its decoded value; None if it did not decode."""

    kv: KeyValue
    decoded: object | None


Decode = Callable[[KeyValue], object | None]


class Entries:
    """Key-values in key order, with their decoded values. Immutable."""

    __slots__ = ("_entries", "_keys")

    def __init__(self, keys: list[str], entries: list[KeySpaceEntry]) -> None:
        self._keys = keys
        self._entries = entries

    @staticmethod
    def load(kvs: Iterable[KeyValue], decode: Decode) -> Entries:
        ordered = sorted(kvs, key=lambda kv: kv.key)
        return Entries([kv.key for kv in ordered], [KeySpaceEntry(kv, decode(kv)) for kv in ordered])

    def merge(self, events: Iterable[WatchEvent], decode: Decode) -> Entries:
        """Return these entries with `events` applied in order. An event that is not newer than its entry is dropped."""
        last: dict[str, WatchEvent] = {}
        for event in events:
            last[event.kv.key] = event
        keys: list[str] = []
        entries: list[KeySpaceEntry] = []
        taken = 0  # Entries before this index are copied or replaced.
        for key in sorted(last):
            event = last[key]
            at = bisect_left(self._keys, key, taken)
            keys.extend(self._keys[taken:at])
            entries.extend(self._entries[taken:at])
            taken = at
            if at < len(self._keys) and self._keys[at] == key:
                taken = at + 1
                if self._entries[at].kv.mod_revision >= event.kv.mod_revision:
                    keys.append(key)
                    entries.append(self._entries[at])
                    continue
            if not event.deleted:
                keys.append(key)
                entries.append(KeySpaceEntry(event.kv, decode(event.kv)))
        keys.extend(self._keys[taken:])
        entries.extend(self._entries[taken:])
        return Entries(keys, entries)

    def are_current(self, snapshot: Snapshot, revision: int) -> bool:
        """Return True if a later snapshot shows that nothing changed since these entries were read at `revision`."""
        return len(snapshot.kvs) == len(self) and all(kv.mod_revision <= revision for kv in snapshot.kvs)

    def get(self, key: str) -> KeySpaceEntry | None:
        at = bisect_left(self._keys, key)
        return self._entries[at] if at < len(self._keys) and self._keys[at] == key else None

    def prefixed(self, prefix: str) -> Sequence[KeySpaceEntry]:
        """Return the entries whose keys begin with `prefix`."""
        begin = bisect_left(self._keys, prefix)
        end = bisect_left(self._keys, prefix + "\U0010ffff", begin)
        return self._entries[begin:end]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[KeySpaceEntry]:
        return iter(self._entries)


class KeySpaceState(Generic[ItemT, MemberT, AssignT]):
    """The key space as of `header.revision`. Immutable; keep it for as long as one consistent view is needed."""

    def __init__(
        self, header: EtcdHeader, entries: Entries, layout: Layout, entities: Entities[ItemT, MemberT, AssignT]
    ) -> None:
        self.header = header
        self.entries = entries
        self.layout = layout
        self.entities = entities

    @property
    def revision(self) -> int:
        return self.header.revision

    def item(self, name: str) -> Item[ItemT] | None:
        try:
            entry = self.entries.get(self.layout.item_key(name))
        except InvalidInput:  # A name that no key can hold.
            return None
        return cast("Item[ItemT]", entry.decoded) if entry and entry.decoded else None

    def member(self, member: MemberId) -> Member[MemberT] | None:
        try:
            entry = self.entries.get(self.layout.member_key(member))
        except InvalidInput:
            return None
        return cast("Member[MemberT]", entry.decoded) if entry and entry.decoded else None

    @cached_property
    def items(self) -> Sequence[Item[ItemT]]:
        """All items, by name."""
        entries = self.entries.prefixed(self.layout.items)
        return [cast("Item[ItemT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def members(self) -> Sequence[Member[MemberT]]:
        """All members, by zone and suffix."""
        entries = self.entries.prefixed(self.layout.members)
        return [cast("Member[MemberT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def all_assignments(self) -> Sequence[Assignment[AssignT]]:
        """All assignments, in key order."""
        entries = self.entries.prefixed(self.layout.assignments)
        return [cast("Assignment[AssignT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def by_member(self) -> dict[MemberId, list[Assignment[AssignT]]]:
        """The assignments of each member that has any."""
        found: dict[MemberId, list[Assignment[AssignT]]] = {}
        for assignment in self.all_assignments:
            found.setdefault(assignment.member, []).append(assignment)
        return found

    def assignments_in_key_order(self, item: str) -> list[Assignment[AssignT]]:
        """Return an item's assignments by zone, suffix and slot: the order of a Route's members."""
        try:
            prefix = self.layout.assignments_of(item)
        except InvalidInput:
            return []
        return [cast("Assignment[AssignT]", entry.decoded) for entry in self.entries.prefixed(prefix) if entry.decoded]

    def assignments(self, item: str) -> list[Assignment[AssignT]]:
        """Return an item's assignments by slot: the primary first, if there is one."""
        return sorted(self.assignments_in_key_order(item), key=lambda a: (a.slot, a.member))

    def consistent(self, item: str) -> bool:
        """Return True if the item has assignments and all of them are consistent."""
        found = [(a.key, a.value) for a in self.assignments_in_key_order(item)]
        return bool(found) and all(self.entities.consistent(found))

    def route_of(self, item: str, *, endpoints: bool = True) -> pb.Route:
        """Return the Route that the item's assignments imply. A member whose key is missing has an empty endpoint."""
        assignments = self.assignments_in_key_order(item)
        route = implied_route([a.key for a in assignments])
        if endpoints:
            for assignment in assignments:
                member = self.member(assignment.member)
                route.endpoints.append(self.entities.endpoint(member.spec) if member else "")
        return route

    @cached_property
    def leader(self) -> Member[MemberT] | None:
        """The member that plans for all: the one whose key is oldest."""
        return min(self.members, key=lambda m: (m.kv.create_revision, m.id), default=None)


class KeySpace(Generic[ItemT, MemberT, AssignT]):
    """A mirror of a layout's prefix. `start` it once; it then follows until `close`, or until it fails for good.

    Changes that arrive within `apply_delay_seconds` of one another are merged together. A cancelled wait leaves the
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
        self._proving = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: CoordinationError | None = None

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
            patience = 0.05
            while self.known_revision < revision:
                try:
                    async with asyncio.timeout(patience):
                        await self._next_move()
                except TimeoutError:
                    await self._prove(revision)
                    patience = min(patience * 2, 2.0)
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
        """Return when the state or the known revision moves."""
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
        """Turn the watch into arrivals. Load the prefix again when the watch cannot continue."""
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
                        "backup; see 'An etcd that was restored' in docs/operations.md"
                    )
                known = arrival.header.revision
                entries = entries.merge(events, self._decode) if events else entries
                events.clear()
                # If nothing changed, keep the revision: peers that only watch might never reach the snapshot's.
                if header is None or not entries.are_current(arrival, header.revision):
                    entries, header = Entries.load(arrival.kvs, self._decode), arrival.header
            elif arrival.events:
                events.extend(arrival.events)
                header = arrival.header
            else:
                known = max(known, arrival.header.revision)
        assert header is not None
        if events:
            entries = entries.merge(events, self._decode)
        self._known_revision = known
        if state is None or entries is not state.entries:
            self._state = KeySpaceState(header, entries, self.layout, self.entities)
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

    async def _prove(self, revision: int) -> None:
        """Advance the known revision if a range proves that the state is current (see the module's docstring)."""
        async with self._proving:
            if self.known_revision >= revision:
                return
            state = self.state
            try:
                newer = await self._coordinator.range(
                    self.layout.root, min_mod_revision=state.revision + 1, limit=1, keys_only=True
                )
            except Unavailable as error:
                _log.debug("keyspace.proof_failed", error=str(error))
                return
            if self.state is state and not newer.kvs and newer.count == len(state.entries):
                self._known_revision = max(self._known_revision, newer.header.revision)
                self._wake()
