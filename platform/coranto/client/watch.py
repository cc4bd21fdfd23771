"""Watches of the journals that match a selector: a snapshot, and another after each creation, change or deletion.

On the wire a snapshot is a message with a header and the first journals, then messages with only further journals, and
an empty message at the end. Gazette's brokers send a header in all messages, which may be blank.

A watch that survives disconnects is a sequence of List RPCs. Each sends the header of the last complete snapshot, so
that no change is reported twice or missed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

import structlog

from coranto.client.dispatch import Dispatcher
from coranto.client.reader import TRANSIENT
from coranto.client.responses import check_answer
from coranto.client.retry import Retry
from coranto.client.values import JournalInfo, Listing
from coranto.effects import Clock
from coranto.errors import CorruptData, Unavailable
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb

_SUBJECT = "watch of journals"

_log = structlog.get_logger(__name__)


class SnapshotBuilder:
    """Combines the messages of one call into snapshots. Pure."""

    def __init__(self) -> None:
        self._header: pb.Header | None = None
        self._journals: list[JournalInfo] = []

    def accept(self, response: pb.ListResponse) -> Listing | None:
        """Accept the next message. Returns the snapshot that the message completes, or None.

        Raises the StatusError of a refusal, and CorruptData for a message that violates the protocol.
        """
        blank = not response.status and not response.header.etcd.revision
        if self._header is None:
            if blank and not response.journals:
                raise CorruptData(f"{_SUBJECT}: the broker violated the protocol: it ended a snapshot before its begin")
            self._header = check_answer(response, _SUBJECT)
        elif blank and not response.journals:
            complete = Listing(self._header, tuple(self._journals))
            self._header, self._journals = None, []
            return complete
        elif not blank:
            raise CorruptData(
                f"{_SUBJECT}: the broker violated the protocol: the continuation of a snapshot has no journals"
            )
        self._journals.extend(map(JournalInfo.of, response.journals))
        return None


class Watch:
    """One watch. `snapshots` may be called once.

    Calls that brokers cannot serve are retried: for `retry_timeout` seconds until the first snapshot, later forever.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock, selector: pb.LabelSelector, retry_timeout: float) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._selector = selector
        self._retry = Retry(retry_timeout)
        self._last: Listing | None = None

    async def snapshots(self) -> AsyncGenerator[Listing]:
        while True:
            try:
                async for listing in self._call():
                    known, self._last = self._last, listing
                    if known is None:
                        self._retry = Retry(math.inf)
                    self._retry.progressed()
                    # A resumed watch may send the same journals again after changes of other journals.
                    if known is None or known.journals != listing.journals:
                        yield listing
            except TRANSIENT as error:
                delay = self._retry.failed(self._clock.monotonic())
                if delay is None:
                    raise
                _log.debug("watch.waiting", failure=str(error), seconds=delay)
                await self._clock.sleep(delay)

    async def _call(self) -> AsyncGenerator[Listing]:
        """Run one List RPC, which ends only with an error."""
        resume = self._last.header if self._last is not None else None
        chosen = self._dispatcher.to_seed()
        call = chosen.stub.List(
            pb.ListRequest(selector=self._selector, watch=True, watch_resume=resume),
            metadata=await chosen.for_selector(Capability.LIST, self._selector),
        )
        builder = SnapshotBuilder()
        with chosen.calling(_SUBJECT, call):
            async for response in call:
                if (listing := builder.accept(response)) is not None:
                    yield listing
        raise Unavailable(f"{_SUBJECT}: the broker ended it; try again")
