"""Headers of requests: those for another process or another etcd are refused."""

from __future__ import annotations

import pytest

from coranto.coordination.etcd import EtcdHeader
from coranto.coordination.headers import check_header, process_id, unrouted_header
from coranto.coordination.layout import MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

ME, OTHER = MemberId("zone", "me"), MemberId("zone", "other")


def header(member: MemberId | None, cluster: int) -> pb.Header:
    return pb.Header(process_id=process_id(member) if member else None, etcd=pb.Header.Etcd(cluster_id=cluster))


@pytest.mark.parametrize("member", [ME, None], ids=["me", "anybody"])
def test_requests_for_this_process_or_for_any_process_are_accepted(member: MemberId | None) -> None:
    check_header(header(member, 7), 7, ME, "broker")


@pytest.mark.parametrize(
    ("member", "cluster", "field"), [(OTHER, 7, "header.process_id"), (ME, 8, "header.etcd.cluster_id")]
)
def test_requests_for_others_are_refused(member: MemberId, cluster: int, field: str) -> None:
    with pytest.raises(InvalidInput, match="broker") as refused:
        check_header(header(member, cluster), 7, ME, "broker")
    assert refused.value.field == field


def test_a_response_header_without_an_item_has_no_primary() -> None:
    found = unrouted_header(ME, EtcdHeader(7, 1, 5, 2))
    assert (found.route.primary, found.process_id, found.etcd.cluster_id) == (-1, process_id(ME), 7)
