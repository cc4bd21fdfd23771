"""An append in its journal's queue, and its outcome."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from coranto.effects import Bytes
from coranto.fragments.fragment import Fragment, sum_words
from coranto.security.tokens import Claims
from coranto.specs.durability import Durability
from coranto.tracing import TraceSpan
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import Refuse
from coranto_broker.append.states import TERMINAL, TRANSITIONS, AppendEvent, State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.replication.resolver import Resolution

if TYPE_CHECKING:
    from coranto_broker.append.batch import AppendRange
    from coranto_broker.append.queue import JournalQueue
    from coranto_broker.append.receiving import Inbox

NO_REGISTERS: Final = pb.LabelSet()
_OK = pb.OK  # Looking it up is slow.


class AppendOutcome(NamedTuple):
    """The outcome of an append, by its state.

    FINISHED: [begin, end) of its content in `fragment`, and its SHA-1 `sum`. ERROR: the refusing status, and perhaps a
    `reason`. PROXY: the primary of `resolution` has to decide. `registers` are the journal's registers after the
    append, committed or refused.
    """

    resolution: Resolution
    status: pb.Status.ValueType = pb.OK
    registers: pb.LabelSet = NO_REGISTERS
    fragment: Fragment | None = None
    begin: int = 0
    end: int = 0
    sum: bytes = b""
    total_chunks: int = 0
    delayed_chunks: int = 0
    durability: Durability = Durability(0, 0)
    """The durability of the append, or of the content that it asks about."""
    stored_end: int = 0
    """The end of the stored part of the content that the append asks about."""
    reason: str = ""

    def encode(self) -> bytes:
        """Return the encoded response to a committed or refused append."""
        # A new message each time, because a reused one keeps memory of earlier values.
        response, resolution, fragment = pb.AppendResponse(), self.resolution, self.fragment
        if fragment is None:
            response.status = self.status
            response.header.CopyFrom(resolution.header)
            if self.status == pb.REGISTER_MISMATCH:
                response.registers.CopyFrom(self.registers)
            response.store_health_error = self.reason
            return response.SerializeToString()
        commit = response.commit
        digest = commit.sum
        commit.journal = fragment.journal
        commit.begin, commit.end = self.begin, self.end
        commit.compression_codec = int(fragment.codec)  # type: ignore[assignment]
        digest.part1, digest.part2, digest.part3 = sum_words(self.sum)
        response.registers.CopyFrom(self.registers)
        response.total_chunks = self.total_chunks
        if self.delayed_chunks:
            response.delayed_chunks = self.delayed_chunks
        # In protobuf, concatenated messages are one message with the fields of all. The header is most of a response.
        durability = _encoded(self.durability, self.stored_end)
        return resolution.encoded_header + response.SerializeToString() + durability


@lru_cache(maxsize=64)
def _encoded(durability: Durability, stored_end: int) -> bytes:
    wire = pb.Durability(
        replicas=durability.replicas,
        zones=durability.zones,
        synced_replicas=durability.synced_replicas,
        synced_zones=durability.synced_zones,
        stored_end=stored_end,
    )
    return pb.AppendResponse(durability=wire).SerializeToString()


class QueuedAppend:
    """An append. It gets one outcome or error, unless its client leaves first."""

    resolution: Resolution | None = None
    state = State.RESOLVE
    queue: JournalQueue | None = None
    caller = ""
    """The caller whose quota its content uses; empty if there is none."""
    outcome: AppendOutcome | Exception | None = None
    sum = b""
    """The SHA-1 of streamed content."""
    total_chunks = delayed_chunks = 0
    """The messages of its content, and those that the journal's maximum rate has delayed."""
    is_plain = False
    """True if the request is known to be plain (`coranto_broker.append.decision.is_plain`)."""
    is_pulse = has_left = False
    span: TraceSpan | None = None
    """The span of the append, if its caller is traced."""
    inbox: Inbox | None = None
    """The source of content that is not buffered."""
    _waiter: asyncio.Future[None] | None = None

    def __init__(
        self,
        request: pb.AppendRequest,
        claims: Claims = UNRESTRICTED,
        content: Bytes | None = None,
        begun: float = 0.0,
        on_settled: Callable[[QueuedAppend], None] | None = None,
    ) -> None:
        """`request` is the validated first message, and `claims` are its sender's.

        `content` is None while it is not received, and if it will be streamed. `begun` is monotonic time. `on_settled`
        is called when the append is settled, and must not raise; without it, await `settled`.
        """
        self.request = request
        self.claims = claims
        self.content = content
        if content:
            self.total_chunks = 1
        self.begun = begun
        self.on_settled = on_settled

    def transition(self, event: AppendEvent) -> None:
        """Move to the state that follows an event."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise RuntimeError(f"append state machine: {event.name} must not occur in state {self.state.name}")
        self.state = following

    def committed(
        self, fragment: Fragment, place: AppendRange, durability: Durability, stored_end: int = 0
    ) -> AppendOutcome:
        """Return the outcome of a commit as part of `fragment`."""
        (begin, end, registers), content, chunks = place, self.content, self.total_chunks
        digest = self.sum if content is None else hashlib.sha1(content, usedforsecurity=False).digest()
        result = self.resolved, _OK, registers, fragment, begin, end, digest, chunks, self.delayed_chunks
        return AppendOutcome(*result, durability, stored_end)

    def refused(self, refusal: Refuse) -> AppendOutcome:
        """Return the outcome of a refusal."""
        return AppendOutcome(self.resolved, refusal.status, refusal.registers, reason=refusal.reason)

    @property
    def resolved(self) -> Resolution:
        """The resolution. Only RESOLVE has none."""
        assert self.resolution is not None
        return self.resolution

    def settle(self, outcome: AppendOutcome | Exception) -> None:
        """Set the outcome, an error unless the state is terminal. Further calls have no effect. Does not raise."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.state not in TERMINAL:
            self.state = State.ERROR
        if self.on_settled is not None:
            self.on_settled(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def settled(self) -> AppendOutcome:
        """Wait for the outcome. Raises the append's error. For one caller."""
        if self.outcome is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def leave(self) -> None:
        """Drop the append, because its client has left. No effect once it is proposed or settled."""
        self.has_left = True
        if self.queue is not None and self.outcome is None:
            self.queue.discard(self)
