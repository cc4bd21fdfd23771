"""Batching of small appends: ordered within each journal, parallel across journals, bounded in memory or on disk.

While an append to a journal is in flight, further content for the journal is queued for the next append
(docs/architecture.md, "An append").

Brokers check only the end of an append to a journal of whole lines. So content that ends within a line is sent to such
a journal in a separate append, and its rejection does not affect other content.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from coranto.client.append.spill import DEFAULT_SPILL_BYTES, Spill, Spilled
from coranto.client.client import JournalClient
from coranto.client.values import AppendResult
from coranto.errors import CorantoError, InvalidInput
from coranto.labels import NAME, label_selector, takes_whole_lines
from coranto.tracing import TraceSpan, tracer

DEFAULT_BATCH_BYTES = 4 << 20
DEFAULT_PENDING_BYTES = 64 << 20
DEFAULT_RETRY_TIMEOUT = 300.0
_NEWLINE = ord("\n")


@dataclass(frozen=True, slots=True)
class Appended:
    """The offsets [begin, end) of one committed piece of content, and the append that contained it."""

    begin: int
    end: int
    batch: AppendResult


@dataclass(slots=True)
class _PendingAppend:
    content: bytes | Spilled
    size: int
    done: asyncio.Future[Appended]
    span: TraceSpan | None = None


@dataclass(slots=True)
class _JournalQueue:
    queue: deque[_PendingAppend] = field(default_factory=deque)
    sender: asyncio.Task[None] | None = None
    failure: CorantoError | None = None
    has_torn: bool = False
    """True once a piece did not end with a newline."""
    refused: list[Spilled] = field(default_factory=list)
    """Failed content of the spill, until `reset`."""


class AppendService:
    """Batches appends. Use as `async with AppendService(client) as service:`, which flushes on leaving.

    A failed batch is retried for `retry_timeout` seconds. The outcome of an attempt can be unknown, so content may be
    committed more than once unless `retry_unknown` is false. Leave it true only for content whose readers discard
    duplicates, such as messages with UUIDs.

    When the retries of a batch end, its pieces and all later content for that journal fail with the same error, so that
    content never follows a gap. `reset(journal)` accepts appends again.

    With `spill`, the path of a folder, pending content is on disk instead of in memory, up to `spill_bytes`, and
    batches are retried without limit. Accepted content survives this process, also `kill -9`: the next service of the
    folder appends it first, in the order of acceptance per journal. Delivery is **at least once**: content that was
    appended shortly before the process ended may be appended again. Readers discard the second copy of messages with
    UUIDs; content without UUIDs appears twice, because this service checks neither offsets nor registers. A power loss
    may lose the newest content, since files are not synced for each append. Failed content of a journal stays in the
    folder until `reset`.
    """

    def __init__(
        self,
        client: JournalClient,
        *,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        retry_unknown: bool = True,
        retry_timeout: float | None = None,
        spill: Path | str | None = None,
        spill_bytes: int = DEFAULT_SPILL_BYTES,
    ) -> None:
        """`batch_bytes` bounds an append of several pieces. `pending_bytes` bounds all content not committed yet.

        `retry_timeout` is by default 300 s, and infinite with a spill. `spill_bytes` bounds the files of the spill;
        each pending piece also takes about a kilobyte of memory. Raises InvalidInput.
        """
        if batch_bytes <= 0 or pending_bytes <= 0:
            raise InvalidInput("batch_bytes and pending_bytes must be positive numbers of bytes", field="batch_bytes")
        if spill is not None and not retry_unknown:
            raise InvalidInput("a spill delivers at least once; leave retry_unknown true", field="retry_unknown")
        self._client = client
        self._spill_folder = Path(spill) if spill is not None else None
        self._spill_bytes = spill_bytes
        self._spill: Spill | None = None
        self._batch_bytes = batch_bytes
        self._capacity = pending_bytes
        self._retry_unknown = retry_unknown
        self._retry_timeout = (
            retry_timeout if retry_timeout is not None else DEFAULT_RETRY_TIMEOUT if spill is None else math.inf
        )
        self._journals: dict[str, _JournalQueue] = {}
        self._whole_lines: dict[str, bool] = {}
        self._pending_bytes = 0
        self._admission = asyncio.Lock()
        self._released = asyncio.Event()
        self._tracer = tracer()

    async def __aenter__(self) -> AppendService:
        """Open the spill, if there is one, and begin to append its content.

        Raises DirectoryInUse if another process has the spill open, CorruptData if it is damaged, and SpillFailed.
        """
        if self._spill_folder is not None:
            self._spill = await asyncio.to_thread(Spill, self._spill_folder, self._spill_bytes)
            for each in self._spill.pending:
                self._queue(each.journal, each, each.size)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.flush()
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop appending. Drops pending content, like `cancel`. A spill keeps its content."""
        try:
            await self.cancel()
        finally:
            spill, self._spill = self._spill, None
            if spill is not None:
                spill.close()

    @property
    def pending_bytes(self) -> int:
        """The number of bytes accepted and not yet committed."""
        return self._pending_bytes

    async def append(self, journal: str, content: bytes) -> asyncio.Future[Appended]:
        """Accept content, and return a future of its commit. Waits first while too much is pending.

        Content commits in the order of acceptance. Waiting calls are served in order. A cancelled call accepts nothing.
        Cancelling the future does not withdraw the content.

        With a spill, raises SpillFailed for content that cannot be written, for example on a full disk, and
        InvalidInput for content that is larger than the spill. Neither is accepted.
        """
        async with self._admission:
            while not self._has_capacity(journal, len(content)):
                self._released.clear()
                await self._released.wait()
            return self.append_nowait(journal, content)

    def append_nowait(self, journal: str, content: bytes) -> asyncio.Future[Appended]:
        """Accept content like `append`, without waiting. The caller bounds the pending content."""
        state = self._journals.get(journal)
        if self._spill_folder is None or (state is not None and state.failure is not None):
            return self._queue(journal, content, len(content))
        if self._spill is None:
            raise InvalidInput("the spill is not open; use the service by `async with`", field="spill")
        return self._queue(journal, self._spill.add(journal, content), len(content))

    def _has_capacity(self, journal: str, size: int) -> bool:
        if self._spill is not None:
            return self._spill.has_capacity(journal, size)
        return not self._pending_bytes or self._pending_bytes + size <= self._capacity

    def _queue(self, journal: str, content: bytes | Spilled, size: int) -> asyncio.Future[Appended]:
        state = self._journals.setdefault(journal, _JournalQueue())
        done: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        # `flush` raises failures too, so asyncio must not report them as never retrieved.
        done.add_done_callback(_retrieve)
        if state.failure is not None:
            done.set_exception(state.failure)
            return done
        self._pending_bytes += size
        span = None
        if self._tracer is not None:
            span = self._tracer.span("publish", journal, "PRODUCER", bytes=size)
        state.queue.append(_PendingAppend(content, size, done, span))
        state.has_torn = state.has_torn or _is_torn(content)
        if state.sender is None:
            state.sender = asyncio.create_task(self._send(journal, state), name=f"append {journal}")
        return done

    async def flush(self) -> None:
        """Wait until all accepted content is committed. Raises the first failure of a journal that is not reset.

        Cancelling ends only the wait; appends continue.
        """
        while senders := [state.sender for state in self._journals.values() if state.sender is not None]:
            await asyncio.wait(senders)
        for state in self._journals.values():
            if state.failure is not None:
                raise state.failure

    async def cancel(self) -> None:
        """Drop pending content; a spill keeps its content. The outcome of in-flight appends is unknown.

        The appends end even if this call is cancelled.
        """
        senders = [state.sender for state in self._journals.values() if state.sender is not None]
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    def reset(self, journal: str) -> None:
        """Accept appends to a journal again, after its failure was handled. Drops its failed content from the spill."""
        state = self._journals.get(journal)
        if state is not None:
            state.failure = None
            if self._spill is not None:
                self._spill.mark_done(journal, state.refused)
                self._released.set()
            state.refused = []

    async def _send(self, journal: str, state: _JournalQueue) -> None:
        batch: list[_PendingAppend] = []
        try:
            # Wait one turn of the event loop, to batch content that is accepted in the same turn.
            await asyncio.sleep(0)
            while state.queue:
                parts = state.has_torn and len(state.queue) > 1 and await self._takes_whole_lines(journal)
                batch = self._next_batch(state.queue, parts_torn=parts)
                append = self._client.append(
                    journal,
                    [self._content_of(piece) for piece in batch],
                    retry_unknown=self._retry_unknown,
                    retry_timeout=self._retry_timeout,
                )
                first = batch[0].span  # The parent of the append's span. The other pieces' spans link to it.
                result = await (append if first is None else first.around(append))
                self._resolve(journal, batch, result)
                batch = []
        except CorantoError as error:
            state.failure = error
            state.refused = [each.content for each in (*batch, *state.queue) if isinstance(each.content, Spilled)]
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
        """Return True if the journal's labels demand whole lines. Returns False if this client may not list it."""
        found = self._whole_lines.get(journal)
        if found is None:
            try:
                listed = (await self._client.list(label_selector(include=[(NAME, journal)]))).journals
            except CorantoError:
                listed = ()
            found = self._whole_lines[journal] = any(takes_whole_lines(each.spec.labels) for each in listed)
        return found

    def _next_batch(self, queue: deque[_PendingAppend], *, parts_torn: bool) -> list[_PendingAppend]:
        """Remove the next batch from the queue. With `parts_torn`, content that ends within a line is its own batch."""
        batch = [queue.popleft()]
        size = batch[0].size
        while queue and size + queue[0].size <= self._batch_bytes:
            if parts_torn and (_is_torn(batch[-1].content) or _is_torn(queue[0].content)):
                break
            batch.append(queue.popleft())
            size += batch[-1].size
        return batch

    def _content_of(self, piece: _PendingAppend) -> bytes:
        if isinstance(piece.content, bytes):
            return piece.content
        assert self._spill is not None, "senders end before the spill is closed"
        return self._spill.read(piece.content)

    def _resolve(self, journal: str, batch: list[_PendingAppend], result: AppendResult) -> None:
        if self._spill is not None:
            self._spill.mark_done(journal, [each.content for each in batch if isinstance(each.content, Spilled)])
        begin = result.begin
        for piece in batch:
            end = begin + piece.size
            if piece.span is not None:
                if piece is not batch[0] and batch[0].span is not None:
                    piece.span.link(batch[0].span)
                piece.span.end(begin=begin, end=end)
            if not piece.done.done():
                piece.done.set_result(Appended(begin, end, result))
            begin = end
        self._release(batch)

    def _fail(self, batch: list[_PendingAppend], error: CorantoError | None) -> None:
        for piece in batch:
            if piece.span is not None:
                piece.span.end(error or asyncio.CancelledError())
            if not piece.done.done():
                if error is None:
                    piece.done.cancel()
                else:
                    piece.done.set_exception(error)
        self._release(batch)

    def _release(self, batch: list[_PendingAppend]) -> None:
        self._pending_bytes -= sum(piece.size for piece in batch)
        self._released.set()


def _is_torn(content: bytes | Spilled) -> bool:
    last = content.last_byte if isinstance(content, Spilled) else content[-1] if content else _NEWLINE
    return last != _NEWLINE


def _retrieve(done: asyncio.Future[Appended]) -> None:
    if not done.cancelled():
        done.exception()
