"""The audit of a journal: compare stored content with the brokers' fragment index, fragment by fragment.

It checks that every persisted fragment of the index has its object, and that the object's content has the length and
the SHA-1 that its name states. It checks that these fragments and the live spool cover the journal without a gap, from
its first retained offset to its write head (invariants I5 and I12). It reads the live spool through the broker, byte
for byte, and compares its SHA-1 with the one in the broker's index.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from coranto.client import JournalClient
from coranto.errors import CorruptFragment, FragmentNotFound, StoreError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry


class AuditStatus(enum.Enum):
    """The result of an audit for one fragment."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FragmentAudit:
    """The audit of one fragment. `problem` is empty when the fragment is sound."""

    fragment: Fragment
    status: AuditStatus
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JournalAudit:
    """The audit of one journal. Offsets are bytes; `head` is exclusive."""

    journal: str
    first: int
    head: int
    fragments: tuple[FragmentAudit, ...]
    gaps: tuple[tuple[int, int], ...]

    @property
    def persisted_head(self) -> int:
        """The largest end of a persisted fragment, or the first offset when there is none."""
        return max((f.fragment.end for f in self.fragments if f.fragment.backing_store), default=self.first)

    @property
    def live_bytes(self) -> int:
        """The number of bytes that only brokers hold so far."""
        return max(0, self.head - self.persisted_head)

    @property
    def problems(self) -> list[str]:
        """One sentence for each problem; empty when the journal is sound."""
        found = [f"{self.journal}: no content covers [{begin}, {end})" for begin, end in self.gaps]
        found += [f"{a.fragment.content_path}: {a.problem}" for a in self.fragments if a.status is not AuditStatus.OK]
        return found

    @property
    def sound(self) -> bool:
        return not self.problems


def uncovered(spans: list[tuple[int, int]], first: int, head: int) -> list[tuple[int, int]]:
    """Return the parts of [first, head) that no span [begin, end) covers, in order."""
    gaps = []
    reached = first
    for begin, end in sorted(spans):
        if begin > reached:
            gaps.append((reached, min(begin, head)))
        reached = max(reached, end)
        if reached >= head:
            break
    if reached < head:
        gaps.append((reached, head))
    return gaps


async def audit_journal(
    client: JournalClient,
    stores: StoreRegistry,
    journal: str,
    *,
    first_offset: int | None = None,
    broken: set[str] | None = None,
) -> JournalAudit:
    """Audit one journal.

    Coverage must begin at `first_offset`. By default it begins at the oldest fragment: retention may have removed
    earlier content. `broken` has the URLs of stores to skip. A store that fails is added, because each attempt may be
    slow. Raises the client's errors when the brokers do not answer. Cancelling leaves nothing behind.
    """
    broken = set() if broken is None else broken
    head = await client.head(journal)
    listed = [info.fragment for info in await client.fragments(journal)]
    audits = []
    for fragment in listed:
        if fragment.backing_store:
            audits.append(await _audit_persisted(stores, fragment, broken))
        else:
            audits.append(await _audit_live(client, fragment))
    begin = min((f.begin for f in listed), default=head) if first_offset is None else first_offset
    sound = [(a.fragment.begin, a.fragment.end) for a in audits if a.status is AuditStatus.OK]
    # The head was read before the index was listed, so the index must cover everything below the head.
    gaps = uncovered(sound, begin, head)
    return JournalAudit(journal, begin, head, tuple(audits), tuple(gaps))


async def _audit_persisted(stores: StoreRegistry, fragment: Fragment, broken: set[str]) -> FragmentAudit:
    if fragment.backing_store in broken:
        return FragmentAudit(fragment, AuditStatus.UNREADABLE, f"{fragment.backing_store} could not be used just now")
    try:
        store = stores.get(fragment.backing_store)
        if not await store.exists(fragment):
            return FragmentAudit(
                fragment, AuditStatus.MISSING, f"the index names it, but {fragment.backing_store} does not have it"
            )
        await store.read(fragment)
    except CorruptFragment as error:
        return FragmentAudit(fragment, AuditStatus.CORRUPT, str(error))
    except FragmentNotFound as error:
        return FragmentAudit(fragment, AuditStatus.MISSING, str(error))  # It was removed just now.
    except StoreError as error:
        broken.add(fragment.backing_store)
        return FragmentAudit(fragment, AuditStatus.UNREADABLE, str(error))
    return FragmentAudit(fragment, AuditStatus.OK)


async def _audit_live(client: JournalClient, fragment: Fragment) -> FragmentAudit:
    sha = hashlib.sha1(usedforsecurity=False)
    reached = fragment.begin
    try:
        if fragment.length:
            async for chunk in client.read(fragment.journal, fragment.begin, end_offset=fragment.end, direct=False):
                sha.update(chunk.content)
                reached = chunk.offset + len(chunk.content)
    except CorruptFragment as error:
        return FragmentAudit(fragment, AuditStatus.CORRUPT, str(error))
    except Unavailable as error:
        # The brokers listed this fragment, so they answer, but cannot serve its content.
        return FragmentAudit(fragment, AuditStatus.UNREADABLE, f"the brokers do not serve it: {error}")
    if reached != fragment.end:
        return FragmentAudit(fragment, AuditStatus.UNREADABLE, f"the brokers served it only up to offset {reached}")
    if fragment.length and sha.digest() != fragment.sum:
        return FragmentAudit(
            fragment, AuditStatus.CORRUPT, f"its SHA-1 is {sha.hexdigest()}, the index says {fragment.sum.hex()}"
        )
    return FragmentAudit(fragment, AuditStatus.OK)
