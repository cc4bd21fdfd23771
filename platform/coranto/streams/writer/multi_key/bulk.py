"""Bulk transactions: transactions of any size over a stream, whose events several processes append.

The processes append events as pending to the segments of their keys, each under its own producer ids, and report
their appends to one process (`BulkPart`). That process commits like a multi-key transaction: it appends a decision with
all acknowledgements to `<stream>/transactions`, on the condition that the gate is unchanged, and then the
acknowledgements to the segments. Segments may be split, merged and sealed in the meantime:

- before the decision: parts in sealed segments are moved to the successors (`bulk_parts.py`), and the decision is tried
  again with the new gate;
- after it: the process that seals a segment appends its acknowledgements first.

**Batches.** A writer that numbers its transactions, such as a streaming query, commits each number once. A register of
the journal of decisions holds the number and the name of its last transaction,
`coranto.dev/batch/<writer>` = `<batch>.<transaction>`, followed by `.done` once the acknowledgements are in their
segments. Another register has a digest of the content (`batch_content.py`). The decision and the registers are one
append, on the condition that the first register is unchanged.

A writer whose batches have no order, such as named jobs, stores the numbers of all batches but the last one elsewhere
(`KeptBatches`): before another batch is decided, the register's number is stored there. Such a writer gets its register
before its first batch (`enlist`), with the unused batch number 0. So a missing register reveals a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.retry import Retry
from coranto.effects import Clock, Entropy
from coranto.errors import (
    AppendOutcomeUnknown,
    CorantoError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    RegisterMismatch,
    StreamChanged,
    StreamSealed,
)
from coranto.messages.uuids import ProducerClock
from coranto.streams.model.batch_content import (
    BATCH_REGISTER,
    content_register,
    last_batches,
    old_batch,
    require_same_content,
    validate_batch_writer,
)
from coranto.streams.model.events import JsonEvents, format_of
from coranto.streams.model.stream import HELD_LABEL, Stream
from coranto.streams.writer.handshake import ensure_held
from coranto.streams.writer.multi_key.bulk_parts import EVENTS, BulkPart, PartMover, acknowledgements, roll_back
from coranto.streams.writer.multi_key.decision_log import DecisionLog, StreamSnapshot

DEFAULT_RETRY_TIMEOUT: Final = 60.0
_NONE_YET: Final = "0.0.done"
"""The register of a newly enlisted writer."""
_VALUE: Final = re.compile(r"(\d{1,18})\.([0-9a-f]{1,64})(\.done)?")
_CONCURRENCY: Final = 16

_log = structlog.get_logger(__name__)


KeptBatches = Callable[[int], Awaitable[bool]]
"""Stores the number of a writer's last batch permanently, except for 0, which means none.

Returns True if the number of the current batch is already stored."""


@dataclass(slots=True)
class _Doubt:
    """The cause of an unknown decision, if there is one.

    While `of_earlier` is true, an earlier call may have decided the same parts, whose acknowledgements may be missing.
    """

    reason: AppendOutcomeUnknown | None = None
    of_earlier: bool = False


class _Known(NamedTuple):
    """A writer's last transaction."""

    batch: int
    txn: str
    is_done: bool


class BulkCommitter:
    """Commits the bulk transactions of one stream, whose events are lines of JSON."""

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        *,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        self._log = DecisionLog(client, stream, retry_timeout=retry_timeout, clock=clock, entropy=entropy)
        self.stream = self._log.stream
        self._client = client
        self._clock, self._ticks = self._log.clock, self._log.ticks
        self._retry_timeout = retry_timeout
        self._decisions = self._log.decisions
        self._mover = PartMover(client, self._ticks, retry_timeout, entropy)
        self.last_batches: Mapping[str, int] = {}
        """The last batch of each writer, when the stream was prepared."""

    async def prepare(self) -> Stream:
        """Return the stream, ready for appends. Finishes the decided transactions of other writers.

        Raises StreamNotFound, StreamSealed, InvalidInput for a stream whose events are not lines of JSON, and errors of
        the client.
        """
        snapshot = await self._log.snapshot()
        stream, self.last_batches = snapshot.stream, last_batches(snapshot.gate.registers)
        if not isinstance(format_of(stream.content_type), JsonEvents):
            raise InvalidInput(f"the events of {self.stream} are {stream.content_type}, not lines of JSON")
        if stream.is_sealed:
            raise StreamSealed(f"stream {self.stream} is sealed: it takes no more events. Write to another stream")
        await self._decisions.finish(snapshot.gate)
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def hold(journal: str) -> None:
            async with limit:
                await hold_segment(self._client, journal, self._ticks, self._retry_timeout)

        await asyncio.gather(*(hold(segment.journal) for segment in stream.active()))
        return stream

    async def last_batch(self, writer: str) -> int | None:
        """Return the number of a writer's last decided batch; None if there is none."""
        value = labels.value_of((await self._decisions.gate()).registers, BATCH_REGISTER + writer)
        return _parsed(value).batch if value else None

    async def enlist(self, writer: str) -> None:
        """Create the register of a writer with `KeptBatches`, unless it exists. Its last batch is then 0."""
        validate_batch_writer(writer)
        missing = labels.label_selector(include=[(HELD_LABEL, "")], exclude=[(BATCH_REGISTER + writer, "")])
        with contextlib.suppress(RegisterMismatch):  # It has one.
            await self._decisions.record(
                {"writer": writer}, check=missing, union={BATCH_REGISTER + writer: _NONE_YET}, retry_unknown=True
            )

    async def commit(
        self,
        parts: Sequence[BulkPart],
        *,
        writer: str = "",
        batch: int = 0,
        accept_loss: bool = False,
        kept: KeptBatches | None = None,
        digest: str = "",
        planned_after: int | None = None,
    ) -> bool:
        """Commit parts as one transaction. Returns False if the `batch` of a `writer` was already committed.

        Batches are in order, unless their numbers are `kept`. Without a writer, each call is a transaction. A writer
        with `kept` must be enlisted, and has batches above 0.

        If a later batch of the writer is committed, raises BatchChanged if that was so when this batch was planned
        (`planned_after` is the writer's last batch at that time), and otherwise Fenced. Raises BatchChanged if this
        batch is committed with another `digest` (if both are known). Raises InvalidInput for a batch above 0 if the
        stream knows no batch of the writer, unless `accept_loss`: the stream was recreated, or all brokers of its
        decisions were lost. Raises StreamChanged if a part cannot be moved to the successors of its segment, or the
        stream keeps changing for `retry_timeout`. Raises StreamSealed, and errors of `kept` and the client. After all
        these errors, this call has committed nothing.

        After CommitUnknown, the outcome is unknown. The next commit of the batch resolves it, with the same parts or
        others. Without a writer, it stays unknown: do not commit the parts again.
        """
        if writer:
            validate_batch_writer(writer)
        placed, doubt = list(parts), _Doubt()
        try:
            committed = await self._decided(placed, doubt, writer, batch, accept_loss, kept, digest, planned_after)
        except CorantoError as error:
            if doubt.reason is not None:  # A rollback would drop events that may be decided.
                raise self._log.unknown(doubt.reason, error) from error
            given = {each.producer for each in parts} if doubt.of_earlier else set()
            await roll_back(self._client, [each for each in placed if each.producer not in given])
            raise
        if not committed:
            await roll_back(self._client, placed)
        return committed

    async def _decided(
        self,
        parts: list[BulkPart],
        doubt: _Doubt,
        writer: str,
        batch: int,
        accept_loss: bool,
        kept: KeptBatches | None,
        digest: str,
        planned_after: int | None,
    ) -> bool:
        """Decide and acknowledge the parts; replace moved parts. Returns False if the batch was already committed."""
        txn, retry = self._log.new_transaction(), Retry(self._retry_timeout)
        while True:
            doubt.of_earlier = bool(writer)
            snapshot = await self._log.snapshot()
            value = labels.value_of(snapshot.gate.registers, BATCH_REGISTER + writer) if writer else ""
            known = _parsed(value) if value else None
            if known is not None and known.batch > batch and kept is None:
                doubt.of_earlier = False  # A batch is decided only after all acknowledgements of the previous one.
                raise old_batch(writer, batch, known.batch, planned_after)
            if known is not None and not known.is_done:
                await self._decisions.finish(snapshot.gate)
            doubt.of_earlier = False
            if known is not None and known.batch == batch:
                if known.txn != txn:
                    require_same_content(snapshot.gate.registers, writer, batch, digest)
                return known.txn == txn
            if kept is not None and known is not None:
                if await kept(known.batch):
                    return False
            elif kept is not None or (writer and known is None and batch and not accept_loss):
                raise InvalidInput(
                    f"stream {self.stream} knows no batch of this writer, whose next one is {batch}: is it another "
                    "stream than before? If loss is accepted, the writer continues, and interrupted batches may be "
                    "duplicated",
                    field="batch",
                )
            try:
                await self._place(parts, snapshot.stream)
                await self._decide(txn, parts, snapshot, writer, batch, value, digest)
            except (RegisterMismatch, NotAllowed) as error:  # The segments have changed, or another call decided.
                doubt.of_earlier = bool(writer)
                delay = retry.failed(self._clock.monotonic())
                if delay is None:
                    raise StreamChanged(
                        f"stream {self.stream} was being changed for {self._retry_timeout:g} s; nothing was written. "
                        "Try again"
                    ) from error
                await self._clock.sleep(delay)
                continue
            except AppendOutcomeUnknown as error:
                doubt.reason = error
                if writer:
                    if retry.failed(self._clock.monotonic()) is None:
                        raise
                    continue  # The register shows the outcome, and the condition on it prevents a second one.
                if not await self._decisions.was_decided(txn, snapshot.gate.end):
                    txn, doubt.reason = self._log.new_transaction(), None
                    continue
            await self._acknowledge(txn, parts, writer, f"{batch}.{txn}")
            return True

    async def _place(self, parts: list[BulkPart], stream: Stream) -> None:
        """Replace the parts of sealed segments by their copies in active ones. They keep their order."""
        active = {segment.journal for segment in stream.active()}
        at = 0
        while at < len(parts):
            moved = [parts[at]] if parts[at].journal in active else await self._mover.move(parts[at], stream)
            parts[at : at + 1] = moved
            at += len(moved)

    async def _decide(
        self,
        txn: str,
        parts: Sequence[BulkPart],
        snapshot: StreamSnapshot,
        writer: str,
        batch: int,
        value: str,
        digest: str,
    ) -> None:
        before, after = dict[str, str](), dict[str, str]()
        if writer:
            before = {BATCH_REGISTER + writer: value}
            after = {BATCH_REGISTER + writer: f"{batch}.{txn}", **content_register(writer, batch, digest)}
        await self._decisions.decide(txn, acknowledgements(parts), snapshot.token, before=before, after=after)

    async def _acknowledge(self, txn: str, parts: Sequence[BulkPart], writer: str, value: str) -> None:
        """Make decided events visible. After an error, the next writer or the sealing of the segment does it."""
        contents = acknowledgements(parts)
        limit = asyncio.Semaphore(_CONCURRENCY)

        async def append(journal: str) -> None:
            async with limit:
                await self._client.append(
                    journal, contents[journal], retry_unknown=True, retry_timeout=self._retry_timeout
                )

        outcomes = await asyncio.gather(*(self._log.acknowledge(append(journal)) for journal in contents))
        if failures := [each for each in outcomes if each is not None]:
            _log.warning("bulk_transaction.not_visible_yet", stream=self.stream, error=str(failures[0]))
            return
        check, union = None, None
        if writer:
            check = labels.label_selector(include=[(HELD_LABEL, ""), (BATCH_REGISTER + writer, value)])
            union = {BATCH_REGISTER + writer: f"{value}.done"}
        try:
            await self._decisions.record({"done": txn}, check=check, union=union)
        except CorantoError as error:  # Acknowledgements may be appended again.
            _log.info("bulk_transaction.not_recorded_as_done", stream=self.stream, error=str(error))


async def hold_segment(client: JournalClient, journal: str, ticks: ProducerClock, retry_timeout: float) -> None:
    """Prepare a segment for events of a bulk transaction."""
    await ensure_held(client, journal, EVENTS, ticks, retry_timeout)


def _parsed(value: str) -> _Known:
    found = _VALUE.fullmatch(value)
    if found is None:
        raise CorruptData(f"the register of a writer's last batch is {value!r}")
    return _Known(int(found[1]), found[2], bool(found[3]))
