"""The connection of a command, and its end."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NoReturn

import pytest

from coranto.cli import connect
from coranto.client import JournalClient


class InterruptedLoop:
    """Is interrupted immediately, and its work cannot be cancelled."""

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()
        raise KeyboardInterrupt


def test_blocked_work_does_not_delay_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    async def work(client: JournalClient) -> None:
        raise AssertionError("the work must not start")

    monkeypatch.setattr(connect, "_CLEAN_UP_SECONDS", 0.0)
    monkeypatch.setattr(connect, "shared_loop", InterruptedLoop)
    monkeypatch.setattr(connect.os, "_exit", leave)
    with pytest.raises(SystemExit) as ended:
        connect.with_client("127.0.0.1:1", work)
    assert ended.value.code == 130
