"""Logs and progress reports, the same for every program of Coranto.

Logs are structured: an event, with facts as key-value pairs. They go to standard error: coloured on a terminal, plain
lines elsewhere, or JSON for machines. `progress` reports the progress of a long task: a bar on a terminal, log lines
elsewhere.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, TextIO

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from coranto.errors import InvalidInput

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PLAIN_SECONDS = 5.0
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


_CONTROL_CHARACTERS: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]"
)


class Log(Protocol):
    """The part of a logger that `progress` uses."""

    def info(self, event: str, **facts: object) -> object: ...


def configure_logging(level: str = "info", *, json_lines: bool = False, stream: TextIO | None = None) -> None:
    """Send logs of `level` and above to `stream` (default: standard error). Raises InvalidInput.

    Libraries that use the standard logging module are shown at warning level and above.
    """
    threshold = LEVELS.get(level.lower())
    if threshold is None:
        raise InvalidInput(f"{level!r} is not a log level; use one of {', '.join(LEVELS)}", field="log level")
    stream = stream or sys.stderr
    renderer: structlog.typing.Processor
    if json_lines:
        renderer = structlog.processors.JSONRenderer()
    else:
        # Plain tracebacks: richer ones take seconds to render, and show values of variables, which may be secrets.
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([_TRACEBACKS] if json_lines else [_without_control_characters]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
    )
    logging.basicConfig(level=max(threshold, logging.WARNING), stream=stream, force=True)


def escape_control_characters(text: str) -> str:
    """Return text with terminal control characters escaped as in Python, except newlines and tabs."""
    return _CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _without_control_characters(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters in facts, which may quote hostile text. The JSON renderer escapes them itself."""
    return {key: escape_control_characters(value) if isinstance(value, str) else value for key, value in event.items()}


class ProgressReport(Protocol):
    """The progress of one running task."""

    def advance(self, amount: int = 1) -> None:
        """Add `amount` to the work done."""
        ...

    def note(self, text: str) -> None:
        """Set the note about the current step, replacing the previous note."""
        ...

    def expect(self, total: int) -> None:
        """Set the total, once it is known."""
        ...

    def __enter__(self) -> ProgressReport: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def progress(
    title: str,
    total: int | None = None,
    *,
    unit: str = "",
    log: Log | None = None,
    console: Console | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> ProgressReport:
    """Report the progress of a task: `with progress("Publishing", 336776, unit="flights") as report:`.

    Shows a bar if standard error is a terminal. Else it logs a line at the start, at most every five seconds, and at
    the end. The unit `"bytes"` is shown in KiB, MiB and so on.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        return _Bar(title, total, unit, console)
    return _Lines(title, total, unit, log or structlog.get_logger("progress"), monotonic)


def amount(count: float, unit: str = "") -> str:
    """Format a count for people: `336,776 flights`, `1.5 MiB`."""
    if unit != "bytes":
        return f"{count:,.0f} {unit}".rstrip()
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if prefix == "B" else f"{count:.1f} {prefix}"
        count /= 1024
    return f"{count:.1f} TiB"


class _Done(ProgressColumn):
    """The column of a progress bar that shows the work done, the total and the speed."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        done = amount(task.completed, "" if self._unit != "bytes" else self._unit)
        text = done if task.total is None else f"{done} of {amount(task.total, self._unit)}"
        speed = task.finished_speed or task.speed
        return Text(f"{text}, {amount(speed, self._unit)}/s" if speed else text)


class _Bar:
    def __init__(self, title: str, total: int | None, unit: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            _Done(unit),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self._task = self._progress.add_task(title, total=total, note="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._progress.tasks[0].total is None:
            self._progress.update(self._task, total=self._progress.tasks[0].completed)
        self._progress.stop()

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)

    def expect(self, total: int) -> None:
        self._progress.update(self._task, total=total)


class _Lines:
    def __init__(self, title: str, total: int | None, unit: str, log: Log, monotonic: Callable[[], float]) -> None:
        self._title = title
        self._total = total
        self._unit = unit
        self._log = log
        self._monotonic = monotonic
        self._done = 0
        self._note = ""
        self._begun = self._said = monotonic()

    def __enter__(self) -> _Lines:
        total = {} if self._total is None else {"total": amount(self._total, self._unit)}
        self._log.info("task.started", task=self._title, **total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = self._monotonic() - self._begun
        facts: dict[str, object] = {"done": amount(self._done, self._unit), "seconds": round(seconds, 1)}
        if self._done and seconds > 0:
            facts["per_second"] = amount(self._done / seconds, self._unit)
        self._log.info("task.done" if error is None else "task.stopped", task=self._title, **facts)

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        self._write_line()

    def note(self, text: str) -> None:
        self._note = text
        self._write_line()

    def expect(self, total: int) -> None:
        self._total = total

    def _write_line(self) -> None:
        now = self._monotonic()
        if now - self._said < _PLAIN_SECONDS:
            return
        self._said = now
        facts: dict[str, object] = {"done": amount(self._done, self._unit)}
        if self._total:
            facts["of"] = amount(self._total, self._unit)
            facts["percent"] = round(100 * self._done / self._total)
        if self._note:
            facts["note"] = self._note
        self._log.info("task.progress", task=self._title, **facts)
