"""The RPC Append: one append to a journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from coranto.errors import InvalidInput
from coranto.security.tokens import Claims
from coranto.tracing import carried_by
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.entry import recognize, resolve
from coranto_broker.append.forwarding import forward
from coranto_broker.append.queue import queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.receiving import Inbox
from coranto_broker.append.response_encoder import AppendResponseEncoder
from coranto_broker.append.states import State
from coranto_broker.handlers.errors import concerns
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.rpc.content import ContentMessage
from coranto_broker.rpc.first_message import first_message
from coranto_broker.rpc.source import MessageSource, require_readable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker


async def serve(broker: Broker, context: MessageSource, claims: Claims, caller: str) -> pb.AppendResponse:
    """Serve one append. Cancelling it rolls back content that was not proposed."""
    return pb.AppendResponse.FromString(await serve_encoded(broker, context, claims, AppendResponseEncoder(), caller))


async def serve_encoded(
    broker: Broker, context: MessageSource, claims: Claims, encoder: AppendResponseEncoder, caller: str = ""
) -> bytes:
    """Serve one append, and return the encoded response. Cancelling it rolls back content that was not proposed.

    `caller` has been admitted by its quota; it is empty without one.
    """
    begun = broker.clock.monotonic()
    request = await first_message(context, broker.receive_budget.first_message_deadlines)
    if not isinstance(request, pb.AppendRequest):
        _refuse_first(request)
    append = QueuedAppend(request, claims, begun=begun)
    if not recognize(broker.appends, append):
        if not is_acceptable(broker, request, request.journal, claims):
            return broker.journal_not_found()
        if not request.journal:
            _refuse_first(request)
    concerns(request.journal)
    append.caller = caller
    if broker.tracer is not None:
        append.span = broker.tracer.continued("append", request.journal, carried_by(context))
    host, inbox = broker.appends, Inbox(context, broker.receive_budget, broker.settings.min_append_rate, broker.clock)
    append.inbox = inbox
    try:
        if append.resolution is None and (refusal := await resolve(host, append)) is not None:
            append.settle(refusal)
        else:
            queue = queue_of(append.resolved.require_replica)
            append.content = await inbox.receive(request, queue.arrivals)
            if append.content is not None:
                broker.quotas.count(caller, len(append.content.content))
            queue.enqueue(append)
        outcome = append.outcome if isinstance(append.outcome, AppendOutcome) else await append.settled()
        if outcome.state is State.PROXY:
            return await forward(broker, append, inbox.read)
        return encoder.encode(outcome)
    except BaseException as error:
        if append.span is not None:
            append.span.end(error)
        raise
    finally:
        append.leave()
        inbox.close()
        host.ended(append)


def _refuse_first(message: object) -> NoReturn:
    """Raise InvalidInput for an invalid or missing first message."""
    require_readable(message)
    if isinstance(message, (ContentMessage, pb.AppendRequest)):
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    raise InvalidInput("the stream ended before its first message", field="AppendRequest")
