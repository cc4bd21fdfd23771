"""The control of the crash matrices' processes: a connection to the test, and a client that stops at named steps."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

from coranto.client import AppendResult, Chunk, JournalClient
from coranto.errors import Fenced
from coranto.messages import Flags, JsonLines, iter_messages
from coranto_consumers.runtime.testing import RunningShard

RESUME = "resume"


def _word_of(words: queue.SimpleQueue[str]) -> str:
    """Return the next word. The process ends when the test does."""
    word = words.get()
    if not word:
        os._exit(2)
    return word


class Control:
    """The connection to the test, and the point where this process must stop."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(job["control"])
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._permissions: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._dispatch_words, daemon=True).start()
        self._point = job.get("point", "")
        self._dies = job.get("dies", False)
        self.armed = False
        self.is_restored = False
        self.say(job["name"])

    def say(self, word: str) -> None:
        self._socket.sendall(f"{word}\n".encode())

    def _dispatch_words(self) -> None:
        """Separate commands from permissions to resume, because a paused process has one waiting thread for each."""
        for line in self._socket.makefile("r"):
            word = line.strip()
            (self._permissions if word == RESUME else self._commands).put(word)
        self._commands.put("")
        self._permissions.put("")

    def _next_command(self) -> str:
        return _word_of(self._commands)

    def arm(self) -> None:
        """Stop at the point the next time it is reached."""
        self.armed = bool(self._point)

    def _stops_at(self, point: str) -> bool:
        if not self.armed or point != self._point:
            return False
        self.armed, self._point = False, ""
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.say("stopped")
        return True

    def at(self, point: str) -> None:
        """Stop here if the test wants it, in a thread that may block."""
        if self._stops_at(point):
            _word_of(self._permissions)

    async def passing(self, point: str) -> None:
        """Stop here if the test wants it, on the event loop. It stalls completely, as on a machine that hangs."""
        self.at(point)

    async def follow(self, shard: RunningShard, journal: str) -> None:
        """Let the shard read as far as the test says, until it must finish or is fenced off."""
        ready = asyncio.create_task(shard.primary.ready.wait())
        await asyncio.wait({ready, shard.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.is_restored = True
        self.say("restored")
        while (word := await asyncio.to_thread(self._next_command)) != "finish":
            try:
                await shard.read_through({journal: int(word)})
            except Fenced:
                self.say("fenced")
                return
            self.arm()
            self.say("read")
        await shard.finish()
        self.say("finished")


class StoppingClient(JournalClient):
    """A client that stops around reads, and around appends of messages."""

    control: Control
    acks = 0

    async def read(self, *arguments: Any, **options: Any) -> AsyncGenerator[Chunk]:  # type: ignore[override]
        async for chunk in super().read(*arguments, **options):
            await self.control.passing("read.before")
            yield chunk
            await self.control.passing("read.after")

    async def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        first = next(iter_messages(JsonLines(), journal, [b"".join(content)], 0))
        if first.flags != Flags.ACK_TXN:
            step = "publish"
        else:
            self.acks += self.control.armed
            step = f"ack{self.acks}"
        await self.control.passing(f"{step}.before")
        result = await super().append(journal, content, **options)
        await self.control.passing(f"{step}.after")
        return result
