"""The RPC Append: streams a client's content through the append state machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import structlog

from coranto.errors import CorantoError, InvalidInput
from coranto.security.tokens import Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import fast_path
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.receiving import Inbox, MinRateGuard
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.handlers.append_answers import Answers
from coranto_broker.handlers.append_commit import commit_whole, count, pay, response_of, start_flow
from coranto_broker.handlers.errors import concerns
from coranto_broker.handlers.first_message import first_message
from coranto_broker.handlers.forwarding import forward
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.replication.pipeline import ReplicationFailed
from coranto_broker.replication.waiting_appends import Whole
from coranto_broker.rpc.content import ContentMessage
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.rpc.source import MessageSource, require_readable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

_log = structlog.get_logger(__name__)


async def serve(broker: Broker, context: MessageSource, claims: Claims) -> pb.AppendResponse:
    """Serve one append. Cancelling it (the client went away) rolls back content that has not been proposed."""
    return pb.AppendResponse.FromString(await serve_encoded(broker, context, claims, Answers()))


async def serve_encoded(broker: Broker, context: MessageSource, claims: Claims, answers: Answers) -> bytes:
    """Serve one append, and return the encoded response. Cancelling it rolls back content not yet proposed."""
    begun = broker.clock.monotonic()
    request = await first_message(context, broker.receive_budget.first_message_deadlines)
    if not isinstance(request, pb.AppendRequest):
        _refuse_first(request)
    candidate = fast_path.candidate(broker, request) if claims is UNRESTRICTED or claims.covers_all else None
    if candidate is None or candidate.after is None:
        if not is_acceptable(broker, request, request.journal, claims):
            header = broker.unrouted_header(broker.keyspace.state)
            return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header).SerializeToString()
        if not request.journal:
            _refuse_first(request)
    concerns(request.journal)
    inbox = broker.receive_budget.open(context)
    state = State.ACQUIRE_PIPELINE
    whole: Whole | None = None
    try:
        if candidate is not None:
            line = candidate.resolution.require_replica.line
            whole = await inbox.receive(request, line, broker.settings.min_append_rate, broker.clock)
            committed = fast_path.commit(broker, candidate, request, whole) if whole is not None else None
            if committed is not None:
                state = State.FINISHED
                count(broker, committed.length, begun)
                return answers.encode(committed)
        fsm = AppendFsm(broker, request, claims)
        try:
            if candidate is not None:
                fsm.whole = whole
            elif await fsm.run(State.ACQUIRE_PIPELINE):
                assert fsm.resolution is not None
                line = fsm.resolution.require_replica.line
                fsm.whole = await inbox.receive(request, line, broker.settings.min_append_rate, broker.clock)
            return (await _drive(broker, fsm, inbox, begun)).SerializeToString()
        finally:
            state = fsm.state
            fsm.release()
    except (ReplicationFailed, RolledBack):
        state = State.ERROR
        raise
    finally:
        inbox.close()
        broker.metrics.appends.count(state)


async def _drive(broker: Broker, fsm: AppendFsm, inbox: Inbox, begun: float) -> pb.AppendResponse:
    """Take an append through its remaining states."""
    if await fsm.run():
        await fsm.prepare_stream()
        if fsm.whole is not None:
            await commit_whole(broker, fsm, fsm.whole)
        else:
            await _stream(broker, fsm, inbox)
        await fsm.finish()
    if fsm.state is State.PROXY:
        return await forward(broker, fsm, inbox)
    return response_of(broker, fsm, begun)


def _refuse_first(message: object) -> NoReturn:
    """Raise InvalidInput that says what is wrong with the first message, or that none came."""
    require_readable(message)
    if isinstance(message, (ContentMessage, pb.AppendRequest)):
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    raise InvalidInput("the stream ended before its first message", field="AppendRequest")


async def _stream(broker: Broker, fsm: AppendFsm, inbox: Inbox) -> None:
    """Pass the client's messages to the state machine until it wants no more."""
    flow = start_flow(broker, fsm, broker.settings.min_append_rate)
    guard = MinRateGuard(flow, broker.clock, broker.receive_budget.deadlines)
    try:
        while True:
            message = await guard.read(inbox)
            if message is None:
                await fsm.written()
                fsm.client_ended()
                return
            if size := len(message.content):
                await pay(broker, fsm, flow, size)
            if not fsm.client_sent(message):
                return
            await fsm.drain()
            flow.forgive(broker.clock.monotonic())
    except CorantoError as error:
        fsm.client_failed(error)
    finally:
        guard.close()
