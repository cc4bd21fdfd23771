"""What clients hand out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb


@dataclass(frozen=True, slots=True)
class AppendResult:
    """A committed append: bytes [begin, end) of the journal, the SHA-1 of them, and the registers after it.

    The sum of no bytes is all zeros, as that of an empty fragment is.
    """

    journal: str
    begin: int
    end: int
    sum: bytes
    registers: pb.LabelSet
    header: pb.Header


@dataclass(frozen=True, slots=True)
class JournalInfo:
    """A journal as listed: its spec, the etcd revisions that created and last changed it, and where it is served."""

    spec: pb.JournalSpec
    mod_revision: int
    create_revision: int
    route: pb.Route

    @classmethod
    def of(cls, entry: pb.ListResponse.Journal) -> JournalInfo:
        return cls(entry.spec, entry.mod_revision, entry.create_revision, entry.route)

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True, slots=True)
class Listing:
    """A consistent snapshot of journals, ordered by name."""

    header: pb.Header
    journals: tuple[JournalInfo, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(journal.spec.name for journal in self.journals)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Content of a journal from `offset` on. `write_head` is the journal's end as last heard, maybe stale."""

    offset: int
    content: bytes
    write_head: int

    @property
    def end(self) -> int:
        """Offset just beyond the content."""
        return self.offset + len(self.content)


@dataclass(frozen=True, slots=True)
class FragmentInfo:
    """A fragment of the index. `signed_url` is empty unless signing was asked for and the fragment is persisted."""

    fragment: Fragment
    signed_url: str

    @property
    def persisted(self) -> bool:
        return self.fragment.mod_time != 0


class Suspend(enum.IntEnum):
    """What an append does about its journal's suspension. Only the first two may have content."""

    RESUME = pb.AppendRequest.SUSPEND_RESUME
    """Wake the journal if it is suspended."""
    NO_RESUME = pb.AppendRequest.SUSPEND_NO_RESUME
    """Fail with JournalSuspended if it is suspended."""
    IF_FLUSHED = pb.AppendRequest.SUSPEND_IF_FLUSHED
    """Suspend it if all content is in its store, for a flush interval by now. JournalSuspended says that it is."""
    NOW = pb.AppendRequest.SUSPEND_NOW
    """Suspend it however recent its content is. JournalSuspended says that it is."""
    KEEP = pb.AppendRequest.SUSPEND_KEEP
    """Leave a partial suspension as it is."""


@dataclass(frozen=True, slots=True)
class AppendConditions:
    """What must hold for an append, and what it does to the journal's registers and suspension.

    `offset` zero means the journal's head, whatever it is. Registers change only with at least one byte of content.
    An empty set of registers satisfies every check.
    """

    offset: int = 0
    check_registers: pb.LabelSelector | None = None
    union_registers: pb.LabelSet | None = None
    subtract_registers: pb.LabelSet | None = None
    suspend: Suspend = Suspend.RESUME
