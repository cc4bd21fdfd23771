"""Output of a command's content without blocking the event loop.

A pipe is full when its reader, such as a pager, has stopped reading. A blocking write to it would also block Ctrl-C. So
the loop waits until the pipe is writable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BUFFER_BYTES: Final = 1 << 16
_PIPE_BYTES: Final = 4096  # A writable pipe accepts at least this many (PIPE_BUF).


class Sink:
    """Buffers content and writes it to a file descriptor. Use on one event loop."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._gathered = bytearray()
        self._may_block = True

    async def write(self, content: bytes) -> None:
        """Add content, and write when enough is buffered. Raises OSError.

        A cancelled call may have written a part; the rest stays buffered.
        """
        self._gathered += content
        if len(self._gathered) >= _BUFFER_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write all buffered content. Raises OSError; a cancelled call may have written a part."""
        while self._gathered:
            await self._wait_writable()
            written = os.write(self._descriptor, self._gathered[: _PIPE_BYTES if self._may_block else None])
            del self._gathered[:written]

    async def _wait_writable(self) -> None:
        if not self._may_block:
            return
        loop, writable = asyncio.get_running_loop(), asyncio.Event()
        try:
            loop.add_writer(self._descriptor, writable.set)
        except PermissionError:  # Files and /dev/null cannot be polled, and never block.
            self._may_block = False
            return
        try:
            await writable.wait()
        finally:
            loop.remove_writer(self._descriptor)


@contextlib.contextmanager
def opened_sink(output: str) -> Iterator[Sink]:
    """Yield a sink for a file, or for standard output if `output` is `-`."""
    if output == "-":
        sys.stdout.flush()
        yield Sink(sys.stdout.fileno())
    else:
        with Path(output).open("wb", buffering=0) as file:
            yield Sink(file.fileno())
