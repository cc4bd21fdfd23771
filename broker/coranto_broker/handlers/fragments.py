"""The RPC ListFragments: pages through the fragment index of a journal.

The index has the stores' content as of its last listing. Since then another broker may have stored fragments and
dropped its files. So a page with a gap is returned only after another listing of the stores. Otherwise an audit or a
recovery would report a loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.fragments.cover_set import CoverSet
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import may_read
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import IndexEntry
from coranto_broker.handlers.errors import set_logged_journal
from coranto_broker.handlers.refusals import is_acceptable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

DEFAULT_PAGE = 1000
LISTING_SECONDS = 15.0
"""The maximum wait for another listing, so that a store that does not respond cannot block the page."""


async def serve(broker: Broker, request: pb.FragmentsRequest, claims: Claims) -> pb.FragmentsResponse:
    """List fragments. Waits for the first listing of the stores. Raises StoreError if they cannot be listed."""
    if not is_acceptable(broker, request, request.journal, claims):
        header = broker.unrouted_header(broker.keyspace.state)
        return pb.FragmentsResponse(status=pb.JOURNAL_NOT_FOUND, header=header)
    set_logged_journal(request.journal)
    resolution = await broker.resolver.resolve(
        request.journal,
        may_proxy=not request.do_not_proxy,
        require_primary=False,
        proxy_header=request.header if request.HasField("header") else None,
        claims=claims,
    )
    response = pb.FragmentsResponse(status=resolution.status, header=resolution.header)
    if resolution.status != pb.OK:
        return response
    if not may_read(resolution.spec):
        response.status = pb.NOT_ALLOWED
        return response
    if not resolution.is_local:
        forwarded = pb.FragmentsRequest()
        forwarded.CopyFrom(request)
        forwarded.header.CopyFrom(resolution.header)
        metadata = broker.peers.metadata(Capability.READ, request.journal)
        with broker.peers.calling(resolution.header):
            stub = broker.peers.stub(resolution.header)
            answer: pb.FragmentsResponse = await stub.ListFragments(forwarded, metadata=metadata)
            return answer
    replica = resolution.require_replica
    await replica.wait_refreshed()
    index = replica.index
    page, response.next_page_token = select(index.entries, request)
    if index.has_gap(request.next_page_token, response.next_page_token):
        is_fresh = await index.wait_listed_again(LISTING_SECONDS)
        page, response.next_page_token = select(index.entries, request)
        response.gap_confirmed = is_fresh and index.has_gap(request.next_page_token, response.next_page_token)
    for entry in page:
        listed = response.fragments.add(spec=entry.fragment.to_wire())
        if request.HasField("signatureTTL") and entry.fragment.backing_store:
            store = broker.stores.get(entry.fragment.backing_store)
            seconds = request.signatureTTL.ToNanoseconds() / 1e9
            listed.signed_url = await store.sign_async(entry.fragment, seconds)
    return response


def select(entries: CoverSet[IndexEntry], request: pb.FragmentsRequest) -> tuple[list[IndexEntry], int]:
    """Return the entries of one page, and the token of the next page (an offset; 0 at the end).

    Times are inclusive. A fragment that is in no store has no time: it is listed unless the request has an end time.
    """
    limit = request.page_limit or DEFAULT_PAGE
    page: list[IndexEntry] = []
    for entry in entries:
        if entry.begin < request.next_page_token:
            continue
        if len(page) == limit:
            return page, entry.begin
        mod_time = entry.fragment.mod_time
        if mod_time and mod_time < request.begin_mod_time:
            continue
        if request.end_mod_time and (not mod_time or mod_time > request.end_mod_time):
            continue
        page.append(entry)
    return page, 0
