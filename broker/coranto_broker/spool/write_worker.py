"""Write and hash large content in another thread, in order, while the event loop continues."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MAX_BEHIND_BYTES = 4 << 20
"""The maximum content (in bytes) that may wait to be written and hashed."""
_RESUME_BYTES = MAX_BEHIND_BYTES // 2
_BATCH_BYTES = 4 << 20
"""The bytes after which a thread serves another owner, so that a few large appends cannot occupy all threads."""

_WORKERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="aside")  # Not shared with uploads.


class WriteQueue:
    """The jobs of one owner. Jobs that arrive while a thread works are done by the same thread, without a new handover.

    After a job has failed, later jobs are skipped. `join` and `abandon` may do jobs themselves and then block the event
    loop for as long as a few jobs take. Await `done` first to avoid this.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], object], int]] = deque()
        self._at_work = threading.Lock()
        self._failure: Exception | None = None
        # Totals of added and of finished jobs. Each is changed by one side only.
        self._added = self._finished = 0  # Bytes.
        self._jobs_added = self._jobs_finished = 0
        self._batch: asyncio.Future[None] | None = None
        self._capacity_waiter: asyncio.Future[None] | None = None
        self._thread = 0

    @property
    def failed(self) -> bool:
        """True if a job has failed and `join` has not raised its error yet."""
        return self._failure is not None

    @property
    def idle(self) -> bool:
        """True if all jobs are done and none has failed."""
        return self._jobs_added == self._jobs_finished and self._failure is None

    def add(self, job: Callable[[], object], size: int) -> None:
        """Add a job, which is done after all earlier jobs. `size` is the number of bytes of its content."""
        self._added += size
        self._jobs_added += 1
        self._jobs.append((job, size))
        if self._batch is None:
            self._hand_over()

    async def wait_for_capacity(self) -> None:
        """Return once there is capacity for more jobs. For one task at a time."""
        if self._added - self._finished <= MAX_BEHIND_BYTES:
            return
        self._capacity_waiter = asyncio.get_running_loop().create_future()
        try:
            if self._added - self._finished > _RESUME_BYTES:  # Otherwise perhaps no job is left that wakes this task.
                await self._capacity_waiter
        finally:
            self._capacity_waiter = None

    async def done(self) -> None:
        """Return once all jobs are done. Raises as `join` does. Cancelling the wait does not stop the jobs."""
        while self._batch is not None and not self._batch.done():
            await asyncio.shield(self._batch)
        self.join()

    def join(self) -> None:
        """Block until all jobs are done. If a job failed, raises its error once; later jobs were skipped."""
        self._work()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Drop all waiting jobs and any failure. Blocks until the running job is done."""
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
        self._wake_waiter()
        if self._jobs:  # The jobs exceeded one batch, or a job came after the thread's last check.
            self._hand_over()

    def _wake_waiter(self) -> None:
        if self._capacity_waiter is not None and not self._capacity_waiter.done():
            self._capacity_waiter.set_result(None)

    def _work(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Do all jobs. With `loop`, do one batch of them, and wake the task that waits for capacity."""
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
                    except Exception as error:  # noqa: BLE001  # `join` raises it.
                        self._failure = error
                done += size
                self._finished += size
                self._jobs_finished += 1
                if (
                    loop is not None
                    and self._capacity_waiter is not None
                    and self._added - self._finished <= _RESUME_BYTES
                    and threading.get_ident() != self._thread
                ):
                    loop.call_soon_threadsafe(self._wake_waiter)
