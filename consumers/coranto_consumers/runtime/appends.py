"""Appends of one shard: in order for each journal, and held back until a commit where required.

The order separates transactions for readers. Messages of a transaction follow the acknowledgement of the previous
transaction, which waits for its transaction's commit. An acknowledgement before its own messages would commit nothing,
and an acknowledgement after later messages of its producer would roll them back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coranto.client import AppendResult
from coranto.tracing import TraceSpan

BATCH_BYTES = 4 << 20
PENDING_BYTES = 32 << 20

Append = Callable[[str, Sequence[bytes], TraceSpan | None], Awaitable[AppendResult]]


@dataclass(slots=True)
class _OrderedAppend:
    content: bytes
    after: asyncio.Future[None] | None
    done: asyncio.Future[int]
    within: TraceSpan | None


@dataclass(slots=True)
class _Lane:
    queue: deque[_OrderedAppend] = field(default_factory=deque)
    sender: asyncio.Task[None] | None = None
    failure: Exception | None = None


class OrderedAppends:
    """Appends through `append(journal, pieces, within)`: to several journals concurrently, with small pieces joined."""

    def __init__(self, append: Append) -> None:
        self._append = append
        self._lanes: dict[str, _Lane] = {}
        self._bytes = 0
        self._released = asyncio.Event()

    def add(
        self,
        journal: str,
        content: bytes,
        *,
        after: asyncio.Future[None] | None = None,
        within: TraceSpan | None = None,
    ) -> asyncio.Future[int]:
        """Append content after all content that was added for the journal before, and not before `after` is done.

        `within` is the trace span of the append. Joined pieces use the span of the first piece.

        The future's result is the end offset of the content in the journal. When an append or `after` fails, all
        later appends to the journal fail too.
        """
        lane = self._lanes.setdefault(journal, _Lane())
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if lane.failure is not None:
            done.set_exception(lane.failure)
            done.exception()  # It may have no waiter, since the shard has failed already.
            return done
        self._bytes += len(content)
        lane.queue.append(_OrderedAppend(content, after, done, within))
        if lane.sender is None:
            lane.sender = asyncio.create_task(self._send(journal, lane), name=f"append {journal}")
        return done

    async def wait_for_capacity(self, limit: int = PENDING_BYTES) -> None:
        """Wait until less than `limit` bytes are pending."""
        while self._bytes >= limit:
            self._released.clear()
            await self._released.wait()

    async def close(self) -> None:
        """Drop pending content. The outcome of an append in progress is unknown."""
        senders = [lane.sender for lane in self._lanes.values() if lane.sender is not None]
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        for lane in self._lanes.values():
            # A sender that never ran has settled nothing.
            self._fail(lane, lane.queue, ConnectionAbortedError("the shard has stopped"))

    async def _send(self, journal: str, lane: _Lane) -> None:
        batch: list[_OrderedAppend] = []
        try:
            # Wait one turn of the loop, so that pieces added in the same turn share an append.
            await asyncio.sleep(0)
            while lane.queue:
                batch = self._next_batch(lane.queue)
                if (gate := batch[0].after) is not None:
                    await asyncio.shield(gate)
                result = await self._append(journal, [piece.content for piece in batch], batch[0].within)
                end = result.begin
                for piece in batch:
                    end += len(piece.content)
                    self._resolve(piece)
                    if not piece.done.done():  # The waiting task may have been cancelled, and this future with it.
                        piece.done.set_result(end)
                batch = []
        except BaseException as error:
            stopped = error if isinstance(error, Exception) else ConnectionAbortedError("the shard has stopped")
            self._fail(lane, [*batch, *lane.queue], stopped)
            if not isinstance(error, Exception):
                raise
        finally:
            lane.sender = None
            if lane.failure is None:
                del self._lanes[journal]

    def _fail(self, lane: _Lane, pieces: Iterable[_OrderedAppend], failure: Exception) -> None:
        lane.failure = lane.failure or failure
        for piece in pieces:
            self._resolve(piece)
            if not piece.done.done():
                piece.done.set_exception(failure)
                piece.done.exception()  # It may have no waiter.
        lane.queue.clear()

    @staticmethod
    def _next_batch(queue: deque[_OrderedAppend]) -> list[_OrderedAppend]:
        """Return the first piece, and the pieces after it that wait for nothing."""
        batch = [queue.popleft()]
        size = len(batch[0].content)
        while queue and queue[0].after is None and size + len(queue[0].content) <= BATCH_BYTES:
            batch.append(queue.popleft())
            size += len(batch[-1].content)
        return batch

    def _resolve(self, piece: _OrderedAppend) -> None:
        self._bytes -= len(piece.content)
        self._released.set()
