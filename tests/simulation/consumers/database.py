"""A SQL database: sessions, row locks, transactions, and the ways in which the answer to a commit gets lost.

It behaves, towards those who write checkpoints under a fence, as a database server does:

* A session that has changed a shard's row has it locked until it commits or ends; others wait for that.
* What a session sends arrives in order. A client that gives up on a session says so behind all that it has sent, so
  a commit may take place after its client has given up; but whoever then waits for the lock finds it done or undone.
* A session ends when its client dies, when nothing is heard of it over a link that is cut, or when it keeps a row
  locked and does nothing.

`SimSqlStore` is a store over it, as `SqlShardStore` is one over the real ones.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from coranto.errors import CommitOutcomeUnknown, Fenced, SqlStoreError
from coranto.messages import Checkpoint
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.network import Lane, Network
from coranto.testing.sim.rpc import GIVE_UP_SECONDS
from coranto.testing.sim.timeline import Process
from coranto_consumers.stores.base import Store

from .history import Book, Entry

NODE = "database"
TIMEOUT_SECONDS = 5.0
IDLE_SECONDS = 8.0
"""The time that a session may keep a row locked without doing anything."""
_RESOLVE_WAITS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0)

T = TypeVar("T")


class _Lost(Exception):
    """The session broke; what was under way may have taken place or not."""


class _Refused(Exception):
    """The database did not do it."""


@dataclass(slots=True)
class DatabaseFaults:
    """Chances per call."""

    refuse: float = 0.0
    lose_answer: float = 0.0
    """It is done, and the session breaks before the answer is there."""
    lose_request: float = 0.0


@dataclass(slots=True)
class Changes:
    """The changes that a transaction makes to a shard's book. Sums are added to, so that doing it twice shows."""

    entries: list[Entry] = field(default_factory=list)
    token: str = ""

    def apply_to(self, book: Book) -> None:
        for entry in self.entries:
            count = book.sums.setdefault(entry.key, [0, 0])
            count[0] += 1
            count[1] += entry.amount
            book.entries.append(entry)
        if self.token:
            book.tokens.append(self.token)


@dataclass(slots=True)
class _Row:
    fence: int = 0
    checkpoint: bytes = b""
    book: Book = field(default_factory=Book)
    holder: Session | None = None
    waiters: deque[tuple[Session, asyncio.Future[None]]] = field(default_factory=deque)


class SimDatabase:
    """The server."""

    checks_fences = True
    """A test has one that does not, to see that this is noticed."""

    def __init__(self, loop: SimLoop, network: Network) -> None:
        self.network = network
        self.loop = loop
        self.faults = DatabaseFaults()
        self._rows: dict[str, _Row] = {}

    def row(self, shard: str) -> _Row:
        return self._rows.setdefault(shard.rpartition("/")[2], _Row())

    async def raise_fence(self, session: Session, shard: str) -> tuple[int, bytes, Book]:
        row = await self._lock(session, shard)
        row.fence += 1
        self.loop.note(f"database: fence {row.fence} of {shard} by {session.process.name}")
        self._unlock(row)
        return row.fence, row.checkpoint, copy.deepcopy(row.book)

    async def update(self, session: Session, shard: str, fence: int, checkpoint: bytes, changes: Changes) -> bool:
        """Change a shard's row, to be committed. False, and nothing is changed, when the fence is another one."""
        row = await self._lock(session, shard)
        if self.checks_fences and row.fence != fence:
            self._unlock(row)
            return False
        session.staged = shard, checkpoint, changes
        session.busy_until = self.loop.time() + IDLE_SECONDS
        self.loop.later(IDLE_SECONDS, session.end_if_idle)
        return True

    async def commit(self, session: Session) -> None:
        if session.staged is None:
            raise _Refused("there is no transaction")
        shard, checkpoint, changes = session.staged
        session.staged = None
        row = self.row(shard)
        row.checkpoint = checkpoint
        changes.apply_to(row.book)
        self.loop.note(f"database: commit of {changes.token} to {shard} by {session.process.name}")
        self._unlock(row)

    async def read(self, session: Session, shard: str) -> tuple[int, bytes]:
        """The fence and the checkpoint, once nobody has the row locked."""
        row = await self._lock(session, shard)
        self._unlock(row)
        return row.fence, row.checkpoint

    def end(self, session: Session) -> None:
        """A session is over: what it has not committed is undone."""
        for row in self._rows.values():
            if row.holder is session:
                self._unlock(row)
        session.staged = None

    async def _lock(self, session: Session, shard: str) -> _Row:
        """Whoever comes first has it first."""
        row = self.row(shard)
        if row.holder is None:
            row.holder = session
        elif row.holder is not session:
            granted: asyncio.Future[None] = self.loop.create_future()
            row.waiters.append((session, granted))
            await granted
            if session.over:
                self.end(session)
                raise _Refused("the session has ended")
        return row

    def _unlock(self, row: _Row) -> None:
        row.holder = None
        if row.waiters:
            row.holder, granted = row.waiters.popleft()
            granted.set_result(None)


class Session:
    """A client's connection, and the server's end of it."""

    def __init__(self, database: SimDatabase, node: str, process: Process) -> None:
        self.process = process
        self.over = False
        """At the server's end."""
        self.staged: tuple[str, bytes, Changes] | None = None
        self.busy_until = 0.0
        self._database = database
        self._network = database.network
        self._loop = database.loop
        self._node = node
        self._up = Lane(self._network, node, NODE, self._arrived)
        self._inbox: deque[Callable[[], Awaitable[None]]] = deque()
        self._works = False
        self._answer: asyncio.Future[object] | None = None
        process.check_alive()
        process.on_death.append(self.close)

    async def call(self, serve: Callable[[], Awaitable[T]]) -> T:
        """Have the server do something. Raises _Refused, and _Lost when there is no answer."""
        self.process.check_alive()
        answer: asyncio.Future[T] = self._loop.create_future()
        faults, rng = self._database.faults, self._network.rng
        loses_request, refuses = rng.random() < faults.lose_request, rng.random() < faults.refuse
        loses_answer = rng.random() < faults.lose_answer

        def reply(settle: Callable[[], None]) -> None:
            if not answer.done():
                settle()

        async def handle() -> None:
            try:
                if self.over or loses_request:
                    self._end()
                    raise _Lost("the server has closed the connection")
                if refuses:
                    raise _Refused("the server has no room")
                result = await serve()
                if loses_answer:
                    self._database.loop.note(f"database: loses an answer to {self.process.name}")
                    self._end()
                    raise _Lost("the connection broke")
            except (_Lost, _Refused) as error:
                failure: Exception = error
                self._network.send(NODE, self._node, lambda: reply(lambda: answer.set_exception(failure)))
            else:
                self._network.send(NODE, self._node, lambda: reply(lambda: answer.set_result(result)))

        self._up.send(handle)
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await answer
        except TimeoutError:
            raise _Lost("the server does not answer") from None

    def close(self) -> None:
        """Give the session up. The server hears of it behind all that was sent, or finds out by itself."""
        if self.close in self.process.on_death:
            self.process.on_death.remove(self.close)
        self._up.send(self._ended)
        if self._network.is_cut(self._node, NODE):
            self._loop.later(self._network.rng.uniform(*GIVE_UP_SECONDS), self._end)

    def end_if_idle(self) -> None:
        if self.staged is not None and self._loop.time() >= self.busy_until:
            self._loop.note(f"database: ends the idle session of {self.process.name}")
            self._end()

    def _arrived(self, request: Callable[[], Awaitable[None]]) -> None:
        self._inbox.append(request)
        if not self._works:
            self._works = True
            self._loop.create_task(self._work(), name="database")

    async def _work(self) -> None:
        """Requests are handled one after the other."""
        while self._inbox:
            await self._inbox.popleft()()
        self._works = False

    async def _ended(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._database.end(self)


class SimSqlStore(Store):
    """A shard's book in the database."""

    retries_blindly = False
    """A test has one that does, to see that this is noticed."""

    def __init__(
        self, database: SimDatabase, node: str, process: Process, clock: SimClock, reached: Callable[[str], None]
    ) -> None:
        """`reached` is told of each step before it is taken."""
        self.book = Book()
        """As this owner sees it: what is committed, and what it did since."""
        self._reach = database, node, process
        self._database = database
        self._clock = clock
        self._reached = reached
        self._changes = Changes()
        self._fence = 0

    def record(self, entry: Entry) -> None:
        self._changes.entries.append(entry)
        Changes([entry]).apply_to(self.book)

    def end_transaction(self, token: str) -> None:
        self._changes.token = token
        self.book.tokens.append(token)

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        self._reached("fence")
        session = Session(*self._reach)
        try:
            self._fence, content, self.book = await session.call(lambda: self._database.raise_fence(session, shard))
        except (_Lost, _Refused) as error:
            raise SqlStoreError(f"the fence of {shard} could not be raised: {error}") from error
        finally:
            session.close()
        return Checkpoint.from_bytes(content)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        changes, self._changes = self._changes, Changes()
        return asyncio.ensure_future(self._commit(shard, checkpoint.to_bytes(), changes, wait_for))

    async def destroy(self) -> None:
        """Sessions are closed as they are done with."""

    async def _commit(
        self, shard: str, checkpoint: bytes, changes: Changes, wait_for: Sequence[Awaitable[object]]
    ) -> None:
        for awaited in wait_for:
            await awaited
        self._reached("update")
        database, session = self._database, Session(*self._reach)
        sent = False
        try:
            if not await session.call(lambda: database.update(session, shard, self._fence, checkpoint, changes)):
                raise Fenced(f"{shard}: fence {self._fence} was raised by a later owner")
            sent = True
            self._reached("commit")
            await session.call(lambda: database.commit(session))
        except _Lost as error:
            if not sent:
                raise SqlStoreError(f"the commit of {shard} broke before it began: {error}") from error
            session.close()
            if self.retries_blindly:
                await self._commit(shard, checkpoint, changes, ())
                return
            await self._resolve(shard, checkpoint, error)
        except _Refused as error:
            raise SqlStoreError(f"the database refused: {error}") from error
        finally:
            session.close()

    async def _resolve(self, shard: str, checkpoint: bytes, cause: Exception) -> None:
        """Return if the commit took place; raise what became of it otherwise."""
        for wait in (*_RESOLVE_WAITS, None):
            session = Session(*self._reach)
            try:
                fence, found = await session.call(functools.partial(self._database.read, session, shard))
            except (_Lost, _Refused) as error:
                if wait is None:
                    raise CommitOutcomeUnknown(f"the commit of {shard} broke, and nothing is heard: {error}") from cause
                await self._clock.sleep(wait)
                continue
            finally:
                session.close()
            if found == checkpoint:
                return
            if fence != self._fence:
                raise Fenced(f"{shard}: the commit broke, and fence {self._fence} was raised meanwhile") from cause
            raise SqlStoreError(f"the commit of {shard} was not applied") from cause
