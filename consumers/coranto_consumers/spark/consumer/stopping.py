"""Ending a continuous consumer by a signal, after the transaction that is running."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop(Protocol):
    """Tells a consumer when to end."""

    def __call__(self) -> bool:
        """Return True once it is to end."""
        ...

    def wait(self, seconds: float = 1.0) -> bool:
        """Wait for `seconds`, or until it is to end. Return True in the latter case."""
        ...


class StopOnSignals:
    """Asks a consumer to end when this process gets SIGTERM or an interrupt.

    ::

        with StopOnSignals() as stop:
            consumer.run_until_stopped(stop, wait=stop.wait)

    Use it in the main thread. Leaving the context restores the handlers of before. A session that Spark starts takes
    interrupts for itself, and cancels all jobs on one; they are taken back before the next transaction.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self._handle()
        return self

    def __call__(self) -> bool:
        """Return True once a signal has come."""
        self._handle()
        return self._asked.is_set()

    def wait(self, seconds: float = 1.0) -> bool:
        """Wait for `seconds`, or until a signal comes. Return True if one has come."""
        return self._asked.wait(seconds)

    def _handle(self) -> None:
        for number in _SIGNALS:
            if signal.getsignal(number) != self._stop:
                signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
