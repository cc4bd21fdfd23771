"""Playback of a log: the state machine validates operations, and their changes are made to files.

It reads nothing itself: `Player` reads the log and feeds its content.
"""

from __future__ import annotations

import structlog

from coranto.errors import CorruptData
from coranto_consumers.recoverylog.authority import Handoff
from coranto_consumers.recoverylog.decoder import DecodedOperation, LogDecoder, SkippedContent, WrittenData
from coranto_consumers.recoverylog.fnode_files import FnodeFiles
from coranto_consumers.recoverylog.fsm import ApplyResult, Fsm
from coranto_consumers.recoverylog.operations import Author, Create, Fnode, RecordedOperation, Unlink, Write

_log = structlog.get_logger(__name__)


class Playback:
    """The state of one playback at a position of a log."""

    def __init__(self, fsm: Fsm, files: FnodeFiles) -> None:
        self.fsm = fsm
        self.log = ""
        self.handoff: Handoff | None = None
        """The first operation of the awaited author that is part of the history. None before."""
        self.recovered_bytes = 0
        self.expected: Handoff | None = None
        """A handoff that must be found at its offset when that offset is read."""
        self._files = files
        self._decoder = LogDecoder("", 0)
        self._author: Author | None = None
        self._write: tuple[Fnode, int] | None = None

    def seek(self, log: str, offset: int) -> None:
        """Continue at `offset` of `log`, where an operation begins."""
        self.log = log
        self._decoder = LogDecoder(log, offset)
        self._pass_expected(offset)

    def _pass_expected(self, offset: int) -> None:
        if self.expected is not None and self.expected.log == self.log and self.expected.begin < offset:
            self.expected = None  # Hints that were made after the handoff lead past it.

    def await_author(self, author: Author) -> None:
        """Stop after the first operation of `author` that is part of the history, and keep it as `handoff`."""
        self._author = author

    @property
    def position(self) -> int:
        """The offset of the log to read next."""
        return self._decoder.fed

    @property
    def wants_seek(self) -> bool:
        """True if the next hinted segment begins elsewhere, so that the content in between need not be read."""
        segment = self.fsm.next_hinted
        if segment is None or self._decoder.is_inside_wanted:
            return False
        return segment.log != self.log or segment.first_offset > self._decoder.position

    def skip_to(self, offset: int) -> None:
        """Continue at `offset`: the log has no content up to there. Raises CorruptData when that content is needed."""
        segment = self.fsm.next_hinted
        expected, at = self.position, f"{self.log} has nothing in [{self.position}, {offset})"
        if self._decoder.is_inside_wanted:
            raise CorruptData(f"{at}, in the middle of a write that must be played")
        if segment is None:
            raise CorruptData(
                f"{at}, and what followed the hints may have been there. Its content is lost or was pruned"
            )
        if segment.log == self.log and segment.last_offset and segment.last_offset <= offset:
            raise CorruptData(f"{at}, where the hinted {segment} was")
        _log.warning("recovery_log.gap", log=self.log, begin=expected, end=offset)
        self._decoder.restart(offset)
        self._pass_expected(offset)

    def at_boundary(self) -> None:
        """Mark the end of an append, where no operation can be incomplete.

        Drops an incomplete operation as garbage. Raises CorruptData when an accepted write is incomplete.
        """
        if self._decoder.is_between:
            return
        if self._decoder.is_inside_wanted:
            raise CorruptData(f"{self.log} ends at {self.position}, in the middle of a write that must be played")
        _log.warning("recovery_log.garbage", log=self.log, begin=self._decoder.position, end=self.position)
        self._decoder.restart(self.position)

    def feed(self, content: bytes) -> bool:
        """Play the next content. Return True to continue reading; False when a seek is needed, or at the handoff.

        Raises CorruptData for content that contradicts the expected handoff.
        """
        garbage: SkippedContent | None = None
        try:
            for event in self._decoder.feed(content):
                match event:
                    case DecodedOperation(op, payload):
                        self._play(op, payload)
                        if self.handoff is not None:
                            return False
                    case WrittenData(piece):
                        self._data(piece)
                    case SkippedContent():
                        garbage = event if garbage is None else SkippedContent(garbage.begin, event.end)
                if self.wants_seek:
                    return False
            return True
        finally:
            if garbage is not None:  # Logged once: there may be a piece of garbage every few bytes.
                _log.warning("recovery_log.garbage", log=self.log, begin=garbage.begin, end=garbage.end)

    def _play(self, op: RecordedOperation, payload: bytes) -> None:
        guided = self.fsm.next_hinted is not None
        result = self.fsm.apply(op, payload)
        self._check_expected(op, guided or result.is_step)
        if not result.is_step:
            if result not in (ApplyResult.NOT_HINTED_AUTHOR, ApplyResult.WRONG_SEQ_NO):
                _log.info("recovery_log.refused", log=self.log, offset=op.begin, reason=result.value, author=op.author)
            return
        self._decoder.accept()
        self._write = None
        if result is ApplyResult.APPLIED:
            match op.change:
                case Create():
                    self._files.create(Fnode(op.seq_no))
                case Unlink(fnode) if not self.fsm.paths_of(fnode):
                    self._files.remove(fnode)
                case Write(fnode, offset):
                    self._write = fnode, offset
        if op.author == self._author:
            self.handoff = Handoff(op.author, self.log, op.seq_no, op.checksum, op.begin, op.end)

    def _check_expected(self, op: RecordedOperation, in_place: bool) -> None:
        expected = self.expected
        if expected is None or self.log != expected.log or op.begin < expected.begin:
            return
        self.expected = None
        if op.begin != expected.begin or op.author != expected.author or not in_place:
            raise CorruptData(
                f"{self.log} was taken over by author {expected.author:#x} at offset {expected.begin}, and there is "
                f"something else now: content was lost together with the log's brokers. Recover from other hints, "
                "after you have checked the missing content."
            )

    def _data(self, piece: bytes) -> None:
        if self._write is None:
            return  # The file is not alive at the end of the hints.
        fnode, offset = self._write
        self._files.write(fnode, offset, piece)
        self._write = fnode, offset + len(piece)
        self.recovered_bytes += len(piece)
