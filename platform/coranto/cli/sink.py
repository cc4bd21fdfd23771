"""Where a command writes what it reads, without holding up its event loop.

A pipe whose reader has stopped reading, such as a pager, takes no more. A loop that were blocked in writing to it could
not be interrupted, and nor could the process: so the loop waits until the pipe has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TOGETHER: Final = 1 << 16
_PIPE_BYTES: Final = 4096  # A pipe that has room has room for these (PIPE_BUF).


class Sink:
    """Gathers content and writes it to a file descriptor. Used on one event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._gathered = bytearray()
        self._may_block = True

    async def write(self, content: bytes) -> None:
        """Take content in. Raises OSError; a call that is cancelled may have written some of it."""
        self._gathered += content
        if len(self._gathered) >= _TOGETHER:
            await self.flush()

    async def flush(self) -> None:
        """Write what was gathered. Raises as `write` does."""
        while self._gathered:
            await self._room()
            written = os.write(self._descriptor, self._gathered[: _PIPE_BYTES if self._may_block else None])
            del self._gathered[:written]

    async def _room(self) -> None:
        if not self._may_block:
            return
        loop, room = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_writer(self._descriptor, room.set)
        except PermissionError:  # Files and /dev/null cannot be waited for, and need not be.
            self._may_block = False
            return
        try:
            await room.wait()
        finally:
            loop.remove_writer(self._descriptor)


@contextlib.contextmanager
def opened_sink(output: str) -> Iterator[Sink]:
    """The sink of a file, or of standard output for `-`."""
    if output == "-":
        sys.stdout.flush()
        yield Sink(sys.stdout.fileno())
    else:
        with Path(output).open("wb", buffering=0) as file:
            yield Sink(file.fileno())
