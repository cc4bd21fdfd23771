"""Contexts that start in several steps."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Self


class StagedContext(ABC):
    """An asynchronous context whose start has several steps.

    Each step pushes its cleanup to `_exits`. The cleanups run in reverse order when the context exits, and also when a
    later step fails or is cancelled.
    """

    def __init__(self) -> None:
        self._exits = contextlib.AsyncExitStack()

    @abstractmethod
    async def _start(self) -> None:
        """Run all steps."""

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()
