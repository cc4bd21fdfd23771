"""Recover spools after a restart.

For each fragment in a journal's spool folder, the longest commit that matches the content counts: the record with the
greatest end whose SHA-1 matches the content up to its end (`commit_check`). After a process was killed, this is the
last record. After a power loss it may be an earlier one, since content and log reach the disk in any order. Everything
after it is truncated. The newest fragment becomes the spool, with its registers. Older fragments had completed but may
not be in a store yet, so they are given to the persister again.

The log also records the possibly acknowledged end. If it is beyond the content here, content is lost. The reason is a
power loss under an fsync policy that does not wait for the disk, or a disk that fails. The files are then copied to
`set-aside/` before they are truncated, or moved there if they have no usable content. If they were the newest files,
the journal's head is beyond the content here. `lost.json` keeps that offset. Until the spool has reached it, appends
are refused with INDEX_HAS_GREATER_OFFSET. Either another replica brings the spool to that offset, or an operator
confirms the loss with an empty append at that explicit offset. Content that was never promised is not a loss, and the
journal continues.

All changes by recovery are on the disk before it returns. So truncated content does not reappear, and cannot be
mistaken for content that is written there later. In a folder where a sync has failed, everything is rewritten: the
content that was read may be in memory only, and another sync would prove nothing.

A completed fragment whose content an earlier process found to be damaged has only its log here. Its content is not
necessarily lost: the log has its extent, and the persister continues to look for the content in the store and at other
brokers. So the fragment is recovered without its content, and the journal continues at its end.

`in_sync` decides whether other brokers have continued without the content found here. Such content is set aside, too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from coranto.fragments.fragment import Fragment
from coranto_broker.spool.commit_check import Examined, examine
from coranto_broker.spool.durable_spool import (
    DISTRUSTED_FILE,
    FETCHED,
    SET_ASIDE,
    DurableSpool,
    Fsync,
    Sealed,
    SettledOffset,
    SpoolFolder,
    SpoolObserver,
    name_aside,
)
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import CommittedState, Hash, Spool, empty_at, new_sum

_NAME = re.compile(r"([0-9a-f]{16})\.(?:(content)|([0-9]+)\.commits)")
_PARTIAL = ".partial"
LOST_FILE = "lost.json"
_READ_BYTES = 1 << 20
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _FragmentFiles:
    """The files of one fragment. `generations` number its logs, newest first."""

    begin: int
    has_content: bool = False
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Verified:
    committed: CommittedState
    log: SharedFile
    generation: int
    sum: Hash
    stamp: Stamp
    readable: int = 0
    quarantined: bool = False

    @property
    def fragment(self) -> Fragment:
        return self.committed.fragment


@dataclass(frozen=True, slots=True)
class Recovered:
    """The content of a spool folder.

    `lost_end` is the end (exclusive) of acknowledged content that is missing here; 0 if none is missing.
    """

    spool: Spool
    log: SharedFile | None = None
    generation: int = 0
    sealed: list[Sealed] = field(default_factory=list)
    lost_end: int = 0
    stamp: Stamp = UNSTAMPED
    watermark: SettledOffset = field(default_factory=SettledOffset)
    readable: int = 0
    """The end of the content that was visible to readers."""
    shown: Fragment | None = None
    """The part of the spool's fragment that was visible to readers."""
    journal_id: str = ""
    """The journal's id, once the in-sync record has been read. Empty if the cluster is unknown."""

    def durable(self, folder: SpoolFolder, observer: SpoolObserver, fsync: Fsync) -> DurableSpool:
        """Return the spool, ready for use."""
        return DurableSpool(
            folder,
            observer,
            fsync,
            spool=self.spool,
            log=self.log,
            generation=self.generation,
            stamp=self.stamp,
            watermark=self.watermark,
            readable=self.readable,
            retired=[file for sealed in self.sealed for file in (sealed.content, sealed.log)],
        )

    def without_spool(self, folder: SpoolFolder) -> Recovered:
        """Set the spool's content aside, because other brokers continued without it. Return the rest."""
        fragment = self.spool.fragment
        if self.log is not None:
            content = folder.content(fragment.begin)
            if fragment.length:
                Sealed(fragment, 0.0, self.spool.registers, content, self.log).set_aside()
            else:
                self.log.discard()
                content.discard()
        return replace(self, spool=Spool(folder.journal), log=None, generation=0, stamp=UNSTAMPED, shown=None)

    def found_elsewhere(self, folder: SpoolFolder) -> Recovered:
        """Forget the loss, because other brokers or a store are known to have the lost content."""
        folder.disk.remove(folder.path / LOST_FILE)
        return replace(self, lost_end=0)


def recover(folder: SpoolFolder, *, distrusted: bool = False) -> Recovered:
    """Read, verify and clean up a spool folder. An absent folder is an empty spool.

    `distrusted`, or a mark in the folder: a sync failed there. The function reads all content, so call it in a thread.
    Nothing else may use the folder during the call. Raises OSError if the folder cannot be read or changed durably.
    Nothing is lost then, and the call may be repeated.
    """
    names = folder.disk.list(folder.path)
    distrusted = distrusted or DISTRUSTED_FILE in names
    for name in names:
        if name.endswith((_PARTIAL, FETCHED)):
            folder.disk.remove(folder.path / name)
    examined = _examine_all(folder, names)
    promised = max((each.promised for _, each in examined), default=0)
    lost_end = max(_read_lost_end(folder), _give_up_empty(examined, promised))
    end = max((each.record.committed.fragment.end for _, each in examined if each.record is not None), default=0)
    readable = 0
    for found, each in examined:
        if (lost := each.lost(promised)) is not None:
            lost_end = max(lost_end, lost)
            if found.has_content:
                readable = max(readable, found.begin)  # For the same reason as the watermark below.
            _log.error(
                "spool.corrupt",
                journal=folder.journal,
                error=each.problem,
                begin=found.begin,
                kept_end=each.kept_end,
                claimed_end=lost,
                folder=str(folder.path / SET_ASIDE),
            )
        elif each.problem:
            _log.warning(
                "spool.unacknowledged_commits_lost",
                journal=folder.journal,
                begin=found.begin,
                kept_end=each.kept_end,
                claimed_end=each.claimed_end,
                details=each.problem,
            )
    if end >= lost_end:
        lost_end = 0
    else:  # Write this before changing the files that show the loss.
        folder.disk.write_atomic(folder.path / LOST_FILE, json.dumps({"end": lost_end}).encode())
    verified: list[_Verified] = []
    try:
        for found, each in examined:
            if (kept := _keep_verified(folder, found, each, promised, distrusted)) is not None:
                verified.append(kept)
    except BaseException:
        for kept in verified:
            kept.log.seal()
        raise
    # A later fragment took content only once all replicas had the content before it.
    watermark = SettledOffset(max((each.fragment.begin for each in verified if each.fragment.length), default=0))
    stamp = verified[-1].stamp if verified else UNSTAMPED
    sealed = [_sealed(folder, each, watermark) for each in verified if each.fragment.length]
    if not verified:
        spool, log, generation = Spool(folder.journal), None, 0
    elif not lost_end and not verified[-1].quarantined:
        newest = verified[-1]
        spool, log, generation = Spool.restored(newest.committed, newest.sum), newest.log, newest.generation
        if newest.committed.fragment.length:
            sealed.pop()
    else:
        # Content after the last fragment is lost, or its own content is quarantined. Close it, as a roll would.
        spool, log, generation = _after(verified[-1]), None, 0
    if not lost_end and LOST_FILE in names:
        folder.disk.remove(folder.path / LOST_FILE)
    for kept in verified:
        if kept.log is not log:
            kept.log.seal()
            if not kept.fragment.length:
                kept.log.discard()
                folder.content(kept.fragment.begin).discard()
    if sealed and log is not None:
        _sync(folder, log)  # Once the sealed files are stored and removed, only this log has the journal's end.
        folder.disk.sync_folder(folder.path)
    if distrusted:
        folder.disk.sync_folder(folder.path)
        folder.disk.remove(folder.path / DISTRUSTED_FILE)
    readable = max(readable, verified[-1].readable if verified else 0)
    shown = _shown(folder, spool.fragment, readable)
    return Recovered(spool, log, generation, sealed, lost_end, stamp, watermark, readable, shown)


def _shown(folder: SpoolFolder, fragment: Fragment, readable: int) -> Fragment | None:
    """Return the part of a verified fragment up to `readable`; None if that is empty."""
    if readable <= fragment.begin or not fragment.length:
        return None
    if readable >= fragment.end:
        return fragment
    content, left, sum = folder.content(fragment.begin), readable - fragment.begin, new_sum()
    with content.borrow():
        while left:
            data = content.read_at(readable - fragment.begin - left, min(_READ_BYTES, left))
            if not data:
                raise OSError(f"{content.path} was cut while it was read")
            sum.update(data)
            left -= len(data)
    content.seal()
    return replace(fragment, end=readable, sum=sum.digest())


def _after(last: _Verified) -> Spool:
    """Return an empty spool at the end of a fragment, with its registers."""
    fragment = empty_at(last.committed.fragment, last.committed.fragment.end, last.committed.fragment.codec)
    return Spool.restored(CommittedState(fragment, last.committed.registers), new_sum())


def _find(names: list[str]) -> list[_FragmentFiles]:
    """Return the fragments that these file names belong to, in offset order."""
    contents: set[int] = set()
    generations: dict[int, list[int]] = defaultdict(list)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        begin = int(match[1], 16)
        if match[2]:
            contents.add(begin)
        else:
            generations[begin].append(int(match[3]))
    return [
        _FragmentFiles(begin, begin in contents, tuple(sorted(generations[begin], reverse=True)))
        for begin in sorted(contents | generations.keys())
    ]


def _examine_all(folder: SpoolFolder, names: list[str]) -> list[tuple[_FragmentFiles, Examined]]:
    """Examine the files of all fragments. Changes nothing."""
    examined = []
    awaits_flush = False
    fragments = _find(names)
    for found in fragments:
        each = _examine(folder, found, completed=found is not fragments[-1])
        if each.torn and awaits_flush:
            # Acknowledgements wait for the disk, and the log reaches the disk before any content. So this content was
            # not acknowledged.
            each = Examined(found.begin)
        awaits_flush = each.record.awaits_flush if each.record is not None else awaits_flush
        examined.append((found, each))
    return examined


def _give_up_empty(examined: list[tuple[_FragmentFiles, Examined]], promised: int) -> int:
    """Drop empty last fragments that follow a fragment with lost content. Return their offset, or 0 if there are none.

    Continuing there would leave a hole that blocks readers. A hole with content after it cannot be avoided.
    """
    kept = len(examined)
    while kept and examined[kept - 1][1].kept_end == examined[kept - 1][0].begin and not examined[kept - 1][1].problem:
        kept -= 1
    if not kept or kept == len(examined) or examined[kept - 1][1].lost(promised) is None:
        return 0
    for index in range(kept, len(examined)):
        found, _ = examined[index]
        examined[index] = found, Examined(found.begin)
    return examined[-1][0].begin


def _examine(folder: SpoolFolder, found: _FragmentFiles, *, completed: bool) -> Examined:
    """Examine the files of one fragment. Changes nothing. `completed`: a later fragment has begun."""
    logs = {each: folder.disk.read(folder.log(found.begin, each).path) for each in found.generations}
    content = folder.content(found.begin)
    if not found.has_content:

        def is_quarantined(fragment: Fragment) -> bool:
            return completed and name_aside(fragment, content.path) in folder.disk.list(folder.path / SET_ASIDE)

        return examine(
            folder.journal,
            folder.create_revision,
            found.begin,
            logs,
            0,
            lambda position, length: b"",
            is_quarantined=is_quarantined,
        )
    try:
        with content.borrow():
            return examine(folder.journal, folder.create_revision, found.begin, logs, content.size(), content.read_at)
    finally:
        content.seal()


def _keep_verified(
    folder: SpoolFolder, found: _FragmentFiles, examined: Examined, promised: int, distrusted: bool
) -> _Verified | None:
    """Reduce a fragment's files to the verified part, durably. Return None if nothing remains."""
    content = folder.content(found.begin)
    if examined.record is None:
        if examined.lost(promised) is not None:
            _set_aside(folder, found)
        else:
            # The fragment's first record was never written, or the fragment was stored and then dropped.
            content.discard()
            for each in found.generations:
                folder.log(found.begin, each).discard()
            folder.disk.sync_folder(folder.path)
        return None
    if examined.lost(promised) is not None:
        _copy_aside(folder, found)
    generation = max(found.generations) + 1 if distrusted else examined.generation
    log = folder.log(found.begin, generation)
    older = [folder.log(found.begin, each) for each in found.generations if each != generation]
    try:
        if distrusted:
            _rewrite(folder, found, examined, log)
        else:
            _cut(folder, found, examined, log, superseding=bool(older))
        if older:
            folder.disk.sync_folder(folder.path)
            for file in older:
                file.discard()
            folder.disk.sync_folder(folder.path)
    except BaseException:
        log.seal()
        raise
    finally:
        content.seal()
    record = examined.record
    quarantined = examined.quarantined
    return _Verified(record.committed, log, generation, examined.sum, record.stamp, record.readable, quarantined)


def _cut(folder: SpoolFolder, found: _FragmentFiles, examined: Examined, log: SharedFile, *, superseding: bool) -> None:
    """Truncate content and log to the verified part. `superseding`: this log replaces older ones, so it is synced."""
    assert examined.record is not None
    content, length = folder.content(found.begin), examined.record.committed.fragment.length
    cut = log.size() > examined.log_end
    log.truncate(examined.log_end)
    if found.has_content:
        with content.borrow():
            content.seal()
            if content.size() > length or superseding:
                content.truncate(length)
                _sync(folder, content)
    if cut or superseding:
        _sync(folder, log)


def _sync(folder: SpoolFolder, file: SharedFile) -> None:
    """Force a file to the disk. If that fails, the folder is distrusted until everything is rewritten."""
    try:
        file.sync()
    except OSError as error:
        folder.distrust(error)
        raise


def _rewrite(folder: SpoolFolder, found: _FragmentFiles, examined: Examined, log: SharedFile) -> None:
    """Write the verified part to new files.

    Each file gets its name once it is complete. Otherwise, after a kill, a truncated log would replace the older log,
    which has more records.
    """
    assert examined.record is not None
    content, old = folder.content(found.begin), folder.log(found.begin, examined.generation)
    if found.has_content:
        with content.borrow():
            _copy(folder, content.read_at, examined.record.committed.fragment.length, content.path)
        content.seal()
    try:
        _copy(folder, old.read_at, examined.log_end, log.path)
    finally:
        old.seal()


def _sealed(folder: SpoolFolder, verified: _Verified, watermark: SettledOffset) -> Sealed:
    committed = verified.committed
    content = folder.content(committed.fragment.begin)
    content.seal()
    if verified.quarantined:
        content.stay_quarantined()
    return Sealed(
        committed.fragment,
        committed.first_append_time,
        committed.registers,
        content,
        verified.log,
        folder.create_revision,
        verified.stamp,
        watermark,
    )


def _files(folder: SpoolFolder, found: _FragmentFiles) -> list[SharedFile]:
    logs = [folder.log(found.begin, each) for each in found.generations]
    return [*logs, folder.content(found.begin)] if found.has_content else logs


def _free_name(folder: SpoolFolder, found: _FragmentFiles) -> Callable[[str], str]:
    """Return a function that maps file names to names that are still free in `set-aside/`."""
    taken = set(folder.disk.list(folder.path / SET_ASIDE))
    names = [file.path.name for file in _files(folder, found)]
    number = 1
    while any(_numbered(name, number) in taken for name in names):
        number += 1
    return lambda name: _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{number}.{name}"


def _set_aside(folder: SpoolFolder, found: _FragmentFiles) -> None:
    """Move a fragment's files to `set-aside/`."""
    aside, name = folder.path / SET_ASIDE, _free_name(folder, found)
    for file in _files(folder, found):
        folder.disk.rename(file.path, aside / name(file.path.name))
        folder.disk.sync_folder(aside)
        folder.disk.sync_folder(folder.path)


def _copy_aside(folder: SpoolFolder, found: _FragmentFiles) -> None:
    """Copy a fragment's files, as they are, to `set-aside/`."""
    aside, name = folder.path / SET_ASIDE, _free_name(folder, found)
    for file in _files(folder, found):
        with file.borrow():
            file.seal()
            _copy(folder, file.read_at, file.size(), aside / name(file.path.name))
    folder.disk.sync_folder(folder.path)


def _copy(folder: SpoolFolder, read: Callable[[int, int], bytes], length: int, target: Path) -> None:
    """Write the first `length` bytes to a file. The file is complete and durable once it has its name."""
    partial = target.with_name(target.name + _PARTIAL)
    file = folder.disk.open(partial)
    try:
        file.truncate(0)
        for position in range(0, length, _READ_BYTES):
            file.write(read(position, min(_READ_BYTES, length - position)))
        file.sync()
    finally:
        file.close()
    folder.disk.rename(partial, target)
    folder.disk.sync_folder(target.parent)


def _read_lost_end(folder: SpoolFolder) -> int:
    try:
        return int(json.loads(folder.disk.read(folder.path / LOST_FILE))["end"])
    except FileNotFoundError:
        return 0
