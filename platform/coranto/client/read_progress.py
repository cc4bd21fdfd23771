"""The progress of a read over its responses. Pure.

A Read RPC answers with *metadata* (status, write head, the fragment that covers the resolved offset, perhaps its URL),
then with *content* of that fragment, and so on for the next fragment. A read that survives disconnects is a sequence of
such RPCs, each from the end of the delivered content. `ReadProgress` accepts the responses of all these RPCs, and
delivers content in order, without repetition, and never beyond `end_offset`.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from coranto.client.responses import check_well_formed
from coranto.client.values import Chunk
from coranto.errors import CorruptData, CorruptFragment, JournalRecreated, OffsetJump, status_error
from coranto.fragments.fragment import Fragment
from coranto.journal_ids import is_same, latest_id
from coranto.wire import protocol_pb2 as pb


class ReadStatus(enum.Enum):
    """A response that carries no content and no fragment."""

    AT_HEAD = "everything written so far was delivered"
    NOT_YET = "content below the write head is not available yet"
    NOTHING = "nothing new"


@dataclass(frozen=True, slots=True)
class Located:
    """The fragment with the next content, and its URL (empty while only brokers have it)."""

    fragment: Fragment
    url: str


class ReadProgress:
    """The state of one read of [offset, end_offset) of a journal; `end_offset` 0 means no bound.

    `journal_id` is the id of the journal that `offset` belongs to, if known.
    """

    def __init__(
        self, journal: str, offset: int, end_offset: int = 0, *, fail_on_jump: bool = False, journal_id: str = ""
    ) -> None:
        self.journal = journal
        self.offset = offset
        self.end_offset = end_offset
        self.journal_id = journal_id
        """The id of the journal; empty until a broker reports it."""
        self._is_bound = bool(journal_id)
        self.write_head = 0
        self._fail_on_jump = fail_on_jump
        self._first = True
        self._sum: _RunningSum | None = None

    @property
    def expected_id(self) -> str:
        """The id that the journal must have; empty while nothing was read."""
        return self.journal_id if self._is_bound or self.offset > 0 else ""

    @property
    def finished(self) -> bool:
        """True if everything below `end_offset` was delivered or is gone."""
        return 0 < self.end_offset <= self.offset

    def connected(self) -> None:
        """Begin a new RPC at `offset`."""
        self._first = True
        self._sum = None

    def accept(self, response: pb.ReadResponse) -> Chunk | Located | ReadStatus:
        """Accept the RPC's next response.

        Raises StatusError for a status other than OK and OFFSET_NOT_YET_AVAILABLE, CorruptData for a response that
        violates the protocol, JournalRecreated for a response of another journal of this name, CorruptFragment if the
        SHA-1 of content is not its fragment's, and OffsetJump if content is gone and `fail_on_jump` is set.
        """
        return self._content(response) if response.content else self._metadata(response)

    def deliver(self, content: bytes) -> Chunk:
        """Return content at the current offset as a chunk, and advance the offset."""
        chunk = Chunk(self.offset, content, self.write_head, self.journal_id)
        self.offset += len(content)
        return chunk

    def _content(self, response: pb.ReadResponse) -> Chunk:
        content = response.content
        if self._first or response.status or response.write_head or response.fragment_url:
            raise self._broken("a content message has metadata, or follows no metadata")
        if response.offset != self.offset:
            raise self._broken(f"it sent content of offset {response.offset} instead of {self.offset}")
        if self.end_offset and self.offset + len(content) > self.end_offset:
            raise self._broken(f"it sent content beyond the requested end offset {self.end_offset}")
        if self._sum is not None:
            self._sum.update(content)
        return self.deliver(content)

    def _metadata(self, response: pb.ReadResponse) -> Located | ReadStatus:
        if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
            raise status_error(response.status, self._subject, response.header)
        check_well_formed(response, self._subject)
        if self._first and not response.HasField("header"):
            raise self._broken("its first answer has no header")
        self._first = False
        if response.journal_id and response.journal_id != self.journal_id:
            if not is_same(self.expected_id, self.offset, response.journal_id):
                raise JournalRecreated(
                    self.journal, self.offset, self.expected_id, response.journal_id, response.write_head
                )
            self.journal_id = latest_id(self.journal_id, response.journal_id)
        self.write_head = response.write_head
        if response.status == pb.OFFSET_NOT_YET_AVAILABLE:
            return ReadStatus.NOT_YET if self.offset < self.write_head else ReadStatus.AT_HEAD
        return self._located(response) if response.HasField("fragment") else ReadStatus.NOTHING

    def _located(self, response: pb.ReadResponse) -> Located:
        fragment = Fragment.from_wire(response.fragment)
        if response.offset < self.offset:
            raise self._broken(f"it went back to offset {response.offset} from {self.offset}")
        if response.offset > self.offset:
            if self._fail_on_jump:
                raise OffsetJump(self.journal, self.offset, response.offset)
            self.offset = response.offset
        if self._sum is None or not self._sum.continues(fragment, self.offset):
            self._sum = _RunningSum(fragment) if fragment.begin == self.offset else None
        else:
            self._sum.fragment = fragment
        return Located(fragment, response.fragment_url)

    @property
    def _subject(self) -> str:
        return f"read of {self.journal} at {self.offset}"

    def _broken(self, problem: str) -> CorruptData:
        return CorruptData(f"{self._subject}: the broker violated the protocol: {problem}")


class _RunningSum:
    """The running SHA-1 of a fragment that is read in pieces, from its first byte on.

    A fragment that is still being written may appear several times, each time longer and with another sum.
    """

    def __init__(self, fragment: Fragment) -> None:
        self.fragment = fragment
        self._digest = hashlib.sha1(usedforsecurity=False)
        self._end = fragment.begin

    def continues(self, fragment: Fragment, offset: int) -> bool:
        return fragment.begin == self.fragment.begin and offset == self._end

    def update(self, content: bytes) -> None:
        self._digest.update(content)
        self._end += len(content)
        if self._end == self.fragment.end and self._digest.digest() != self.fragment.sum:
            raise CorruptFragment(
                f"journal {self.fragment.journal}: the content read of [{self.fragment.begin}, {self.fragment.end}) "
                f"has SHA-1 {self._digest.hexdigest()}, not {self.fragment.sum.hex()}"
            )
