"""Batching of appends to one journal, by the rule of docs/architecture.md ("An append")."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from coranto.client.values import AppendResult

C = TypeVar("C")

MAX_BATCH_BYTES: Final = 1 << 20
"""Maximum bytes in a batch of several contents."""


class ContentRange(NamedTuple):
    """The offsets [begin, end) of content in its journal."""

    begin: int
    end: int


class Batches(Generic[C]):
    """Queue of content for one journal. `send` appends it in batches, in order, one batch at a time.

    `send` gets the contents of a batch and their conditions. The whole batch is appended, or all of it fails with the
    same error.
    """

    def __init__(self, send: Callable[[Sequence[bytes], Sequence[C]], Awaitable[AppendResult]]) -> None:
        self._send = send
        self._waiting: list[tuple[bytes, C, asyncio.Future[ContentRange]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def append(self, content: bytes, condition: C) -> ContentRange:
        """Append content and return its offsets. Cancelling does not stop the append. Raises the errors of `send`."""
        done: asyncio.Future[ContentRange] = asyncio.get_running_loop().create_future()
        self._waiting.append((content, condition, done))
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await done

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch = self._take()
                try:
                    result = await self._send([each[0] for each in batch], [each[1] for each in batch])
                except BaseException as error:
                    for _, _, done in batch:
                        if not done.done():
                            done.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
                    continue
                at = result.begin
                for content, _, done in batch:
                    if not done.done():
                        done.set_result(ContentRange(at, at + len(content)))
                    at += len(content)
        finally:
            self._runner = None
            for _, _, done in self._waiting:  # Not empty only if this task was cancelled.
                done.cancel()
            self._waiting.clear()

    def _take(self) -> list[tuple[bytes, C, asyncio.Future[ContentRange]]]:
        size = count = 0
        for content, _, _ in self._waiting:
            if count and size + len(content) > MAX_BATCH_BYTES:
                break
            size += len(content)
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
