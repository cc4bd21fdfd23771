"""The owner of a recovery log, stored outside of the log. It keeps stale authors out when the log's registers are lost.

The fence of a log is a register of its journal. Registers live with the journal's brokers. When all of these brokers
are lost together (or the journal was suspended as a whole), the registers start empty, and empty registers satisfy
every check. A stale author could then append. To prevent this, each new owner claims the log in etcd *before* it
appends its handoff. An author whose append is answered without its own fence trusts the append only after it has
checked the owner here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coranto.errors import Fenced
from coranto_consumers.recoverylog.operations import Author


@dataclass(frozen=True, slots=True)
class Handoff:
    """The no-op of an author that took a log over. Journal offsets [begin, end) of `log` hold it."""

    author: Author
    log: str
    seq_no: int
    checksum: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """The author that last claimed a log, and the last handoff that was read back from the log.

    The handoff is an earlier author's until the author's own handoff has been read back.
    """

    author: Author
    handoff: Handoff | None = None


class Authority(Protocol):
    """Stores the latest owner of a log. It survives the loss of the log's brokers.

    A cancelled `claim` or `confirm` may or may not have been recorded.
    """

    async def claim(self, author: Author) -> None:
        """Claim the log for `author`, which is about to take it over.

        Later calls of `current`, by any caller, return this author or a later owner. Raises Fenced when the caller may
        not take the log over.
        """
        ...

    async def confirm(self, handoff: Handoff) -> None:
        """Record that the claim's handoff is in the log. Raises Fenced when another author claimed the log since."""
        ...

    async def current(self) -> Ownership | None:
        """Return the latest claim, or None when there was none. The read is linearizable."""
        ...


class MemoryAuthority:
    """An `Authority` within one process, for tests."""

    def __init__(self) -> None:
        self.ownership: Ownership | None = None

    async def claim(self, author: Author) -> None:
        self.ownership = Ownership(author, self.ownership.handoff if self.ownership is not None else None)

    async def confirm(self, handoff: Handoff) -> None:
        if self.ownership is None or self.ownership.author != handoff.author:
            raise not_owner_error(handoff.log, handoff.author, self.ownership)
        self.ownership = Ownership(handoff.author, handoff)

    async def current(self) -> Ownership | None:
        return self.ownership


def not_owner_error(log: str, author: Author, by: Ownership | None) -> Fenced:
    """Return the error to raise for an author that no longer owns the log."""
    owner = f"author {by.author:#x}" if by is not None else "no author"
    return Fenced(f"recovery log {log}: author {author:#x} is not its owner, {owner} is; stop this one")
