"""Inspect the content that a data directory keeps outside its journals: in `set-aside/` folders, and in `deleted/`.

A `set-aside/` folder has content that a broker did not accept as part of a journal. Either other brokers continued
without the content, which was never acknowledged, or it is from damaged files. Some content of damaged files was
acknowledged, and an operator must check whether the journal has it from another broker. `deleted/` has spools of
deleted journals.
Nothing here changes a file.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import AsyncIterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coranto.client.values import Chunk
from coranto.effects import Disk
from coranto.errors import ContentGone, InvalidInput, OffsetNotYetAvailable
from coranto_broker.recovery import deleted_spools
from coranto_broker.recovery.residence import spools_of
from coranto_broker.spool import commit_log
from coranto_broker.spool.commit_check import examine
from coranto_broker.spool.durable_spool import SET_ASIDE, folder_of

_NAME = re.compile(r"((?:[0-9a-z]+\.)?)([0-9a-f]{16})\.(?:(content)|([0-9]+)\.commits)")
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SetAsideFragment:
    """The files of one fragment that were set aside: the journal's bytes from `begin` on."""

    path: Path
    """The content file, which may be absent."""
    journal: str
    """The journal's name; empty if no log has it."""
    create_revision: int
    begin: int
    size: int
    """The size of the content in bytes."""
    committed_end: int
    """The journal's end offset of committed content according to the log."""
    sound_end: int
    """The journal's end offset of committed content whose SHA-1 matches."""
    deleted: bool = False
    """True if the journal was deleted, and this is its spool."""

    @property
    def end(self) -> int:
        """The journal offset (exclusive) where the content ends."""
        return self.begin + self.size


def find(data_dir: Path, disk: Disk) -> list[SetAsideFragment]:
    """Return all set-aside content below a broker's data directory, ordered by journal and offset."""
    spools, deleted = spools_of(data_dir), data_dir / deleted_spools.FOLDER
    folders = [folder / SET_ASIDE for name in disk.list(spools) for folder in _children(spools / name, disk)]
    for name in disk.list(deleted):
        for folder in _children(deleted / name, disk):
            folders += [folder, folder / SET_ASIDE]
    found = [kept for folder in folders for kept in _within(folder, disk)]
    return sorted(found, key=lambda kept: (kept.journal, kept.begin, kept.path))


def at(path: Path, disk: Disk) -> SetAsideFragment:
    """Return the fragment that was set aside with this content file. Raises InvalidInput if there is none."""
    for kept in _within(path.parent, disk):
        if kept.path == path:
            return kept
    raise InvalidInput(f"{path} is not set-aside content; `coranto broker set-aside list` shows the existing files")


def _children(folder: Path, disk: Disk) -> list[Path]:
    return [folder / name for name in disk.list(folder)]


def _within(folder: Path, disk: Disk) -> Iterator[SetAsideFragment]:
    spool = folder.parent if folder.name == SET_ASIDE else folder
    is_deleted = spool.parent.parent.name == deleted_spools.FOLDER
    if spool == folder and not is_deleted:
        return  # The spool of a journal that exists.
    digits = spool.name.partition(".")[0]
    create_revision = int(digits) if digits.isdecimal() else 0
    logs: dict[tuple[str, str], dict[int, bytes]] = defaultdict(dict)
    contents: set[tuple[str, str]] = set()
    for name in disk.list(folder):
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if match[3]:
            contents.add((match[1], match[2]))
        else:
            logs[match[1], match[2]][int(match[4])] = disk.read(folder / name)
    for prefix, begin in sorted(contents | logs.keys()):
        path = folder / f"{prefix}{begin}.content"
        kept = _kept(path, int(begin, 16), create_revision, logs[prefix, begin], disk)
        yield replace(kept, deleted=is_deleted)


def _kept(path: Path, begin: int, create_revision: int, logs: dict[int, bytes], disk: Disk) -> SetAsideFragment:
    journal = next((last.fragment.journal for data in logs.values() if (last := commit_log.decode(data).last)), "")
    if path.name not in disk.list(path.parent):
        examined = examine(journal, create_revision, begin, logs, 0, lambda position, length: b"")
        return SetAsideFragment(path, journal, create_revision, begin, 0, examined.claimed_end, begin)
    file = disk.open(path)
    try:
        size = file.size()
        examined = examine(journal, create_revision, begin, logs, size, file.read_at)
    finally:
        file.close()
    committed = examined.claimed_end if journal else begin
    return SetAsideFragment(path, journal, create_revision, begin, size, committed, examined.kept_end)


def read(kept: SetAsideFragment, disk: Disk, begin: int, end: int) -> Iterator[bytes]:
    """Iterate over the bytes of journal offsets [begin, end), in pieces. Raises InvalidInput if some are not here."""
    if not kept.begin <= begin <= end <= kept.end:
        raise InvalidInput(
            f"[{begin}, {end}) is not within [{kept.begin}, {kept.end}), the set-aside range; "
            "choose --begin and --end within it"
        )
    yield from _pieces(kept.path, disk, begin - kept.begin, end - kept.begin)


def pieces_with_sum(
    data_dir: Path, disk: Disk, journal: str, begin: int, end: int, digest: bytes
) -> Iterator[bytes] | None:
    """Return the content of a journal's offsets [begin, end) with the SHA-1 `digest`, in pieces, from local files.

    These are the spools of all current, former and deleted journals of the name, and their set-aside files. Returns
    None if no files have the content. Raises OSError if the disk fails.
    """
    for root in (spools_of(data_dir), data_dir / deleted_spools.FOLDER):
        for spool in _children(folder_of(root, journal, 0).parent, disk):
            for folder in (spool / SET_ASIDE, spool):
                for chain in _covering(folder, disk, begin, end):
                    found = hashlib.sha1(usedforsecurity=False)
                    for piece in _of_chain(chain, disk):
                        found.update(piece)
                    if found.digest() == digest:
                        return _of_chain(chain, disk)
    return None


_Part = tuple[Path, int, int]
"""A file, and the positions [begin, end) of its bytes."""


def _covering(folder: Path, disk: Disk, begin: int, end: int) -> Iterator[list[_Part]]:
    """Yield the ways to read offsets [begin, end) from a folder: from one file that has them all, or from several."""
    files: list[tuple[int, int, Path]] = []
    for name in disk.list(folder):
        match = _NAME.fullmatch(name)
        if match is not None and match[3] and (first := int(match[2], 16)) < end:
            file = disk.open(folder / name)
            try:
                files.append((first, first + file.size(), folder / name))
            finally:
                file.close()
    whole = [each for each in files if each[0] <= begin and end <= each[1]]
    for first, _, path in whole:
        yield [(path, begin - first, end - first)]
    chain: list[_Part] = []
    reached = begin
    while not whole and reached < end:
        first, last, path = max(
            (each for each in files if each[0] <= reached), key=lambda each: each[1], default=(0, 0, folder)
        )
        if last <= reached:
            return
        chain.append((path, reached - first, min(last, end) - first))
        reached = last
    if chain:
        yield chain


def _of_chain(chain: list[_Part], disk: Disk) -> Iterator[bytes]:
    for path, position, stop in chain:
        yield from _pieces(path, disk, position, stop)


def _pieces(path: Path, disk: Disk, position: int, stop: int) -> Iterator[bytes]:
    """Yield a file's bytes [position, stop), or fewer if it ends before."""
    file = disk.open(path)
    try:
        while position < stop and (data := file.read_at(position, min(_READ_BYTES, stop - position))):
            yield data
            position += len(data)
    finally:
        file.close()


class ComparedSpan(NamedTuple):
    """Offsets [begin, end) of a journal. `found` describes its content there: `same` bytes, `other`, or `nothing`."""

    begin: int
    end: int
    found: str


async def compare(kept: SetAsideFragment, disk: Disk, chunks: AsyncIterable[Chunk]) -> list[ComparedSpan]:
    """Compare content that was set aside with `chunks`, the journal's content from `kept.begin` on."""
    spans: list[ComparedSpan] = []
    position = kept.begin

    def add(end: int, found: str) -> None:
        nonlocal position
        if end > position:
            if spans and spans[-1].found == found:
                spans[-1] = ComparedSpan(spans[-1].begin, end, found)
            else:
                spans.append(ComparedSpan(position, end, found))
            position = end

    with suppress(ContentGone, OffsetNotYetAvailable):  # There is a hole, or the journal ends.
        async for chunk in chunks:
            add(min(chunk.offset, kept.end), "nothing")
            end = min(chunk.end, kept.end)
            if position < end:
                theirs = chunk.content[position - chunk.offset : end - chunk.offset]
                ours = b"".join(read(kept, disk, position, end))
                add(position + _same(ours, theirs), "same")
                add(end, "other")
            if position >= kept.end:
                break
    add(kept.end, "nothing")
    return spans


def _same(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix in bytes."""
    if one == other:
        return len(one)
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
