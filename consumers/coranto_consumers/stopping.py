"""Stop of a continuous consumer by a signal, after the current transaction."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final, Protocol, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop(Protocol):
    """Decides when a consumer stops."""

    def __call__(self) -> bool: ...

    def wait(self, seconds: float = 1.0) -> bool:
        """Wait for `seconds`, or until the consumer should stop. Return True in the latter case."""


class StopOnSignals:
    """Stops a consumer when this process receives SIGTERM or SIGINT.

    ::

        with StopOnSignals() as stop:
            consumer.run_until_stopped(stop, wait=stop.wait)

    Use it in the main thread. Leaving the context restores the previous handlers. A new Spark session installs its own
    SIGINT handler, which cancels all jobs; this class restores its handler before the next transaction.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._handle()
        return self

    def __call__(self) -> bool:
        self._handle()
        return self._asked.is_set()

    def wait(self, seconds: float = 1.0) -> bool:
        return self._asked.wait(seconds)

    def _handle(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) != self._stop:
                signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
