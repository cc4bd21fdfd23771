"""Copies of content in the local files of the other brokers of a journal's Route.

Peers are asked by reads without proxying. So they return only content that is visible to readers, and only if they hold
the journal as of this broker's etcd revision. Content with a known SHA-1 may also come from files that they have set
aside: other replicas may have continued without the last part of such a file, but have the rest of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import structlog

from coranto.client.responses import check_well_formed
from coranto.coordination.etcd import EtcdHeader
from coranto.coordination.keyspace_state import Item, Member
from coranto.coordination.layout import MemberId
from coranto.errors import CorantoError, CorruptFragment, Unavailable
from coranto.fragments.forks import counts_in, folders_of
from coranto.fragments.fragment import Codec, Fragment
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.peers import Peers
from coranto_broker.spool.shared_file import SharedFile

ANSWER_TIMEOUT_SECONDS = 30.0
"""The maximum wait for the next part of a peer's answer."""
ASKING_SECONDS = 5.0
"""The maximum wait for a peer's answer about its fragment."""
_log = structlog.get_logger(__name__)


class Routes(Protocol):
    """The part of the key space's state with members, Routes and specs."""

    @property
    def header(self) -> EtcdHeader: ...

    @property
    def members(self) -> Sequence[Member[pb.BrokerSpec]]: ...

    def route_of(self, item: str) -> pb.Route: ...

    def item(self, name: str) -> Item[pb.JournalSpec] | None: ...


class KeySpaceView(Protocol):
    """A mirrored key space."""

    @property
    def state(self) -> Routes: ...


class _Peer(NamedTuple):
    """Another broker of a journal's Route, and the header of calls to it."""

    name: str
    endpoint: str
    header: pb.Header


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A peer's fragment with `offset`. As a source of `FragmentCache`, it reads the peer's local file.

    The fragment's `backing_store` is "" unless the peer reports that a store has it.
    """

    offset: int
    fragment: Fragment
    broker: str
    _peer: _Peer
    _copies: PeerCopies

    url = "copies of peers"
    """The same for all peers, since equal fragments have equal content."""

    @property
    def uncompressed(self) -> Fragment:
        """The fragment in the form of the peer's local file."""
        return replace(self.fragment, codec=Codec.NONE, backing_store="", mod_time=0, path_postfix="", file_bytes=None)

    async def read(self, fragment: Fragment) -> bytes:
        return b"".join([piece async for piece in self.stream(fragment)])

    async def stream(self, fragment: Fragment) -> AsyncIterator[bytes]:
        async with aclosing(self._copies.pieces(fragment, self._peer)) as pieces:
            async for piece in pieces:
                yield piece
        _log.warning("fragment.read_from_peer", fragment=fragment.content_path, broker=self.broker)


class PeerCopies:
    """Reads from the local files of the other brokers of a journal's Route."""

    def __init__(self, keyspace: KeySpaceView, me: MemberId, peers: Peers) -> None:
        self._keyspace = keyspace
        self._me = me
        self._peers = peers

    async def fetch(self, fragment: Fragment, target: SharedFile) -> str:
        for peer in self._others(fragment.journal):
            length = 0
            try:
                target.truncate(0)
                async with aclosing(self.pieces(fragment, peer)) as pieces:
                    async for piece in pieces:
                        target.write_at(length, piece)
                        length += len(piece)
            except CorantoError as error:
                _log.info(
                    "fragment.no_copy_at_peer", fragment=fragment.content_path, broker=peer.name, reason=str(error)
                )
                continue
            return peer.name
        return ""

    async def find(self, journal: str, offset: int, begin_mod_time: int) -> tuple[list[PeerCopy], bool]:
        """Ask all peers for their fragment with this offset, or with a later one if they have a gap there.

        Returns their copies, and True if all of them have answered.
        """
        asked = [self._ask(peer, journal, offset, begin_mod_time) for peer in self._others(journal)]
        answers = await asyncio.gather(*asked)
        return [each for each in answers if isinstance(each, PeerCopy)], False not in answers

    async def kept(self, request: pb.ReadRequest) -> AsyncGenerator[pb.ReadResponse]:
        """Yield the answers of the first other broker of the cluster that has the content with the request's sum.

        Yields nothing if none has it. Raises CorantoError if that broker fails after its first answer.
        """
        state, begun = self._keyspace.state, False
        for member in state.members:
            if begun or member.id == self._me:
                continue
            named = pb.ProcessSpec.ID(zone=member.id.zone, suffix=member.id.suffix)
            header = pb.Header(process_id=named, route=pb.Route(primary=-1), etcd=state.header.to_wire())
            peer = _Peer(f"{member.id.zone}#{member.id.suffix}", member.spec.process_spec.endpoint, header)
            asked = pb.ReadRequest()
            asked.CopyFrom(request)
            try:
                async with aclosing(self._answers(peer, asked, ANSWER_TIMEOUT_SECONDS)) as answers:
                    async for answer in answers:
                        if not begun and answer.fragment.sum != request.content_sum:
                            break
                        begun = True
                        yield answer
            except CorantoError as error:
                if begun:
                    raise
                _log.info("fragment.no_copy_at_peer", fragment=request.journal, broker=peer.name, reason=str(error))

    def _others(self, journal: str) -> list[_Peer]:
        state = self._keyspace.state
        route = state.route_of(journal)
        found = []
        for member, endpoint in zip(route.members, route.endpoints, strict=True):
            if MemberId(member.zone, member.suffix) != self._me:
                header = pb.Header(process_id=member, route=route, etcd=state.header.to_wire())
                found.append(_Peer(f"{member.zone}#{member.suffix}", endpoint, header))
        return found

    async def _ask(self, peer: _Peer, journal: str, offset: int, begin_mod_time: int) -> PeerCopy | bool:
        """Return the peer's fragment, True if it answered that it has none, or False if it failed."""
        request = pb.ReadRequest(journal=journal, offset=offset, begin_mod_time=begin_mod_time, metadata_only=True)
        try:
            async with aclosing(self._answers(peer, request, ASKING_SECONDS)) as answers:
                async for answer in answers:
                    if answer.status == pb.OFFSET_NOT_YET_AVAILABLE:
                        return True
                    fragment = Fragment.from_wire(answer.fragment)
                    at = answer.offset
                    if not self._has(journal, fragment) or at < offset or not fragment.begin <= at < fragment.end:
                        raise Unavailable(f"it reads {at} from {fragment.content_path}")
                    return PeerCopy(at, fragment, peer.name, peer, self)
            raise Unavailable("it answered nothing")
        except CorantoError as error:
            _log.info("journal.peer_not_asked", journal=journal, offset=offset, broker=peer.name, reason=str(error))
            return False

    def _has(self, journal: str, fragment: Fragment) -> bool:
        """Return True if a fragment belongs to a journal, or is a stored one that the journal shares as a fork."""
        if fragment.journal == journal:
            return True
        item = self._keyspace.state.item(journal)
        folders = folders_of(item.spec) if item is not None and fragment.backing_store else ()
        return counts_in(folders, fragment)

    async def pieces(self, fragment: Fragment, peer: _Peer) -> AsyncGenerator[bytes]:
        """Yield a fragment's content from the peer's local files.

        Raises Unavailable if the peer does not have it, and CorruptFragment at the end if the SHA-1 does not match.
        """
        request = pb.ReadRequest(journal=fragment.journal, offset=fragment.begin, end_offset=fragment.end)
        request.content_sum.CopyFrom(fragment.to_wire().sum)
        digest, length = hashlib.sha1(usedforsecurity=False), 0
        async with aclosing(self._answers(peer, request, ANSWER_TIMEOUT_SECONDS)) as answers:
            async for answer in answers:
                content = answer.content
                if not content:
                    continue
                if answer.offset != fragment.begin + length or length + len(content) > fragment.length:
                    raise Unavailable(f"it sent content at {answer.offset} instead")
                digest.update(content)
                length += len(content)
                yield content
        if length != fragment.length:
            raise Unavailable(f"it has {length} of {fragment.length} bytes in local files")
        if digest.digest() != fragment.sum:
            raise CorruptFragment(
                f"the copy of {fragment.content_path} at {peer.name} has the SHA-1 {digest.hexdigest()}: it is "
                "also damaged"
            )

    async def _answers(
        self, peer: _Peer, request: pb.ReadRequest, timeout_seconds: float
    ) -> AsyncGenerator[pb.ReadResponse]:
        """Yield the answers of a peer that reads local files. Raises CorantoError for a failure or a refusal."""
        request.header.CopyFrom(peer.header)
        request.do_not_proxy = True
        metadata = self._peers.metadata(Capability.READ, request.journal)
        call = self._peers.stub_at(peer.endpoint).Read(request, metadata=metadata)
        answers = aiter(call)
        try:
            while True:
                with self._peers.calling(peer.header):
                    try:
                        async with asyncio.timeout(timeout_seconds):
                            answer = await anext(answers)
                    except StopAsyncIteration:
                        return
                check_well_formed(answer, f"read of {request.journal} at {peer.name}")
                if answer.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
                    raise Unavailable(f"it answered {pb.Status.Name(answer.status)}")
                yield answer
        except TimeoutError:
            raise Unavailable(f"{peer.name} did not answer in time") from None
        finally:
            call.cancel()
