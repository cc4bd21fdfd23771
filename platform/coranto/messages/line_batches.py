"""Decoder of JSON lines to Arrow batches, for content that arrives in chunks of any size.

Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

import pyarrow as pa

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.batches import line_batch
from coranto.messages.framing import IncompleteTail, JsonLines


class LineBatchDecoder:
    """Turns the content of one journal, fed in order, into batches of lines (see `batches.line_batch`)."""

    def __init__(self, framing: JsonLines, journal: str, offset: int) -> None:
        self._framing = framing
        self._journal = journal
        self._offset = offset
        self._held: list[bytes] = []  # Content of an incomplete line.
        self._held_bytes = 0

    @property
    def offset(self) -> int:
        """The offset of the first byte that is not yet part of a returned line."""
        return self._offset

    def feed(self, content: bytes, offset: int) -> pa.RecordBatch | None:
        """Return the lines that `content`, which begins at `offset`, completes; None if there are none.

        Raises CorruptMessage for a line that is not a message, continues across missing content, or is too long.
        """
        fed = self._offset + self._held_bytes
        if offset < fed:
            raise InvalidInput(f"content of {self._journal} at offset {offset} was fed before, up to {fed}")
        if offset > fed:
            if self._held:
                reason = f"the rest of the line is missing: content continues at offset {offset}"
                raise CorruptMessage(self._journal, self._offset, reason)
            self._offset = offset
        cut = content.rfind(b"\n") + 1
        batch = None
        if cut:
            whole = b"".join([*self._held, content[:cut]])
            batch, consumed = line_batch(self._framing, self._journal, whole, self._offset)
            self._offset += consumed
            self._held, self._held_bytes, content = [], 0, content[cut:]
        if content:
            self._held.append(content)
            self._held_bytes += len(content)
        if self._held_bytes > self._framing.max_line_bytes:
            reason = f"a line that has not ended after {self._framing.max_line_bytes} bytes"
            raise CorruptMessage(self._journal, self._offset, reason)
        return batch

    def finish(self) -> IncompleteTail | None:
        """Return the incomplete line at the end of the content fed so far, or None."""
        return IncompleteTail(self._journal, self._offset, self._held_bytes) if self._held else None
