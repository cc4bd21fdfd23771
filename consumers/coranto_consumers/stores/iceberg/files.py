"""Data files that owners write: their locations, and the removal of files that were never committed."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import pyarrow as pa
import structlog
from pyarrow.fs import FileSelector, FileType
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table import Table, TableProperties

from coranto_consumers.stores.iceberg.state import SnapshotId

_log = structlog.get_logger(__name__)
_FAILURES: Final = (OSError, ValueError, pa.ArrowException)
"""Failures of file systems. PyArrow lacks a file system for some schemes that pyiceberg supports."""


def file_location(table: Table, name: str) -> str:
    """Return the location of an owner's file or folder in the table's data location."""
    data = table.properties.get(TableProperties.WRITE_DATA_PATH) or f"{table.location().rstrip('/')}/data"
    return f"{data.rstrip('/')}/{name}"


def remove_file(table: Table, location: str) -> None:
    """Remove a file that no snapshot refers to, if it exists. A failure is only logged: the file is harmless."""
    try:
        table.io.delete(location)
    except FileNotFoundError:
        return  # The usual case.
    except _FAILURES as error:
        _log.warning("iceberg.file_left", file=location, error=str(error))
    else:
        _log.info("iceberg.file_swept", file=location)


def _path_of(table: Table, location: str) -> str:
    """Return a location's normalized path: the same for `s3` and `s3a`, and for any number of slashes."""
    path: str = PyArrowFileIO.parse_location(location, table.io.properties)[2]
    return _normal(path)


def _normal(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


def sweep(table: Table, name: str, keep: Collection[str] = ()) -> None:
    """Remove the file `name`, or all files of the folder `name` except those in `keep`. Failures are only logged.

    Tables may share a location, and thus the folder: `keep` must have the files of all of them.
    """
    location = file_location(table, name)
    if not name.endswith("/"):
        remove_file(table, location)
        return
    try:
        io = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(dict(table.io.properties))
        scheme, host, path = io.parse_location(location, io.properties)
        folder = path.rstrip("/")
        kept = {_path_of(table, each) for each in keep}
        files = io.fs_by_scheme(scheme, host)
        found = files.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True))
        for each in found:
            if each.type == FileType.File and _normal(each.path) not in kept:
                files.delete_file(each.path)
                _log.info("iceberg.file_swept", file=location + each.path[len(folder) + 1 :])
        if found and not any(_normal(each.path) in kept for each in found):
            files.delete_dir(folder)
    except _FAILURES as error:
        _log.warning("iceberg.file_left", file=location, error=str(error))


def sweep_committed(name: str, tables: Sequence[tuple[Table, SnapshotId]]) -> None:
    """Remove all files of a transaction's folder that were not committed.

    `tables` are all tables that may have files in the folder, each with its last snapshot that added files, or 0 for
    none. If the files of one table are unknown, the folder is kept for all tables that share its location.
    """
    named: defaultdict[str, list[set[str] | None]] = defaultdict(list)
    for table, known in tables:
        found = _added_files(table, known) if known.snapshot else set[str]()
        named[_path_of(table, file_location(table, name))].append(found)
    for table, _ in tables:
        of_all = named[_path_of(table, file_location(table, name))]
        keep = [each for each in of_all if each is not None]
        if len(keep) == len(of_all):
            sweep(table, name, set[str]().union(*keep))


def _added_files(table: Table, committed: SnapshotId) -> set[str] | None:
    """Return the locations of the files that a snapshot added. None if the snapshot has expired, or cannot be read."""
    snapshot = table.snapshot_by_id(committed.snapshot)
    if snapshot is None:
        return None
    try:
        return {
            entry.data_file.file_path
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == committed.snapshot
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            if entry.status == ManifestEntryStatus.ADDED
        }
    except _FAILURES as error:
        _log.warning("iceberg.manifests_unread", table=".".join(table.name()), error=str(error))
        return None
