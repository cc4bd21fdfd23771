"""Copies of content that peers hold in local files."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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


@dataclass(slots=True)
class _Part:
    """The part [begin, end) of a fragment that is read from `at` on: writes it to `target`, and sums it."""

    begin: int
    end: int
    at: int
    target: SharedFile
    sum: Any = field(default_factory=lambda: hashlib.sha1(usedforsecurity=False))

    def take(self, content: bytes) -> None:
        """Take the next content of the fragment."""
        first, last = max(self.begin - self.at, 0), min(self.end - self.at, len(content))
        if first < last:
            self.sum.update(content[first:last])
            self.target.write_at(self.at + first - self.begin, content[first:last])
        self.at += len(content)


class PeerCopies:
    """Fetches content from the other brokers of a journal's Route, which read only their local copies."""

    def __init__(self, keyspace: KeySpaceView, me: MemberId, peers: Peers) -> None:
        self._keyspace = keyspace
        self._me = me
        self._peers = peers

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        for name, endpoint in self._others(fragment.journal):
            part = _Part(fragment.begin, fragment.end, fragment.begin, target)
            try:
                target.truncate(0)
                await self._read(fragment, endpoint, part.take)
            except (CorantoError, TimeoutError) as error:
                reason = str(error) or "it did not answer in time"
                _log.info("fragment.no_copy_at_peer", fragment=fragment.content_path, broker=name, reason=reason)
                continue
            return name
        return ""

    async def fetch_last(self, journal: str, begin: int, end: int, target: SharedFile) -> tuple[Fragment, str] | None:
        """Write the last content of [begin, end), as far as a peer has it in one fragment, to the empty file `target`.

        The peer's whole fragment is read and compared with its SHA-1. Returns what was written as a fragment of its
        own, and the broker that had it; None if no broker has the last byte. Raises OSError when writing fails.
        """
        for name, endpoint in self._others(journal):
            try:
                target.truncate(0)
                held = await self._held(journal, end - 1, endpoint)
                part = _Part(max(begin, held.begin), min(end, held.end), held.begin, target)
                await self._read(held, endpoint, part.take)
            except (CorantoError, TimeoutError) as error:
                reason = str(error) or "it did not answer in time"
                _log.info("journal.no_copy_at_peer", journal=journal, begin=begin, end=end, broker=name, reason=reason)
                continue
            return Fragment(journal, part.begin, part.end, part.sum.digest(), held.codec), name
        return None

    def _others(self, journal: str) -> Iterator[tuple[str, str]]:
        """Yield the names and endpoints of the other brokers of the journal's Route."""
        route = self._keyspace.state.route_of(journal)
        for member, endpoint in zip(route.members, route.endpoints, strict=True):
            if MemberId(member.zone, member.suffix) != self._me:
                yield f"{member.zone}#{member.suffix}", endpoint

    async def _held(self, journal: str, offset: int, endpoint: str) -> Fragment:
        """Return the fragment from which that broker reads `offset`. Raises Unavailable if it has none."""
        request = pb.ReadRequest(journal=journal, offset=offset, do_not_proxy=True, metadata_only=True)
        call = self._peers.stub_at(endpoint).Read(request, metadata=self._peers.metadata(Capability.READ, journal))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for response in call:
                    if response.status != pb.OK:
                        raise Unavailable(f"it answered {pb.Status.Name(response.status)}")
                    held = Fragment.from_wire(response.fragment)
                    if held.journal != journal or not held.begin <= offset < held.end:
                        raise Unavailable(f"it has {held.content_path} at offset {offset}")
                    return replace(held, path_postfix="", backing_store="", mod_time=0)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"it answered {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        raise Unavailable("it answered nothing")

    async def _read(self, fragment: Fragment, endpoint: str, take: Callable[[bytes], None]) -> None:
        """Pass the content to `take` in order. Raises Unavailable if that broker does not have it, or in the end if it
        is not the fragment's."""
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
                    take(content)
                    length += len(content)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"it answered {error.code().name}: {error.details()}") from error
        finally:
            call.cancel()
        if length != fragment.length:
            raise Unavailable(f"it has {length} of {fragment.length} bytes in local files")
        if digest.digest() != fragment.sum:
            raise Unavailable(f"its copy has the SHA-1 {digest.hexdigest()}: it is damaged, too")
