"""Hedged calls: ask several servers the same question until one answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

from coranto.errors import CorantoError

T = TypeVar("T")
NEXT_SECONDS: Final = 1.0
"""The wait for an answer before the next server is also asked."""


async def first_answer(
    calls: Iterable[Callable[[], Coroutine[Any, Any, T]]], timeout: float, failure: CorantoError
) -> T:
    """Return the first result of `calls`; each asks one server.

    The next call begins when the earlier ones have failed, or none has answered for `NEXT_SECONDS`. The first answer
    cancels the others. Raises the error of the last failed call, and `failure` if none ended within `timeout` seconds.
    """
    asked: set[asyncio.Task[T]] = set()

    async def answered(wait: float | None) -> list[T]:
        """Return the first answer in a list: empty if all calls have failed, or none ended within `wait` seconds."""
        nonlocal asked, failure
        while asked:
            done, asked = await asyncio.wait(asked, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    return [task.result()]
                except CorantoError as error:
                    failure = error
            if not done:
                break
        return []

    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for call in calls:
                    asked.add(asyncio.create_task(call()))
                    if found := await answered(NEXT_SECONDS):
                        return found[0]
                if found := await answered(None):
                    return found[0]
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    raise failure
