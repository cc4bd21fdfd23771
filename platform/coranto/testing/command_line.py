"""The `coranto` command in the test's process, and a fake broker for it on a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, TextIOWrapper
from typing import Any
from unittest.mock import patch

from coranto.cli import main
from coranto.client.loop import LoopThread
from coranto.testing.fake_broker import CallPoint, FakeBroker


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command: its exit code, standard output and standard error."""

    code: int
    output: str
    errors: str


class CommandLine:
    """Runs the command line. `captured` returns the output (out, err) since its last call."""

    def __init__(self, captured: Callable[[], Any], *prefix: str) -> None:
        self._captured = captured
        self._prefix = prefix

    def __call__(self, *words: str, input: bytes = b"") -> CommandResult:
        with patch("sys.stdin", TextIOWrapper(BytesIO(input))):
            code = main([*self._prefix, *words])
        captured = self._captured()
        return CommandResult(code, captured.out.decode(), captured.err.decode())


class RemoteBroker:
    """A fake broker that serves on its own thread, while the test's thread does other work. Call `stop` at the end."""

    def __init__(self) -> None:
        self._loop = LoopThread("fake-broker")
        self.fake = self._loop.run(self._start())

    async def _start(self) -> FakeBroker:
        return await FakeBroker().__aenter__()

    def write(self, name: str, content: bytes) -> None:
        """Commit content, as if a client had appended it."""
        self._loop.run(self.fake.write(name, content))

    def reached(self, point: CallPoint, times: int = 1) -> None:
        """Wait until `point` was reached `times` times since the start."""
        self._loop.run(self.fake.reached(point, times))

    def contents(self) -> dict[str, bytes]:
        """Return the content of each journal."""
        return {name: journal.content for name, journal in self.fake.journals.items()}

    def stop(self) -> None:
        self._loop.run(self.fake.__aexit__(None, None, None))
        self._loop.stop()
