"""Commands that are interrupted, or whose output takes no more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import pytest

from coranto.cli import connect
from coranto.client import JournalClient


class InterruptedLoop:
    """Is interrupted at once, and its work cannot be cancelled."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise KeyboardInterrupt


def test_work_that_is_held_up_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    async def work(client: JournalClient) -> None:
        raise AssertionError("it never begins")

    monkeypatch.setattr(connect, "_CLEAN_UP_SECONDS", 0.0)
    monkeypatch.setattr(connect, "shared_loop", InterruptedLoop)
    monkeypatch.setattr(connect.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        connect.with_client("127.0.0.1:1", work)
    assert ended.value.code == 130


def test_output_that_is_full_is_reported_once() -> None:
    script = "import sys; from coranto.cli import main; sys.exit(main(['version']))"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"coranto: No space left on device\n")
