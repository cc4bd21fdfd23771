"""Does what is stored agree with what the brokers say? An audit of one journal, fragment by fragment.

For every persisted fragment of the index: its object exists, decompresses to the length that its name states, and has
the SHA-1 that its name states. Together with the live spool they cover the journal without a gap, from its first
retained offset to its write head (invariants I5 and I12). The live spool is read through the broker, byte for byte, and
its SHA-1 is compared with what the broker's index says of it.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from coranto.client import JournalClient
from coranto.errors import CorruptFragment, StoreError, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry


class Verdict(enum.Enum):
    """What an audit found of one fragment."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class FragmentAudit:
    """One fragment, and what was found of it. `problem` is empty when it is sound."""

    fragment: Fragment
    verdict: Verdict
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JournalAudit:
    """What was found of one journal. Offsets are bytes; `head` is exclusive."""

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
        """Bytes that only brokers hold so far."""
        return max(0, self.head - self.persisted_head)

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong; empty when the journal is sound."""
        found = [f"{self.journal}: no content covers [{begin}, {end})" for begin, end in self.gaps]
        found += [f"{a.fragment.content_path}: {a.problem}" for a in self.fragments if a.verdict is not Verdict.OK]
        return found

    @property
    def sound(self) -> bool:
        return not self.problems


def uncovered(spans: list[tuple[int, int]], first: int, head: int) -> list[tuple[int, int]]:
    """The parts of [first, head) that no span [begin, end) covers, in order."""
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
    client: JournalClient, stores: StoreRegistry, journal: str, *, first_offset: int | None = None
) -> JournalAudit:
    """Audit one journal.

    `first_offset` is where coverage must begin; by default where the oldest fragment does, which accepts that
    retention removed what was before. Raises what the client raises when the brokers do not answer.
    """
    head = await client.head(journal)
    listed = [info.fragment for info in await client.fragments(journal)]
    audits = []
    for fragment in listed:
        if fragment.backing_store:
            audits.append(await _audit_persisted(stores, fragment))
        else:
            audits.append(await _audit_live(client, fragment))
    begin = min((f.begin for f in listed), default=head) if first_offset is None else first_offset
    sound = [(a.fragment.begin, a.fragment.end) for a in audits if a.verdict is Verdict.OK]
    # The head was read before the index was listed, so the index owes coverage of all below it.
    gaps = uncovered(sound, begin, head)
    return JournalAudit(journal, begin, head, tuple(audits), tuple(gaps))


async def _audit_persisted(stores: StoreRegistry, fragment: Fragment) -> FragmentAudit:
    try:
        store = stores.get(fragment.backing_store)
        if not await store.exists(fragment):
            return FragmentAudit(fragment, Verdict.MISSING, f"the index names it, {fragment.backing_store} lacks it")
        await store.read(fragment)
    except CorruptFragment as error:
        return FragmentAudit(fragment, Verdict.CORRUPT, str(error))
    except StoreError as error:
        return FragmentAudit(fragment, Verdict.UNREADABLE, str(error))
    return FragmentAudit(fragment, Verdict.OK)


async def _audit_live(client: JournalClient, fragment: Fragment) -> FragmentAudit:
    sha = hashlib.sha1(usedforsecurity=False)
    reached = fragment.begin
    try:
        if fragment.length:
            async for chunk in client.read(fragment.journal, fragment.begin, end_offset=fragment.end, direct=False):
                sha.update(chunk.content)
                reached = chunk.offset + len(chunk.content)
    except CorruptFragment as error:
        return FragmentAudit(fragment, Verdict.CORRUPT, str(error))
    except Unavailable as error:
        # The brokers answer, or nobody had told of the fragment. So they cannot serve this one.
        return FragmentAudit(fragment, Verdict.UNREADABLE, f"the brokers do not serve it: {error}")
    if reached != fragment.end:
        return FragmentAudit(fragment, Verdict.UNREADABLE, f"the brokers served it only up to offset {reached}")
    if fragment.length and sha.digest() != fragment.sum:
        return FragmentAudit(
            fragment, Verdict.CORRUPT, f"its SHA-1 is {sha.hexdigest()}, the index says {fragment.sum.hex()}"
        )
    return FragmentAudit(fragment, Verdict.OK)
