"""A shard's primary: it reads, consumes, commits and acknowledges, from its checkpoint on.

`transaction.Transactions` decides the next step, and `consuming.Consuming` has the next messages. This module has the
effects. One task runs the steps. Other tasks read the sources, append, and complete the prior transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import structlog

from coranto import labels
from coranto.client import AppendResult, JournalClient
from coranto.client.reader import TRANSIENT
from coranto.client.retry import REPORT_SECONDS
from coranto.effects import Clock
from coranto.errors import (
    AppendOutcomeUnknown,
    CorantoError,
    Fenced,
    IndexHasGreaterOffset,
    InvalidInput,
    JournalNotFound,
    JournalRecreated,
    RejectedRow,
)
from coranto.fragments import forks
from coranto.messages import Checkpoint, ProducerClock, ProducerId, Source
from coranto.messages.checkpoints import Identity
from coranto.specs.validation import duration_seconds
from coranto.tracing import Tracer, TraceSpan, tracer
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.outputs.identity import IdentityCheck, journal_outputs, journals_source
from coranto_consumers.runtime.appends import OrderedAppends
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.consuming import Consuming
from coranto_consumers.runtime.inputs import MessageInput
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.producers import ProducerWatch
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.recreated import advice, present_sources
from coranto_consumers.runtime.rejections import RejectionSearch
from coranto_consumers.runtime.specs import recovery_log
from coranto_consumers.runtime.transaction import Limits, NextStep, Prior, Times, Transactions
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.engines import is_transient

_log = structlog.get_logger(__name__)

READ_AHEAD: Final = 8192
"""Messages to read ahead, if the shard's spec does not set the number. Sources in columns are limited by bytes only."""
READ_AHEAD_BYTES: Final = 64 << 20
"""The limit of bytes to read ahead, for any number of messages. Writers choose the size of messages."""

FENCE_SECONDS: Final = 10.0
"""Seconds after which an idle shard checks in its store if it is fenced off."""

ACKNOWLEDGE_SECONDS: Final = 10.0
"""Seconds that a failed shard may take to acknowledge its commits."""

_NO_LIMIT: Final = 1 << 62


def limits_of(spec: pc.ShardSpec, max_messages: int | None = None) -> Limits:
    """Return the limits of a shard's transactions. `max_messages` is set during a search for a rejected message."""
    return Limits(
        duration_seconds(spec.min_txn_duration),
        duration_seconds(spec.max_txn_duration),
        wait_for_acks=not spec.disable_wait_for_ack,
        max_messages=max_messages,
    )


class Primary:
    """One run of a shard's transactions. Use it once: after an error, a new one continues from the checkpoint."""

    def __init__(
        self,
        app: Application[Any],
        shard: Shard,
        *,
        clock: Clock,
        producer: ProducerId,
        progress: Progress,
        metrics: ConsumerMetrics,
        restored: Callable[[], Awaitable[None]] | None = None,
        search: RejectionSearch | None = None,
        accept_changes: str = "",
        sources: str = "",
    ) -> None:
        """`restored` is awaited once the store has restored its checkpoint.

        `search` is shared by the runs of a shard's primary. `accept_changes` has the codes of confirmed changes
        (`outputs/identity.py`). `sources` is the label selector of the sources, if checkpoints record it in place of
        their names: then new journals of the selector are not a change.
        """
        self._search = RejectionSearch() if search is None else search
        self._app = app
        self._shard = shard
        self._client: JournalClient = shard.client
        self._clock = clock
        self._progress = progress
        self._restored = restored
        self._identity = IdentityCheck(shard.id, accept_changes)
        self._sources = sources
        self._metrics = metrics
        self._publisher = ShardPublisher(producer, ProducerClock(lambda: int(clock.now() * 1e9)))
        self._appends = OrderedAppends(self._append)
        self._published: list[asyncio.Future[int]] = []
        """Appends of the current transaction that are not known to have succeeded."""
        self._transactions = Transactions(limits_of(shard.spec, self._search.max_messages))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shard {shard.id}")
        self._wake = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._completing: asyncio.Task[None] | None = None
        self._input = self._consuming({})
        self._producers = self._watch_producers({})
        self._acknowledging = False
        """True if the transaction that is being completed has committed."""
        self._declared: set[str] = set()
        """The journals that the application declares, as far as they are known."""
        self._is_waiting = False
        """True while there is no step to take."""
        self._fed: dict[str, int] = {}
        """The offsets through which sources were read."""
        self._may_repeat = False
        """True if an append since the completion of the prior transaction may be repeated in its journal."""
        self._resets = 0
        self._tracer = tracer()
        self._span: TraceSpan | None = None
        """The span of the current transaction, once it has messages."""
        self._completing_span: TraceSpan | None = None
        self.store: Store | None = None
        self.ready = asyncio.Event()
        """Set once the store has been restored."""

    async def run(self) -> None:
        """Run transactions until `stop`, or until something fails. Raises the failure.

        Cancelling abandons the current transaction. The outcome of a commit in progress is then unknown.
        """
        try:
            store = self.store = await self._call(self._app.new_store, self._shard)
            if not isinstance(store, Store):
                raise InvalidInput(
                    f"new_store returned {store!r}, which is not a Store; "
                    "return a subclass of coranto_consumers.stores.base.Store",
                    field="new_store",
                )
            checkpoint = await store.restore_checkpoint(self._shard.fqn)
            self._compare(store, checkpoint)
            self._progress.restored(checkpoint.identity.resets)
            await self._require_unread(checkpoint.sources.keys())
            if self._restored is not None:
                await self._restored()
            sources = await present_sources(self._client, self._shard.spec, checkpoint.sources)
            for journal in sources:
                if sources[journal] != checkpoint.sources[journal]:
                    self._progress.begin_again(journal)
            sources = await self._recorded(store, checkpoint, sources)
            self._input = self._consuming(sources)
            self._progress.journal_ids = self._input.ids
            self._producers = self._watch_producers(sources)
            offsets = {journal: source.read_through for journal, source in sources.items()}
            intents = checkpoint.ack_intents
            written = {journal: self._appends.add(journal, intent) for journal, intent in intents.items()}
            self._begin_completing(self._write_restored(written, offsets))
            self.ready.set()
            _log.info("shard.primary", shard=self._shard.id, read_through=offsets)
            for source in self._shard.spec.sources:
                self._spawn(self._read(source.journal, max(source.min_offset, offsets.get(source.journal, 0))))
            self._spawn(self._producers.run())
            await self._steps()
        except Exception as error:
            await self._finish_acknowledging()
            for span in (self._completing_span, self._span):
                if span is not None:
                    span.end(error)
            if (rejected := self._rejection(error)) is not None:
                raise rejected from None  # The error itself may quote values of rows.
            raise
        finally:
            await self._close()

    def _compare(self, store: Store, checkpoint: Checkpoint) -> None:
        """Compare the shard with the record in its checkpoint. Raises ConsumerChanged."""
        journals = {source.journal for source in self._shard.spec.sources}
        known, log = store.identity(), recovery_log(self._shard.spec)
        place = known.store or (f"recovery log {log}" if log else "")
        outputs = known.outputs | journal_outputs(self._app.publishes)
        self._identity.restored(
            checkpoint,
            Identity(self._sources or journals_source(journals), outputs, store=place),
            lambda: checkpoint.sources.keys() - journals,
            outputs_known=bool(place or outputs),
        )
        self._identity.require_confirmed()

    async def _recorded(self, store: Store, checkpoint: Checkpoint, sources: dict[str, Source]) -> dict[str, Source]:
        """Commit the sources that are new in a selector to the store, and return all sources.

        The checkpoint then shows that the predecessors of a new segment were read, even if the segment has no content.
        """
        chosen = self._shard.spec.sources if self._sources else ()
        new = {each.journal: Source(each.min_offset) for each in chosen if each.journal not in checkpoint.sources}
        if not new:
            return sources
        known = {**sources, **new}
        recorded = Checkpoint(known, checkpoint.ack_intents, self._identity.record)
        await (await store.start_commit(self._shard.fqn, recorded, ()))
        return known

    def stop(self) -> None:
        """Stop consuming, complete the transactions, and end `run`. Returns immediately."""
        self._transactions.ended()
        self._wake.set()

    def is_caught_up(self, offsets: Mapping[str, int]) -> bool:
        """Return True if sources are read through these offsets, and the store has all that is committed there.

        Transactions that are open there are not waited for. False for a journal that is not a source.
        """
        return (
            self._is_waiting
            and all(self._fed.get(journal, -1) >= offset for journal, offset in offsets.items())
            and not self._input.is_ready
            and not self._transactions.is_open
            and self._transactions.prior is Prior.DONE
        )

    def _rejection(self, error: Exception) -> RejectedRow | None:
        """Return the error of a row that the store rejected. None for other errors."""
        rejected = self.store.rejection_of(error) if isinstance(self.store, Store) else None
        if rejected is None or self._app.atomic:
            return rejected
        # During a search, only one transaction is in progress.
        looking = self._search.max_messages is not None
        messages = self._transactions.messages_under_way(only_one=looking) + self._input.in_hand
        return self._search.record_rejection(rejected, messages, self._input.last)

    async def _finish_acknowledging(self) -> None:
        """Wait a bounded time for acknowledgements of a committed transaction, after any failure.

        Otherwise it may take long until another process acknowledges it.
        """
        if self._acknowledging and self._completing is not None:
            await asyncio.wait([self._completing], timeout=ACKNOWLEDGE_SECONDS)

    async def _close(self) -> None:
        self._input.aborted = True
        tasks = [*self._tasks, *([self._completing] if self._completing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._appends.close()
        await self._input.close()
        # A plain method that is being called cannot be stopped, but its effects are dropped.
        await asyncio.to_thread(self._thread.shutdown)
        if self.store is not None:
            await self.store.destroy()

    # -- The steps -----------------------------------------------------------------------------------------------------

    async def _steps(self) -> None:
        transactions = self._transactions
        while True:
            self._wake.clear()
            self._raise_failures()
            transactions.limits = limits_of(self._shard.spec, self._search.max_messages)
            now = self._clock.monotonic()
            ready, pending = self._input.is_ready, self._input.has_pending
            match transactions.next_step(now, ready=ready, pending=pending, in_partial_set=self._input.in_partial_set):
                case NextStep.CONSUME:
                    await self._consume()
                case NextStep.COMMIT:
                    await self._commit()
                case NextStep.WAIT:
                    await self._wait(transactions.deadline(now), now)
                case NextStep.END:
                    return

    async def _wait(self, deadline: float | None, now: float) -> None:
        is_idle = not self._transactions.is_open and self._transactions.prior is Prior.DONE
        if deadline is None and is_idle:
            deadline = now + FENCE_SECONDS
        self._is_waiting = True
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - now)):
                await self._wake.wait()
        except TimeoutError:
            if is_idle:
                await self._require_fence()
        finally:
            self._is_waiting = False

    async def _require_fence(self) -> None:
        """Raise Fenced if the store has a later owner. Temporary errors are ignored: the next commit raises them."""
        assert self.store is not None
        try:
            await self.store.require_fence()
        except Exception as error:
            if isinstance(error, Fenced) or not self.store.is_transient(error):
                raise

    def _raise_failures(self) -> None:
        """Raise the error that ended one of the tasks."""
        for task in (*self._tasks, *([self._completing] if self._completing is not None else [])):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _consume(self) -> None:
        """Let the application consume the available messages for a while, and append its published messages."""
        assert self.store is not None
        await self._input.consume(self.store)
        if self._tracer is not None and self._span is None and self._transactions.is_open:
            begun = int((self._clock.now() - self._now() + self._transactions.current.began) * 1e9)
            self._span = self._tracer.span(
                "transaction", kind="CONSUMER", consumer=self._shard.id, begun=begun, is_root=True
            )
        self._append_published()
        await self._input.replay(self._client)
        self._has_capacity.set()
        if self._input.resets > self._resets:
            self._metrics.resets.labels(self._shard.id).inc(self._input.resets - self._resets)
            self._resets = self._input.resets
            _log.warning("producer.reset", shard=self._shard.id)
        self._record_skipped_ends()
        await self._appends.wait_for_capacity()

    def _append_published(self) -> None:
        for journal, content in self._publisher.take():
            self._published.append(self._appends.add(journal, content, within=self._span))
        self._published = [append for append in self._published if not _succeeded(append)]

    async def _commit(self) -> None:
        """Begin to commit the current transaction, and let the next one begin."""
        store = self.store
        assert store is not None
        await self._call(self._app.finalize_txn, self._shard, store, self._publisher)
        await self._require_declared()
        self._append_published()
        intents = self._publisher.ack_intents()
        checkpoint = Checkpoint(self._input.checkpoint(self._producers.pruning()), intents, self._identity.record)
        self._producers.committing(checkpoint.sources)
        # A transaction may commit only once its published messages are appended, and not if an append has failed.
        wait_for, self._published = self._published, []
        committing = asyncio.ensure_future(await store.start_commit(self._shard.fqn, checkpoint, wait_for))
        self._transactions.start_commit(self._now())
        # Acknowledgements are queued now, so that no message of the next transaction can come before them.
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        span, self._completing_span, self._span = self._span, self._span, None
        acknowledged = {
            journal: self._appends.add(journal, intent, after=gate, within=span) for journal, intent in intents.items()
        }
        self._begin_completing(self._complete(committing, checkpoint, gate, acknowledged))

    async def _require_declared(self) -> None:
        """Raise InvalidInput if the application has published to a journal that its `publishes` does not have."""
        wanted = self._app.publishes
        if not wanted or not self._publisher.chosen - self._declared:
            return
        if isinstance(wanted, str):
            listing = await self._client.list(wanted)
            self._declared = {journal.spec.name for journal in listing.journals}
        else:
            self._declared = set(wanted)
        if left := sorted(self._publisher.chosen - self._declared):
            what = f"journals of the label selector {wanted}" if isinstance(wanted, str) else ", ".join(wanted)
            raise InvalidInput(
                f"{type(self._app).__name__} declares that it publishes to {what}, and has a message for {left[0]}, "
                "which is not among these. Nothing of the transaction is committed. Declare that journal, too",
                field="publishes",
            )

    # -- Completing the prior transaction ------------------------------------------------------------------------------

    def _begin_completing(self, work: Coroutine[Any, Any, None]) -> None:
        self._acknowledging = False
        self._completing = asyncio.create_task(work, name=f"complete {self._shard.id}")
        self._completing.add_done_callback(lambda _: self._wake.set())

    async def _write_restored(self, written: dict[str, asyncio.Future[int]], offsets: dict[str, int]) -> None:
        """Write the acknowledgements of the restored checkpoint, which may never have been written.

        They also roll back messages that were published after that checkpoint.
        """
        self._acknowledging = True
        ends = await self._acknowledged(written, may_be_deleted=True)
        self._transactions.acknowledged(self._now())
        self._progress.advance(offsets, ends)
        self._record_skipped_ends()

    async def _complete(
        self,
        committing: asyncio.Future[None],
        checkpoint: Checkpoint,
        gate: asyncio.Future[None],
        acknowledged: dict[str, asyncio.Future[int]],
    ) -> None:
        try:
            await committing
        except BaseException:
            gate.cancel()
            raise
        self._transactions.committed(self._now())
        self._search.completed()
        self._acknowledging = True
        gate.set_result(None)
        ends = await self._acknowledged(acknowledged)
        if self._may_repeat:
            self._may_repeat = False
            self._publisher.replace_prior_producer()
        self._transactions.acknowledged(self._now())
        offsets = {journal: source.read_through for journal, source in checkpoint.sources.items()}
        self._metrics.completed(self._shard.id, self._transactions.completing)
        if self._tracer is not None and self._completing_span is not None:
            self._trace(self._tracer, self._completing_span, self._transactions.completing)
        self._metrics.read_through(self._shard.id, offsets)
        self._progress.advance(offsets, ends)
        self._record_skipped_ends()

    def _trace(self, tracer: Tracer, span: TraceSpan, times: Times) -> None:
        """End the span of a completed transaction, with a span of each phase."""
        offset = self._clock.now() - self._now()
        for phase, begin, end in times.phases:
            begun, ended = int((offset + begin) * 1e9), int((offset + end) * 1e9)
            tracer.span(phase, consumer=self._shard.id, within=span, begun=begun).end(at=ended)
        span.end(at=ended, messages=times.messages, bytes=times.bytes)
        self._completing_span = None

    async def _acknowledged(
        self, written: dict[str, asyncio.Future[int]], *, may_be_deleted: bool = False
    ) -> dict[str, int]:
        """Wait for acknowledgements, and return their end offsets, by journal.

        A failure of one journal does not stop the others. Raises the first failure. After it, the wait ends when no
        acknowledgement completes for `ACKNOWLEDGE_SECONDS`, because brokers may be unavailable for long.
        """
        journals = {done: journal for journal, done in written.items()}
        ends: dict[str, int] = {}
        failure: BaseException | None = None
        pending = set(journals)
        while pending:
            timeout = None if failure is None else ACKNOWLEDGE_SECONDS
            settled, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not settled:
                break
            for done in settled:
                journal, error = journals[done], done.exception()
                if error is None:
                    ends[journal] = done.result()
                elif may_be_deleted and isinstance(error, JournalNotFound):
                    _log.warning("acknowledgement.dropped", shard=self._shard.id, journal=journal)
                else:
                    failure = failure or error
                    self._log_missing_acknowledgement(journal, str(error))
        if failure is not None:
            for done in pending:
                self._log_missing_acknowledgement(journals[done], "its brokers do not answer")
            raise failure
        return ends

    def _log_missing_acknowledgement(self, journal: str, error: str) -> None:
        _log.warning("acknowledgement.failed", shard=self._shard.id, journal=journal, error=error)

    def _record_skipped_ends(self) -> None:
        """Advance the progress past skipped messages, such as duplicates, if no transaction is open or completing.

        No commit would record them.
        """
        if self._transactions.prior is Prior.DONE and not self._transactions.is_open and self._input.skipped_ends:
            self._progress.advance(self._input.skipped_ends, {})
            self._input.skipped_ends.clear()

    # -- Effects -------------------------------------------------------------------------------------------------------

    async def _require_unread(self, known: Collection[str]) -> None:
        """Raise InvalidInput if a new source is a fork of a journal in the checkpoint that is not a source any more."""
        journals = {source.journal for source in self._shard.spec.sources}
        left, new = set(known) - journals, sorted(journals - set(known))
        if left and new:
            listing = await self._client.list(labels.label_selector(include=[(labels.NAME, name) for name in new]))
            forks.require_unread((info.spec for info in listing.journals), left)

    def _watch_producers(self, sources: Mapping[str, Source]) -> ProducerWatch:
        journals = [source.journal for source in self._shard.spec.sources]
        return ProducerWatch(self._shard.id, self._client, self._clock, self._metrics, journals, sources)

    def _now(self) -> float:
        return self._clock.monotonic()

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the application: an `async` one here, a plain one on the shard's thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        return await self._in_thread(method, *arguments)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*arguments))

    def _consuming(self, sources: Mapping[str, Source]) -> Consuming:
        """Return the shard's input, from restored states of its sources on."""
        return Consuming(
            self._app,
            self._shard,
            self._publisher,
            self._transactions,
            self._now,
            self._in_thread,
            sources,
            self._search,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._wake.set())
        self._tasks.append(task)

    async def _append(self, journal: str, pieces: Any, within: TraceSpan | None) -> AppendResult:
        # A message that is appended twice is read once, because of its UUID. The append waits for unreachable brokers,
        # because committed messages must be acknowledged.
        begun, waited = self._now(), False
        while True:
            append = self._client.append(journal, pieces, retry_unknown=True, retry_timeout=REPORT_SECONDS)
            try:
                result = await (append if within is None else within.around(append))
            except (AppendOutcomeUnknown, *TRANSIENT) as error:
                waited = self._may_repeat = True  # An attempt with an unknown outcome may be applied later.
                seconds = self._now() - begun
                self._metrics.outage.labels(self._shard.id).set(seconds)
                _log.warning(
                    "shard.waiting_for_brokers",
                    shard=self._shard.id,
                    journal=journal,
                    error=str(error),
                    seconds=round(seconds, 1),
                )
            else:
                self._may_repeat |= result.may_repeat
                if waited:
                    self._metrics.outage.labels(self._shard.id).set(0)
                return result

    async def _read(self, journal: str, offset: int) -> None:
        try:
            await self._keep_reading(journal, offset)
        except JournalRecreated as error:
            raise error.with_advice(advice(self._shard.id, journal)) from error

    async def _keep_reading(self, journal: str, offset: int) -> None:
        """Read a source until the shard ends, with bounded read-ahead."""
        listing = await self._client.list(labels.label_selector(include={labels.NAME: journal}))
        if not listing.journals:
            raise JournalNotFound(f"source of shard {self._shard.id}: {journal}")
        assert self.store is not None
        input = self._input.add_source(journal, self._app.new_message(listing.journals[0].spec), self.store)
        feed = input.feed(journal, offset)
        limit = self._shard.spec.read_channel_size or (READ_AHEAD if isinstance(input, MessageInput) else _NO_LIMIT)
        known = self._input.ids.get(journal, "") if offset else ""
        self._fed[journal] = offset
        async with contextlib.aclosing(self._client.read(journal, offset, block=True, journal_id=known)) as chunks:
            async for chunk in chunks:
                if chunk.journal_id:
                    self._input.ids[journal] = chunk.journal_id
                decoded, through = feed(chunk)
                while self._input.size_of(input) >= limit or self._input.size_bytes >= READ_AHEAD_BYTES:
                    self._has_capacity.clear()
                    await self._has_capacity.wait()
                self._input.arrive(input, journal, decoded, through)
                self._fed[journal] = chunk.offset + len(chunk.content)
                self._wake.set()
        raise CorantoError(f"the read of {journal} ended unexpectedly; the shard starts again from its checkpoint")


def is_retriable(error: Exception, store: Store | None) -> bool:
    """Return True if an error that ended a shard's primary may be temporary, so that a new primary can continue."""
    # Brokers that know where a journal ends may come back, or an operator may reset its head.
    if isinstance(error, IndexHasGreaterOffset) or (isinstance(error, CorantoError) and error.retriable):
        return True
    return is_transient(error) if store is None else store.is_transient(error)


def _succeeded(append: asyncio.Future[int]) -> bool:
    return append.done() and not append.cancelled() and append.exception() is None
