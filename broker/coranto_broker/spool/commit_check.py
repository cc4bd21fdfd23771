"""Find the longest recorded commit of a fragment that matches its content. Pure functions over the files' bytes.

Each record has the SHA-1 of all content up to its end. The last record is checked first, in one pass over the content.
If it does not match, a second pass compares the sum at each record's end, and finds the longest commit that matches. If
several records end at the same offset, the last written one is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from coranto.fragments.fragment import Fragment
from coranto_broker.spool import commit_log
from coranto_broker.spool.commit_log import CommitRecord
from coranto_broker.spool.spool import Hash, new_sum

READ_BYTES = 1 << 20

Read = Callable[[int, int], bytes]
"""Reads from a position (the first argument) up to a number of bytes (the second argument)."""


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of examining a fragment's files. `record` is None if they have no usable content."""

    begin: int
    record: CommitRecord | None = None
    generation: int = 0
    """The generation of the log that holds the record."""
    log_end: int = 0
    """The target length of this log in bytes."""
    sum: Hash = field(default_factory=new_sum)
    """The running SHA-1 over the record's content."""
    claimed_end: int = 0
    """The end of the longest recorded commit, even if its content is missing."""
    promised: int = 0
    """The journal end of possibly acknowledged content, according to these logs."""
    problem: str = ""
    """A description of the fault in the files; empty if there is none."""
    torn: bool = False
    """True if there is content and a log, but the log has no complete record."""
    quarantined: bool = False
    """True if an earlier process found the content to be damaged, and set it aside."""

    @property
    def kept_end(self) -> int:
        """The journal's end according to the usable part of these files."""
        return self.record.committed.fragment.end if self.record is not None else self.begin

    def lost(self, promised: int) -> int | None:
        """Return the end of acknowledged content that is missing from these files; None if nothing is missing.

        `promised` is the highest `promised` of all logs in the folder.
        """
        end = min(self.claimed_end, promised)
        return end if self.problem and end > self.kept_end else None


def examine(
    journal: str,
    create_revision: int,
    begin: int,
    logs: Mapping[int, bytes],
    size: int,
    read: Read,
    *,
    is_quarantined: Callable[[Fragment], bool] = lambda fragment: False,
) -> Examined:
    """Examine the fragment at `begin`: its `logs` by generation, and its content of `size` bytes.

    `is_quarantined` returns True if content with this extent and SHA-1 was set aside as damaged while its log stayed.
    """
    records: list[tuple[int, int, int, CommitRecord]] = []  # Each after its sort key: end, generation, position.
    whole: dict[int, int] = {}  # The end of the last complete entry, by generation.
    promised = 0
    for generation, data in sorted(logs.items()):
        for found in commit_log.scan(data):
            whole[generation] = found.end
            promised = max(promised, found.promised)
            if isinstance(found, CommitRecord):
                records.append((found.committed.fragment.end, generation, found.position, found))
    if not records:
        if not (size and logs):
            return Examined(begin, promised=promised)
        problem = f"there are {size} bytes of content but no log with a whole record"
        return Examined(
            begin, claimed_end=begin + size, promised=max(promised, begin + size), problem=problem, torn=True
        )
    claimed_end = max(end for end, *_ in records)
    for *_, record in records:
        fragment = record.committed.fragment
        if (fragment.journal, fragment.begin, record.create_revision) != (journal, begin, create_revision):
            problem = (
                f"a log is of journal {fragment.journal} at {fragment.begin}, create revision "
                f"{record.create_revision}, which does not match its name"
            )
            claimed_end = max(begin + size, claimed_end)
            return Examined(begin, claimed_end=claimed_end, promised=max(promised, claimed_end), problem=problem)
    best = max(records)
    if is_quarantined(best[-1].committed.fragment):
        _, generation, _, record = best
        return Examined(
            begin, record, generation, whole[generation], new_sum(), claimed_end, promised, quarantined=True
        )
    running = _sum_of(read, best[0] - begin) if best[0] - begin <= size else None
    problem = ""
    if running is None or not _agrees(best[-1], running):
        problem = _describe(best[-1], size, running)
        best, running = _longest(records, begin, size, read)
    _, generation, _, record = best
    if running is None:
        return Examined(begin, claimed_end=claimed_end, promised=promised, problem=problem)
    # After a problem, the entries after the kept record describe content that is missing.
    log_end = record.end if problem else whole[generation]
    return Examined(begin, record, generation, log_end, running, claimed_end, promised, problem)


def _agrees(record: CommitRecord, running: Hash) -> bool:
    fragment = record.committed.fragment
    return not fragment.length or running.digest() == fragment.sum


def _describe(record: CommitRecord, size: int, running: Hash | None) -> str:
    fragment = record.committed.fragment
    if running is None:
        return f"there are {size} of {fragment.length} committed bytes"
    return f"content has SHA-1 {running.digest().hex()}, committed was {fragment.sum.hex()}"


def _sum_of(read: Read, length: int) -> Hash | None:
    """Return the sum of the first `length` bytes; None if the content is shorter."""
    running = new_sum()
    position = 0
    while position < length:
        data = read(position, min(READ_BYTES, length - position))
        if not data:
            return None
        running.update(data)
        position += len(data)
    return running


def _longest(
    records: list[tuple[int, int, int, CommitRecord]], begin: int, size: int, read: Read
) -> tuple[tuple[int, int, int, CommitRecord], Hash | None]:
    """Return the longest commit that matches the content, and its sum. The sum is None if no commit matches."""
    by_end: dict[int, list[tuple[int, int, int, CommitRecord]]] = defaultdict(list)
    for each in records:
        if each[0] - begin <= size:
            by_end[each[0]].append(each)
    running, position = new_sum(), 0
    found: tuple[tuple[int, int, int, CommitRecord], Hash | None] = (min(records), None)
    for end in sorted(by_end):
        while position < end - begin:
            data = read(position, min(READ_BYTES, end - begin - position))
            if not data:
                return found
            running.update(data)
            position += len(data)
        agreeing = [each for each in by_end[end] if _agrees(each[-1], running)]
        if agreeing:
            found = max(agreeing), running.copy()
    return found
