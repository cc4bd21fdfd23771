"""Tasks that write rows as files of an Iceberg table, for the driver to commit.

If a task has few rows, it carries them to the driver, which writes the rows of all such tasks into one file. Spark
gives the driver the results of winning attempts only. Files of other attempts are never committed, and are swept.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from coranto_consumers.spark.outputs.tasks import Batches, as_stream, partition_number, share_of
from coranto_consumers.spark.session.task_errors import told_to_driver
from coranto_consumers.stores.iceberg.writing import FileWriter

FILES: Final = "rows BIGINT, files BINARY, staged ARRAY<STRING>, carried BINARY"


@dataclass(frozen=True, slots=True)
class WriteFilesTask:
    """Writes the rows of a partition. Yields (rows, files, staged, carried) if there are rows.

    `files` are the pickled `DataFile`s to commit. If the driver has to merge the rows (`merged`), `staged` are the
    locations of files for it to read. Rows up to `carried_bytes` (less for later tasks) are `carried` as an Arrow
    stream.
    """

    writer: FileWriter
    carried_bytes: int
    merged: bool = False

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._write(batches)

    def _write(self, batches: Batches) -> Batches:
        held: list[Any] = []
        left = share_of(self.carried_bytes, partition_number())
        rows = 0

        def counted() -> Iterator[Any]:
            nonlocal rows
            while held:
                rows += held[0].num_rows
                yield held.pop(0)
            for batch in batches:
                rows += batch.num_rows
                yield batch

        for batch in batches:
            held.append(batch)
            left -= batch.nbytes
            if left < 0:
                break
        else:
            if rows := sum(each.num_rows for each in held):
                yield _result(rows, carried=as_stream(held))
            return
        if self.merged:
            staged = list(self.writer.stage(counted()))
            yield _result(rows, staged=staged)
        else:
            files = pickle.dumps(list(self.writer.write(counted())))
            yield _result(rows, files=files)


def _result(
    rows: int, files: bytes | None = None, staged: list[str] | None = None, carried: bytes | None = None
) -> Any:
    columns = {
        "rows": pa.array([rows]),
        "files": pa.array([files], pa.binary()),
        "staged": pa.array([staged or []], pa.list_(pa.string())),
        "carried": pa.array([carried], pa.binary()),
    }
    return pa.record_batch(columns)
