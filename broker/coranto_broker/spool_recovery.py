"""Taking up spools again after a restart.

For every fragment whose files lie in a journal's spool folder: the last whole record of its commit log says what had
committed. The content is hashed again and must agree; whatever lies behind it never committed and is cut off. The
newest fragment becomes the spool, with its registers. Older ones had completed but may not be in a store yet, so they
go back to the persister.

Files that contradict each other (which a killed process cannot cause, but power loss or a failing disk can) are never
served. They are set aside under `set-aside/`. If they were the newest, the journal's head is beyond anything that can
still be shown here: that offset is kept in `lost.json`, and until the spool has reached it appends are refused with
INDEX_HAS_GREATER_OFFSET. Either another replica brings the spool there, or an operator's append of nothing with that
explicit offset confirms the loss.

Whether others went on without what is found here is for `in_sync` to say. What they went on without is set aside, too.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

import structlog

from coranto.errors import CorruptSpool
from coranto.fragments import Fragment
from coranto_broker import commit_log
from coranto_broker.in_sync import UNSTAMPED, Stamp
from coranto_broker.shared_file import SharedFile
from coranto_broker.spool import Committed, Hash, Spool, empty_at, new_sum
from coranto_broker.spool_files import DurableSpool, Fsync, Sealed, SpoolFolder, SpoolObserver, Watermark

_NAME = re.compile(r"([0-9a-f]{16})\.(?:(content)|([0-9]+)\.commits)")
LOST_FILE = "lost.json"
_READ_BYTES = 1 << 20
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """Files of one fragment."""

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


def recover(folder: SpoolFolder) -> Recovered:
    """Read, verify and clean up a spool folder; an absent one is an empty spool.

    Reads all content, so it belongs in a thread. Nothing else may use the folder meanwhile.
    """
    verified: list[_Verified] = []
    lost_end = _read_lost_end(folder)
    readable = 0
    for found in _find(folder):
        try:
            fragment = _verify(folder, found)
        except CorruptSpool as error:
            claimed = _set_aside(folder, found)
            lost_end = max(lost_end, claimed)
            if found.has_content:
                readable = max(readable, found.begin)  # As of the watermark below.
            _log.error(
                "spool is corrupt and was set aside",
                journal=folder.journal,
                error=str(error),
                begin=found.begin,
                claimed_end=claimed,
                folder=str(folder.path / "set-aside"),
            )
            continue
        if fragment is not None:
            verified.append(fragment)
    # Content of a later fragment was taken only behind what everybody had.
    watermark = Watermark(max((each.fragment.begin for each in verified if each.fragment.length), default=0))
    stamp = verified[-1].stamp if verified else UNSTAMPED
    sealed = [_sealed(folder, each, watermark) for each in verified if each.fragment.length]
    if not verified:
        spool, log, generation = Spool(folder.journal), None, 0
    elif not lost_end or verified[-1].committed.fragment.end >= lost_end:
        newest = verified[-1]
        spool, log, generation = Spool.restored(newest.committed, newest.sum), newest.log, newest.generation
        if newest.committed.fragment.length:
            sealed.pop()
    else:
        # What came after is lost. The last good fragment is closed, as it would have been.
        spool, log, generation = _after(verified[-1]), None, 0
    if lost_end:
        if spool.end >= lost_end:
            lost_end = 0
            folder.disk.remove(folder.path / LOST_FILE)
        else:
            folder.disk.write_atomic(folder.path / LOST_FILE, json.dumps({"end": lost_end}).encode())
    for each in verified:
        if each.log is not log:
            each.log.seal()
            if not each.committed.fragment.length:
                each.log.discard()
                folder.content(each.committed.fragment.begin).discard()
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
                raise CorruptSpool(f"{content.path} was cut while it was read")
            sum.update(data)
            left -= len(data)
    content.seal()
    return replace(fragment, end=readable, sum=sum.digest())


def _after(last: _Verified) -> Spool:
    """An empty spool at the end of a fragment, with its registers."""
    fragment = empty_at(last.committed.fragment, last.committed.fragment.end, last.committed.fragment.codec)
    return Spool.restored(Committed(fragment, last.committed.registers), new_sum())


def _find(folder: SpoolFolder) -> list[_Found]:
    """Fragments that have files here, in offset order."""
    contents: set[int] = set()
    generations: dict[int, list[int]] = defaultdict(list)
    for name in folder.disk.list(folder.path):
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


def _verify(folder: SpoolFolder, found: _Found) -> _Verified | None:
    """A fragment's last commit, its content checked and cut to length. None (and no files) if there never was one."""
    content = folder.content(found.begin)
    records, log, generation = _last_records(folder, found)
    size = content.size() if found.has_content else 0
    if records is None or records.last is None:
        if size and found.generations:
            raise CorruptSpool(f"{content.path} has {size} bytes but no log with a whole record")
        # Its first record never got written, or it was dropped after being stored.
        content.discard()
        for each in found.generations:
            folder.log(found.begin, each).discard()
        return None
    committed = records.last
    fragment = committed.fragment
    if (fragment.journal, fragment.begin, records.create_revision) != (
        folder.journal,
        found.begin,
        folder.create_revision,
    ):
        raise CorruptSpool(
            f"{log.path} is of journal {fragment.journal} at {fragment.begin}, create revision "
            f"{records.create_revision}, which is not what its name says"
        )
    if size < fragment.length:
        raise CorruptSpool(f"{content.path} has {size} of {fragment.length} committed bytes")
    running_sum = new_sum()
    with content.borrow():
        position = 0
        while position < fragment.length:
            data = content.read_at(position, min(_READ_BYTES, fragment.length - position))
            if not data:
                raise CorruptSpool(f"{content.path} ends at {position} of {fragment.length} committed bytes")
            running_sum.update(data)
            position += len(data)
        if fragment.length and running_sum.digest() != fragment.sum:
            raise CorruptSpool(
                f"{content.path} has SHA-1 {running_sum.digest().hex()}, committed was {fragment.sum.hex()}"
            )
        if size > fragment.length:
            content.truncate(fragment.length)
    content.seal()
    log.truncate(records.valid_length)
    return _Verified(committed, log, generation, running_sum, records.stamp, records.readable)


def _last_records(folder: SpoolFolder, found: _Found) -> tuple[commit_log.LogContent | None, SharedFile, int]:
    """The newest generation with a whole record; older generations, and torn newer ones, are removed."""
    chosen: tuple[commit_log.LogContent | None, SharedFile, int] | None = None
    for generation in found.generations:
        log = folder.log(found.begin, generation)
        if chosen is None:
            records = commit_log.decode(folder.disk.read(log.path))
            if records.last is not None:
                chosen = records, log, generation
                continue
            if generation == found.generations[-1]:
                break
        log.discard()
    return chosen or (None, folder.log(found.begin, 0), 0)


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


def _set_aside(folder: SpoolFolder, found: _Found) -> int:
    """Move a fragment's files out of the way; returns the end that they claim."""
    claimed = found.begin
    aside = folder.path / "set-aside"
    for generation in found.generations:
        log = folder.log(found.begin, generation)
        last = commit_log.decode(folder.disk.read(log.path)).last
        if last is not None:
            claimed = max(claimed, last.fragment.end)
        folder.disk.rename(log.path, aside / log.path.name)
    if found.has_content:
        content = folder.content(found.begin)
        if claimed == found.begin:
            claimed += content.size()
        content.seal()
        folder.disk.rename(content.path, aside / content.path.name)
    return claimed


def _read_lost_end(folder: SpoolFolder) -> int:
    try:
        return int(json.loads(folder.disk.read(folder.path / LOST_FILE))["end"])
    except FileNotFoundError:
        return 0
