"""Copies of in-sync records on a broker's disk: for each journal, the latest record that this broker wrote.

The records in etcd are authoritative. But an etcd that is restored from a backup lacks later records, and so does not
know which brokers hold all acknowledged content. The broker that wrote the last record of a journal still has a copy
(`coranto_broker.recovery.adoption`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from coranto.effects import Disk
from coranto.errors import InvalidInput
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import folder_of
from coranto_broker.spool.in_sync import InSyncRecord

FOLDER = "records"


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """A record and its journal. `gone` is the wall time when the journal was first found missing, or 0."""

    journal: str
    record: InSyncRecord
    gone: float = 0.0


class SavedRecords:
    """The records below a data directory."""

    def __init__(self, data_dir: Path, disk: Disk, *, synced: Callable[[str], bool] = lambda _: True) -> None:
        """The records of journals survive power loss if `synced` returns True for the journal."""
        self._root = data_dir / FOLDER
        self._disk = disk
        self._synced = synced
        self._named = False  # True once the folder's own name is on the disk.

    def save(self, journal: str, record: InSyncRecord) -> None:
        """Save a record in place of an earlier one of the same journal. Raises OSError if the disk fails."""
        self._put(SavedRecord(journal, record))

    def remove(self, journal: str) -> None:
        self._disk.remove(self._path(journal))

    def __iter__(self) -> Iterator[SavedRecord]:
        for name in self._disk.list(self._root):
            if not name.endswith(".json"):
                continue
            path = self._root / name
            try:
                document = json.loads(self._disk.read(path))
                record = in_sync.decode(json.dumps(document["record"]).encode())
                record = replace(record, written=int(document["written"]))
                yield SavedRecord(str(document["journal"]), record, float(document["gone"]))
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(
                    f"{path} is not an in-sync record: {error}; move it away to continue without it"
                ) from error

    def sweep(self, exists: set[str], now: float, keep_seconds: float) -> None:
        """Remove the records of journals that have been missing for `keep_seconds`."""
        for saved in list(self):
            if saved.journal in exists:
                if saved.gone:
                    self._put(replace(saved, gone=0.0))
            elif not saved.gone:
                self._put(replace(saved, gone=now))
            elif now - saved.gone >= keep_seconds:
                self.remove(saved.journal)

    def _path(self, journal: str) -> Path:
        return self._root / f"{folder_of(self._root, journal, 0).parent.name}.json"

    def _put(self, saved: SavedRecord) -> None:
        document = {
            "journal": saved.journal,
            "written": saved.record.written,
            "gone": saved.gone,
            "record": json.loads(in_sync.encode(saved.record)),
        }
        path, synced = self._path(saved.journal), self._synced(saved.journal)
        partial = path.with_suffix(".partial")
        self._disk.remove(partial)
        file = self._disk.open(partial)
        try:
            file.write(json.dumps(document).encode())
            if synced:
                file.sync()
        finally:
            file.close()
        self._disk.rename(partial, path)
        if synced:  # Otherwise a power loss may remove its name, or its folder's.
            self._disk.sync_folder(self._root)
            if not self._named:
                self._disk.sync_folder(self._root.parent)
                self._named = True
