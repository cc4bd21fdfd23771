"""Force a spool to the disk: its content, its log and, if it has new names, its folder, all concurrently.

A version is the count of the spool's commits. A flush covers the version at its start. A log that was replaced, or that
belongs to an empty fragment that is gone, is removed once a flush has covered its replacement.

A sync that fails ends the use of the spool (`DiskFailed`). The kernel may have dropped unwritten content, and
would report the next sync as a success. The folder is marked, so that recovery rewrites everything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import structlog

from coranto_broker.spool.shared_file import SharedFile

if TYPE_CHECKING:
    from pathlib import Path

    from coranto_broker.spool.durable_spool import SpoolFolder

_log = structlog.get_logger(__name__)


class DiskFailed(OSError):
    """A sync of this spool has failed. It must be closed and recovered."""


class Current(NamedTuple):
    """The files that a spool writes to, and the journal's current end according to them."""

    files: list[SharedFile]
    end: int


@dataclass(frozen=True, slots=True)
class _FlushWork:
    """The work of one flush: commits up to `version`, and the journal up to `end`.

    After the flush, the `retired` ones of the `files` need no further sync, and the `superseded` logs can be removed.
    """

    version: int
    end: int
    files: list[SharedFile]
    retired: list[SharedFile]
    folders: dict[Path, int]
    superseded: list[SharedFile]


class Flusher:
    """Forces one spool to the disk and tracks how much of it is there. Runs on the spool's event loop."""

    def __init__(
        self,
        folder: SpoolFolder,
        current: Callable[[], Current],
        on_flushed: Callable[[int], object],
        *,
        recovered: bool = False,
        retired: Sequence[SharedFile] = (),
    ) -> None:
        """`current` returns the files to flush. `on_flushed` is called with the journal's end after each flush.

        `recovered`: the spool has files already. These and the `retired` files may not be on the disk yet.
        """
        self.version = int(recovered)
        """The number of commits and other changes that must survive power loss."""
        self.flushed_version = 0
        """The last version that is known to be on the disk."""
        self.on_failure: Callable[[], object] = lambda: None
        """A callback for the first failed sync."""
        self._folder = folder
        self._current = current
        self._on_flushed = on_flushed
        self._retired = dict.fromkeys(retired)
        self._superseded: list[SharedFile] = []
        # Folders with new names that are not on the disk yet, each with the number of its last change. Initially, the
        # parent folders may be new, too. The last of them contains the data directory's name.
        self._folders = dict.fromkeys((folder.path, *folder.path.parents[:4]), 0)
        self._changes = 0
        self._flushing: asyncio.Task[None] | None = None
        self._failure: OSError | None = None

    @property
    def failed(self) -> bool:
        """True if a sync has failed."""
        return self._failure is not None

    @property
    def superseded(self) -> tuple[SharedFile, ...]:
        """Logs that the next flush removes."""
        return tuple(self._superseded)

    # -- The content to flush ------------------------------------------------------------------------------------------

    def record_new_files(self) -> None:
        """Record that files were created in the folder."""
        self._changes += 1
        self._folders[self._folder.path] = self._changes

    def retire(self, *files: SharedFile) -> None:
        """Flush these files once more. They are no longer current."""
        # Drop discarded files: without a flush, the list would grow with every completed fragment.
        self._retired = {file: None for file in (*self._retired, *files) if not file.discarded}

    def supersede(self, log: SharedFile, *, unflushed: bool) -> None:
        """Remove this log after the next flush, because another log has replaced it.

        `unflushed` is for spools that are not flushed: the next call removes the log, since the kernel has written its
        replacement long before.
        """
        log.seal()
        if unflushed:
            self._discard(self._superseded)
        self._superseded.append(log)

    # -- Flushing ------------------------------------------------------------------------------------------------------

    async def flush_through(self, version: int) -> None:
        """Return once that version is on the disk. Callers that wait at the same time share one flush.

        Raises OSError if the flush fails. Cancelling the wait does not stop the flush.
        """
        while self.flushed_version < version:
            self.require_sound()
            # A flush that is done may not cover this version, and awaiting it would never suspend.
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self.flush())
                self._flushing.add_done_callback(_retrieve)
            await asyncio.shield(self._flushing)

    async def flush(self) -> None:
        """Force everything written so far to the disk. Raises OSError if a sync fails."""
        pending = self._pending()
        with ExitStack() as loans:
            # The content of a discarded file is safe in a fragment store.
            borrowed = [
                loans.enter_context(file.borrow())
                for file in pending.files
                if not (file.discarded or file.is_quarantined)
            ]
            done = await asyncio.gather(
                *(asyncio.to_thread(self._force, file.sync) for file in borrowed),
                *(asyncio.to_thread(self._force, self._folder.disk.sync_folder, each) for each in pending.folders),
                return_exceptions=True,
            )
        failed = next((each for each in done if isinstance(each, BaseException)), None)
        if isinstance(failed, OSError):
            self._report_failure(failed)
        if failed is not None:
            raise failed
        self._flushed(pending)

    def flush_now(self) -> None:
        """Do the same as `flush`, but block the event loop until then."""
        pending = self._pending()
        self._sync(pending.files, pending.folders)
        self._flushed(pending)

    def ensure_flushed(self, version: int, log: SharedFile | None) -> bool:
        """Ensure that `log` as of that version survives power loss, under any policy. Return False if the disk fails.

        The caller is about to remove the files of a completed fragment, and with them the only other log that has the
        journal's end. Usually everything has been flushed since, and there is nothing to do.
        """
        if self.flushed_version < version and not self.failed and log is not None:
            folders = dict(self._folders)
            with contextlib.suppress(OSError):  # `_sync` has reported it.
                self._sync([log], folders)
                self._folders_flushed(folders)
        return not self.failed

    def require_sound(self) -> None:
        """Raise DiskFailed if a sync has failed."""
        if self._failure is not None:
            raise DiskFailed(
                f"the disk failed to keep content written to {self._folder.path} ({self._failure}). The spool is "
                "recovered again; if that does not help, replace the disk"
            )

    def _pending(self) -> _FlushWork:
        """Return everything that a flush must force to the disk now."""
        files, end = self._current()
        retired = list(self._retired)
        return _FlushWork(self.version, end, retired + files, retired, dict(self._folders), list(self._superseded))

    def _sync(self, files: Iterable[SharedFile], folders: Iterable[Path]) -> None:
        try:
            for file in files:
                if not (file.discarded or file.is_quarantined):
                    with file.borrow():
                        self._force(file.sync)
            for folder in folders:
                self._force(self._folder.disk.sync_folder, folder)
        except OSError as error:
            self._report_failure(error)
            raise

    def _force(self, sync: Callable[..., None], *arguments: Path) -> None:
        """Call `sync`, in any thread. If it fails, mark the folder immediately, because this process may end soon."""
        try:
            sync(*arguments)
        except OSError as error:
            self._folder.distrust(error)
            raise

    def _flushed(self, pending: _FlushWork) -> None:
        """Record that everything in `pending` is on the disk."""
        self._retired = {file: None for file in self._retired if file not in pending.retired}
        self._folders_flushed(pending.folders)
        self.flushed_version = max(self.flushed_version, pending.version)
        self._on_flushed(pending.end)
        self._discard(pending.superseded)

    def _folders_flushed(self, folders: dict[Path, int]) -> None:
        for folder, change in folders.items():
            if self._folders.get(folder) == change:
                del self._folders[folder]

    def _discard(self, superseded: list[SharedFile]) -> None:
        for log in list(superseded):
            if log in self._superseded:
                self._superseded.remove(log)
                log.discard()

    def _report_failure(self, error: OSError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        _log.error(
            "spool.sync_failed",
            journal=self._folder.journal,
            folder=str(self._folder.path),
            error=str(error),
        )
        self.on_failure()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark the error as retrieved, since the waiting tasks get it."""
    if not task.cancelled():
        task.exception()
