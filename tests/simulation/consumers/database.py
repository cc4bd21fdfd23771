"""A simulated SQL database: sessions, row locks, transactions, and commits whose answer is lost.

For clients that write checkpoints under a fence, it behaves as a database server does:

* A session that has changed a shard's row has it locked until it commits or ends. Others wait for that.
* Requests of a session arrive in order. A client that closes a session sends the close after them, so a commit may take
  place after its client has timed out. A later holder of the lock finds it either applied or rolled back.
* A session ends when its client dies, when its link is cut for long, or when it keeps a row locked and is idle.

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
"""The longest time that an idle session may keep a row locked."""
_RESOLVE_WAITS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0)

T = TypeVar("T")


class _Lost(Exception):
    """The session broke. The pending request may have been applied or not."""


class _Refused(Exception):
    """The database rejected the request."""


@dataclass(slots=True)
class DatabaseFaults:
    """Probabilities per call."""

    refuse: float = 0.0
    lose_answer: float = 0.0
    """The request is applied, and the session breaks before the answer arrives."""
    lose_request: float = 0.0


@dataclass(slots=True)
class Changes:
    """The changes of a transaction to a shard's book. Sums are increments, so that a repetition is visible."""

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
    checks_fences = True
    """A test sets it to False, to prove that the checker finds the effects."""

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
        """Change a shard's row without committing. Return False, without a change, if the fence differs."""
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
        """Return the fence and the checkpoint, once the row is unlocked."""
        row = await self._lock(session, shard)
        self._unlock(row)
        return row.fence, row.checkpoint

    def end(self, session: Session) -> None:
        """End a session, and roll back its uncommitted changes."""
        for row in self._rows.values():
            if row.holder is session:
                self._unlock(row)
        session.staged = None

    async def _lock(self, session: Session, shard: str) -> _Row:
        """Lock a row, in request order (FIFO)."""
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
    """A client's connection and the server's session."""

    def __init__(self, database: SimDatabase, node: str, process: Process) -> None:
        self.process = process
        self.over = False
        """True once the server has ended it."""
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
        """Let the server handle a request. Raises _Refused, or _Lost if there is no answer."""
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
        """Close the session. The server ends it after all earlier requests, or when the link times out."""
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
        """Handle requests one after the other."""
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
    retries_blindly = False
    """A test sets it to True, to prove that the checker finds the effects."""

    def __init__(
        self, database: SimDatabase, node: str, process: Process, clock: SimClock, reached: Callable[[str], None]
    ) -> None:
        """Create a store. `reached` is called with each step before it is taken."""
        self.book = Book()
        """The book as this owner sees it: its state when restored, and the owner's own changes."""
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
        """Do nothing: each session is closed after its use."""

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
        """Return if the commit took place. Raises the actual outcome otherwise."""
        for wait in (*_RESOLVE_WAITS, None):
            session = Session(*self._reach)
            try:
                fence, found = await session.call(functools.partial(self._database.read, session, shard))
            except (_Lost, _Refused) as error:
                if wait is None:
                    raise CommitOutcomeUnknown(
                        f"the commit of {shard} broke, and there is no answer: {error}"
                    ) from cause
                await self._clock.sleep(wait)
                continue
            finally:
                session.close()
            if found == checkpoint:
                return
            if fence != self._fence:
                raise Fenced(
                    f"{shard}: the commit broke, and fence {self._fence} was raised by a later owner"
                ) from cause
            raise SqlStoreError(f"the commit of {shard} was not applied") from cause
