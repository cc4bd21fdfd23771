"""The RPC List: journal specs from the mirrored key space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto import labels
from coranto.security.tokens import Claims
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.errors import Context

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.resolver import JournalState

JOURNALS_PER_RESPONSE = 25


async def serve(broker: Broker, request: pb.ListRequest, context: Context, claims: Claims) -> None:
    """Send a snapshot of the matching journals and, with `watch`, another one after each change of their specs.

    With `watch`, an empty message ends each snapshot. Changes that affect only routes are not sent.
    """
    selector = labels.rewrite_legacy_prefix(request.selector)
    validate(pb.ListRequest(selector=selector, watch=request.watch))
    state = broker.keyspace.state
    if request.HasField("watch_resume"):
        state = await broker.keyspace.wait_for_revision(request.watch_resume.etcd.revision + 1)
    last: list[tuple[str, int]] | None = None
    while True:
        journals = _matching(state, selector, claims)
        now = [(journal.spec.name, journal.mod_revision) for journal in journals]
        if now != last:
            last = now
            await _send_snapshot(broker, state, journals, context)
            if not request.watch:
                return
            await context.write(pb.ListResponse())
        state = await broker.keyspace.wait_for_change(state)


async def _send_snapshot(
    broker: Broker, state: JournalState, journals: list[pb.ListResponse.Journal], context: Context
) -> None:
    head = pb.ListResponse(status=pb.OK, header=broker.unrouted_header(state))
    for begin in range(0, len(journals), JOURNALS_PER_RESPONSE) or (0,):
        response = head if begin == 0 else pb.ListResponse()
        response.journals.extend(journals[begin : begin + JOURNALS_PER_RESPONSE])
        await context.write(response)


def _matching(state: JournalState, selector: pb.LabelSelector, claims: Claims) -> list[pb.ListResponse.Journal]:
    matches = labels.matcher(selector)
    return [
        pb.ListResponse.Journal(
            spec=item.spec,
            mod_revision=item.mod_revision,
            create_revision=item.create_revision,
            route=state.route_of(item.id),
        )
        for item in state.items
        if matches(labels.with_meta(item.id, item.spec.labels)) and claims.covers(item.id, item.spec.labels)
    ]
