"""Transactions on several routing keys.

A transaction on one key takes one append. A multi-key transaction takes more, because several segments must agree:

1. The events are appended to each segment as CONTINUE_TXN, under a producer id that no other open transaction has: one
   append per segment, all at the same time. Readers see the events, but do not treat them as committed.
2. The decision, with the acknowledgements of all segments, is appended to `<stream>/transactions`: one append, on the
   condition that the stream's segments have not changed since the transaction read them (`decisions.py`). This
   commits the transaction, whatever happens to this process.
3. The acknowledgements are appended to the segments, again all at the same time. Readers then deliver the events.

So a transaction over n segments costs 2n + 1 appends in three consecutive steps. Concurrent transactions of one writer
share appends. The events need not be contiguous in a segment, and readers of different segments deliver them at
different times; but every reader gets all events of its segments or none.

A writer reuses a producer id, or *lane*, once its last transaction is recorded as ended in the journal of decisions.
The registers of each segment name the transaction in progress on a lane, so that a late acknowledgement of an earlier
one is refused (`coranto.streams.model.lanes`). Events are never appended twice under one producer id: a reader that
resumes after the transaction would deliver them as new events. If the answer to an append of events is lost, the whole
transaction starts again on another lane, and its first lane is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, cast

import structlog

from coranto.client.client import JournalClient
from coranto.client.retry import Retry
from coranto.effects import Clock, Entropy
from coranto.errors import (
    AppendOutcomeUnknown,
    CorantoError,
    Fenced,
    InvalidInput,
    JournalNotFound,
    MaxTransactionSizeExceeded,
    NotAllowed,
    RegisterMismatch,
    StreamSealed,
    TransactionTimeout,
    Unavailable,
)
from coranto.messages.uuids import Flags, build_uuid, new_producer_id
from coranto.streams.control.batches import Batches, ContentRange
from coranto.streams.control.transaction_ends import LaneEnd, drop_transaction, dropping, end_transactions, open_lanes
from coranto.streams.model.events import EventFormat, JsonEvents, format_of, stamped
from coranto.streams.model.keys import KeyRange, key_hashes
from coranto.streams.model.lanes import (
    CROWDED_LANES,
    MAX_LANES,
    LaneChange,
    LanePool,
    LaneStep,
    LaneUse,
    is_abandoned,
    lanes_in,
    parameters,
)
from coranto.streams.model.stream import Stream, dead_letters_journal
from coranto.streams.writer.handshake import ensure_held
from coranto.streams.writer.multi_key.decision_log import DecisionLog, StreamSnapshot
from coranto.streams.writer.multi_key.numbered import (
    NumberedBatch,
    is_decided,
    is_overtaken,
)
from coranto.streams.writer.multi_key.transaction import MultiKeyPosition, MultiKeyResult, MultiKeyTransaction

E = TypeVar("E")

MAX_MULTI_KEY_BYTES: Final = 16 << 20
DEFAULT_TIMEOUT: Final = 30.0
DEFAULT_RETRY_TIMEOUT: Final = 60.0
_FINISH_EVERY: Final = 256
"""A writer records after this many transactions that all decisions are carried out, so that recovery reads little."""

_LETTERS: Final = JsonEvents()
"""The format of dead letters."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Part:
    """A transaction's part in one journal: the events, and the acknowledgements that commit or drop them.

    The number of the segment is -1 for a journal outside the segments.
    """

    number: int
    journal: str
    format: EventFormat[Any]
    use: LaneUse
    content: bytes
    ack: bytes
    drop: bytes


class _Restart(Exception):
    """Nothing was decided, and the whole transaction must start again. `__cause__` has the reason."""


class _SegmentsChanged(_Restart):
    """The stream's segments have changed since the transaction read them."""


class MultiKeyWriter(Generic[E]):
    """A writer of transactions on several keys. Use as `async with MultiKeyWriter(client, "orders") as writer:`.

    Safe for many tasks. Their transactions run concurrently, each all or nothing, in no particular order. Cancelling a
    caller revokes no commit (see `MultiKeyTransaction.commit`). After a cancelled `open` or `close`, work of decided
    transactions may be left to the next `open`.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        *,
        format: EventFormat[E] | None = None,
        max_transaction_bytes: int = MAX_MULTI_KEY_BYTES,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """`format` of events is by default the one of the stream's content type. `retry_timeout` is in seconds."""
        if max_transaction_bytes < 1:
            raise InvalidInput(
                "the limit of transactions must be a positive number of bytes", field="max_transaction_bytes"
            )
        self._log = DecisionLog(client, stream, retry_timeout=retry_timeout, clock=clock, entropy=entropy)
        self.stream = self._log.stream
        self.max_transaction_bytes = max_transaction_bytes
        self._client = client
        self._format = format
        self._cached_snapshot: StreamSnapshot | None = None
        self._held: set[str] = set()
        self._batches: dict[str, Batches[LaneChange]] = {}
        self._lane_limit = asyncio.Semaphore(MAX_LANES)
        self._dropping = asyncio.Lock()
        self._lanes = LanePool(lambda: new_producer_id(entropy))
        self._committed = 0
        self._decided_to = 0  # All later decisions are at or after this offset.
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the writer, and finish the decided transactions of other writers. Raises StreamNotFound."""
        stream = await self._log.streams.describe(self.stream)
        if self._format is None:
            self._format = cast("EventFormat[E]", format_of(stream.content_type))
        await self._log.decisions.finish(await self._log.decisions.gate())

    async def close(self) -> None:
        """Record which transactions are carried out. Open transactions stay open, but can no longer be committed."""
        self._closed = True
        with self._housekeeping():
            await self._log.decisions.done(each.txn for each in self._lanes.take_ended())

    def transaction(self, *, timeout: float = DEFAULT_TIMEOUT) -> MultiKeyTransaction[E]:
        """Return a transaction: `async with writer.transaction() as txn: txn.write(key, event)`.

        It is aborted if it is open for more than `timeout` seconds.
        """
        if not timeout > 0:
            raise InvalidInput(f"{timeout!r} is not a timeout; give seconds above 0", field="timeout")
        return MultiKeyTransaction(self._encode, self._commit, self._log.clock, timeout)

    # -- For transactions ----------------------------------------------------------------------------------------------

    def _encode(self, event: E, size: int) -> bytes:
        """Encode an event for a transaction that has `size` bytes so far.

        Raises InvalidInput and MaxTransactionSizeExceeded.
        """
        if self._format is None:
            raise InvalidInput("the writer is not open yet: use it as `async with MultiKeyWriter(…) as writer:`")
        encoded = self._format.encode(event)
        if size + len(encoded) > self.max_transaction_bytes:
            raise MaxTransactionSizeExceeded(self.max_transaction_bytes, size + len(encoded))
        return encoded

    async def _commit(self, keys: Sequence[str], events: Sequence[bytes]) -> MultiKeyResult:
        """Commit events with these keys. Starts the whole transaction again if segments change."""
        if self._closed:
            raise InvalidInput("the writer is closed; create another one")
        async with self._lane_limit:
            return await self._attempts(keys, events)

    # -- Internals -----------------------------------------------------------------------------------------------------

    async def _attempts(
        self, keys: Sequence[str], events: Sequence[bytes], batch: NumberedBatch | None = None
    ) -> MultiKeyResult:
        retry = Retry(self._log.retry_timeout)
        while True:
            snapshot = await self._snapshot()
            try:
                return await self._attempt(snapshot, keys, events, batch)
            except _Restart as error:
                if self._cached_snapshot is snapshot and isinstance(error, _SegmentsChanged):
                    self._cached_snapshot = None
                delay = retry.failed(self._log.clock.monotonic())
                if delay is None and not isinstance(error, _SegmentsChanged):
                    raise Unavailable(
                        f"a transaction on stream {self.stream} was not committed: {error.__cause__}"
                    ) from error.__cause__
                if delay is None:
                    raise TransactionTimeout(
                        f"stream {self.stream} was being changed for {self._log.retry_timeout:g} s; nothing was "
                        "committed. Try again"
                    ) from None
                await self._log.clock.sleep(delay)

    async def _snapshot(self) -> StreamSnapshot:
        """Return the state of the stream, cached until an attempt finds that it has changed."""
        if self._cached_snapshot is not None:
            return self._cached_snapshot
        snapshot = await self._log.snapshot()
        known = {segment.journal for segment in snapshot.stream.segments.values()} | {dead_letters_journal(self.stream)}
        self._held &= known
        self._batches = {journal: batches for journal, batches in self._batches.items() if journal in known}
        self._cached_snapshot = snapshot
        self._decided_to = max(self._decided_to, snapshot.gate.end)
        return snapshot

    async def _attempt(
        self, snapshot: StreamSnapshot, keys: Sequence[str], events: Sequence[bytes], batch: NumberedBatch | None
    ) -> MultiKeyResult:
        """Make one attempt. Its lane is reused only if the transaction is committed and ends in all segments."""
        use = LaneUse(self._lanes.take(), self._log.new_transaction(), self._log.ticks.tick())
        parts = self._parts(snapshot.stream, use, keys, events, batch.letters if batch else ())
        outcomes = await asyncio.gather(*map(self._append, parts), return_exceptions=True)
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        if failures:
            await self._roll_back(parts)
            raise _worst(failures)
        done = self._lanes.take_ended()
        acks = {each.journal: each.ack for each in parts}
        try:
            await self._decide(use, acks, snapshot, [each.txn for each in done], batch)
            self._lanes.free(done)
        except AppendOutcomeUnknown as error:
            self._lanes.add_ended(*done)
            if batch is not None:  # It may still be applied, unless another batch with its number is.
                raise self._log.unknown(error, error) from error
            try:
                was_decided = await self._log.decisions.was_decided(use.txn, snapshot.gate.end)
            except CorantoError as problem:
                raise self._log.unknown(error, problem) from error
            if not was_decided:
                await self._roll_back(parts)
                raise _SegmentsChanged from None
        except CorantoError as error:
            self._lanes.add_ended(*done)
            await self._roll_back(parts)
            raise _SegmentsChanged if isinstance(error, RegisterMismatch) else error from None
        acknowledged = await asyncio.gather(*map(self._acknowledge, parts))
        positions = [each for each in outcomes if isinstance(each, MultiKeyPosition)]
        if all(acknowledged):
            self._lanes.add_ended(use)
        self._committed += 1
        if self._committed % _FINISH_EVERY == 0:
            with self._housekeeping():
                await self._log.decisions.finish(await self._log.decisions.gate())
        return MultiKeyResult(use.txn, tuple(positions), all(acknowledged))

    async def _decide(
        self,
        use: LaneUse,
        acks: Mapping[str, bytes],
        snapshot: StreamSnapshot,
        done: Sequence[str],
        batch: NumberedBatch | None,
    ) -> None:
        """Decide a transaction. Raises Fenced for a batch that is not the next one."""
        decide = self._log.decisions.decide
        if batch is None:
            await decide(use.txn, acks, snapshot.token, use=use, done=done)
            return
        before, after = batch.before(), batch.after(use.txn, self._decided_to)
        try:
            self._decided_to = await decide(
                use.txn,
                acks,
                snapshot.token,
                use=use,
                done=done,
                before=before,
                after=after,
                extra=batch.line(),
                retry_unknown=True,
            )
        except RegisterMismatch as error:
            if is_decided(error.registers, batch, use.txn):
                return  # The answer to an earlier attempt was lost.
            if is_overtaken(error.registers, batch):
                raise Fenced(
                    f"batch {batch.number} of {batch.writer} on stream {self.stream} was decided by another process"
                ) from None
            raise

    def _parts(
        self,
        stream: Stream,
        use: LaneUse,
        keys: Sequence[str],
        events: Sequence[bytes],
        letters: Sequence[Mapping[str, object]] = (),
    ) -> list[_Part]:
        """Group the events by segment and stamp them. Events of a segment keep their order. Letters come last."""
        format: Any = self._format
        parts = [
            self._part(number, stream.segments[number].journal, format, use, each)
            for number, each in sorted(self._by_segment(stream, keys, events).items())
        ]
        if letters:
            journal, lines = dead_letters_journal(self.stream), [_LETTERS.encode(each) for each in letters]
            parts.append(self._part(-1, journal, _LETTERS, use, lines))
        return parts

    def _by_segment(self, stream: Stream, keys: Sequence[str], events: Sequence[bytes]) -> dict[int, Sequence[bytes]]:
        """Group events by the segments of their keys. Raises StreamSealed."""
        active = stream.active()
        if events and len(active) == 1 and active[0].range == KeyRange.FULL:
            return {active[0].number: events}
        by_segment: dict[int, list[bytes]] = {}
        by_key: dict[str, list[bytes]] = {}  # The lists of `by_segment`.
        for key, place in key_hashes(keys).items():
            segment = stream.segment_at(place)
            if segment is None:
                raise StreamSealed(f"stream {self.stream} is sealed: it takes no more events. Write to another stream")
            by_key[key] = by_segment.setdefault(segment.number, [])
        for key, event in zip(keys, events, strict=True):
            by_key[key].append(event)
        return dict(by_segment)

    def _part(
        self, number: int, journal: str, format: EventFormat[Any], use: LaneUse, events: Sequence[bytes]
    ) -> _Part:
        content = stamped(format, events, use.producer, self._log.ticks.ticks(len(events)), Flags.CONTINUE_TXN)
        ack = format.acknowledgement(build_uuid(use.producer, self._log.ticks.tick(), Flags.ACK_TXN))
        return _Part(number, journal, format, use, content, ack, dropping(format, use, ack))

    async def _append(self, part: _Part) -> MultiKeyPosition:
        journal = part.journal
        await self._hold(journal, part.format)
        try:
            found = await self._send(part, part.content, LaneStep.BEGIN)
        except (RegisterMismatch, InvalidInput):
            self._held.discard(journal)  # The registers may be lost, or full.
            raise
        return MultiKeyPosition(part.number, journal, *found)

    async def _send(self, part: _Part, content: bytes, step: LaneStep) -> ContentRange:
        """Append a step of a transaction, batched with other queued steps. Does not retry after a lost answer."""
        journal, change = part.journal, LaneChange(step, part.use)
        append, retry_timeout = self._client.append, self._log.retry_timeout
        batches = self._batches.get(journal)
        if batches is None:
            batches = self._batches[journal] = Batches(
                lambda contents, changes: append(journal, contents, retry_timeout=retry_timeout, **parameters(changes))
            )
        try:
            return await batches.append(content, change)
        except RegisterMismatch:  # Another transaction of the batch may have caused it.
            alone = await append(journal, content, retry_timeout=retry_timeout, **parameters([change]))
            return ContentRange(alone.begin, alone.end)

    async def _hold(self, journal: str, format: EventFormat[Any]) -> None:
        """Mark the registers of a segment as held, as checks of lanes require, and make room for lanes."""
        if journal in self._held:
            return
        registers = await ensure_held(self._client, journal, format, self._log.ticks, self._log.retry_timeout)
        if self._is_crowded(lanes_in(registers)):
            async with self._dropping:
                if self._is_crowded(await open_lanes(self._client, journal, retry_timeout=self._log.retry_timeout)):
                    await self._log.streams.drop_lanes(self.stream, self._format)
        self._held.add(journal)

    def _is_crowded(self, uses: Sequence[LaneUse]) -> bool:
        now = self._log.ticks.tick()
        return sum(is_abandoned(use, now) for use in uses) >= CROWDED_LANES

    @contextlib.contextmanager
    def _housekeeping(self) -> Iterator[None]:
        """Log errors of recording ended transactions. The next process that opens the stream records them."""
        try:
            yield
        except CorantoError as error:
            _log.info("multi_key_writer.not_recorded_as_done", stream=self.stream, error=str(error))

    async def _acknowledge(self, part: _Part) -> bool:
        """Make the events of a segment visible to readers. Returns False if that failed."""
        error = await self._log.acknowledge(self._end(part))
        if error is not None:
            _log.warning("multi_key_writer.not_visible_yet", stream=self.stream, error=str(error))
        return error is None

    async def _end(self, part: _Part) -> None:
        try:
            await self._send(part, part.ack, LaneStep.END)
        except (AppendOutcomeUnknown, RegisterMismatch):
            end = LaneEnd(part.use, part.ack)
            await end_transactions(self._client, part.journal, [end], retry_timeout=self._log.retry_timeout)

    async def _roll_back(self, parts: Sequence[_Part]) -> None:
        """Make readers drop events that were not decided. Failures are ignored, because no reader waits for this."""

        async def drop(part: _Part) -> None:
            with contextlib.suppress(CorantoError):
                await drop_transaction(
                    self._client, part.journal, part.use, part.drop, retry_timeout=self._log.retry_timeout
                )

        await asyncio.gather(*map(drop, parts))


def _worst(failures: Sequence[BaseException]) -> BaseException:
    """Choose the error to raise after failed appends of events. Nothing is committed then."""
    for each in failures:
        if not isinstance(each, NotAllowed | JournalNotFound | AppendOutcomeUnknown | RegisterMismatch):
            return each
    for each in failures:
        if isinstance(each, AppendOutcomeUnknown | RegisterMismatch):
            again = _Restart()
            again.__cause__ = each
            return again
    return _SegmentsChanged()
