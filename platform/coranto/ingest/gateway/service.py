"""The ingest of webhooks: it commits requests in batches, and deduplicates them by key.

Gateways share one sequence of numbered batches, and each batch's record has the keys of its requests. A gateway whose
batch number was decided by another gateway reads that one's records, and retries without the requests whose keys they
have. So a gateway that decides a batch knows all keys of the window. Gateways that compete take turns
(`coranto.streams.writer.multi_key.numbered`).
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from typing import Any, Final, Unpack

import structlog

from coranto.client.client import JournalClient
from coranto.errors import Fenced, InvalidInput, SourceChanged
from coranto.ingest.gateway.metrics import WebhookMetrics
from coranto.ingest.gateway.progress import WebhookProgress
from coranto.ingest.gateway.queue import Committed, Request, RequestQueue, WindowFull
from coranto.ingest.progress import catch_up, load_into, next_batch
from coranto.ingest.rows import RowEncoder
from coranto.ingest.runs import IngestOptions, IngestReport, RunningIngest, prepare
from coranto.ingest.spec import IngestSpec
from coranto.ingest.webhook.keys import DeduplicationWindow, pack
from coranto.ingest.webhook.options import WebhookOptions
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from coranto.streams.writer.multi_key.numbered import LastBatch

_SOURCE: Final = "webhook"
_COMPETING_SECONDS: Final = 600.0
"""The time to take turns after another gateway has last committed."""
_TURN_SECONDS: Final = 2.0
"""The timeout of a turn. Then the gateway whose turn it is counts as dead."""
_POLL_SECONDS: Final = 0.004
_PAUSE_SECONDS: Final = 0.012
"""The pause of a gateway between two of its turns, so that other gateways get one."""

_log = structlog.get_logger(__name__)


class WebhookIngest(RunningIngest):
    """The ingest of webhooks, with the arguments of `RunningIngest`. `run` serves requests until `stop`."""

    def __init__(self, client: JournalClient, spec: IngestSpec, **options: Unpack[IngestOptions]) -> None:
        super().__init__(client, spec, **options)
        self.options: WebhookOptions = spec.options
        self.webhooks = WebhookMetrics(self.metrics.registry)
        self.held_bytes = 0
        self.is_ready = False
        self.url = ""
        self._queue = RequestQueue(self.release)
        self._gateway = f"gateway-{os.urandom(5).hex()}"
        self._progress = WebhookProgress()
        self._loaded = asyncio.Event()
        self._competed = -math.inf
        self._closing: asyncio.Task[None] | None = None

    # -- For the server ------------------------------------------------------------------------------------------------

    def hold(self, size: int) -> None:
        """Count bytes that bodies hold in memory, until `release`."""
        self.held_bytes += size
        self.webhooks.bytes.labels(self.spec.name).set(self.held_bytes)

    def release(self, size: int) -> None:
        self.hold(-size)

    async def encoder(self) -> RowEncoder:
        """Return the encoder of rows, once the message type is known."""
        await self._loaded.wait()
        return self._encoders.encoder

    async def commit(self, request: Request) -> Committed:
        """Wait until a request is committed. Releases its bytes, which the caller has counted with `hold`.

        Raises KeyUsed and WindowFull if the request is not committed, and GatewayEnded if the outcome is unknown. After
        a cancellation the outcome is unknown, too.
        """
        keys = self._progress.keys
        if request.digest is not None and keys.get(request.id) is None:
            keys.expire(self._clock.now())
            if len(keys) + self._queue.keys >= self.options.window_keys:
                self.release(request.size)
                raise WindowFull
        request = self._queue.put(request)
        request.waiting += 1
        is_first = request.waiting == 1
        try:
            done = await asyncio.shield(request.done)
        finally:
            self._queue.remove_waiter(request)
        if done.is_duplicate or not is_first:
            self.webhooks.duplicates.labels(self.spec.name).inc()
        return done if is_first else Committed(True)

    # -- The run -------------------------------------------------------------------------------------------------------

    async def run(self, *, follow: bool = False) -> IngestReport:
        """Serve requests until `stop`.

        Raises InvalidInput without `follow`, ClusterError for an address in use, and the errors of `RunningIngest.run`.
        """
        if not follow:
            raise InvalidInput("a gateway of webhooks is a service: run it with --follow, or with the mode service")
        from coranto.ingest.gateway.server import WebhookServer

        self._server = WebhookServer(self)
        await self._server.start()
        _log.info("ingest.webhooks_served", ingest=self.spec.name, url=self.url)
        try:
            return await super().run(follow=True)
        finally:
            self._queue.fail()
            await self._server.stop()
            if self._closing is not None:
                await self._closing

    def stop(self) -> None:
        """Accept no more requests, and end the run once all received requests are answered."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="close of a gateway")

    async def _close(self) -> None:
        await self._server.stop()
        super().stop()
        self._queue.grown.set()

    async def _session(self, *, follow: bool) -> None:
        spec = self.spec
        await prepare(self.client, spec)
        async with BatchWriter[Any](self.client, spec.stream) as writer:
            last, self._progress = await self._load(writer)
            if self._progress.source not in ("", _SOURCE):
                raise SourceChanged(
                    f"ingest {spec.name} has read {self._progress.source} into stream {spec.stream}, and is to take "
                    "webhooks now: give the ingest another name"
                )
            await self._encoders.load()
            self._loaded.set()
            self.is_ready = True
            try:
                await self._batches(writer, last)
            finally:
                self.is_ready = False

    async def _load(self, writer: BatchWriter[Any]) -> tuple[LastBatch, WebhookProgress]:
        seconds = self.options.window_seconds
        new = WebhookProgress(keys=DeduplicationWindow(seconds), seconds=seconds)
        return await load_into(new, writer, self.spec.name, accept_loss=self._accept_loss)

    async def _batches(self, writer: BatchWriter[Any], last: LastBatch) -> None:
        queue = self._queue
        while True:
            progress = self._progress
            self._report.progress = progress
            progress.keys.expire(self._clock.now())
            self.webhooks.keys.labels(self.spec.name).set(len(progress.keys))
            queue.resolve_committed(progress.number_of(self._gateway), progress.keys)
            batch = queue.take(self.spec.batch_bytes, progress.keys)
            if not batch:
                if self._stop.is_set():
                    return
                await queue.grown.wait()
                continue
            if self._clock.monotonic() - self._competed < _COMPETING_SECONDS:
                known = await self._turn(writer, last)
                if known is None:
                    self._competed = self._clock.monotonic()
                    last = await self._caught_up(writer, last)
                    continue
                last = known
            try:
                last = await self._commit(writer, last, batch)
            except Fenced:
                self.metrics.overtaken.labels(self.spec.name).inc()
                self._competed = self._clock.monotonic()
                last = await self._caught_up(writer, last)
                continue
            if not last.visible:
                last = await self._caught_up(writer, last)
            if self._clock.monotonic() - self._competed < 1.0:
                await self._clock.sleep(_PAUSE_SECONDS)

    async def _turn(self, writer: BatchWriter[Any], last: LastBatch) -> LastBatch | None:
        """Wait for this gateway's turn. Returns None if another gateway commits before."""
        mine, seen, since, dead = f"{last.number + 1}.{self._gateway}.", "", 0.0, ""
        while True:
            found = await writer.take_turn(last, self.spec.name, self._gateway, dead=dead)
            if found is None or found.turn.startswith(mine):
                return None if found is None else replace(last, turn=found.turn)
            now = self._clock.monotonic()
            if found.turn != seen:
                seen, since = found.turn, now
            elif now - since > _TURN_SECONDS:
                dead = seen
            await self._clock.sleep(_POLL_SECONDS)

    async def _caught_up(self, writer: BatchWriter[Any], last: LastBatch) -> LastBatch:
        """Apply the batches that other gateways have decided, and return the last one."""
        known = await catch_up(self._progress, writer, self.spec.name, last)
        if known is None:
            known, self._progress = await self._load(writer)
        return known

    async def _commit(self, writer: BatchWriter[Any], last: LastBatch, batch: list[Request]) -> LastBatch:
        began, at, name = self._clock.monotonic(), round(self._clock.now(), 3), self.spec.name
        keys = [key for each in batch for key in each.keys]
        events = [event for each in batch for event in each.events]
        dead_letters = [letter for each in batch for letter in each.dead_letters]
        changes = {self._gateway: [batch[-1].number, at]}
        progress = self._progress.after(_SOURCE, changes, {}, len(events), len(dead_letters))
        progress.at, progress.new = at, pack((each.id, each.digest) for each in batch if each.digest is not None)
        planned = replace(next_batch(name, last, progress, changes, dead_letters), in_turn=True)
        decided = await writer.commit_batch(planned, keys, events)
        progress.keys.add(at, progress.new)
        self._progress = progress
        self._count(len(events), sum(map(len, events)), len(dead_letters), 0, began)
        self._queue.resolve_committed(batch[-1].number, progress.keys)
        return decided
