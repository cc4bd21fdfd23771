"""Writing a writer's times to the stream's journal of marks (see `coranto.streams.model.watermarks`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from coranto.errors import CorantoError
from coranto.messages.uuids import Flags, build_uuid
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.stream import marks_journal
from coranto.streams.model.watermarks import TimeMark
from coranto.streams.writer.shared import Shared

_log = structlog.get_logger(__name__)


class TimeMarkWriter:
    """Appends a mark for each time that a writer notes. Of times noted during an append, only the largest."""

    def __init__(
        self,
        shared: Shared,
        stream: str,
        resolved: Callable[[], Awaitable[None]],
        positions: Callable[[], Mapping[int, int]],
    ) -> None:
        """`resolved` waits until all writes so far are resolved; `positions` returns their ends by segment."""
        self._shared = shared
        self._journal = marks_journal(stream)
        self._resolved = resolved
        self._positions = positions
        self._wanted: float | None = None
        self._noted: float | None = None
        self._task: asyncio.Task[None] | None = None

    def note(self, time: float) -> None:
        """Note a time once everything written so far is resolved. A smaller time than before has no effect."""
        self._wanted = time if self._wanted is None else max(time, self._wanted)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"marks on {self._journal}")

    async def flush(self) -> None:
        """Wait until all noted times are in the journal."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self, deadline: float) -> None:
        """Record that this writer has stopped, so that it no longer holds back the watermark.

        Waits for up to `deadline` seconds for times that are being noted.
        """
        if self._task is not None:
            _, late = await asyncio.wait((self._task,), timeout=deadline)
            for task in late:
                task.cancel()
        if self._noted is not None:
            await self._append(TimeMark(self._shared.identity.writer, self._noted, self._positions(), left=True))

    async def _run(self) -> None:
        try:
            while (time := self._wanted) is not None:
                self._wanted = None
                await self._resolved()
                if self._noted is None or time >= self._noted:
                    self._noted = time
                    await self._append(TimeMark(self._shared.identity.writer, time, self._positions()))
        finally:
            self._task = None

    async def _append(self, mark: TimeMark) -> None:
        shared = self._shared
        uuid = build_uuid(shared.identity.producer, shared.ticks.tick(), Flags.OUTSIDE_TXN)
        try:
            await shared.client.append(
                self._journal,
                JsonEvents().marshal(mark.to_message(), uuid),
                retry_unknown=True,
                retry_timeout=shared.retry_timeout,
            )
        except CorantoError as error:
            # Watermarks are delayed or missing; events are not affected.
            _log.warning("stream_writer.time_mark_failed", journal=self._journal, error=str(error))
