"""Taking up spools again after a restart.

Of every fragment whose files lie in a journal's spool folder, the longest commit counts that its content bears out: the
record with the greatest end whose SHA-1 is that of the content up to there (`commit_check`). After the death of a
process that is the last one. After a power loss it may be an earlier one, since content and log reach the disk in any
order. What lies behind it is cut off. The newest fragment becomes the spool, with its registers. Older ones had
completed but may not be in a store yet, so they go back to the persister.

The log also tells what may have been acknowledged. If that reaches beyond what can be shown here, content is lost:
power was, and the fsync policy does not wait for the disk, or a disk fails. Then the files are copied to `set-aside/`
as they are before anything is cut off, or moved there if nothing of them can be used. If they were the newest, the
journal's head is beyond what is here: that offset is kept in `lost.json`, and until the spool has reached it appends
are refused with INDEX_HAS_GREATER_OFFSET. Either another replica brings the spool there, or an operator's append of
nothing with that explicit offset confirms the loss. What was never promised is no loss, and the journal goes on.

What recovery changes is on the disk before it returns. So what it has cut off does not come back, and cannot be taken
for what is written there later. In a folder that has met a failed sync everything is written anew: what was read may
lie in memory alone, and to sync it again would prove nothing.

Whether others went on without what is found here is for `in_sync` to say. What they went on without is set aside, too.
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
    SpoolFolder,
    SpoolObserver,
    Watermark,
)
from coranto_broker.spool.in_sync import UNSTAMPED, Stamp
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import Committed, Hash, Spool, empty_at, new_sum

_NAME = re.compile(r"([0-9a-f]{16})\.(?:(content)|([0-9]+)\.commits)")
_PARTIAL = ".partial"
LOST_FILE = "lost.json"
_READ_BYTES = 1 << 20
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """Files of one fragment; generations from the newest on."""

    begin: int
    has_content: bool = False
    generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Verified:
    committed: Committed
    log: SharedFile
    generation: int
    sum: Hash
    stamp: Stamp
    readable: int = 0

    @property
    def fragment(self) -> Fragment:
        return self.committed.fragment


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a spool folder held. `lost_end` is the end (exclusive) of content that was set aside, 0 if none matters."""

    spool: Spool
    log: SharedFile | None = None
    generation: int = 0
    sealed: list[Sealed] = field(default_factory=list)
    lost_end: int = 0
    stamp: Stamp = UNSTAMPED
    watermark: Watermark = field(default_factory=Watermark)
    readable: int = 0
    """Up to where readers had been shown the journal."""
    shown: Fragment | None = None
    """What of the spool's fragment they had been shown."""

    def durable(self, folder: SpoolFolder, observer: SpoolObserver, fsync: Fsync) -> DurableSpool:
        """The spool, ready for use."""
        return DurableSpool(
            folder,
            observer,
            fsync,
            spool=self.spool,
            log=self.log,
            generation=self.generation,
            stamp=self.stamp,
            watermark=self.watermark,
            retired=[file for sealed in self.sealed for file in (sealed.content, sealed.log)],
        )

    def without_spool(self, folder: SpoolFolder) -> Recovered:
        """The same with an empty spool: others went on without the content of this one, which is set aside."""
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
        """The same when what was lost here is known to be in other hands."""
        folder.disk.remove(folder.path / LOST_FILE)
        return replace(self, lost_end=0)


def recover(folder: SpoolFolder, *, distrusted: bool = False) -> Recovered:
    """Read, verify and clean up a spool folder; an absent one is an empty spool.

    `distrusted` says that a sync failed there, as a mark in the folder does. Reads all content, so it belongs in a
    thread. Nothing else may use the folder meanwhile. Raises OSError when the folder cannot be read, or be changed for
    good; nothing is lost by that, and it may be tried again.
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
                readable = max(readable, found.begin)  # As of the watermark below.
            _log.error(
                "spool is corrupt and was set aside",
                journal=folder.journal,
                error=each.problem,
                begin=found.begin,
                kept_end=each.kept_end,
                claimed_end=lost,
                folder=str(folder.path / SET_ASIDE),
            )
        elif each.problem:
            _log.warning(
                "commits that were never acknowledged were lost with the power",
                journal=folder.journal,
                begin=found.begin,
                kept_end=each.kept_end,
                claimed_end=each.claimed_end,
                details=each.problem,
            )
    if end >= lost_end:
        lost_end = 0
    else:  # Before anything is touched that shows it.
        folder.disk.write_atomic(folder.path / LOST_FILE, json.dumps({"end": lost_end}).encode())
    verified: list[_Verified] = []
    try:
        for found, each in examined:
            if (kept := _settle(folder, found, each, promised, distrusted)) is not None:
                verified.append(kept)
    except BaseException:
        for kept in verified:
            kept.log.seal()
        raise
    # Content of a later fragment was taken only behind what everybody had.
    watermark = Watermark(max((each.fragment.begin for each in verified if each.fragment.length), default=0))
    stamp = verified[-1].stamp if verified else UNSTAMPED
    sealed = [_sealed(folder, each, watermark) for each in verified if each.fragment.length]
    if not verified:
        spool, log, generation = Spool(folder.journal), None, 0
    elif not lost_end:
        newest = verified[-1]
        spool, log, generation = Spool.restored(newest.committed, newest.sum), newest.log, newest.generation
        if newest.committed.fragment.length:
            sealed.pop()
    else:
        # What came after is lost. The last good fragment is closed, as it would have been.
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
        _sync(folder, log)  # Those may go once they are stored, and then no other log knows where the journal is.
        folder.disk.sync_folder(folder.path)
    if distrusted:
        folder.disk.sync_folder(folder.path)
        folder.disk.remove(folder.path / DISTRUSTED_FILE)
    readable = max(readable, verified[-1].readable if verified else 0)
    shown = _shown(folder, spool.fragment, readable)
    return Recovered(spool, log, generation, sealed, lost_end, stamp, watermark, readable, shown)


def _shown(folder: SpoolFolder, fragment: Fragment, readable: int) -> Fragment | None:
    """What there is of a verified fragment up to `readable`."""
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
    """An empty spool at the end of a fragment, with its registers."""
    fragment = empty_at(last.committed.fragment, last.committed.fragment.end, last.committed.fragment.codec)
    return Spool.restored(Committed(fragment, last.committed.registers), new_sum())


def _find(names: list[str]) -> list[_Found]:
    """Fragments that have files of these names, in offset order."""
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
        _Found(begin, begin in contents, tuple(sorted(generations[begin], reverse=True)))
        for begin in sorted(contents | generations.keys())
    ]


def _examine_all(folder: SpoolFolder, names: list[str]) -> list[tuple[_Found, Examined]]:
    """Look at all fragments' files. Changes nothing."""
    examined = []
    awaits_flush = False
    for found in _find(names):
        each = _examine(folder, found)
        if each.torn and awaits_flush:
            # Acknowledgements wait for the disk, and for the log before it has content. So none was given here.
            each = Examined(found.begin)
        awaits_flush = each.record.awaits_flush if each.record is not None else awaits_flush
        examined.append((found, each))
    return examined


def _give_up_empty(examined: list[tuple[_Found, Examined]], promised: int) -> int:
    """Give up empty fragments that come last, right behind one that lost content. Returns their offset, else 0.

    To go on there would leave a hole that readers wait at. With content behind it there is no other way.
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


def _examine(folder: SpoolFolder, found: _Found) -> Examined:
    """Look at a fragment's files. Changes nothing."""
    logs = {each: folder.disk.read(folder.log(found.begin, each).path) for each in found.generations}
    if not found.has_content:
        return examine(folder.journal, folder.create_revision, found.begin, logs, 0, lambda position, length: b"")
    content = folder.content(found.begin)
    try:
        with content.borrow():
            return examine(folder.journal, folder.create_revision, found.begin, logs, content.size(), content.read_at)
    finally:
        content.seal()


def _settle(
    folder: SpoolFolder, found: _Found, examined: Examined, promised: int, distrusted: bool
) -> _Verified | None:
    """Leave of a fragment's files what counts, on the disk for good. None when that is nothing."""
    content = folder.content(found.begin)
    if examined.record is None:
        if examined.lost(promised) is not None:
            _set_aside(folder, found)
        else:
            # Its first record never got written, or it was dropped after being stored.
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
            _write_anew(folder, found, examined, log)
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
    return _Verified(record.committed, log, generation, examined.sum, record.stamp, record.readable)


def _cut(folder: SpoolFolder, found: _Found, examined: Examined, log: SharedFile, *, superseding: bool) -> None:
    """Leave in content and log nothing but what counts. With `superseding` the log is to do without older ones."""
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
    """Force a file to the disk. If that fails nothing here is trusted until it is written anew."""
    try:
        file.sync()
    except OSError as error:
        folder.distrust(error)
        raise


def _write_anew(folder: SpoolFolder, found: _Found, examined: Examined, log: SharedFile) -> None:
    """Write what counts to new files."""
    assert examined.record is not None
    content, old = folder.content(found.begin), folder.log(found.begin, examined.generation)
    if found.has_content:
        with content.borrow():
            _copy(folder, content.read_at, examined.record.committed.fragment.length, content.path)
        content.seal()
    try:
        log.write_at(0, old.read_at(0, examined.log_end))
    finally:
        old.seal()
    log.sync()


def _sealed(folder: SpoolFolder, verified: _Verified, watermark: Watermark) -> Sealed:
    committed = verified.committed
    content = folder.content(committed.fragment.begin)
    content.seal()
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


def _files(folder: SpoolFolder, found: _Found) -> list[SharedFile]:
    logs = [folder.log(found.begin, each) for each in found.generations]
    return [*logs, folder.content(found.begin)] if found.has_content else logs


def _free_name(folder: SpoolFolder, found: _Found) -> Callable[[str], str]:
    """Gives names below `set-aside/` that nothing has that was set aside before."""
    taken = set(folder.disk.list(folder.path / SET_ASIDE))
    names = [file.path.name for file in _files(folder, found)]
    number = 1
    while any(_numbered(name, number) in taken for name in names):
        number += 1
    return lambda name: _numbered(name, number)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{number}.{name}"


def _set_aside(folder: SpoolFolder, found: _Found) -> None:
    """Move a fragment's files out of the way."""
    aside, name = folder.path / SET_ASIDE, _free_name(folder, found)
    for file in _files(folder, found):
        folder.disk.rename(file.path, aside / name(file.path.name))
        folder.disk.sync_folder(aside)
        folder.disk.sync_folder(folder.path)


def _copy_aside(folder: SpoolFolder, found: _Found) -> None:
    """Keep a copy of a fragment's files as they are."""
    aside, name = folder.path / SET_ASIDE, _free_name(folder, found)
    for file in _files(folder, found):
        with file.borrow():
            file.seal()
            _copy(folder, file.read_at, file.size(), aside / name(file.path.name))
    folder.disk.sync_folder(folder.path)


def _copy(folder: SpoolFolder, read: Callable[[int, int], bytes], length: int, target: Path) -> None:
    """Write the first `length` bytes to a file, which is there for good and whole once it has its name."""
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
