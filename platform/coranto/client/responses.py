"""Checks of what brokers answer: an answer is either good, or an error that says what is wrong with it."""

from __future__ import annotations

from coranto.errors import CorruptData, RegisterMismatch, StatusError, status_error
from coranto.wire import protocol_pb2 as pb


def check_status(status: pb.Status.ValueType, subject: str, header: pb.Header | None = None, detail: str = "") -> None:
    """Raise the StatusError of a status other than OK."""
    if status != pb.OK:
        raise status_error(status, subject, header, detail)


def check_header(header: pb.Header, subject: str) -> None:
    """Raise CorruptData unless a header names a consistent route and etcd revision."""
    route, etcd = header.route, header.etcd
    members = len(route.members)
    if not -1 <= route.primary < max(members, 1) or (members == 0 and route.primary != -1):
        raise CorruptData(f"{subject}: the answer's route has primary {route.primary} among {members} members")
    if len(route.endpoints) not in (0, members):
        raise CorruptData(f"{subject}: the answer's route has {len(route.endpoints)} endpoints for {members} members")
    if not etcd.cluster_id or not etcd.member_id or not etcd.raft_term or etcd.revision <= 0:
        raise CorruptData(f"{subject}: the answer's header names no etcd revision")


def append_failure(response: pb.AppendResponse, subject: str) -> StatusError | None:
    """The error of an append that was refused, or None. A refused append was not applied."""
    if response.status == pb.OK:
        return None
    if response.status == pb.REGISTER_MISMATCH:
        return RegisterMismatch(subject, response.header, response.store_health_error, response.registers)
    return status_error(response.status, subject, response.header, response.store_health_error)
