"""Headers of requests and responses, shared by brokers and consumers."""

from __future__ import annotations

from coranto.coordination.etcd import EtcdHeader
from coranto.coordination.layout import MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb


def process_id(member: MemberId) -> pb.ProcessSpec.ID:
    """Return a member's id on the wire."""
    return pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix)


def check_header(header: pb.Header, cluster_id: int, member: MemberId, kind: str) -> None:
    """Check that a request is meant for the process `member` and its etcd cluster. `kind` names it in errors.

    Raises InvalidInput.
    """
    if header.etcd.cluster_id != cluster_id:
        raise InvalidInput(
            f"the request is from etcd cluster {header.etcd.cluster_id:#x}, "
            f"but this {kind} is of {cluster_id:#x}; give all processes one etcd",
            field="header.etcd.cluster_id",
        )
    wanted = header.process_id
    if (wanted.zone or wanted.suffix) and MemberId(wanted.zone, wanted.suffix) != member:
        raise InvalidInput(
            f"the request is meant for {kind} {wanted.zone}#{wanted.suffix}, but this is {member}; "
            "resolve the item again",
            field="header.process_id",
        )


def unrouted_header(member: MemberId, etcd: EtcdHeader) -> pb.Header:
    """Return the header of a response of `member` that is not about one item."""
    return pb.Header(process_id=process_id(member), route=pb.Route(primary=-1), etcd=etcd.to_wire())
