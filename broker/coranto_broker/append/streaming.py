"""STREAM_CONTENT: content that the client sends while its append owns the pipeline.

This is for content that is too large to be buffered: each message goes to all replicas immediately. A client that is
too slow loses its append (`coranto_broker.replication.flow_control`).
"""

from __future__ import annotations

from coranto.effects import Bytes
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.decision import TORN_LINE, Refuse, is_torn, judge_content
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.append.receiving import has_parameters
from coranto_broker.append.states import AppendEvent
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.pipeline import Pipeline, rolled_back
from coranto_broker.replication.resolver import Resolution
from coranto_broker.rpc.content import AppendMessage
from coranto_broker.spool.spool import Hash, new_sum

THROTTLE_QUANTUM_SECONDS = 0.05


class ContentStream:
    """The content of one append so far: the range [begin, end) after the committed content."""

    def __init__(self, fsm: AppendFsm) -> None:
        """`fsm` owns the pipeline, in STREAM_CONTENT."""
        assert fsm.held.pipeline is not None
        self.fsm = fsm
        fsm.is_streaming = True
        self.append: QueuedAppend = fsm.append
        self.pipeline: Pipeline = fsm.held.pipeline
        self.begin = self.end = self.pipeline.spool.end
        # In an empty fragment, the spool's sum of the fragment is also the append's sum.
        self._sum: Hash | None = new_sum() if self.pipeline.spool.fragment.length else None
        self._is_committing = self._is_torn = False

    async def receive(self, host: AppendHost, flow: FlowControl) -> Refuse | None:
        """Send the client's messages to all replicas. Return None at a commit, or the refusal. Raises other errors."""
        assert self.append.inbox is not None
        guard = self.append.inbox.guard()
        try:
            while (message := await guard.read()) is not None:
                if size := len(message.content):
                    await host.quotas.pace_append(self.append.caller, size)
                    await charge(host, self.append, flow, size)
                if (refusal := self.client_sent(message)) is not None:
                    return refusal
                if (error := self.pipeline.error) is not None:
                    raise rolled_back(error)
                await self.pipeline.drain()  # Slow replicas, the local one included, catch up.
            await self.pipeline.written()
            return self.client_ended()
        finally:
            guard.close()

    def client_sent(self, message: AppendMessage) -> Refuse | None:
        """Send a message of the client to all replicas, or refuse it. Raises InvalidInput."""
        content, refusal = message.content, None
        if self._is_committing:
            raise InvalidInput("expected the end of the stream after the empty message that commits")
        if has_parameters(message):
            words = "only the first message may hold more than content"
            raise InvalidInput(words, field="AppendRequest.content")
        if not content:
            self._is_committing = True
        elif self.fsm.decided is None:
            refusal = Refuse(pb.INDEX_HAS_GREATER_OFFSET, self.pipeline.spool.registers)
        else:
            refusal = self._judge(len(content))
            if refusal is None:
                self._write(content)
        self.append.on(AppendEvent.CLIENT_SENT)
        return refusal

    def client_ended(self) -> Refuse | None:
        """Handle the end of the client's stream. Raises InvalidInput without a commit."""
        if not self._is_committing:
            raise InvalidInput("unexpected EOF: an empty message commits, and none was sent")
        if self._is_torn:
            return Refuse(pb.NOT_ALLOWED, self.pipeline.spool.registers, TORN_LINE)
        return self._judge(0) if self.end == self.begin else None

    def sum_in(self, proposal: Fragment) -> bytes:
        """Return the SHA-1 of the content that `proposal` commits."""
        # The sum of an empty append is the SHA-1 of no bytes, unlike the sum of an empty fragment.
        return proposal.sum if self._sum is None and self.end > self.begin else (self._sum or new_sum()).digest()

    def _write(self, content: Bytes) -> None:
        """Send content to all replicas. The pipeline's `error` has failures."""
        self.pipeline.write(self.end - self.begin, content)
        if self._sum is not None:
            self.pipeline.spool.hash(self._sum, content)
        self.end += len(content)
        self._is_torn = is_torn(content, self.pipeline.whole_lines)

    def _judge(self, length: int) -> Refuse | None:
        spec, pipeline = self.append.resolved.spec, self.pipeline
        return judge_content(self.append.request, spec, length, pipeline.spool.registers, pipeline.refusal)


def start_flow(host: AppendHost, resolution: Resolution) -> FlowControl:
    """Start the flow control of an append, with its journal's maximum rate."""
    max_rate = resolution.spec.max_append_rate
    if host.max_append_rate:
        max_rate = min(max_rate or host.max_append_rate, host.max_append_rate)
    flow = resolution.require_replica.flow_control
    flow.start(0, max_rate, host.clock.monotonic())
    return flow


async def charge(host: AppendHost, append: QueuedAppend, flow: FlowControl, size: int) -> None:
    """Account for a chunk, and wait while the journal exceeds its rate."""
    invalidated = append.resolved.invalidated
    flow.tick(host.clock.monotonic())
    flow.chunk(size)
    while flow.throttled:
        await host.clock.sleep(min(flow.seconds_until_paid(), THROTTLE_QUANTUM_SECONDS))
        flow.tick(host.clock.monotonic())
        if invalidated is not None and invalidated.fired:
            flow.lift()
    append.total_chunks, append.delayed_chunks = flow.total_chunks, flow.delayed_chunks
