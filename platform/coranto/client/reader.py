"""Reads that survive broker restarts, and read persisted content directly from its store where possible."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

import structlog

from coranto.client.direct import DirectReader
from coranto.client.dispatch import Dispatcher
from coranto.client.read_progress import Located, ReadProgress, ReadStatus
from coranto.client.retry import REPORT_SECONDS, Retry
from coranto.client.values import Chunk
from coranto.effects import Clock
from coranto.errors import (
    ContentGone,
    CorantoError,
    CorruptFragment,
    InsufficientBrokers,
    JournalNotFound,
    JournalSuspended,
    NoPrimaryBroker,
    NotJournalBroker,
    NotPrimaryBroker,
    OffsetNotYetAvailable,
    StoreError,
    Unavailable,
    WrongRoute,
)
from coranto.security.tokens import Capability
from coranto.tracing import carried
from coranto.wire import protocol_pb2 as pb

TRANSIENT = (Unavailable, NoPrimaryBroker, NotPrimaryBroker, InsufficientBrokers, NotJournalBroker, WrongRoute)
"""Errors of brokers that cannot serve now, and have applied nothing."""

_NOT_FOUND_ATTEMPTS = 4
"""The number of attempts before JournalNotFound is raised, because some brokers learn of a new journal later."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read of journal offsets [offset, end_offset). An `end_offset` of 0 means no bound.

    `block` waits for content that is not written yet, also while the journal is suspended; without a bound, forever.
    `begin_mod_time` (Unix seconds) skips persisted fragments that were last modified before it. `direct` allows reading
    persisted fragments from their store. `fail_on_jump` raises OffsetJump where content is gone, instead of continuing
    after the gap. `journal_id` is the id of the journal that `offset` belongs to, if known; JournalRecreated is raised
    if brokers have another one.
    """

    journal: str
    offset: int = 0
    end_offset: int = 0
    block: bool = False
    begin_mod_time: int = 0
    direct: bool = True
    fail_on_jump: bool = False
    min_etcd_revision: int = 0
    journal_id: str = ""


class Reader:
    """One read. `read` may be called once."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        direct: DirectReader,
        clock: Clock,
        options: ReadOptions,
        retry_timeout: float,
        gap_at: Callable[[str, int], Awaitable[int | None]],
    ) -> None:
        """`gap_at` returns the end of a gap in the content, if brokers confirm the gap."""
        self._gap_at = gap_at
        self._missing = -1
        """The last offset where content below the head was missing; -1 if none was."""
        self._dispatcher = dispatcher
        self._chosen = dispatcher.to_replica(options.journal)
        self._direct = direct
        self._clock = clock
        self._options = options
        self._progress = ReadProgress(
            options.journal,
            options.offset,
            options.end_offset,
            fail_on_jump=options.fail_on_jump,
            journal_id=options.journal_id,
        )
        self._retry = Retry(math.inf if options.block else retry_timeout)
        self._direct_from = options.offset if options.direct else math.inf
        """The first offset to read directly, if its content is persisted."""
        self._damage: tuple[int, CorruptFragment] | None = None
        """The end of the last fragment whose file was damaged, and the error."""
        self._broker_has_journal = True
        """False if the seed does not serve the journal, so that it has to proxy the read."""

    async def read(self) -> AsyncGenerator[Chunk]:
        progress = self._progress
        while not progress.finished:
            self._chosen = chosen = self._dispatcher.to_replica(progress.journal)
            before, asked, damage = progress.offset, self._do_not_proxy, self._damage
            otherwise = False
            try:
                located: Located | None = None
                async with contextlib.aclosing(self._call()) as responses:
                    async for item in responses:
                        if isinstance(item, Chunk):
                            yield item
                        elif isinstance(item, Located):
                            located = item
                        elif self._completed_by(item):
                            return
                if located is not None and not progress.finished:
                    async with contextlib.aclosing(self._fragment(located)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                failure: CorantoError = Unavailable(f"read of {progress.journal}: the broker ended it without content")
            except (*TRANSIENT, JournalNotFound, JournalSuspended, OffsetNotYetAvailable) as error:
                if isinstance(error, JournalSuspended) and not self._options.block:
                    raise
                failure = error
                if isinstance(error, NotJournalBroker) and asked:
                    # The answer may have the route to a broker of the journal. Otherwise a seed may proxy the read.
                    otherwise = not chosen.routed and self._dispatcher.to_replica(progress.journal).routed
                    self._broker_has_journal = otherwise
            if progress.offset > before:
                self._retry.progressed()
            elif not otherwise and asked == self._do_not_proxy and not progress.finished:
                if damage is not None and progress.offset < damage[0]:
                    raise damage[1]  # Brokers do not have the content either.
                await self._wait(failure)

    @property
    def _do_not_proxy(self) -> bool:
        """The request's flag `do_not_proxy`: the broker sends URLs of persisted content instead of the content.

        With this flag, a broker that does not serve the journal refuses the read. Without it, such a broker proxies,
        and the reader ends the call when it gets a URL that it can read.
        """
        return self._progress.offset >= self._direct_from and (self._chosen.routed or self._broker_has_journal)

    def _completed_by(self, event: ReadStatus) -> bool:
        """Return True if the read is complete. Raises OffsetNotYetAvailable if its content is not available yet."""
        progress = self._progress
        if event is ReadStatus.NOTHING or self._options.block:
            return False
        if event is ReadStatus.AT_HEAD and progress.offset <= progress.write_head:
            return True
        subject = f"read of {progress.journal} at {progress.offset} with write head {progress.write_head}"
        raise OffsetNotYetAvailable(subject)

    async def _wait(self, failure: CorantoError) -> None:
        if isinstance(failure, JournalNotFound) and self._retry.failures + 1 >= _NOT_FOUND_ATTEMPTS:
            raise failure
        if isinstance(failure, OffsetNotYetAvailable) and self._progress.offset > self._progress.write_head:
            raise failure
        if isinstance(failure, OffsetNotYetAvailable):
            await self._examine_gap()
        now = self._clock.monotonic()
        delay = self._retry.failed(now)
        if delay is None:
            raise failure
        seconds = self._retry.seconds(now)
        # The wait for a suspended journal is not an outage.
        lasts = seconds >= REPORT_SECONDS and not isinstance(failure, JournalSuspended)
        if lasts and self._retry.is_report_due(now):
            _log.warning(
                "reader.waiting_for_brokers", journal=self._progress.journal, error=str(failure), seconds=seconds
            )
        _log.debug("reader.waiting", journal=self._progress.journal, failure=str(failure), seconds=delay)
        await self._clock.sleep(delay)

    async def _examine_gap(self) -> None:
        """Raise ContentGone if content is missing for the second time, and brokers confirm the gap."""
        journal, offset = self._progress.journal, self._progress.offset
        again, self._missing = self._missing == offset, offset
        if again and (end := await self._gap_at(journal, offset)) is not None:
            raise ContentGone(
                {journal: (offset, end)}, {journal: end}, "neither its stores nor its brokers have that content"
            )

    async def _call(self) -> AsyncGenerator[Chunk | Located | ReadStatus]:
        """Run one Read RPC, up to the first fragment that this reader can read directly."""
        progress, options = self._progress, self._options
        progress.connected()
        request = pb.ReadRequest(
            journal=options.journal,
            offset=progress.offset,
            block=options.block,
            do_not_proxy=self._do_not_proxy,
            end_offset=options.end_offset,
            begin_mod_time=options.begin_mod_time,
            min_etcd_revision=options.min_etcd_revision,
            journal_id=progress.expected_id,
        )
        chosen = self._chosen
        tracer, metadata = self._dispatcher.tracer, await chosen.for_journal(Capability.READ, options.journal)
        span = None if tracer is None else tracer.span("read", options.journal, "CLIENT", begin=progress.offset)
        call = chosen.stub.Read(request, metadata=carried(metadata, span))
        with contextlib.ExitStack() as during:
            if span is not None:
                during.enter_context(span)
                during.callback(lambda: span.note(end=progress.offset))
            during.enter_context(chosen.calling(f"read of {progress.journal}", call))
            without_content = None
            async for response in call:
                if response.HasField("header"):
                    chosen.answered(response.status, response.header)
                item = progress.accept(response)
                if isinstance(item, Located):
                    if item.url and progress.offset >= self._direct_from:
                        if self._direct.can_read(item.url):
                            yield item
                            return
                        self._direct_from = math.inf
                    without_content = item
                else:
                    without_content = None
                    yield item
            if without_content is not None and request.do_not_proxy:
                # The content is in a store that only brokers can read.
                self._direct_from = max(self._direct_from, without_content.fragment.end)

    async def _fragment(self, located: Located) -> AsyncGenerator[Chunk]:
        progress, fragment = self._progress, located.fragment
        end = min(fragment.end, progress.end_offset or fragment.end)
        try:
            async with contextlib.aclosing(self._direct.read(fragment, located.url, progress.offset, end)) as pieces:
                async for piece in pieces:
                    yield progress.deliver(piece)
        except (StoreError, CorruptFragment) as error:
            # No part of the fragment was delivered. A broker may still have the undamaged content.
            self._damage = (fragment.end, error) if isinstance(error, CorruptFragment) else self._damage
            _log.warning("reader.direct_read_failed", reason=str(error))
            self._direct_from = fragment.end
