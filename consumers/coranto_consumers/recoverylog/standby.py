"""`LogStandby` and `LogOwner`: a shard's recovery log during an assignment.

A standby plays the log into a folder of its own. On promotion, it takes the log over, and a store is opened on the
recorder. When the store has restored its checkpoint, `opened` keeps the recovered hints as a backup. From then on the
owner's hints are stored periodically, so that the next player has little to read::

    async with LogStandby(client, coordinator, keys, log, folder, guard=assignment) as standby:
        await standby.tailing()                    # BACKFILL is over
        async with await standby.take_over() as owner:
            store = SqliteStore(owner.recorder)
            checkpoint = await store.restore_checkpoint(shard)
            await owner.opened()                   # PRIMARY
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog

from coranto import labels
from coranto.client import JournalClient
from coranto.coordination.etcd import Coordinator, KeyValue
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import CorantoError, Fenced, InvalidInput, JournalNotFound
from coranto_consumers.recoverylog.hint_store import EtcdAuthority, HintKeys, HintStore
from coranto_consumers.recoverylog.hints import Hints
from coranto_consumers.recoverylog.operations import new_author
from coranto_consumers.recoverylog.player import Player, RecoveredFiles
from coranto_consumers.recoverylog.recorder import Recorder

HINTS_EVERY_S: Final = 300.0

_log = structlog.get_logger(__name__)


class LogStandby:
    """Plays a shard's recovery log. Use as `async with`.

    Leaving the block stops playing, and removes the folder unless the log was taken over. `guard` is the process's
    assignment to the shard. A process that has lost it takes nothing over and writes no hints.
    """

    def __init__(
        self,
        client: JournalClient,
        coordinator: Coordinator,
        keys: HintKeys,
        log: str,
        folder: Path,
        *,
        guard: KeyValue | None = None,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """`folder` is emptied. It must belong to this standby alone."""
        self._client = client
        self._log = log
        self._folder = folder
        self._hint_store = HintStore(coordinator, keys, guard=guard)
        self._authority = EtcdAuthority(coordinator, keys, log, guard=guard)
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._player: Player | None = None

    async def __aenter__(self) -> LogStandby:
        """Begin to play. Raises InvalidInput when the journal is not a recovery log, or the hints name another log."""
        await self._check_journal()
        hints = (await self._hint_store.fetch()).pick(self._log)
        if hints.log != self._log:
            raise InvalidInput(
                f"the hints of shard {self._hint_store.keys.shard} are of {hints.log}, but its log is {self._log}"
            )
        self._player = Player(self._client, hints, self._folder, authority=self._authority)
        await self._player.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._playing.__aexit__(kind, error, traceback)

    @property
    def _playing(self) -> Player:
        if self._player is None:
            raise InvalidInput("a standby plays within its block: `async with LogStandby(...) as standby:`")
        return self._player

    async def tailing(self) -> None:
        """Wait until all content was read that was in the log when playing began. Raises the failure of playing.

        Cancelling ends only the wait.
        """
        await self._playing.tailing()

    async def take_over(self, guard: KeyValue | None = None) -> LogOwner:
        """Take the log over. Pass the assignment as `guard` when it has changed, for example by a promotion.

        Raises Fenced when the process has lost its assignment. Cancelling does not stop the takeover; leaving the
        standby's block does.
        """
        if guard is not None:
            self._hint_store.reassigned(guard)
            self._authority.reassigned(guard)
        recovery = await self._playing.hand_off(new_author(self._entropy))
        recorder = Recorder(self._client, recovery, authority=self._authority, clock=self._clock)
        return LogOwner(recorder, recovery, self._hint_store, self._clock)

    async def _check_journal(self) -> None:
        listing = await self._client.list(f"name={self._log}")
        if not listing.journals:
            raise JournalNotFound(f"recovery log {self._log}")
        found = {label.name: label.value for label in listing.journals[0].spec.labels.labels}
        if found.get(labels.CONTENT_TYPE) != labels.RECOVERY_LOG:
            raise InvalidInput(
                f"{self._log} has the label {labels.CONTENT_TYPE}={found.get(labels.CONTENT_TYPE, '')}; a recovery log "
                f"has {labels.RECOVERY_LOG}"
            )


class LogOwner:
    """Records into a shard's recovery log, and stores the hints of the log. Use as `async with`.

    A cancelled `opened` or `store_hints` may have stored hints, which is harmless. Call it again.
    """

    def __init__(self, recorder: Recorder, recovery: RecoveredFiles, hint_store: HintStore, clock: Clock) -> None:
        self.recorder = recorder
        self._recovered: Hints = recovery.hints
        self._hint_store = hint_store
        self._clock = clock
        self._storing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LogOwner:
        await self.recorder.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._storing is not None:
            self._storing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._storing
        await self.recorder.close()

    async def opened(self, hints_every_s: float = HINTS_EVERY_S) -> None:
        """Record that the store was opened and has restored its checkpoint, so the recovered files are sound.

        Stores the recovered hints as a backup, and new hints immediately and then every `hints_every_s` seconds.
        """
        await self._hint_store.store_recovered(self._recovered)
        await self.store_hints()
        self._storing = asyncio.create_task(self._store_periodically(hints_every_s), name=f"hints {self.recorder.log}")

    async def store_hints(self) -> bool:
        """Store hints of all files recorded so far. Return True if they were stored.

        Raises Fenced, or the recorder's failure.
        """
        return await self._hint_store.store_recorded(await self.recorder.hints())

    async def _store_periodically(self, seconds: float) -> None:
        while True:
            await self._clock.sleep(seconds)
            try:
                await self.store_hints()
            except Fenced as error:
                _log.warning("hints.fenced", log=self.recorder.log, reason=str(error))
                return
            except CorantoError as error:
                _log.warning("hints.not_stored", log=self.recorder.log, reason=str(error))
                if self.recorder.has_failed:
                    return
