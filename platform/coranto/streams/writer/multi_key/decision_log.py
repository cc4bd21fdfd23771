"""The decisions of a stream, for writers of transactions on several segments.

`MultiKeyWriter` and `BulkCommitter` commit in the same steps: read the stream's state (`snapshot`), append events,
decide, append acknowledgements. Only the second step differs.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final

import structlog

from coranto.client.client import JournalClient
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import AppendOutcomeUnknown, CommitUnknown, CorantoError, JournalNotFound, NotAllowed, Unavailable
from coranto.messages.uuids import ProducerClock
from coranto.streams.control.decisions import Decisions, Gate
from coranto.streams.control.lifecycle import Streams
from coranto.streams.model.stream import Stream, validate_stream

_GATE_SECONDS: Final = 5.0
"""Seconds to wait at a closed gate before the process that closed it is presumed dead."""
_POLL_SECONDS: Final = 0.05
_LISTING_SECONDS: Final = 60.0
"""Maximum seconds to wait for a broker that lists an earlier state of the stream."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """An open gate, and the stream's segments as read after the gate."""

    token: str
    gate: Gate
    stream: Stream


class DecisionLog:
    """The decisions of one stream, and the clocks of a writer that decides. `retry_timeout` is in seconds."""

    def __init__(
        self, client: JournalClient, stream: str, *, retry_timeout: float, clock: Clock | None, entropy: Entropy
    ) -> None:
        self.stream = validate_stream(stream)
        self.retry_timeout = retry_timeout
        self.clock: Clock = clock or SystemClock()
        self.entropy = entropy
        self.ticks = ProducerClock(lambda: int(self.clock.now() * 1e9))
        self.streams = Streams(client, clock=self.clock, entropy=entropy)
        self.decisions = Decisions(client, stream, entropy)

    def new_transaction(self) -> str:
        return self.entropy(12).hex()

    async def snapshot(self) -> StreamSnapshot:
        """Return the state of the stream, once its gate is open.

        If the gate stays closed, finishes the change of segments of the process that closed it. Raises the errors of
        `Streams.resume` and `Streams.describe`.
        """
        gate = await self.decisions.gate()
        since = self.clock.monotonic()
        while not gate.is_open:
            if gate.token is None:
                await self.decisions.open(None)
            elif self.clock.monotonic() - since < _GATE_SECONDS:
                await self.clock.sleep(_POLL_SECONDS)
            else:
                _log.warning("multi_key_writer.scaling_unfinished", stream=self.stream)
                await self.streams.resume(self.stream)
                since = self.clock.monotonic()
            gate = await self.decisions.gate()
        assert gate.token is not None
        # The segments changed before the gate was opened. A broker may not know the change yet.
        deadline = self.clock.monotonic() + _LISTING_SECONDS
        while not gate.is_before(stream := await self.streams.describe(self.stream)):
            if self.clock.monotonic() > deadline:
                raise Unavailable(
                    f"stream {self.stream} changed at etcd revision {gate.revision}, and the broker that lists it "
                    f"knows only revision {stream.revision}: check its connection to etcd, or use another broker"
                )
            await self.clock.sleep(_POLL_SECONDS)
        return StreamSnapshot(gate.token, gate, stream)

    def unknown(self, doubt: AppendOutcomeUnknown, problem: CorantoError) -> CommitUnknown:
        """Return the error for a transaction in doubt, whose outcome cannot be read because of `problem`."""
        return CommitUnknown(
            f"a transaction on stream {self.stream} may be committed or not: {doubt} The outcome could not be read "
            f"since: {problem}"
        )

    async def acknowledge(self, appending: Awaitable[object]) -> CorantoError | None:
        """Await the append of a decided transaction's acknowledgement. Returns the error if it failed.

        After an error, the acknowledgement is appended by the next process that opens the stream or seals the segment.
        """
        try:
            await appending
        except (NotAllowed, JournalNotFound):
            return None  # The process that sealed the segment has appended it.
        except CorantoError as error:
            return error
        return None
