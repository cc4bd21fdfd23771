"""Runs of ingests: one session after the other, until a session succeeds or fails with a permanent error."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, field
from typing import TypedDict

import structlog

from coranto.client.client import JournalClient
from coranto.client.retry import JOB_SECONDS, Retry, RetryPolicy
from coranto.effects import Clock, SystemClock
from coranto.errors import (
    CorantoError,
    Fenced,
    InvalidInput,
    Outcome,
    StreamChanged,
    StreamExists,
    StreamNotFound,
    TransactionTimeout,
)
from coranto.ingest.encoders import Encoders
from coranto.ingest.metrics import IngestMetrics
from coranto.ingest.progress import IngestProgress
from coranto.ingest.spec import IngestSpec
from coranto.labels import JSON_LINES, MESSAGE_TYPE, with_value
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.model.stream import dead_letters_journal

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class IngestReport:
    """The number of rows, dead letters and transactions of one run, and the progress at its end."""

    rows: int = 0
    dead_letters: int = 0
    batches: int = 0
    progress: IngestProgress = field(default_factory=IngestProgress)


class IngestOptions(TypedDict, total=False):
    """Options of a run. `policy` sets the retries. `accept_loss` continues after a loss of the stream's records."""

    metrics: IngestMetrics | None
    clock: Clock | None
    policy: RetryPolicy | None
    accept_loss: bool


class RunningIngest:
    """A run of one ingest. Subclasses implement its sessions."""

    def __init__(
        self,
        client: JournalClient,
        spec: IngestSpec,
        *,
        metrics: IngestMetrics | None = None,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        accept_loss: bool = False,
    ) -> None:
        self.spec = spec
        self.metrics = metrics or IngestMetrics()
        self.client = client
        self._clock: Clock = clock or SystemClock()
        self._policy = policy
        self._accept_loss = accept_loss
        self._stop = asyncio.Event()
        self._report = IngestReport()
        self._encoders = Encoders(client, spec)

    @property
    def report(self) -> IngestReport:
        """The report of the run so far. It changes while the run continues."""
        return self._report

    def stop(self) -> None:
        """End the run once the rows that were read are committed. A later run continues after these rows."""
        self._stop.set()

    async def run(self, *, follow: bool = False) -> IngestReport:
        """Ingest until the source ends, or with `follow` until `stop`. Returns a report.

        Transient failures are retried, by default for ten minutes, with `follow` without a limit. Raises PoisonRow,
        SourceChanged, InvalidInput, and the last error after the timeout. Committed rows stay committed.
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
                if not is_transient(error):
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

    # -- Sessions ------------------------------------------------------------------------------------------------------

    async def _session(self, *, follow: bool) -> None:
        """Ingest from the progress in the stream to the end of the source. Raises Fenced, and other errors of `run`."""
        raise NotImplementedError

    def _count(self, rows: int, size: int, dead_letters: int, lost: int, began: float) -> None:
        """Count a committed batch."""
        metrics, name, report = self.metrics, self.spec.name, self._report
        report.rows += rows
        report.dead_letters += dead_letters
        report.batches += 1
        metrics.batches.labels(name).inc()
        metrics.rows.labels(name).inc(rows)
        metrics.bytes.labels(name).inc(size)
        metrics.dead_letters.labels(name).inc(dead_letters)
        metrics.lost.labels(name).inc(lost)
        metrics.committed_at.labels(name).set(self._clock.now())
        metrics.commit_seconds.labels(name).observe(self._clock.monotonic() - began)

    async def _wait(self, seconds: float) -> None:
        """Wait for some seconds, or until `stop`."""
        waits = asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


def is_transient(error: CorantoError) -> bool:
    """Return True if a new session from the committed progress may succeed."""
    return error.retriable or error.outcome is Outcome.UNKNOWN or isinstance(error, StreamChanged | TransactionTimeout)


async def prepare(client: JournalClient, spec: IngestSpec) -> None:
    """Create the ingest's stream and its dead letters, if necessary.

    Raises StreamNotFound, and InvalidInput for a stream of another format.
    """
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
