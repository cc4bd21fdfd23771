"""The state machine of recorded operations. Pure; recorders and players use the same one.

It takes operations in order, and only those that continue its history. Such an operation has the next `seq_no`, the
checksum over all operations before it and, while there are hints left, the author that the hints name. Any other
operation belongs to another history (of an author that lost the log, a repeated append, a torn write) and changes
nothing. `ApplyResult` tells these cases apart.

With hints, the machine steps through the segments that they name, and jumps from the end of one to the first operation
of the next. It tracks only the files that are alive at the end of the hints. A file that is created before that end and
not named by the hints was removed before it, perhaps between segments, so it is not tracked.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from coranto_consumers.recoverylog.hints import Hints, LiveFnode
from coranto_consumers.recoverylog.operations import (
    Create,
    Fnode,
    Link,
    RecordedOperation,
    SetProperty,
    Unlink,
    Write,
    crc32c,
)
from coranto_consumers.recoverylog.segments import LogSegment


class ApplyResult(enum.Enum):
    """The outcome of an operation. Only the first two are steps of the machine."""

    APPLIED = "applied"
    NOT_TRACKED = "the file is not tracked"
    """The operation is part of the history, but its file is unknown or not alive at the end of the hints."""
    NOT_HINTED_AUTHOR = "hints name another author"
    WRONG_SEQ_NO = "another sequence number is next"
    WRONG_CHECKSUM = "the checksum is of another history"
    NOT_HINTED_CREATE = "hints say that a file is created here"
    PATH_EXISTS = "the path exists"
    PROPERTY_EXISTS = "the path is a property's"
    NO_SUCH_LINK = "the file has no such path"

    @property
    def is_step(self) -> bool:
        """True if the machine advanced to the next operation."""
        return self in (ApplyResult.APPLIED, ApplyResult.NOT_TRACKED)


@dataclass(slots=True)
class _LiveFile:
    paths: set[str] = field(default_factory=set)
    segments: list[LogSegment] = field(default_factory=list)


class Fsm:
    """The state of a history. Not safe for use by several threads."""

    def __init__(self, hints: Hints) -> None:
        """Raises InvalidInput for hints that contradict themselves."""
        segments = hints.live_segments()
        self.next_seq_no = 1
        self.next_checksum = 0
        self.last_log = hints.log
        """The log of the last operation."""
        self.properties: dict[str, str] = {item.path: item.content for item in hints.properties}
        self._files: dict[Fnode, _LiveFile] = {}
        self._paths: dict[str, Fnode] = {}
        self._hinted_segments = deque(segments)
        self._hinted_fnodes = deque(live.fnode for live in hints.live_fnodes)
        if self._hinted_segments:
            self._seek()

    def _seek(self) -> None:
        self.next_seq_no = self._hinted_segments[0].first_seq_no
        self.next_checksum = self._hinted_segments[0].first_checksum

    # -- State --------------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> Mapping[str, Fnode]:
        """The files by their paths."""
        return self._paths

    def paths_of(self, fnode: Fnode) -> frozenset[str]:
        """Return the paths of a file; none when it is not alive."""
        live = self._files.get(fnode)
        return frozenset(live.paths) if live is not None else frozenset()

    @property
    def live_fnodes(self) -> list[Fnode]:
        """Files that have a path, in ascending order."""
        return sorted(self._files)

    @property
    def next_hinted(self) -> LogSegment | None:
        """The hinted segment that the machine is in or before. None when there are no hints (left)."""
        return self._hinted_segments[0] if self._hinted_segments else None

    @property
    def hinted_segments(self) -> tuple[LogSegment, ...]:
        """The hinted segments that are left."""
        return tuple(self._hinted_segments)

    @property
    def has_hints_left(self) -> bool:
        """True if a hinted segment or file was not found yet."""
        return bool(self._hinted_segments or self._hinted_fnodes)

    def hints(self, log: str) -> Hints:
        """Return hints that lead another machine to this state, to continue in `log`."""
        return Hints(
            log,
            tuple(LiveFnode(fnode, tuple(self._files[fnode].segments)) for fnode in self.live_fnodes),
            tuple(SetProperty(path, content) for path, content in sorted(self.properties.items())),
        )

    # -- Steps --------------------------------------------------------------------------------------------------------

    def apply(self, op: RecordedOperation, payload: bytes) -> ApplyResult:
        """Apply `op`, whose frame held `payload`. Nothing changes unless the result is a step."""
        hinted = self.next_hinted
        if hinted is not None and hinted.author != op.author:
            return ApplyResult.NOT_HINTED_AUTHOR
        if op.seq_no != self.next_seq_no:
            return ApplyResult.WRONG_SEQ_NO
        if op.checksum != self.next_checksum:
            return ApplyResult.WRONG_CHECKSUM
        result = self._apply_change(op)
        if not result.is_step:
            return result
        self.next_seq_no += 1
        self.next_checksum = crc32c(self.next_checksum, payload)
        self.last_log = op.log
        if hinted is not None and hinted.last_seq_no < self.next_seq_no:
            self._hinted_segments.popleft()
            if self._hinted_segments:
                self._seek()
        return result

    def _apply_change(self, op: RecordedOperation) -> ApplyResult:
        change = op.change
        if isinstance(change, Create):
            return self._create(change.path, op)
        if self._hinted_fnodes and self._hinted_fnodes[0] == op.seq_no:
            return ApplyResult.NOT_HINTED_CREATE
        match change:
            case Link(fnode, path):
                return self._link(fnode, path, op)
            case Unlink(fnode, path):
                return self._unlink(fnode, path, op)
            case Write(fnode):
                return self._touch(fnode, op)
            case SetProperty(path, content):
                if path in self._paths:
                    return ApplyResult.PATH_EXISTS
                if self._hinted_segments:
                    return ApplyResult.NOT_TRACKED  # Hints hold its last content.
                self.properties[path] = content
        return ApplyResult.APPLIED

    def _occupied(self, path: str) -> ApplyResult | None:
        if path in self._paths:
            return ApplyResult.PATH_EXISTS
        return ApplyResult.PROPERTY_EXISTS if path in self.properties else None

    def _create(self, path: str, op: RecordedOperation) -> ApplyResult:
        occupied = self._occupied(path)
        if occupied is not None:
            return occupied
        fnode = Fnode(op.seq_no)
        if self._hinted_segments:
            if not self._hinted_fnodes or self._hinted_fnodes[0] != fnode:
                return ApplyResult.NOT_TRACKED
            self._hinted_fnodes.popleft()
        self._files[fnode] = _LiveFile({path})
        self._paths[path] = fnode
        return self._touch(fnode, op)

    def _link(self, fnode: Fnode, path: str, op: RecordedOperation) -> ApplyResult:
        occupied = self._occupied(path)
        if occupied is not None:
            return occupied
        if fnode not in self._files:
            return ApplyResult.NOT_TRACKED
        self._files[fnode].paths.add(path)
        self._paths[path] = fnode
        return self._touch(fnode, op)

    def _unlink(self, fnode: Fnode, path: str, op: RecordedOperation) -> ApplyResult:
        live = self._files.get(fnode)
        if live is None:
            return ApplyResult.NOT_TRACKED
        if path not in live.paths:
            return ApplyResult.NO_SUCH_LINK
        live.paths.remove(path)
        del self._paths[path]
        self._touch(fnode, op)
        if not live.paths:
            del self._files[fnode]
        return ApplyResult.APPLIED

    def _touch(self, fnode: Fnode, op: RecordedOperation) -> ApplyResult:
        """Record that `op` refers to this file."""
        live = self._files.get(fnode)
        if live is None:
            return ApplyResult.NOT_TRACKED
        last = live.segments[-1] if live.segments else None
        if last is not None and last.author == op.author and last.log == op.log:
            # Every write runs this code, and `replace` takes several times as long.
            live.segments[-1] = LogSegment(
                last.author, last.first_seq_no, last.first_offset, last.first_checksum, op.seq_no, op.end, last.log
            )
        else:
            live.segments.append(
                LogSegment(op.author, op.seq_no, op.begin, op.checksum, op.seq_no, op.end, op.log),
            )
        return ApplyResult.APPLIED
