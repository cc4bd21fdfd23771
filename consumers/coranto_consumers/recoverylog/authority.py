"""Who owns a log, as known outside of it: what keeps a stale author out when the log's registers are lost.

The fence of a log is a register of its journal. Registers live with the journal's brokers: when all of them are lost
at once (or the journal was suspended as a whole), they start empty, and empty registers satisfy every check. A stale
author would then be let in. So each new owner says in etcd that it is one *before* it injects its handoff, and an
author whose append was answered without its own fence believes in the append only after asking here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from coranto.errors import Fenced
from coranto_consumers.recoverylog.operations import Author


@dataclass(frozen=True, slots=True)
class Handoff:
    """The no-op by which an author took a log over: journal offsets [begin, end) of `log` hold it."""

    author: Author
    log: str
    seq_no: int
    checksum: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """The author that last claimed a log, and the last handoff that was read back from the log.

    Until the author's own was, that is an earlier one's.
    """

    author: Author
    handoff: Handoff | None = None


class Authority(Protocol):
    """Tells the latest owner of a log; survives the brokers of the log."""

    async def claim(self, author: Author) -> None:
        """`author` is about to take over. On return, `current` of any later caller tells it, or a later owner.

        Raises Fenced when the caller is not the one that may.
        """
        ...

    async def confirm(self, handoff: Handoff) -> None:
        """The claim's handoff is in the log. Raises Fenced when another has claimed the log since."""
        ...

    async def current(self) -> Ownership | None:
        """The latest claim, None when there was none. Linearizable."""
        ...


class MemoryAuthority:
    """An `Authority` within one process, for tests."""

    def __init__(self) -> None:
        self.ownership: Ownership | None = None

    async def claim(self, author: Author) -> None:
        self.ownership = Ownership(author, self.ownership.handoff if self.ownership is not None else None)

    async def confirm(self, handoff: Handoff) -> None:
        if self.ownership is None or self.ownership.author != handoff.author:
            raise taken_over(handoff.log, handoff.author, self.ownership)
        self.ownership = Ownership(handoff.author, handoff)

    async def current(self) -> Ownership | None:
        return self.ownership


def taken_over(log: str, author: Author, by: Ownership | None) -> Fenced:
    """What to raise for an author that is not the owner any more."""
    owner = f"author {by.author:#x}" if by is not None else "nobody"
    return Fenced(f"recovery log {log}: author {author:#x} is not its owner, {owner} is; stop this one")
