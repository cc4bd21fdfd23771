"""Spools of deleted journals, which are kept for some time, since a deletion may be an accident.

A folder `spools/<name>/<create revision>` moves unchanged to `deleted/<name>/<create revision>`. Its `deleted.json`
has the journal's name, the time when the folder was set aside, and the time until which it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from coranto.effects import Clock, Disk

FOLDER = "deleted"
NOTE = "deleted.json"
SWEEP_SECONDS = 600.0
"""The pause between checks for expired folders."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DeletedSpool:
    """One folder that was set aside. `until` is the wall time (seconds since the epoch) of its possible removal."""

    path: Path
    journal: str
    create_revision: int
    until: float


class DeletedSpools:
    """The spool folders of deleted journals below a data directory."""

    def __init__(self, data_dir: Path, disk: Disk, clock: Clock, keep_seconds: float) -> None:
        """`keep_seconds` is how long folders are kept; 0 removes them immediately."""
        self._root = data_dir / FOLDER
        self._disk = disk
        self._clock = clock
        self.keep_seconds = keep_seconds

    def take(self, folder: Path, journal: str, create_revision: int) -> None:
        """Set aside an unused spool folder, or remove it if it is not kept. Can be repeated if it raises OSError."""
        names = self._disk.list(folder)
        if not self.keep_seconds or not names:
            _log.info("deleted_spool.removed", journal=journal, folder=str(folder))
            self._disk.remove_tree(folder)
            return
        now = self._clock.now()
        until = now + self.keep_seconds
        note = {
            "journal": journal,
            "create_revision": create_revision,
            "deleted": _readable(now),
            "until": _readable(until),
            "until_seconds": until,
        }
        self._disk.write_atomic(folder / NOTE, json.dumps(note, indent=1).encode())
        target = self._root / folder.parent.name / folder.name
        number = 2
        while self._disk.list(target):
            target, number = target.with_name(f"{folder.name}.{number}"), number + 1
        self._disk.rename(folder, target)
        _log.warning("deleted_spool.set_aside", journal=journal, folder=str(target), until=_readable(until))

    def __iter__(self) -> Iterator[DeletedSpool]:
        for name in self._disk.list(self._root):
            for revision in self._disk.list(self._root / name):
                path = self._root / name / revision
                try:
                    note = json.loads(self._disk.read(path / NOTE))
                    until, created = float(note["until_seconds"]), int(note["create_revision"])
                    yield DeletedSpool(path, str(note["journal"]), created, until)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    _log.warning("deleted_spool.expiry_unknown", folder=str(path), error=str(error))

    def bring_back(self, spool: DeletedSpool, folder: Path) -> None:
        """Undo `take`, because the journal exists again."""
        self._disk.remove(spool.path / NOTE)
        self._disk.rename(spool.path, folder)

    def sweep(self) -> None:
        """Remove expired folders."""
        now = self._clock.now()
        for spool in list(self):
            if spool.until <= now:
                _log.info("deleted_spool.removed", journal=spool.journal, folder=str(spool.path))
                self._disk.remove_tree(spool.path)


def _readable(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
