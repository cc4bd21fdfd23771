"""Batching of small appends: ordered within each journal, parallel across journals, bounded in memory.

While one append of a journal is under way, further content for the journal is collected and goes with the next append.
There is no linger time: a single append is sent at once.

Brokers look at the end of an append to a journal of lines, and not within it. So content that ends within a line is
sent alone to such a journal: it is refused alone, and nothing continues its line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from coranto.client.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import CorantoError, InvalidInput
from coranto.labels import NAME, label_selector, takes_whole_lines

DEFAULT_BATCH_BYTES = 4 << 20
DEFAULT_PENDING_BYTES = 64 << 20
DEFAULT_PATIENCE = 300.0
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class Appended:
    """The offsets [begin, end) at which one piece of content was committed, and the append that contained it."""

    begin: int
    end: int
    batch: AppendResult


@dataclass(slots=True)
class _PendingAppend:
    content: bytes
    done: asyncio.Future[Appended]


@dataclass(slots=True)
class _JournalQueue:
    queue: deque[_PendingAppend] = field(default_factory=deque)
    sender: asyncio.Task[None] | None = None
    failure: CorantoError | None = None
    has_torn: bool = False
    """True once content of it did not end with a newline."""


class AppendService:
    """Batches appends. Use as `async with AppendService(client) as service:`, which flushes on leaving.

    A failed batch is retried for `patience` seconds. The outcome of a try can be unknown, so content may be committed
    more than once unless `retry_unknown` is false. Leave it true only for content whose readers discard duplicates,
    such as messages with UUIDs.

    When a batch finally fails, its pieces and all later content for that journal fail with the same error, so that
    content never follows a gap. `reset(journal)` accepts appends again.
    """

    def __init__(
        self,
        client: JournalClient,
        *,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        retry_unknown: bool = True,
        patience: float = DEFAULT_PATIENCE,
    ) -> None:
        """`batch_bytes` bounds an append of several pieces. `pending_bytes` bounds all content not committed yet."""
        if batch_bytes <= 0 or pending_bytes <= 0:
            raise InvalidInput("batch_bytes and pending_bytes must be positive numbers of bytes", field="batch_bytes")
        self._client = client
        self._batch_bytes = batch_bytes
        self._capacity = pending_bytes
        self._retry_unknown = retry_unknown
        self._patience = patience
        self._journals: dict[str, _JournalQueue] = {}
        self._whole_lines: dict[str, bool] = {}  # Of journals that were sent content without a newline at its end.
        self._pending_bytes = 0
        self._admission = asyncio.Lock()
        self._released = asyncio.Event()

    async def __aenter__(self) -> AppendService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.flush()
        else:
            await self.cancel()

    @property
    def pending_bytes(self) -> int:
        """The number of bytes accepted and not yet committed."""
        return self._pending_bytes

    async def append(self, journal: str, content: bytes) -> asyncio.Future[Appended]:
        """Accept content, and return a future of its commit. Wait first while too much is pending.

        Content is committed in the order in which it was accepted. Waiting calls are served in turn. A cancelled call
        accepts nothing. Cancelling the future does not take the content back.
        """
        async with self._admission:
            while self._pending_bytes and self._pending_bytes + len(content) > self._capacity:
                self._released.clear()
                await self._released.wait()
            return self.append_nowait(journal, content)

    def append_nowait(self, journal: str, content: bytes) -> asyncio.Future[Appended]:
        """Accept content like `append`, but without waiting: the caller limits the pending content."""
        state = self._journals.setdefault(journal, _JournalQueue())
        done: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        # A caller may leave failures to `flush`, which raises them. asyncio must not report them as never retrieved.
        done.add_done_callback(_retrieve)
        if state.failure is not None:
            done.set_exception(state.failure)
            return done
        self._pending_bytes += len(content)
        state.queue.append(_PendingAppend(content, done))
        state.has_torn = state.has_torn or _is_torn(content)
        if state.sender is None:
            state.sender = asyncio.create_task(self._send(journal, state), name=f"append {journal}")
        return done

    async def flush(self) -> None:
        """Return once all accepted content is committed. Raises the first failure of a journal that is not reset.

        Cancelling ends only the wait; appends go on.
        """
        while senders := [state.sender for state in self._journals.values() if state.sender is not None]:
            await asyncio.wait(senders)
        for state in self._journals.values():
            if state.failure is not None:
                raise state.failure

    async def cancel(self) -> None:
        """Drop pending content. The outcome of appends under way is unknown.

        Appends also end if this call is cancelled.
        """
        senders = [state.sender for state in self._journals.values() if state.sender is not None]
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    def reset(self, journal: str) -> None:
        """Accept appends to a journal again, after its callers have handled its failure."""
        state = self._journals.get(journal)
        if state is not None:
            state.failure = None

    async def _send(self, journal: str, state: _JournalQueue) -> None:
        batch: list[_PendingAppend] = []
        try:
            # Wait one turn of the event loop, so that content accepted in the same turn is sent together.
            await asyncio.sleep(0)
            while state.queue:
                parts = state.has_torn and len(state.queue) > 1 and await self._takes_whole_lines(journal)
                batch = self._next_batch(state.queue, parts_torn=parts)
                result = await self._client.append(
                    journal,
                    [piece.content for piece in batch],
                    retry_unknown=self._retry_unknown,
                    patience=self._patience,
                )
                self._resolve(batch, result)
                batch = []
        except CorantoError as error:
            state.failure = error
            self._fail([*batch, *state.queue], error)
            state.queue.clear()
        except asyncio.CancelledError:
            self._fail([*batch, *state.queue], None)
            state.queue.clear()
            raise
        finally:
            state.sender = None
            if state.failure is None and not state.queue:
                del self._journals[journal]

    async def _takes_whole_lines(self, journal: str) -> bool:
        """Return True if the journal's labels demand whole lines. A client that may not list it is not told."""
        found = self._whole_lines.get(journal)
        if found is None:
            try:
                listed = (await self._client.list(label_selector(include=[(NAME, journal)]))).journals
            except CorantoError:
                listed = ()
            found = self._whole_lines[journal] = any(takes_whole_lines(each.spec.labels) for each in listed)
        return found

    def _next_batch(self, queue: deque[_PendingAppend], *, parts_torn: bool) -> list[_PendingAppend]:
        """Take the content of the next append. With `parts_torn`, content that ends within a line is alone in it."""
        batch = [queue.popleft()]
        size = len(batch[0].content)
        while queue and size + len(queue[0].content) <= self._batch_bytes:
            if parts_torn and (_is_torn(batch[-1].content) or _is_torn(queue[0].content)):
                break
            batch.append(queue.popleft())
            size += len(batch[-1].content)
        return batch

    def _resolve(self, batch: list[_PendingAppend], result: AppendResult) -> None:
        begin = result.begin
        for piece in batch:
            end = begin + len(piece.content)
            if not piece.done.done():
                piece.done.set_result(Appended(begin, end, result))
            begin = end
        self._release(batch)

    def _fail(self, batch: list[_PendingAppend], error: CorantoError | None) -> None:
        for piece in batch:
            if not piece.done.done():
                if error is None:
                    piece.done.cancel()
                else:
                    piece.done.set_exception(error)
        self._release(batch)

    def _release(self, batch: list[_PendingAppend]) -> None:
        self._pending_bytes -= sum(len(piece.content) for piece in batch)
        self._released.set()


def _is_torn(content: bytes) -> bool:
    return bool(content) and content[-1] != _NEWLINE


def _retrieve(done: asyncio.Future[Appended]) -> None:
    if not done.cancelled():
        done.exception()
