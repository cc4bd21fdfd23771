"""Work that another thread does, in order, while the event loop goes on: writing and hashing of large content."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_BEHIND_BYTES = 4 << 20
"""Content that may wait for its work."""
_ROOM_BYTES = MAX_BEHIND_BYTES // 2
_BATCH_BYTES = 4 << 20
"""A thread turns to another owner's work after this much, lest a few large appends keep all threads."""

_WORKERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="aside")  # Its own: appends wait for no upload.


class Aside:
    """Jobs of one owner. Those that come while a thread is at it are done by the same thread: one handover for many.

    Once a job has failed those after it are not done. `join` and `abandon` may take the place of the other thread, and
    hold up the event loop for as long as a few jobs take; who awaits `done` before makes that no time at all.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._at_work = threading.Lock()
        self._failure: Exception | None = None
        # What was added and what is done with: each is changed by one side only.
        self._added = self._finished = 0  # Bytes.
        self._jobs_added = self._jobs_finished = 0
        self._batch: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._thread = 0

    @property
    def failed(self) -> bool:
        """Whether a job has failed, which `join` has not raised yet."""
        return self._failure is not None

    @property
    def idle(self) -> bool:
        """Whether everything is done, and went well."""
        return self._jobs_added == self._jobs_finished and self._failure is None

    def add(self, job: Callable[[], object], size: int) -> None:
        """Have this done after what was added before; `size` is that of its content."""
        self._added += size
        self._jobs_added += 1
        self._jobs.append((job, size))
        if self._batch is None:
            self._hand_over()

    async def room(self) -> None:
        """Return once little enough waits. For one task at a time."""
        if self._added - self._finished <= MAX_BEHIND_BYTES:
            return
        self._room = asyncio.get_running_loop().create_future()
        try:
            if self._added - self._finished > _ROOM_BYTES:  # Otherwise nobody may be left to tell us.
                await self._room
        finally:
            self._room = None

    async def done(self) -> None:
        """Return once everything is done. Raises as `join` does."""
        while self._batch is not None and not self._batch.done():
            await asyncio.shield(self._batch)
        self.join()

    def join(self) -> None:
        """Return once everything is done. Raises, once, what a job raised; then those after it were not done."""
        self._work()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Return once nothing is being done any more, and forget the rest, failures included."""
        self._jobs.clear()
        self._work()
        self._failure = None
        self._finished, self._jobs_finished = self._added, self._jobs_added

    def _hand_over(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._batch = loop.run_in_executor(_WORKERS, self._work, loop)
        self._batch.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Future[None]) -> None:
        self._batch = None
        self._tell_room()
        if self._jobs:  # There was too much for one batch, or they came when the thread had looked for the last time.
            self._hand_over()

    def _tell_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _work(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Do all jobs; or, given the event loop, a batch of them, and tell it in time that there is room again."""
        done = 0
        with self._at_work:
            while loop is None or done < _BATCH_BYTES:
                try:
                    job, size = self._jobs.popleft()
                except IndexError:
                    return
                if self._failure is None:
                    try:
                        job()
                    except Exception as error:  # noqa: BLE001  # It belongs to whoever waits.
                        self._failure = error
                done += size
                self._finished += size
                self._jobs_finished += 1
                if (
                    loop is not None
                    and self._room is not None
                    and self._added - self._finished <= _ROOM_BYTES
                    and threading.get_ident() != self._thread
                ):
                    loop.call_soon_threadsafe(self._tell_room)
