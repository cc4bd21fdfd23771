"""Runner that writes a table with one shard of this process, without Java.

The shard has its checkpoint and its fence in the store, under the table's name. It reads open journals: a segment of a
stream is open once its predecessors are read to their ends, so that messages of a routing key stay in order. When more
journals open, the shard completes its transactions, and restarts with them.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.retry import JOB_SECONDS, REPORT_SECONDS, Retry
from coranto.effects import Clock, SystemClock
from coranto.errors import CorantoError, JournalNotFound, RejectedRow
from coranto.messages import Source, new_producer_id
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.journals.discovery import ContentExtent, open_journals
from coranto_consumers.runtime.application import Shard
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary, is_retriable
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.rejections import RejectionSearch
from coranto_consumers.runtime.specs import validate_shard_spec
from coranto_consumers.stores.fencing import fenced_off
from coranto_consumers.stores.reading import read_checkpoint
from coranto_consumers.tables.application import TableApplication
from coranto_consumers.tables.columns import TableLayout
from coranto_consumers.tables.inputs import present_journals, require_content
from coranto_consumers.tables.runs import RunOptions, TableReport
from coranto_consumers.tables.spec import TableSpec
from coranto_consumers.tables.type_watch import TypeChanged, TypeWatch

_MAX_SECONDS: Final = 1.0
"""The maximum seconds that a transaction takes messages, unless the file has a longer interval."""
_POLL_SECONDS: Final = 0.05
_CHECK_SECONDS: Final = 2.0
"""Seconds between two checks for open journals."""

_log = structlog.get_logger(__name__)


class ShardRunner:
    """Writes a table until it has caught up (`once`), or until `stop`. Run it once."""

    def __init__(
        self,
        client: SyncJournalClient,
        spec: TableSpec,
        prepared: Callable[[], TableLayout],
        watch: TypeWatch,
        options: RunOptions,
        clock: Clock | None = None,
    ) -> None:
        """`client`, `prepared` and `watch` are called in other threads.

        `prepared` prepares the table and returns its layout. `watch` is checked before each commit.
        """
        self._sync = client
        self._spec = spec
        self._prepared = prepared
        self._watch = watch
        self._options = options
        self._layout: TableLayout | None = None
        """None until the table is prepared, and again if its type has a later version."""
        self._stopping = False
        self._clock = clock or SystemClock()
        self._metrics = ConsumerMetrics()
        self._progress = Progress()
        self._search = RejectionSearch()
        self._fence: int | None = None
        """The highest fence that the last run of the shard may have raised."""
        self._sources: Mapping[str, Source] = {}
        self._journals: frozenset[str] = frozenset()
        """The journals that the shard reads."""
        self._targets: dict[str, int] | None = None
        """The heads of the journals at the start, which a run with `once` must reach. None without `once`."""

    @property
    def report(self) -> TableReport:
        """The messages and transactions that were committed."""
        found = [
            self._metrics.registry.get_sample_value(f"coranto_shard_{name}_total", {"shard": self._spec.name})
            for name in ("messages", "transactions")
        ]
        return TableReport(*(int(each or 0) for each in found))

    def stop(self) -> None:
        """Make `run` complete its transactions and return. May be called in any thread."""
        self._stopping = True

    async def run(self) -> None:
        """Write the table. Raises the error that ends it; the next run continues from the last commit.

        Temporary failures are retried: for ten minutes with `once`, otherwise without a limit. Cancellation abandons
        the current transaction.
        """
        retry = Retry(JOB_SECONDS) if self._options.once else Retry()
        async with JournalClient.of(self._sync.config) as client:
            while not self._stopping:
                before, begun = dict(self._progress.read_through), math.inf
                primary: Primary | None = None
                try:
                    if (layout := self._layout) is None:
                        self._layout = layout = await asyncio.to_thread(self._prepared)
                    present = await asyncio.to_thread(self._present)
                    primary = self._primary(client, layout, present)
                    begun = self._clock.monotonic()
                    if await self._serve(primary):
                        return
                except TypeChanged:
                    self._layout = None
                except Exception as error:
                    if isinstance(error, RejectedRow) and self._search.may_continue():
                        continue
                    now = self._clock.monotonic()
                    if self._progress.read_through != before or now - begun >= REPORT_SECONDS:
                        retry.progressed()
                    store = primary.store if primary is not None else None
                    # A journal was deleted, such as a segment that was read. The next attempt lists them again.
                    passes = isinstance(error, JournalNotFound) or is_retriable(error, store)
                    pause = retry.failed(now) if passes else None
                    if pause is None:
                        raise
                    if retry.is_report_due(now):
                        _log.warning("table.waiting", table=self._spec.name, error=str(error))
                    await self._clock.sleep(pause)

    def _present(self) -> dict[str, ContentExtent]:
        """Return the content of the journals. Raises Fenced, and an error for unread content that is gone."""
        present = present_journals(self._sync, self._spec)
        found = read_checkpoint(self._spec.store_url, self._spec.name)
        fence = 0 if found is None else found.fence
        if self._fence is not None and fence > self._fence:  # A later process has started: do not fence it off.
            raise fenced_off(self._spec.name, self._fence, found)
        self._fence = fence + 1
        self._sources = {} if found is None else dict(found.checkpoint.sources)
        require_content(present, self._sources)
        if self._options.once and self._targets is None:
            self._targets = {journal: extent.head for journal, extent in present.items()}
        if self._targets is not None:
            self._targets = {journal: offset for journal, offset in self._targets.items() if journal in present}
        return present

    def _read(self) -> Mapping[str, int]:
        """Return the read offsets of journals."""
        read = {journal: source.read_through for journal, source in self._sources.items()}
        for journal, offset in self._progress.read_through.items():
            read[journal] = max(offset, read.get(journal, 0))
        return read

    def _primary(self, client: JournalClient, layout: TableLayout, present: Mapping[str, ContentExtent]) -> Primary:
        """Return a primary of the shard for all open journals."""
        spec = pc.ShardSpec(id=self._spec.name)
        interval = 0.0 if self._options.once else self._spec.interval
        spec.min_txn_duration.FromNanoseconds(round(interval * 1e9))
        spec.max_txn_duration.FromNanoseconds(round(max(_MAX_SECONDS, interval) * 1e9))
        self._journals = open_journals(present, self._read())
        for journal in sorted(self._journals):
            begin = 0 if journal in self._sources else present[journal].begin
            spec.sources.add(journal=journal, min_offset=begin)
        validate_shard_spec(spec)
        return Primary(
            TableApplication(layout, lambda: self._watch.require_latest(layout)),
            Shard(spec, client),
            clock=self._clock,
            producer=new_producer_id(os.urandom),
            progress=self._progress,
            metrics=self._metrics,
            search=self._search,
            accept_changes=self._options.accept_changes,
            sources=self._spec.input.selector,
        )

    async def _serve(self, primary: Primary) -> bool:
        """Run the shard until it is stopped, has caught up, or more journals open. Return True to end `run`."""
        task = asyncio.create_task(primary.run(), name=f"table {self._spec.name}")
        check_at = self._clock.monotonic() + _CHECK_SECONDS
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_POLL_SECONDS)
                if self._stopping:
                    primary.stop()
                    await task
                    return True
                caught_up = self._reached(primary)
                if not caught_up and self._clock.monotonic() < check_at:
                    continue
                check_at = self._clock.monotonic() + _CHECK_SECONDS
                more = await self._may_be_read() - self._journals
                has_more = bool(more if self._targets is None else more & self._targets.keys())
                if caught_up or has_more:
                    primary.stop()
                    await task
                    return not has_more
            await task
            return False
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _reached(self, primary: Primary) -> bool:
        """Return True if the shard has reached the targets in its journals."""
        if self._targets is None:
            return False
        read = self._read()
        left = {name: end for name, end in self._targets.items() if name in self._journals and read.get(name, 0) < end}
        return not left or primary.is_caught_up(left)

    async def _may_be_read(self) -> frozenset[str]:
        """Return the open journals. Without `once`, return none if brokers do not answer: the next check retries."""
        try:
            present = await asyncio.to_thread(present_journals, self._sync, self._spec)
        except CorantoError as error:
            if self._options.once or not error.retriable:
                raise
            return frozenset()
        return open_journals(present, self._read())
