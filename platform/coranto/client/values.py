"""The values that clients take and return."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from coranto.errors import InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.specs.durability import Durability
from coranto.wire import protocol_pb2 as pb


@dataclass(frozen=True, slots=True)
class AppendResult:
    """A committed append: bytes [begin, end) of the journal, their SHA-1, and the registers after it.

    The sum of an empty append is all zeros.
    """

    journal: str
    begin: int
    end: int
    sum: bytes
    registers: pb.LabelSet
    header: pb.Header
    may_repeat: bool = False
    """True if the outcome of an earlier attempt is unknown: the journal may have the content twice, or get it later."""
    durability: Durability | None = None
    """The durability of the append when it was acknowledged. None from Gazette's brokers."""
    stored_end: int = field(default=0, repr=False, compare=False)
    """The end of the content that a fragment store has without a gap; 0 unless the append requested its durability."""
    _client: DurabilityClient | None = field(default=None, repr=False, compare=False)

    async def durable(
        self, *, replicas: int = 0, zones: int = 0, synced: bool = False, retry_timeout: float | None = None
    ) -> Durability:
        """Wait until the append has this durability (see `JournalClient.durable`). Cancelling ends only the wait."""
        return await self._durability_client.durable(
            self, replicas=replicas, zones=zones, synced=synced, retry_timeout=retry_timeout
        )

    async def stored(self, *, retry_timeout: float | None = None) -> None:
        """Wait until a fragment store has the append (see `JournalClient.stored`). Cancelling ends only the wait."""
        await self._durability_client.stored(self, retry_timeout=retry_timeout)

    @property
    def _durability_client(self) -> DurabilityClient:
        if self._client is None:
            raise InvalidInput("this result has no client; call JournalClient.durable or JournalClient.stored with it")
        return self._client


class DurabilityClient(Protocol):
    """The part of `JournalClient` that reports the later durability of an append."""

    async def durable(
        self, appended: AppendResult, *, replicas: int, zones: int, synced: bool, retry_timeout: float | None
    ) -> Durability: ...

    async def stored(self, appended: AppendResult, *, retry_timeout: float | None) -> None: ...


@dataclass(frozen=True, slots=True)
class JournalInfo:
    """A listed journal: its spec, the etcd revisions that created and last changed it, and its Route."""

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

    @property
    def is_asleep(self) -> bool:
        """True if no broker serves the journal because it is fully suspended."""
        return self.spec.suspend.level == pb.JournalSpec.Suspend.FULL

    @property
    def primary(self) -> int:
        """The primary's index in the members of the route; -1 if there is no primary."""
        return self.route.primary if 0 <= self.route.primary < len(self.route.members) else -1


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
    """Content of a journal from `offset` on. `write_head` is the last known write head, perhaps stale.

    `journal_id` is the id of the journal, to be stored with an offset. It is empty from brokers that do not send it.
    """

    offset: int
    content: bytes
    write_head: int
    journal_id: str = field(default="", compare=False)

    @property
    def end(self) -> int:
        """The offset after the content."""
        return self.offset + len(self.content)


@dataclass(frozen=True, slots=True)
class FragmentInfo:
    """A listed fragment. `signed_url` is empty unless signing was requested and the fragment is persisted."""

    fragment: Fragment
    signed_url: str

    @property
    def persisted(self) -> bool:
        return self.fragment.mod_time != 0


class Suspend(enum.IntEnum):
    """The effect of an append on its journal's suspension. Only RESUME and NO_RESUME may have content."""

    RESUME = pb.AppendRequest.SUSPEND_RESUME
    """Wake the journal if it is suspended."""
    NO_RESUME = pb.AppendRequest.SUSPEND_NO_RESUME
    """Raise JournalSuspended if the journal is suspended."""
    IF_FLUSHED = pb.AppendRequest.SUSPEND_IF_FLUSHED
    """Suspend the journal if all its content has been stored for a flush interval. JournalSuspended confirms it."""
    NOW = pb.AppendRequest.SUSPEND_NOW
    """Suspend the journal, even if its content is recent. JournalSuspended confirms it."""
    KEEP = pb.AppendRequest.SUSPEND_KEEP
    """Leave a partial suspension as it is."""


@dataclass(frozen=True, slots=True)
class AppendConditions:
    """The conditions of an append, and its changes of the journal's registers and suspension.

    `offset` 0 accepts any head; `at_start` requires that the head is 0. Registers change only with at least one byte of
    content. An empty set of registers satisfies every check.
    """

    offset: int = 0
    check_registers: pb.LabelSelector | None = None
    union_registers: pb.LabelSet | None = None
    subtract_registers: pb.LabelSet | None = None
    suspend: Suspend = Suspend.RESUME
    at_start: bool = False
