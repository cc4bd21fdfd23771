"""The progress of an ingest: the positions of its splits, as the stream's journal of decisions records them.

Each batch records the positions that it changes. From time to time a batch records all positions, so that a process
that continues the ingest reads a bounded part of the journal (`coranto.streams.writer.multi_key.numbered`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

import structlog

from coranto.errors import CorruptData, InvalidInput
from coranto.ingest.source import Position
from coranto.streams.model.stream import MAX_RECORD_BYTES
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from coranto.streams.writer.multi_key.numbered import LastBatch, NumberedBatch

_COMPLETE_BYTES: Final = 64 << 10
_COMPLETE_SHARE: Final = 4
"""All positions are recorded after _COMPLETE_BYTES of changes, or _COMPLETE_SHARE times their own size if larger."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class IngestProgress:
    """The committed part of an ingest. `lost`, `rows` and `dead_letters` count from its first batch on."""

    source: str = ""
    """The identity of the other system; empty before the first batch."""
    splits: dict[str, Position] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    dead_letters: int = 0
    changed_bytes: int = 0
    """The bytes of the records after the last complete one."""
    complete_bytes: int = 0

    def after(
        self, source: str, changes: Mapping[str, Position], lost: Mapping[str, int], rows: int, dead_letters: int
    ) -> Self:
        """Return the progress after a batch with these changes."""
        return replace(
            self,
            source=source,
            splits={**self.splits, **changes},
            lost={**self.lost, **{split: self.lost.get(split, 0) + count for split, count in lost.items()}},
            rows=self.rows + rows,
            dead_letters=self.dead_letters + dead_letters,
        )

    def record(self, changes: Mapping[str, Position], *, is_first: bool) -> tuple[dict[str, object], bool]:
        """Return the record of the batch that ends at this progress, and True if it has all positions.

        Raises InvalidInput if there are too many splits for a record.
        """
        record = self._fields(changes, is_complete=False)
        size = len(json.dumps(record, separators=(",", ":")))
        limit = max(_COMPLETE_BYTES, _COMPLETE_SHARE * self.complete_bytes)
        if not is_first and self.changed_bytes + size <= limit:
            self.changed_bytes += size
            return record, False
        record = self._fields(self.splits, is_complete=True)
        self.changed_bytes, self.complete_bytes = 0, len(json.dumps(record, separators=(",", ":")))
        if self.complete_bytes > MAX_RECORD_BYTES // 2:
            raise InvalidInput(
                f"the positions of {len(self.splits)} splits take {self.complete_bytes} bytes, and may take "
                f"{MAX_RECORD_BYTES // 2}: divide the source among several ingests"
            )
        return record, True

    def _fields(self, splits: Mapping[str, Position], *, is_complete: bool) -> dict[str, object]:
        """Return the fields of a record."""
        return {
            "source": self.source,
            "splits": dict(splits),
            "lost": self.lost,
            "rows": self.rows,
            "letters": self.dead_letters,
        }

    def apply(self, record: Mapping[str, Any]) -> None:
        """Apply the record of a batch. Raises CorruptData."""
        try:
            splits = {**({} if record["complete"] else self.splits), **record["splits"]}
            self.source, self.splits, self.lost = str(record["source"]), splits, dict(record["lost"])
            self.rows, self.dead_letters = int(record["rows"]), int(record["letters"])
            size = len(json.dumps(record, separators=(",", ":")))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"a record of an ingest's progress cannot be read: {error!r}") from error
        if record["complete"]:
            self.changed_bytes, self.complete_bytes = 0, size
        else:
            self.changed_bytes += size


P = TypeVar("P", bound=IngestProgress)


async def load(writer: BatchWriter[Any], name: str, *, accept_loss: bool = False) -> tuple[LastBatch, IngestProgress]:
    """Return the last batch and the progress of an ingest, once all acknowledgements of the batch are appended.

    Raises CorruptData if the stream has lost records. With `accept_loss`, the ingest continues from the remaining ones.
    """
    return await load_into(IngestProgress(), writer, name, accept_loss=accept_loss)


async def load_into(
    progress: P, writer: BatchWriter[Any], name: str, *, accept_loss: bool = False
) -> tuple[LastBatch, P]:
    """Load the progress of an ingest into `progress`, which must be new, like `load`."""
    known, last = await writer.last_batch(name), 0
    async for record in writer.records(known, name):
        if not last and not record.get("complete") and known.number:
            continue  # It was decided before the complete record.
        progress.apply(record)
        last = int(record["batch"])
    if last == known.number:
        return known, progress
    if not accept_loss:
        raise CorruptData(
            f"stream {writer.stream} knows {known.number} batches of ingest {name}, and has records of {last}: its "
            "brokers have lost registers or content. Compare the stream with the source. With --accept-loss the ingest "
            "continues from the records that are left, and rows may be there twice"
        )
    _log.warning("ingest.loss_accepted", ingest=name, stream=writer.stream, batch=known.number, recorded=last)
    return replace(known, number=max(last, known.number)), progress


async def catch_up(progress: IngestProgress, writer: BatchWriter[Any], name: str, last: LastBatch) -> LastBatch | None:
    """Apply the batches that others have decided after `last`. Returns the last one; None if records are missing."""
    known, number = await writer.last_batch(name), last.number
    async for record in writer.records(replace(known, begin=last.end), name):
        progress.apply(record)
        number = int(record["batch"])
    return known if number == known.number else None


def next_batch(
    name: str,
    known: LastBatch,
    progress: IngestProgress,
    changes: Mapping[str, Position],
    dead_letters: list[Mapping[str, object]],
) -> NumberedBatch:
    """Return the batch that ends at this progress. Raises InvalidInput for too many splits."""
    record, is_complete = progress.record(changes, is_first=not known.number)
    return NumberedBatch(name, known, record, is_complete, dead_letters)
