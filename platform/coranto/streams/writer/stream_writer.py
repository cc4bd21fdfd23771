"""`StreamWriter`: writes events and transactions on one routing key, each exactly once.

The writer accepts events immediately and appends them in the background: in order per routing key, and each exactly
once, across failures of connections, brokers and segments. With a `writer_id` and the user's sequences, this holds
across processes, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from coranto.client.client import JournalClient
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import (
    CorantoError,
    InvalidInput,
    JournalNotFound,
    MaxTransactionSizeExceeded,
    NotAllowed,
    StreamNotFound,
    WriterClosed,
)
from coranto.messages.uuids import ProducerClock, build_uuid, new_producer_id
from coranto.streams.model.events import EventFormat, format_of, validate_writer_id
from coranto.streams.model.keys import key_hash
from coranto.streams.model.registers import Fence, WriterIdentity, stable_producer, validate_fence_name
from coranto.streams.model.stream import decode, segments_selector, validate_stream
from coranto.streams.writer.counters import WriterCounters
from coranto.streams.writer.fencing import raise_fence
from coranto.streams.writer.metrics import WriterMetrics
from coranto.streams.writer.numbering import Numbering
from coranto.streams.writer.open_transactions import OpenTransactions
from coranto.streams.writer.routing import Routing
from coranto.streams.writer.segment_writer import SegmentWriter
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.shielded_future import ShieldedFuture
from coranto.streams.writer.time_marks import TimeMarkWriter
from coranto.streams.writer.transactions import Transaction
from coranto.streams.writer.units import CommitResult, EventPosition, WriteUnit

E = TypeVar("E")

MAX_TRANSACTION_BYTES: Final = 16 << 20
"""Maximum bytes of an event, or of a transaction with its end, including all framing."""
DEFAULT_BATCH_BYTES: Final = 1 << 20
DEFAULT_PENDING_BYTES: Final = 64 << 20
DEFAULT_IN_FLIGHT: Final = 8
DEFAULT_RETRY_TIMEOUT: Final = 60.0
DEFAULT_TIMEOUT: Final = 60.0
CLOSE_SECONDS: Final = 30.0

_KNOWN_KEYS = 1 << 14


class StreamWriter(Generic[E]):
    """A writer of a stream. Use as `async with StreamWriter(client, "orders") as writer:`, on one event loop.

    Leaving the block waits for all writes (see `close`). Cancelling a task that waits for a result does not stop the
    write. Safe for many tasks.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        *,
        format: EventFormat[E] | None = None,
        writer_id: str | None = None,
        fresh: bool = False,
        max_transaction_bytes: int = MAX_TRANSACTION_BYTES,
        in_flight: int = DEFAULT_IN_FLIGHT,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        metrics: WriterMetrics | None = None,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """`format` is the format of events, by default the one of the stream's content type (JSON objects, or bytes).

        `writer_id` names a writer that successive processes continue: a later process fences off the earlier one. If
        the stream has forgotten the state of such a writer, writing raises WriterExpired; with `fresh`, the writer
        continues, and assumes that its earlier writes are resolved. Up to `in_flight` appends per segment are in
        flight; an append of several events or transactions has at most `batch_bytes`. `drain` waits while more than
        `pending_bytes` are not resolved. Appends are retried for `retry_timeout` seconds.
        """
        if writer_id is not None:
            validate_writer_id(writer_id)
        if min(max_transaction_bytes, in_flight, batch_bytes, pending_bytes) < 1:
            raise InvalidInput("sizes and the number of appends in flight must be positive numbers", field="in_flight")
        self.stream = validate_stream(stream)
        self.max_transaction_bytes = max_transaction_bytes
        self.metrics = metrics or WriterMetrics()
        producer = new_producer_id(entropy) if writer_id is None else stable_producer(writer_id)
        self.identity = WriterIdentity(
            producer.hex() if writer_id is None else writer_id,
            producer,
            int.from_bytes(entropy(6)),
            writer_id is not None,
        )
        self._client = client
        self._format = format
        self._pending_bytes = pending_bytes
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._in_flight = in_flight
        self._batch_bytes = batch_bytes
        self._retry_timeout = retry_timeout
        self._fresh = fresh
        self._shared: Shared | None = None
        self._routing: Routing | None = None
        self._time_marks: TimeMarkWriter | None = None
        self._closed = False
        self._end_bytes = 0  # The size of a transaction end.
        self._key_hashes: dict[str, int] = {}
        self._numbering = Numbering(stable=self.identity.stable)
        self._counters = WriterCounters(self.metrics, self.stream, self.identity.writer, self._clock)
        self._open: OpenTransactions[E] = OpenTransactions(self.stream, self._clock, self._counters)

    async def __aenter__(self) -> StreamWriter[E]:
        """Open the writer.

        Raises StreamNotFound, InvalidInput if the format of the stream's events is not known, and client errors.
        """
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the writer, as entering the block does. Nothing is appended."""
        if self._routing is not None or self._closed:
            raise WriterClosed("a writer is opened once; create another")
        try:
            stream = decode(await self._client.list(segments_selector(self.stream)))
        except StreamNotFound:
            raise StreamNotFound(
                f"there is no stream {self.stream}: check its name, or create it (`coranto streams create`)"
            ) from None
        events: Any = self._format or format_of(stream.content_type)
        self._shared = Shared(
            self._client,
            self.identity,
            events,
            self._clock,
            ProducerClock(lambda: int(self._clock.now() * 1e9)),
            self._counters,
            self._in_flight,
            self._batch_bytes,
            self._retry_timeout,
            self._fresh,
            self.stream,
        )
        self._format = events
        self._end_bytes = len(events.transaction_end(build_uuid(self.identity.producer, 0, 0), self.identity.writer, 0))
        self._routing = Routing(self._shared, self.stream, stream)
        self._time_marks = TimeMarkWriter(self._shared, self.stream, self._wait_resolved, self._ends)

    # -- Writing -------------------------------------------------------------------------------------------------------

    def write_event(self, key: str, event: E, *, sequence: int | None = None) -> asyncio.Future[EventPosition]:
        """Append an event in the background, after everything written for the same key before.

        The future's result is the event's position; the event is then durable and readable. `sequence`, for writers
        with an id, numbers all events and transactions of the writer in increasing order. If the stream already has a
        write of this writer for the key with this sequence or a later one, the event is not appended again. If one
        write has a sequence, all must have one.

        Raises InvalidInput, MaxTransactionSizeExceeded and WriterClosed. The future raises WriteError, whose `outcome`
        says if the event may be durable, StreamSealed, and errors of the client. The writer's own retries never
        duplicate an event. Do not write an event with an unknown outcome again, unless it has a sequence: that may
        duplicate it.
        """
        encoded = self._encoder.encode(event)
        if len(encoded) > self.max_transaction_bytes:
            raise MaxTransactionSizeExceeded(self.max_transaction_bytes, len(encoded))
        done: asyncio.Future[EventPosition] = asyncio.get_running_loop().create_future()
        self._submit(
            WriteUnit(self._next(sequence), self.key_hash(key), (encoded,), len(encoded), done, sequence=sequence)
        )
        return done

    def write_events(
        self,
        key: str,
        events: Sequence[E],
        *,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> asyncio.Future[CommitResult]:
        """Append events of one key in the background as a transaction: all or nothing, and contiguous.

        The other arguments are as in `transaction`. Returns without waiting for the commit, so that transactions of one
        key can be pipelined.
        """
        encode, encoded = self._encoder.encode, list[bytes]()
        size = self._end_bytes
        for event in events:
            content = encode(event)
            size += len(content)
            if size > self.max_transaction_bytes:
                raise MaxTransactionSizeExceeded(self.max_transaction_bytes, size)
            encoded.append(content)
        return self._commit(key, encoded, size, sequence, expected_offset, fence)

    def transaction(
        self,
        key: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> Transaction[E]:
        """Return a transaction on one routing key: `async with writer.transaction(key) as txn: txn.write(event)`.

        It is aborted if it is open for more than `timeout` seconds. Only one transaction per key may be open at a time;
        otherwise, entering the block raises TransactionInProgress. `sequence` is as in `write_event`; a transaction
        that is durable already is not appended again, and its original position is returned.

        With `expected_offset`, it commits only if the key's segment ends at that offset. With `fence`, it commits only
        if that is still the last fence raised under its name. Otherwise `commit` raises PreconditionFailed.
        """
        if not timeout > 0:
            raise InvalidInput(f"{timeout!r} is not a timeout; give seconds above 0", field="timeout")
        self._check_conditions(expected_offset, fence)
        if sequence is not None:
            self._numbering.check(sequence)
        return Transaction(self, key, self.key_hash(key), timeout, self._end_bytes, sequence, expected_offset, fence)

    def note_time(self, time: float) -> None:
        """Declare that all events written from now on have this time or a later one.

        Times are in any unit that the stream's writers agree on. Readers derive time windows from them
        (`coranto.streams.model.watermarks`), once everything written before is durable.
        """
        self._require_open()
        assert self._time_marks is not None
        self._time_marks.note(time)

    async def flush(self) -> None:
        """Wait until everything written so far is resolved, and noted times are in the stream.

        If events failed since the last `flush`, raises the first error. The errors of transactions are raised only by
        the transactions.
        """
        shared = self._ready
        await self._wait_resolved()
        if self._time_marks is not None:
            await self._time_marks.flush()
        failure, shared.failure = shared.failure, None
        if failure is not None:
            raise failure

    async def drain(self) -> None:
        """Wait until the pending bytes are within their limit. Call it between writes to bound memory."""
        shared = self._ready
        while shared.pending_bytes > self._pending_bytes:
            shared.resolved.clear()
            await shared.resolved.wait()

    @property
    def pending_bytes(self) -> int:
        """The bytes of all writes that are not resolved yet."""
        return self._shared.pending_bytes if self._shared is not None else 0

    async def last_sequence(self, key: str) -> int:
        """Return the last sequence of this writer that is durable for a key; -1 if there is none.

        Events up to this sequence need not be written again. Raises WriterExpired if the stream no longer knows it.
        """
        key_hash = self.key_hash(key)
        writer = await self._writer_after_handshake(key_hash)
        return await writer.last_sequence(key_hash)

    # -- Fences --------------------------------------------------------------------------------------------------------

    async def raise_fence(self, key: str, name: str) -> Fence:
        """Raise the fence of this name in the key's segment, so that all earlier holders of it are refused.

        Pass the returned fence to transactions of this writer or any other. The fence belongs to the segment. Once the
        segment is sealed, or all its brokers are lost, the fence is gone: every holder is refused, and it must be
        raised again. After a cancellation, the fence may have been raised.
        """
        fence = Fence(validate_fence_name(name), self._entropy(16).hex())
        key_hash = self.key_hash(key)
        await raise_fence(self._ready, fence, lambda: self._writer_after_handshake(key_hash))
        return fence

    # -- Closing -------------------------------------------------------------------------------------------------------

    async def close(self, deadline: float = CLOSE_SECONDS) -> None:
        """Abort open transactions, and wait up to `deadline` seconds for other writes.

        Events and transactions that are not resolved by that time fail: with CommitUnknown if they may be durable,
        otherwise with WriterClosed.
        """
        self._closed = True
        await self._open.close()
        if self._shared is not None and self._routing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline):
                    await self._wait_resolved()
            await self._routing.cancel(
                WriterClosed(f"the writer was closed, and this was not appended within {deadline:g} s")
            )
            await self._shared.close()
            if self._time_marks is not None:
                await self._time_marks.close(deadline)

    # -- For transactions ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock.monotonic()

    async def opened(self, transaction: Transaction[E]) -> None:
        self._require_open()
        self._open.add(transaction)
        try:
            await self._writer_after_handshake(transaction.key_hash)
        except BaseException:
            transaction.abort()
            raise

    def ended(self, transaction: Transaction[E]) -> None:
        self._open.ended(transaction)

    def encode(self, event: E, size: int) -> bytes:
        encoded = self._encoder.encode(event)
        if size + len(encoded) > self.max_transaction_bytes:
            raise MaxTransactionSizeExceeded(self.max_transaction_bytes, size + len(encoded))
        return encoded

    def commit(self, transaction: Transaction[E], events: list[bytes]) -> ShieldedFuture[CommitResult]:
        self._open.remove(transaction)
        size = self._end_bytes + sum(map(len, events))
        return self._commit(
            transaction.key,
            events,
            size,
            transaction.sequence,
            transaction.expected_offset,
            transaction.fence,
        )

    # -- Internals -----------------------------------------------------------------------------------------------------

    def key_hash(self, key: str) -> int:
        """Return the hash of a routing key: its position in the key space."""
        found = self._key_hashes.get(key)
        if found is None:
            if len(self._key_hashes) >= _KNOWN_KEYS:
                self._key_hashes.clear()
            found = self._key_hashes[key] = key_hash(key)
        return found

    def _commit(
        self,
        key: str,
        events: list[bytes],
        size: int,
        sequence: int | None,
        expected_offset: int | None,
        fence: Fence | None,
    ) -> ShieldedFuture[CommitResult]:
        self._check_conditions(expected_offset, fence)
        key_hash = self.key_hash(key)
        done: ShieldedFuture[CommitResult] = ShieldedFuture(loop=asyncio.get_running_loop())
        if not events:
            self._require_open()
            self._counters.ended("empty", key_hash, sequence)
            done.set_result(CommitResult("", -1, -1, -1, key_hash, -1, -1))
            return done
        unit = WriteUnit(
            self._next(sequence),
            key_hash,
            events,
            size,
            done,
            is_transaction=True,
            sequence=sequence,
            expected_offset=expected_offset,
            fence=fence,
            begun=self.now(),
        )
        self._submit(unit)
        return done

    def _submit(self, unit: WriteUnit) -> None:
        shared = self._ready
        shared.taken(unit)
        try:
            shared.require_alive()
            self._ready_routing.route(unit.key_hash).submit(unit)
        except CorantoError as error:
            shared.fail(unit, error)

    def _next(self, sequence: int | None) -> int:
        """Return the order number of the next event or transaction. Raises InvalidInput and WriterClosed."""
        self._require_open()
        return self._numbering.next(sequence)

    def _check_conditions(self, expected_offset: int | None, fence: Fence | None) -> None:
        if expected_offset is not None and expected_offset < 0:
            raise InvalidInput(f"{expected_offset} is not an offset; give 0 or more", field="expected_offset")
        if fence is not None:
            validate_fence_name(fence.name)

    @property
    def _encoder(self) -> EventFormat[E]:
        self._require_open()
        assert self._format is not None
        return self._format

    @property
    def _ready(self) -> Shared:
        if self._shared is None:
            raise WriterClosed("the writer is not open; use it in `async with StreamWriter(…) as writer:`")
        return self._shared

    @property
    def _ready_routing(self) -> Routing:
        assert self._routing is not None
        return self._routing

    def _require_open(self) -> None:
        if self._closed or self._shared is None:
            raise WriterClosed(
                f"the writer of {self.stream} is {'closed' if self._closed else 'not open'}; use it in `async with`"
            )

    async def _writer_after_handshake(self, key_hash: int) -> SegmentWriter:
        """Return the writer of a key hash's segment, after its handshake. Raises errors of the handshake."""
        while True:
            self._ready.require_alive()
            writer = self._ready_routing.route(key_hash)
            try:
                await writer.prepare()
                return writer
            except (JournalNotFound, NotAllowed):
                writer.leave()  # It was truncated away or sealed, or the stream is gone.
                await self._ready_routing.wait_until_sealing(writer)
                await writer.idle()

    async def _wait_resolved(self) -> None:
        """Wait until everything written so far is resolved."""
        shared, last = self._ready, self._numbering.last
        while min([shared.oldest_found, *(writer.oldest for writer in self._ready_routing.writers)]) <= last:
            shared.resolved.clear()
            await shared.resolved.wait()

    def _ends(self) -> dict[int, int]:
        """Return the end offset of the writes of each segment that still exists."""
        segments = self._ready_routing.stream.segments
        return {number: end for number, end in self._ready.ends.items() if number in segments}
