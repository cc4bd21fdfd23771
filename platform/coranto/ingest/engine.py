"""The engine of ingests: it writes the rows of a source to a stream, exactly once.

A process loads the progress of the last batch from the stream, reads the rows after it, and commits them with the new
positions as the next numbered batch. If several processes run, one of them commits each batch, and the others reload
the progress. While a batch is committed, the next one is filled: at most two batches are in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Unpack

import structlog

from coranto.client.client import JournalClient
from coranto.errors import (
    CorantoError,
    Fenced,
    InvalidInput,
    PoisonRow,
    SourceChanged,
)
from coranto.ingest.progress import load, next_batch
from coranto.ingest.rows import RowEncoder, dead_letter_of, encode_rows
from coranto.ingest.runs import IngestOptions, RunningIngest, prepare
from coranto.ingest.source import Poison, Position, Read, RowSource, SourceRow
from coranto.ingest.spec import IngestSpec
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from coranto.streams.writer.multi_key.numbered import LastBatch

LAG_SECONDS: Final = 10.0
"""The time between two measurements of the lag."""
_DEAD_LETTER_BYTES: Final = 256
_IDLE_SECONDS: Final = 1.0
"""The maximum wait for rows before the previous commit is awaited."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Batch:
    """Rows that are committed together."""

    keys: list[str] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    dead_letters: list[Mapping[str, object]] = field(default_factory=list)
    positions: dict[str, Position] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    size: int = 0
    poison: PoisonRow | None = None


class Ingest(RunningIngest):
    """One ingest, with the arguments of `RunningIngest`."""

    def __init__(
        self, client: JournalClient, spec: IngestSpec, source: RowSource, **options: Unpack[IngestOptions]
    ) -> None:
        super().__init__(client, spec, **options)
        self._source = source
        self._identity = ""
        self._measured = -math.inf

    # -- One session, from the progress in the stream to the end of the source or a failure ----------------------------

    async def _session(self, *, follow: bool) -> None:
        spec = self.spec
        await prepare(self.client, spec)
        async with BatchWriter[Any](self.client, spec.stream) as writer:
            last, progress = await load(writer, spec.name, accept_loss=self._accept_loss)
            self._report.progress = progress
            await self._encoders.load()
            try:
                self._identity = await self._source.open(progress.splits, follow=follow)
                if progress.source and progress.source != self._identity:
                    raise SourceChanged(
                        f"ingest {spec.name} has read {progress.source} into stream {spec.stream}, and is to read "
                        f"{self._identity} now: give the ingest another name"
                    )
                await self._batches(writer, last)
            finally:
                await self._source.close()

    async def _batches(self, writer: BatchWriter[Any], last: LastBatch) -> None:
        """Fill and commit batches. While one is committed, the next one is filled."""
        committing: asyncio.Task[LastBatch] | None = None
        try:
            is_last = False
            while not is_last:
                batch = _Batch()
                is_last = await self._fill(batch, committing) or batch.poison is not None
                if committing is not None:
                    last = await committing
                    committing = None
                if batch.positions or batch.lost:
                    committing = asyncio.create_task(self._commit(writer, last, batch), name="commit of a batch")
                await self._measure()
            if committing is not None:
                await committing
        finally:
            if committing is not None and not committing.done():
                committing.cancel()
                with contextlib.suppress(CorantoError, asyncio.CancelledError):
                    await committing
        if batch.poison is not None:
            raise batch.poison

    async def _fill(self, batch: _Batch, committing: asyncio.Task[LastBatch] | None) -> bool:
        """Read rows until the batch is full or its time is over. Returns True at the end of the source, or to stop."""
        spec, deadline = self.spec, self._clock.monotonic() + _IDLE_SECONDS
        while batch.size < spec.batch_bytes and self._clock.monotonic() < deadline:
            if self._stop.is_set():
                return True
            if committing is not None and committing.done() and committing.exception() is not None:
                return False
            reads = await self._source.read(spec.batch_bytes - batch.size)
            if reads is None:
                return True
            if reads and not batch.positions:
                deadline = self._clock.monotonic() + spec.batch_seconds
            if spec.registers:
                await self._encoders.register(await self._source.fields())
            await asyncio.to_thread(self._add, batch, self._encoders.encoder, reads)
            if batch.poison is not None:
                break
        return False

    def _add(self, batch: _Batch, encoder: RowEncoder, reads: Sequence[Read]) -> None:
        """Encode reads into the batch. Unless poison is kept, stops before the first read with a poison row."""
        spec = self.spec
        for read in reads:
            keys, events, poison = encode_rows(
                encoder, read.rows, partial(poison_of, read.position), keeps_poison=spec.keeps_poison
            )
            if poison and not spec.keeps_poison:
                batch.poison = PoisonRow(spec.kind, read.split, poison[0].place, poison[0].problem)
                return
            dead_letters = [dead_letter_of(spec.name, read.split, row) for row in poison]
            batch.keys += keys
            batch.events += events
            batch.dead_letters += dead_letters
            batch.positions[read.split] = read.position
            if read.lost:
                batch.lost[read.split] = batch.lost.get(read.split, 0) + read.lost
            batch.size += sum(map(len, events))
            batch.size += sum(_DEAD_LETTER_BYTES + len(str(each.get("value", ""))) for each in dead_letters)

    async def _commit(self, writer: BatchWriter[Any], last: LastBatch, batch: _Batch) -> LastBatch:
        name, began = self.spec.name, self._clock.monotonic()
        await self._source.confirm()
        progress = self._report.progress.after(
            self._identity, batch.positions, batch.lost, len(batch.events), len(batch.dead_letters)
        )
        decided = await writer.commit_batch(
            next_batch(name, last, progress, batch.positions, batch.dead_letters), batch.keys, batch.events
        )
        self._report.progress = progress
        size = sum(map(len, batch.events))
        self._count(len(batch.events), size, len(batch.dead_letters), sum(batch.lost.values()), began)
        for split, count in batch.lost.items():
            _log.warning("ingest.rows_lost", ingest=name, split=split, rows=count)
        await self._source.committed(progress.splits)
        if decided.visible:
            return decided
        known = await writer.last_batch(name)
        if known.value != decided.value:
            raise Fenced(f"batch {known.number} of {name} was decided by another process")
        return known

    # -- Measurements --------------------------------------------------------------------------------------------------

    async def _measure(self) -> None:
        """Measure the lag every LAG_SECONDS. A failure to measure does not stop the ingest."""
        now = self._clock.monotonic()
        if now - self._measured < LAG_SECONDS:
            return
        self._measured = now
        try:
            found = await self._source.lag(self._report.progress.splits)
            retained = await self._source.retained()
        except CorantoError as error:
            _log.info("ingest.lag_unknown", ingest=self.spec.name, error=str(error))
            return
        self.metrics.lag.labels(self.spec.name).set(sum(found.values()))
        if retained is not None:
            self.metrics.retained.labels(self.spec.name).set(retained)


def poison_of(position: Position, row: SourceRow, number: int, error: InvalidInput) -> Poison:
    """Return the Poison for a row that cannot be encoded. `position` is the end of its read."""
    place = f"row {number + 1} of the read that ends at {position}"
    if row.meta:
        place = f"{{{row.meta.decode()}}}"
    text = json.dumps(row.fields, default=str).encode() if row.text is None else row.text
    return Poison(place, error.message, row.key.encode("utf-8", "surrogateescape"), text)
