"""The engine of ingests: it writes the rows of a source to a stream, each once.

A process loads the progress of the last batch from the stream, reads rows that follow it, and commits them with the
next positions as the next numbered batch. So of several processes one commits each batch, and the others load again.
While a batch is committed, the next one is filled: no more than two are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from coranto.client.client import JournalClient
from coranto.client.retry import JOB_SECONDS, Retry, RetryPolicy
from coranto.effects import Clock, SystemClock
from coranto.errors import (
    CorantoError,
    Fenced,
    InvalidInput,
    Outcome,
    PoisonRow,
    SourceChanged,
    StreamChanged,
    StreamExists,
    StreamNotFound,
    TransactionTimeout,
)
from coranto.ingest.encoders import Encoders
from coranto.ingest.metrics import IngestMetrics
from coranto.ingest.progress import IngestProgress, load, next_batch
from coranto.ingest.rows import RowEncoder, letter_of
from coranto.ingest.source import Poison, Position, Read, RowSource, SourceRow
from coranto.ingest.spec import IngestSpec
from coranto.labels import JSON_LINES, MESSAGE_TYPE, with_value
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.model.stream import dead_letters_journal
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from coranto.streams.writer.multi_key.numbered import LastBatch

LAG_SECONDS: Final = 10.0
"""The time between two measurements of the lag."""
_LETTER_BYTES: Final = 256
_IDLE_SECONDS: Final = 1.0
"""The time without rows after which a commit that was under way is looked at."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class IngestReport:
    """The number of rows, dead letters and transactions of one run, and the progress at its end."""

    rows: int = 0
    letters: int = 0
    batches: int = 0
    progress: IngestProgress = field(default_factory=IngestProgress)


@dataclass(slots=True)
class _Batch:
    """Rows that are committed together."""

    events: list[tuple[int, bytes]] = field(default_factory=list)
    letters: list[Mapping[str, object]] = field(default_factory=list)
    positions: dict[str, Position] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    size: int = 0
    poison: PoisonRow | None = None


class Ingest:
    """One ingest. `policy` is for waits. `accept_loss` continues after a loss of the stream's registers."""

    def __init__(
        self,
        client: JournalClient,
        spec: IngestSpec,
        source: RowSource,
        *,
        metrics: IngestMetrics | None = None,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        accept_loss: bool = False,
    ) -> None:
        self.spec = spec
        self.metrics = metrics or IngestMetrics()
        self.client = client
        self._source = source
        self._clock: Clock = clock or SystemClock()
        self._policy = policy
        self._accept_loss = accept_loss
        self._stop = asyncio.Event()
        self._report = IngestReport()
        self._identity = ""
        self._encoders = Encoders(client, spec)
        self._measured = -math.inf

    @property
    def report(self) -> IngestReport:
        """The report of the run so far. It changes while the run continues."""
        return self._report

    def stop(self) -> None:
        """End the run once the rows that were read are committed. A later run continues there."""
        self._stop.set()

    async def run(self, *, follow: bool = False) -> IngestReport:
        """Ingest until the source has no more, or with `follow` until `stop`. Returns a report of it.

        Failures that may pass are waited for, by default for ten minutes, with `follow` without a limit. Raises
        PoisonRow, SourceChanged, InvalidInput, and the last error after the timeout. Committed rows stay committed.
        """
        timeout = math.inf if follow else JOB_SECONDS
        policy = self._policy or RetryPolicy(timeout, seed=int.from_bytes(os.urandom(4)))
        retry, overtaken = Retry(policy), Retry(RetryPolicy(seed=policy.seed, scale=policy.scale))
        while not self._stop.is_set():
            before = self._report.batches
            try:
                await self._session(follow=follow)
                break
            except Fenced as error:
                self.metrics.overtaken.labels(self.spec.name).inc()
                if self._report.batches > before:
                    overtaken.progressed()
                _log.info("ingest.overtaken", ingest=self.spec.name, stream=self.spec.stream, error=str(error))
                delay: float | None = overtaken.failed(self._clock.monotonic())
            except CorantoError as error:
                if not may_pass(error):
                    raise
                self.metrics.failures.labels(self.spec.name).inc()
                if self._report.batches > before:
                    retry.progressed()
                now = self._clock.monotonic()
                delay = retry.failed(now)
                if delay is None:
                    raise
                if retry.is_report_due(now):
                    _log.warning("ingest.waiting", ingest=self.spec.name, stream=self.spec.stream, error=str(error))
            await self._wait(delay or 0.0)
        return self._report

    # -- One session: from the progress in the stream to the end, or a failure -----------------------------------------

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
        """Read rows until there are enough, or the time is over. Returns True if there are no more to read."""
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
        """Encode rows. A read with a row that cannot be an event is left out, unless such rows are kept."""
        spec, encode = self.spec, encoder.encode
        for read in reads:
            events, letters = list[tuple[int, bytes]](), list[Mapping[str, object]]()
            for number, row in enumerate(read.rows):
                if not isinstance(row, Poison):
                    try:
                        events.append(encode(row))
                        continue
                    except InvalidInput as error:
                        row = poison_of(row, read, number, error)
                if not spec.keeps_poison:
                    batch.poison = PoisonRow(spec.kind, read.split, row.place, row.problem)
                    return
                letters.append(letter_of(spec.name, read.split, row))
            batch.events += events
            batch.letters += letters
            batch.positions[read.split] = read.position
            if read.lost:
                batch.lost[read.split] = batch.lost.get(read.split, 0) + read.lost
            batch.size += sum(len(line) for _, line in events)
            batch.size += sum(_LETTER_BYTES + len(str(each.get("value", ""))) for each in letters)

    async def _commit(self, writer: BatchWriter[Any], last: LastBatch, batch: _Batch) -> LastBatch:
        name, began = self.spec.name, self._clock.monotonic()
        await self._source.confirm()
        progress = self._report.progress.after(
            self._identity, batch.positions, batch.lost, len(batch.events), len(batch.letters)
        )
        decided = await writer.commit_batch(
            next_batch(name, last, progress, batch.positions, batch.letters), batch.events
        )
        self._report.progress = progress
        self._report.rows += len(batch.events)
        self._report.letters += len(batch.letters)
        self._report.batches += 1
        self._count(batch, began)
        for split, count in batch.lost.items():
            _log.warning("ingest.rows_lost", ingest=name, split=split, rows=count)
        await self._source.committed(progress.splits)
        if decided.visible:
            return decided
        known = await writer.last_batch(name)
        if known.value != decided.value:
            raise Fenced(f"batch {known.number} of {name} was decided by another process")
        return known

    # -- Its parts -----------------------------------------------------------------------------------------------------

    def _count(self, batch: _Batch, began: float) -> None:
        metrics, name = self.metrics, self.spec.name
        metrics.batches.labels(name).inc()
        metrics.rows.labels(name).inc(len(batch.events))
        metrics.bytes.labels(name).inc(sum(len(line) for _, line in batch.events))
        metrics.dead_letters.labels(name).inc(len(batch.letters))
        metrics.lost.labels(name).inc(sum(batch.lost.values()))
        metrics.committed_at.labels(name).set(self._clock.now())
        metrics.commit_seconds.labels(name).observe(self._clock.monotonic() - began)

    async def _measure(self) -> None:
        """Measure the lag from time to time. A failure of that stops nothing."""
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

    async def _wait(self, seconds: float) -> None:
        """Wait, but not after `stop`."""
        waits = asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


def may_pass(error: CorantoError) -> bool:
    """Return True if an ingest that begins again at its progress may succeed."""
    return error.retriable or error.outcome is Outcome.UNKNOWN or isinstance(error, StreamChanged | TransactionTimeout)


def poison_of(row: SourceRow, read: Read, number: int, error: InvalidInput) -> Poison:
    """Return a row that its source took for one, and that cannot be an event."""
    place = f"row {number + 1} of the read that ends at {read.position}"
    if row.meta:
        place = f"{{{row.meta.decode()}}}"
    text = json.dumps(row.fields, default=str).encode() if row.text is None else row.text
    return Poison(place, error.message, row.key.encode("utf-8", "surrogateescape"), text)


async def prepare(client: JournalClient, spec: IngestSpec) -> None:
    """Create the streams of the file, if necessary. Raises StreamNotFound, and InvalidInput for another format."""
    streams = Streams(client)
    try:
        stream = await streams.describe(spec.stream)
    except StreamNotFound:
        if spec.create is None:
            raise StreamNotFound(
                f"there is no stream {spec.stream}: create it (`coranto streams create {spec.stream}`), or add "
                "`create: {segments: 4}` to the file"
            ) from None
        new = spec.create
        template = default_template(replication=new.replication, stores=new.stores)
        if spec.type:
            name, _, _ = spec.type.partition("@")
            template.labels.CopyFrom(with_value(template.labels, MESSAGE_TYPE, name))
        try:
            stream = await streams.create(spec.stream, new.segments, template=template)
        except StreamExists as error:
            # Another process may be creating it. A broker may not know all of its journals yet.
            raise StreamChanged(f"stream {spec.stream} cannot be created: {error}") from error
    if stream.content_type not in ("", JSON_LINES):
        raise InvalidInput(f"the events of {spec.stream} are {stream.content_type}, not lines of JSON", field="stream")
    if spec.keeps_poison:
        await streams.ensure_part(spec.stream, dead_letters_journal(spec.stream))
