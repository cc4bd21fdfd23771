"""Compaction: committed messages of old fragments as Parquet files. The fragments are kept.

Each file has the messages that became committed in a span [begin, end) of a journal, each once: together, the files of
a journal equal its committed read. For that, a file also has the reading state at its end, where the next file
continues. An interrupted or repeated run is harmless, because files are written atomically, and the content of a span
never changes. Concurrent runs may choose different spans. Then the chain of files without a gap or an overlap that
reaches furthest is used, and the next run removes the other files.

Files are below `.coranto-tables/JOURNAL/` in the store of the fragments, and named by their spans.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from coranto.client.loop import run_blocking
from coranto.errors import CorruptData, InvalidInput, OffsetJump
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.lake.content import ManifestContent, require_lines
from coranto.lake.manifest import JournalPart, Manifest
from coranto.lake.scanning import OWN, VALUE, Types, own_column, to_schema
from coranto.lake.values import FieldParser, ScanMisfits
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.framing import DEFAULT_UUID_POINTER, JsonLines
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import ReplayRange

FOLDER: Final = ".coranto-tables"
DEFAULT_FILE_BYTES: Final = 128 << 20
STAMPS: Final = pa.schema([pa.field("_producer", pa.uint64(), nullable=False), pa.field("_clock", pa.uint64())])
"""The columns with the producer and the clock of a message's UUID, both 0 for a message without one."""

_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.parquet")
_STATE: Final = b"coranto.state"
_REVISION: Final = b"coranto.revision"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CompactedSpan:
    """A file with the messages that became committed in the content [begin, end) of a journal.

    `path` is below the store's URL. `rows` is None if the file was not read.
    """

    journal: str
    begin: int
    end: int
    store: str
    rows: int | None = None

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.journal}/{self.begin:016x}-{self.end:016x}.parquet"


@dataclass(frozen=True, slots=True)
class CompactionOptions:
    """The content to compact, and the form of the files.

    Only fragments that were stored at `stored_before` (Unix seconds) or earlier are compacted. A file has at least
    `file_bytes` bytes of content; a smaller rest is left for later, or written if `partial`. `schema`, `misfits` and
    `uuid_pointer` are arguments of `scan`. `file_root` is the root folder of `file:///` stores.
    """

    stored_before: float
    schema: pa.Schema | Types | None = None
    file_bytes: int = DEFAULT_FILE_BYTES
    partial: bool = False
    misfits: ScanMisfits = ScanMisfits.ERROR
    uuid_pointer: str | None = DEFAULT_UUID_POINTER
    file_root: Path | None = None


def compact(manifest: Manifest, options: CompactionOptions) -> Iterator[CompactedSpan]:
    """Write the files that are missing, and yield the span of each once it is stored.

    The manifest must begin where journals do, or where their last file ends. Raises OffsetJump if content that was not
    compacted is gone, CorruptData for files of another journal of that name, and the errors of scans and stores.
    """
    require_lines(manifest)
    if options.file_bytes < 1:
        raise InvalidInput(f"{options.file_bytes} is not a positive number of bytes", field="file_bytes")
    run = _Compaction(manifest, options)
    for part in manifest.journals:
        if part.fragments:
            yield from run.journal(part)


def compacted(store: FragmentStore, journal: str) -> list[CompactedSpan]:
    """Return the chain of a journal's files, in order and without gap or overlap. Raises StoreError."""
    return _chain(run_blocking(_listed(store, journal)))


def compacted_files(manifest: Manifest, file_root: Path | None = None) -> dict[str, list[CompactedSpan]]:
    """Return `compacted` for each journal of a manifest, from the store with its files. Raises StoreError."""
    stores = StoreRegistry(file_root)
    return {part.journal: _chain(_place(stores, part)[1]) for part in manifest.journals if part.fragments}


class _Compaction:
    def __init__(self, manifest: Manifest, options: CompactionOptions) -> None:
        self._options = options
        self._fields = to_schema(options.schema)
        self._framing = JsonLines(options.uuid_pointer, tolerant=options.misfits is ScanMisfits.NULLS)
        self._content = ManifestContent(manifest, options.file_root)
        self._stores = StoreRegistry(options.file_root)
        self._pruning = Pruning(options.stored_before)
        self._schema = pa.schema([*OWN, *STAMPS, *([VALUE] if self._fields is None else self._fields)])

    def journal(self, part: JournalPart) -> Iterator[CompactedSpan]:
        store, listed = _place(self._stores, part)
        chain = _chain(listed)
        others = sorted(set(listed) - set(chain), key=lambda each: each.begin)
        for each in others:
            if each.begin > chain[-1].end:
                raise CorruptData(
                    f"{store.url}{FOLDER}/{part.journal}/: the file of [{chain[-1].end}, {each.begin}) is missing, and "
                    "there are later files; restore the missing file, or remove the later files to rebuild them"
                )
        source = self._state(store, chain[-1], part) if chain else Source(part.begin)
        if source.replay_from < part.begin:
            raise OffsetJump(part.journal, source.replay_from, part.begin)
        for each in others:  # Files of concurrent runs. Content beyond the chain is compacted again.
            _log.info("compaction.file_removed", store=store.url, path=each.path)
            run_blocking(store.remove_note(each.path))
        ends = [end for end in self._ends(part) if end > source.read_through]
        while ends:
            at = source.read_through
            full = [end for end in ends if end - at >= self._options.file_bytes]
            tried = full or (ends[-1:] if self._options.partial else [])
            for end in tried:
                try:
                    content, rows, source = self._table(part, source, end)
                except InvalidInput as error:
                    if error.field != "end":
                        raise
                    continue  # The fragment ends within a line; try the end of the next fragment.
                span = CompactedSpan(part.journal, at, end, store.url, rows)
                run_blocking(store.put_note(span.path, content))
                yield span
                break
            else:
                return
            ends = [end for end in ends if end > source.read_through]

    def _ends(self, part: JournalPart) -> list[int]:
        """Return the possible ends of files: the ends of fragments that are old enough."""
        ends = []
        for each in part.chain():
            if each.stored_at > self._options.stored_before or each.end > part.end:
                break
            ends.append(each.end)
        return ends

    def _state(self, store: FragmentStore, last: CompactedSpan, part: JournalPart) -> Source:
        where = f"{store.url}{last.path}"
        try:
            metadata = pq.read_metadata(pa.BufferReader(run_blocking(store.get_note(last.path)))).metadata or {}
            source = Checkpoint.from_bytes(base64.b64decode(metadata[_STATE])).sources[part.journal]
            (revision,) = struct.unpack("<q", base64.b64decode(metadata[_REVISION]))
        except (pa.ArrowException, KeyError, ValueError, struct.error) as error:
            raise CorruptData(f"{where} is not a file of a compaction: {error}; remove it to rebuild it") from error
        if revision != part.revision or source.read_through != last.end:
            raise CorruptData(
                f"{where} is of a journal that was deleted and created again since; remove {FOLDER}/{part.journal}/ "
                "to start over"
            )
        return source

    def _table(self, part: JournalPart, source: Source, end: int) -> tuple[bytes, int, Source]:
        """Return a file with the messages committed up to `end`, its number of rows, and the state at `end`."""
        typed = None if self._fields is None else FieldParser(self._fields, self._options.misfits)

        def again(wanted: ReplayRange) -> Iterator[pa.RecordBatch]:
            return self._content.lines(part, self._framing, wanted.begin, wanted.end)

        sequencer = ColumnarSequencer(again, {part.journal: source})
        sink, rows = pa.BufferOutputStream(), 0
        with pq.ParquetWriter(sink, self._schema, compression="zstd") as writer:
            for lines in self._content.lines(part, self._framing, source.read_through, end):
                committed = sequencer.feed(lines)
                if committed.num_rows:
                    writer.write_table(self._rows(committed, typed))
                    rows += committed.num_rows
            after = Source(end, sequencer.checkpoint(self._pruning)[part.journal].producers)
            state = Checkpoint({part.journal: after}).to_bytes()
            writer.add_key_value_metadata(
                {
                    _STATE.decode(): base64.b64encode(state).decode(),
                    _REVISION.decode(): base64.b64encode(struct.pack("<q", part.revision)).decode(),
                }
            )
        return bytes(sink.getvalue()), rows, after

    def _rows(self, committed: pa.RecordBatch, typed: FieldParser | None) -> pa.Table:
        parsed: Any = {} if typed is None else typed.parse(committed)
        fields = () if self._fields is None else self._fields.names
        arrays = []
        for field in self._schema:
            if field.name in fields:
                arrays.append(parsed[field.name])
            elif field.name in STAMPS.names:
                arrays.append(committed.column(field.name[1:]))
            else:
                arrays.append(own_column(committed, field.name))
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _place(stores: StoreRegistry, part: JournalPart) -> tuple[FragmentStore, list[CompactedSpan]]:
    """Return the store with files of a journal, and the files; without files, the store of the newest fragment."""
    newest = [each.store for each in reversed(part.fragments)]
    for url in dict.fromkeys(newest):
        if listed := run_blocking(_listed(stores.get(url), part.journal)):
            return stores.get(url), listed
    return stores.get(newest[0]), []


async def _listed(store: FragmentStore, journal: str) -> list[CompactedSpan]:
    names = [file.path async for file in store.files(f"{FOLDER}/{journal}")]  # Other journals may be below this one.
    matches = [matched for name in names if (matched := _NAME.fullmatch(name))]
    return [CompactedSpan(journal, int(each[1], 16), int(each[2], 16), store.url) for each in matches]


def _chain(listed: Sequence[CompactedSpan]) -> list[CompactedSpan]:
    """Return the chain of consecutive spans from the lowest begin on that reaches furthest."""
    chains: dict[int, list[CompactedSpan]] = {}  # The best chain from each begin, in reverse order.
    for each in sorted(listed, key=lambda each: (-each.begin, each.end)):
        chain = [*chains.get(each.end, []), each]
        known = chains.get(each.begin)
        if each.end > each.begin and (known is None or chain[0].end > known[0].end):
            chains[each.begin] = chain
    return chains[min(chains)][::-1] if chains else []
