"""Forcing a spool to the disk: its content, its log, and the folder if names in it are new, all at the same time.

What is on the disk is known by version: the spool counts its commits, and a flush covers those that it began behind.
A log that was started over, or that an empty fragment has left behind, goes once a flush has covered what takes its
place.

A sync that fails ends the use of the spool (`DiskFailed`): the kernel may have dropped what it could not write, and
would call the next sync a success. The folder is marked, so that recovery writes everything anew.
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
    """Files that a spool writes to, and the journal's end as they have it by now."""

    files: list[SharedFile]
    end: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """What a flush forces to the disk: commits up to `version`, the journal up to `end`.

    `retired` are those of the `files` that need no further sync, and the `superseded` logs are of no use any more then.
    """

    version: int
    end: int
    files: list[SharedFile]
    retired: list[SharedFile]
    folders: dict[Path, int]
    superseded: list[SharedFile]


class Flusher:
    """Forces one spool to the disk, and knows how much of it is there. On the spool's event loop."""

    def __init__(
        self,
        folder: SpoolFolder,
        current: Callable[[], Current],
        on_flushed: Callable[[int], object],
        *,
        recovered: bool = False,
        retired: Sequence[SharedFile] = (),
    ) -> None:
        """`current` asks what there is to flush; `on_flushed` hears up to which end of the journal that has been done.

        `recovered` says that the spool has files already. They may not be on the disk, nor may the `retired` ones.
        """
        self.version = int(recovered)
        """Counts commits, and whatever else is to outlive the machine."""
        self.flushed_version = 0
        """The last one that is known to be on the disk."""
        self.on_failure: Callable[[], object] = lambda: None
        """Called once, when a sync has failed."""
        self._folder = folder
        self._current = current
        self._on_flushed = on_flushed
        self._retired = list(retired)
        self._superseded: list[SharedFile] = []
        # Folders in which names were made since, and at which change. At first those above it may be new, too: up to
        # the data directory, whose name is in the last of these.
        self._folders = dict.fromkeys((folder.path, *folder.path.parents[:4]), 0)
        self._changes = 0
        self._flushing: asyncio.Task[None] | None = None
        self._failure: OSError | None = None

    @property
    def failed(self) -> bool:
        """Whether a sync has failed."""
        return self._failure is not None

    @property
    def superseded(self) -> tuple[SharedFile, ...]:
        """Logs that wait for a flush to be removed."""
        return tuple(self._superseded)

    # -- What is to be flushed -----------------------------------------------------------------------------------------

    def names_change(self) -> None:
        """Files were created in the folder."""
        self._changes += 1
        self._folders[self._folder.path] = self._changes

    def retire(self, *files: SharedFile) -> None:
        """These are no longer current, and flushed once more."""
        self._retired += files

    def supersede(self, log: SharedFile, *, in_turn: bool) -> None:
        """Another log has been begun, which makes this one needless. It stays until the next flush.

        With `in_turn` it stays until the next time at most, for spools that are not flushed: by then the kernel has
        written what the other is about.
        """
        log.seal()
        if in_turn:
            self._discard(self._superseded)
        self._superseded.append(log)

    # -- Flushing ------------------------------------------------------------------------------------------------------

    async def through(self, version: int) -> None:
        """Return once that version is on the disk. Those who wait at the same time share one flush.

        Raises OSError when it cannot be. Cancelling the wait changes nothing.
        """
        while self.flushed_version < version:
            self.require_sound()
            if self._flushing is None:
                self._flushing = asyncio.create_task(self.flush())
                self._flushing.add_done_callback(self._flush_ended)
            await asyncio.shield(self._flushing)

    async def flush(self) -> None:
        """Force all that there is by now to the disk. Raises OSError."""
        pending = self._pending()
        with ExitStack() as loans:
            # What was discarded meanwhile is safe in a fragment store.
            borrowed = [
                loans.enter_context(file.borrow()) for file in pending.files if not (file.discarded or file.taken_out)
            ]
            done = await asyncio.gather(
                *(asyncio.to_thread(self._force, file.sync) for file in borrowed),
                *(asyncio.to_thread(self._force, self._folder.disk.sync_folder, each) for each in pending.folders),
                return_exceptions=True,
            )
        failed = next((each for each in done if isinstance(each, BaseException)), None)
        if isinstance(failed, OSError):
            self._tell_failure(failed)
        if failed is not None:
            raise failed
        self._flushed(pending)

    def flush_now(self) -> None:
        """As `flush`, but that the event loop has to wait."""
        pending = self._pending()
        self._sync(pending.files, pending.folders)
        self._flushed(pending)

    def assure(self, version: int, log: SharedFile | None) -> bool:
        """See to it that `log` outlives the machine as it was at that version, whatever the policy.

        A completed fragment is about to go, and with it the only other log that knows where the journal is. Nearly
        always all has been flushed since. False if the disk fails.
        """
        if self.flushed_version < version and not self.failed and log is not None:
            folders = dict(self._folders)
            with contextlib.suppress(OSError):  # It is told of by then.
                self._sync([log], folders)
                self._folders_flushed(folders)
        return not self.failed

    def require_sound(self) -> None:
        """Raises DiskFailed once a sync has failed."""
        if self._failure is not None:
            raise DiskFailed(
                f"the disk failed to keep what was written to {self._folder.path} ({self._failure}). The spool is "
                "taken up anew; if that does not help, replace the disk"
            )

    def _pending(self) -> _Pending:
        """All that is to be forced to the disk by now."""
        files, end = self._current()
        retired = list(self._retired)
        return _Pending(self.version, end, retired + files, retired, dict(self._folders), list(self._superseded))

    def _sync(self, files: Iterable[SharedFile], folders: Iterable[Path]) -> None:
        try:
            for file in files:
                if not (file.discarded or file.taken_out):
                    with file.borrow():
                        self._force(file.sync)
            for folder in folders:
                self._force(self._folder.disk.sync_folder, folder)
        except OSError as error:
            self._tell_failure(error)
            raise

    def _force(self, sync: Callable[..., None], *arguments: Path) -> None:
        """Call `sync`, in any thread. If it fails the folder is marked at once, lest this process ends before that."""
        try:
            sync(*arguments)
        except OSError as error:
            self._folder.distrust(error)
            raise

    def _flushed(self, pending: _Pending) -> None:
        """All of that is on the disk."""
        self._retired = [file for file in self._retired if file not in pending.retired]
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

    def _tell_failure(self, error: OSError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        _log.error(
            "spool could not be forced to the disk and is taken up anew",
            journal=self._folder.journal,
            folder=str(self._folder.path),
            error=str(error),
        )
        self.on_failure()

    def _flush_ended(self, task: asyncio.Task[None]) -> None:
        self._flushing = None
        if not task.cancelled():
            task.exception()  # Whoever waits for it gets it.
