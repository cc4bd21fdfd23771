"""Reading of a journal's range as blocks of whole lines, and parsing of blocks into columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.client import Chunk
from coranto.client.range_prefetch import JournalRange
from coranto.errors import CorruptMessage, JournalRecreated, OffsetJump
from coranto.journal_ids import is_same
from coranto.messages.columnar import Int64s, Mask, UInt16s, UInt64s, producer_number
from coranto.messages.framing import DEFAULT_LINE_BYTES, Decoder, JsonLines
from coranto.messages.special_lines import read_block
from coranto.messages.uuids import ZERO_UUID, UuidParts
from coranto_consumers.journals.framings import ReadFraming, Records
from coranto_consumers.journals.ranges import Range

BLOCK_BYTES = 4 << 20
OVERRUN_BYTES = 4 << 10
"""The size of the first read after a range. A larger read would need the next fragment more often."""
_MAX_CLOCK = (1 << 63) - 1


class JournalContent(Protocol):
    """The source of content: `SyncJournalClient`, or a test double."""

    def read(
        self, journal: str, offset: int, *, end_offset: int, block: bool, fail_on_jump: bool, journal_id: str
    ) -> Iterator[Chunk]: ...


@dataclass(frozen=True, slots=True)
class Lines:
    """Messages of one journal, in order, as columns of equal length; or of several journals, one after the other."""

    journal: str
    """The journal, or the first one."""
    begins: Int64s
    ends: Int64s
    """The offsets just after the lines' newlines."""
    producers: UInt64s
    clocks: UInt64s
    flags: UInt16s
    content: Any
    """An Arrow binary array of the lines with their newlines."""
    unreadable: Mask | None = None
    """The lines whose UUID cannot be read; None without any. They count as messages without a UUID."""
    commits: Int64s | None = None
    """The offsets of the acknowledgements that committed the messages, if they were requested."""
    headed: Mask | None = None
    """The lines of JSON whose first field contains only the UUID (`LineColumns.headed`)."""
    journals: Any | None = None
    """The journal of each message, as an Arrow array of texts, if there are several."""
    blank: Mask | None = None
    """The rows that are not messages, such as empty lines; None without any."""

    @classmethod
    def together(cls, parts: Sequence[Lines]) -> Lines:
        if len(parts) == 1:
            return parts[0]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(each, name) for each in parts])
            for name in ("begins", "ends", "producers", "clocks", "flags")
        }
        for name in ("unreadable", "headed"):
            masks = [getattr(each, name) for each in parts]
            if any(mask is not None for mask in masks):
                columns[name] = np.concatenate(
                    [
                        np.zeros(len(each), np.bool_) if mask is None else mask
                        for each, mask in zip(parts, masks, strict=True)
                    ]
                )
        names = pa.array([each.journal for each in parts], pa.string())
        journals = names.take(pa.array(np.repeat(np.arange(len(parts)), [len(each) for each in parts])))
        content = pa.concat_arrays([each.content for each in parts])
        return cls(parts[0].journal, content=content, journals=journals, **columns)

    def journal_of(self, row: int) -> str:
        return self.journal if self.journals is None else str(self.journals[row])

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def values(self) -> Any:
        """An Arrow binary array of the lines without their newlines."""
        return pc.binary_slice(self.content, 0, -1)

    @property
    def messages(self) -> Lines:
        return self if self.blank is None else replace(self.where(~self.blank), blank=None)

    def where(self, mask: Mask) -> Lines:
        if mask.all():
            return self
        chosen = pa.array(mask)
        columns = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "journal"}
        return Lines(
            self.journal,
            **{
                name: column.filter(chosen) if isinstance(column, pa.Array) else column[mask]
                for name, column in columns.items()
                if column is not None
            },
        )


def read_lines(
    content: JournalContent, part: Range, framing: ReadFraming, block_bytes: int = BLOCK_BYTES
) -> Iterator[Lines]:
    """Yield blocks of the messages and blank rows that start in a range. Raises CorruptMessage and OffsetJump."""
    if not isinstance(framing, JsonLines):
        yield from read_records(content, part, framing, block_bytes)
        return
    for offset, block in read_blocks(content, part, block_bytes, framing.max_line_bytes):
        yield parse_lines(framing, part.journal, offset, block)


def parse_lines(framing: JsonLines, journal: str, offset: int, block: bytes) -> Lines:
    """Return the lines of a block that begins at `offset` and ends with a newline."""
    found = read_block(framing, journal, block, offset)
    lines, unreadable = found.lines, found.unreadable
    begins = lines.offsets(offset)
    clocks = lines.uuids.clocks
    if len(clocks) and clocks.max() > _MAX_CLOCK:
        beyond: Mask = clocks > _MAX_CLOCK
        if not framing.tolerant:
            bad = int(np.argmax(beyond))
            raise CorruptMessage(journal, int(begins[bad]), "the timestamp of its UUID is beyond the year 3409")
        unreadable = beyond if unreadable is None else unreadable | beyond
        for column in lines.uuids:
            column[beyond] = 0
    return Lines(
        journal,
        begins,
        lines.end_offsets(offset),
        lines.uuids.producers,
        clocks,
        lines.uuids.flags,
        found.content,
        unreadable,
        headed=lines.headed,
        blank=found.blank,
    )


def read_records(
    content: JournalContent, part: Range, records: Records, block_bytes: int = BLOCK_BYTES
) -> Iterator[Lines]:
    """Yield blocks of the messages of a range, with newlines. Content between two messages becomes a blank row."""
    framing = records.framing()
    decoder: Decoder[Any] = framing.decoder(part.journal, part.begin)
    held: list[_Record] = []
    size, at, read_through = 0, part.begin, part.begin
    for chunk in _to_end_of_message(content, part, decoder):
        read_through += len(chunk)
        for record in _records(content, part, decoder, chunk, records):
            if at < min(record.begin, part.end):
                held.append(_blank(at, record.begin))
            if record.begin < part.end:
                held.append(record)
                size += len(record.content)
            at = record.end
        if size >= block_bytes:
            yield _lines_of(part.journal, held, records)
            held, size = [], 0
    tail = decoder.finish()
    end = read_through if tail is None else tail.offset
    if at < min(end, part.end):
        held.append(_blank(at, end))
    if held:
        yield _lines_of(part.journal, held, records)


class _Record(NamedTuple):
    """A message, content that a tolerant framing rejects as a message, or blank content."""

    begin: int
    end: int
    uuid: UuidParts
    content: bytes
    is_readable: bool = True
    is_blank: bool = False


def _blank(begin: int, end: int) -> _Record:
    return _Record(begin, end, ZERO_UUID, b"", is_blank=True)


def _records(
    content: JournalContent, part: Range, decoder: Decoder[Any], chunk: bytes, records: Records
) -> Iterator[_Record]:
    """Yield the messages that a chunk completes. Raises CorruptMessage unless the framing is tolerant."""
    while True:
        try:
            for each in decoder.feed(chunk):
                uuid = UuidParts(each.producer, each.clock, each.flags)
                if each.clock <= _MAX_CLOCK:
                    yield _Record(each.begin, each.end, uuid, each.content)
                elif records.tolerant:
                    yield _Record(each.begin, each.end, ZERO_UUID, each.content, is_readable=False)
                else:
                    problem = "the timestamp of its UUID is beyond the year 3409"
                    raise CorruptMessage(part.journal, each.begin, problem)
            return
        except CorruptMessage as error:
            if not records.tolerant:
                raise
            # The decoder has skipped the malformed content.
            passed = b"".join(_contiguous(content, part, error.offset, decoder.offset))
            yield _Record(error.offset, decoder.offset, ZERO_UUID, records.payload_of(passed), is_readable=False)
            chunk = b""


def _to_end_of_message(content: JournalContent, part: Range, decoder: Decoder[Any]) -> Iterator[bytes]:
    """Yield the content of a range, and the rest of a message that starts within it."""
    yield from _contiguous(content, part, part.begin, part.end)
    begin, step = part.end, OVERRUN_BYTES
    while begin < part.limit:
        tail = decoder.finish()
        if tail is None or tail.offset >= part.end:
            return
        end = min(part.limit, begin + step)
        yield from _contiguous(content, part, begin, end)
        begin, step = end, min(step * 2, BLOCK_BYTES)


def _lines_of(journal: str, found: Sequence[_Record], records: Records) -> Lines:
    unreadable: Mask | None = None
    if records.tolerant:
        unreadable = np.fromiter((not each.is_readable for each in found), np.bool_, len(found))
        unreadable = unreadable if unreadable.any() else None
    blank: Mask = np.fromiter((each.is_blank for each in found), np.bool_, len(found))
    return Lines(
        journal,
        np.array([each.begin for each in found], dtype=np.int64),
        np.array([each.end for each in found], dtype=np.int64),
        np.array([producer_number(each.uuid.producer) for each in found], dtype=np.uint64),
        np.array([each.uuid.clock for each in found], dtype=np.uint64),
        np.array([each.uuid.flags for each in found], dtype=np.uint16),
        pa.array([each.content + b"\n" for each in found], pa.binary()),
        unreadable,
        blank=blank if blank.any() else None,
    )


def read_blocks(
    content: JournalContent, part: Range, block_bytes: int = BLOCK_BYTES, max_line_bytes: int = DEFAULT_LINE_BYTES
) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of blocks of whole lines: exactly the lines that start in the range.

    A last line that exceeds the range's `limit` is left out: its writer has not finished it. Raises CorruptMessage for
    a line that has not ended after `max_line_bytes`.
    """
    start = part.start
    skipping = not part.aligned
    pieces: list[bytes | memoryview] = []  # Joined only once: copying content costs more than finding its lines.
    size = 0
    offset = start
    for chunk in _contiguous(content, part, start, part.end):
        view = memoryview(chunk)
        if skipping:
            line = chunk.find(b"\n") + 1
            offset += line or len(chunk)
            if not line:
                continue
            view, skipping = view[line:], False
        cut = chunk.rfind(b"\n") + 1 - (len(chunk) - len(view))
        if size + len(view) >= block_bytes and cut > 0:
            block = b"".join([*pieces, view[:cut]])
            yield offset, block
            offset += len(block)
            pieces, size, view = [], 0, view[cut:]
        if len(view):
            pieces.append(view)
            size += len(view)
    held = b"".join(pieces)
    if held and not held.endswith(b"\n"):
        whole = bytearray(held)
        _finish_line(content, part, whole, offset, max_line_bytes)
        held = bytes(whole[: whole.rfind(b"\n") + 1])
    if held:
        yield offset, held


def _finish_line(content: JournalContent, part: Range, held: bytearray, offset: int, max_bytes: int) -> None:
    """Append content after the range to `held`, up to the end of its last line or the range's limit."""
    begin, step = part.end, OVERRUN_BYTES
    line = held.rfind(b"\n") + 1
    while begin < part.limit:
        if len(held) - line > max_bytes:
            raise CorruptMessage(part.journal, offset + line, f"a line that has not ended after {max_bytes} bytes")
        end = min(part.limit, begin + step)
        more = b"".join(_contiguous(content, part, begin, end))
        newline = more.find(b"\n")
        if newline >= 0:
            held += more[: newline + 1]
            return
        held += more
        begin, step = end, min(step * 2, BLOCK_BYTES)


def _contiguous(content: JournalContent, part: Range, begin: int, end: int) -> Iterator[bytes]:
    """Yield exactly [begin, end) of a part's journal. Wait for lagging brokers: the content existed at planning."""
    if begin < end:
        yield from contiguous(
            JournalRange(part.journal, begin, end, part.journal_id),
            content.read(
                part.journal, begin, end_offset=end, block=True, fail_on_jump=True, journal_id=part.journal_id
            ),
        )


def contiguous(wanted: JournalRange, chunks: Iterable[Chunk]) -> Iterator[bytes]:
    """Yield the content of chunks. Raises OffsetJump and JournalRecreated unless they are exactly the range."""
    journal, expected, end, journal_id = wanted
    for chunk in chunks:
        if chunk.offset != expected:
            raise OffsetJump(journal, expected, chunk.offset)
        if not is_same(journal_id, end, chunk.journal_id):
            raise JournalRecreated(journal, end, journal_id, chunk.journal_id, chunk.write_head)
        expected += len(chunk.content)
        yield chunk.content
    if expected != end:
        raise OffsetJump(journal, expected, end)
