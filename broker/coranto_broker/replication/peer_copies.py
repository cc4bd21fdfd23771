"""Copies of a fragment that peers hold in local files."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Protocol

import grpc
import grpc.aio
import structlog

from coranto.coordination.layout import MemberId
from coranto.errors import CorantoError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.peers import Peers
from coranto_broker.spool.shared_file import SharedFile

PATIENCE_SECONDS = 30.0
"""The longest wait for the next part of a peer's answer."""
_log = structlog.get_logger(__name__)


class Routes(Protocol):
    """The part of the key space's `KeySpaceView` that tells who holds a journal."""

    def route_of(self, item: str) -> pb.Route: ...


class KeySpaceView(Protocol):
    """A mirrored key space."""

    @property
    def state(self) -> Routes: ...


class PeerCopies:
    """Fetches fragments from the other brokers of a journal's Route, which read only their local copies."""

    def __init__(self, keyspace: KeySpaceView, me: MemberId, peers: Peers) -> None:
        self._keyspace = keyspace
        self._me = me
        self._peers = peers

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        route = self._keyspace.state.route_of(fragment.journal)
        for member, endpoint in zip(route.members, route.endpoints, strict=True):
            name = f"{member.zone}#{member.suffix}"
            if MemberId(member.zone, member.suffix) == self._me:
                continue
            try:
                target.truncate(0)
                await self._read(fragment, endpoint, target)
            except (CorantoError, TimeoutError) as error:
                reason = str(error) or "it did not answer in time"
                _log.info("fragment.no_copy_at_peer", fragment=fragment.content_path, broker=name, reason=reason)
                continue
            return name
        return ""

    async def _read(self, fragment: Fragment, endpoint: str, target: SharedFile) -> None:
        """Write the verified content to `target`. Raises Unavailable if that broker does not have it."""
        stub = self._peers.stub_at(endpoint)
        request = pb.ReadRequest(
            journal=fragment.journal, offset=fragment.begin, end_offset=fragment.end, do_not_proxy=True
        )
        call = stub.Read(request, metadata=self._peers.metadata(Capability.READ, fragment.journal))
        digest, length, loop = hashlib.sha1(usedforsecurity=False), 0, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS) as patience:
                async for response in call:
                    patience.reschedule(loop.time() + PATIENCE_SECONDS)
                    if response.status != pb.OK:
                        raise Unavailable(f"it answered {pb.Status.Name(response.status)}")
                    content = response.content
                    if not content:
                        continue
                    if response.offset != fragment.begin + length or length + len(content) > fragment.length:
                        raise Unavailable(f"it sent content at {response.offset} instead")
                    digest.update(content)
                    target.write_at(length, content)
                    length += len(content)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"it answered {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        if length != fragment.length:
            raise Unavailable(f"it has {length} of {fragment.length} bytes in local files")
        if digest.digest() != fragment.sum:
            raise Unavailable(f"its copy has the SHA-1 {digest.hexdigest()}: it is damaged, too")
