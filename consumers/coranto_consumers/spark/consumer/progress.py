"""The progress of a running consumer, its display, and hooks."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection

from coranto.telemetry import Log, amount, progress
from coranto.tracing import TraceSpan, tracer
from coranto_consumers.journals.losses import LostContent
from coranto_consumers.spark.consumer.pending_report import OldestTransaction


class Step(enum.Enum):
    """The steps of a consumer, in order. The steps from PLANNED on repeat for each transaction."""

    FENCED = "the fence is raised and the checkpoint restored"
    RECOVERED = "the checkpoint's acknowledgements are appended again, and stale staged rows are deleted"
    PLANNED = "the transaction's ranges are planned"
    SEQUENCED = "its messages are read, and the committed ones are known"
    STAGED = "its rows are staged"
    PUBLISHED = "its messages are in their journals, pending"
    MERGED = "staged rows are merged, in a transaction of the store that is still open"
    COMMITTED = "the store's transaction has committed"
    ACKNOWLEDGED = "acknowledgements are appended: published messages are committed"


class Hooks:
    """Hooks that a consumer calls while it runs. An exception from a hook ends the consumer there, as a crash would."""

    def on_step(self, step: Step) -> None:
        """Handle the completion of `step`."""

    def commit(self, connection: Connection) -> None:
        """Commit the SQL transaction."""
        connection.commit()

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt, after a failure of a store, broker or fragment store."""
        time.sleep(seconds)


_SOME_CHECKPOINTS: Final = 5
PHASES: Final = ("reading", "writing", "committing", "acknowledging")
"""The phases of a transaction, in order. `reading` is the time that a transaction waits for its input."""


@dataclass(frozen=True, slots=True)
class ConsumeReport:
    """The progress of a run so far."""

    transactions: int
    messages: int
    """Committed content messages that were processed."""
    records_read: int
    """Records that were read: these messages, duplicates, acknowledgements, and pending or rolled back messages."""
    published: int
    """Messages that were published and acknowledged."""
    offsets: Mapping[str, int]
    """Offsets through which each source journal is processed, as in the committed checkpoint."""
    heads: Mapping[str, int]
    """Write heads of the source journals. During a run: the heads to catch up with. At its end: the latest heads."""
    replayed_intents: int
    """The number of journals whose acknowledgements in the restored checkpoint were appended again."""
    fence: int
    misfits: int = 0
    """Processed messages that do not fit the application's columns: dead letters, or nulls."""
    lost: tuple[LostContent, ...] = ()
    """Lost content of the sources, which was skipped."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of transactions by phase: reading (waiting for their input), writing, committing, acknowledging."""

    open_transactions: tuple[OldestTransaction, ...] = ()
    """The oldest open transaction of each source journal that has one."""

    retries: int = 0
    """Failures of stores and brokers that the run has retried."""
    outage_seconds: float = 0.0
    """The time since the first failure after the last progress. 0 while the run makes progress."""

    @property
    def lag_bytes(self) -> int:
        """The bytes of content up to `heads` that are not processed yet."""
        return sum(max(0, head - self.offsets.get(journal, 0)) for journal, head in self.heads.items())


NOTHING: Final = ConsumeReport(0, 0, 0, 0, {}, {}, 0, 0)
OnProgress = Callable[[ConsumeReport], None]


@contextmanager
def show_progress(log: Log | None = None) -> Iterator[OnProgress]:
    """Show a consumer's progress in bytes, on a terminal or in `log`. Yields the function for `on_progress`."""
    with progress("Consuming", unit="bytes", log=log) as bar:
        lag: int | None = None

        def show(report: ConsumeReport) -> None:
            nonlocal lag
            bar.note(
                f"{report.messages:,} messages ({report.published:,} published), transactions: {report.transactions}"
                f"{describe_open_transaction(report)}"
            )
            if lag is None:
                bar.expect(report.lag_bytes)
            else:
                bar.advance(lag - report.lag_bytes)
            lag = report.lag_bytes

        yield show


def describe_open_transaction(report: ConsumeReport) -> str:
    """Describe the transaction with the most content to read again among those open over several checkpoints."""
    lasting = [each for each in report.open_transactions if each.checkpoints >= _SOME_CHECKPOINTS]
    if not lasting:
        return ""
    most = max(lasting, key=lambda each: each.bytes_read_again)
    return (
        f"; open over {most.checkpoints} checkpoints: a transaction in {most.journal}, "
        f"{amount(most.bytes_read_again, 'bytes')} to read again"
    )


class PhaseTimes:
    """Measures the phases of one transaction, in seconds, and traces them."""

    def __init__(self, consumer: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._seconds: dict[str, float] = {}
        self._consumer = consumer
        self._tracer = tracer()
        self._begun = time.time_ns()
        self._traced: list[tuple[str, int]] = []
        """The phases to trace, with the times of their ends."""

    def end_phase(self, phase: str) -> None:
        """Record the end of a phase, which is the begin of the next one."""
        now = self._monotonic()
        self._seconds[phase] = now - self._last
        self._last = now
        if self._tracer is not None:
            self._traced.append((phase, time.time_ns()))

    @contextmanager
    def trace(self) -> Iterator[TraceSpan | None]:
        """Run the block in the transaction's trace span, which ends with the block. Yields None without tracing."""
        if self._tracer is None:
            yield None
            return
        begun = self._begun
        with self._tracer.span("transaction", kind="CONSUMER", consumer=self._consumer, begun=begun) as span:
            try:
                with span.current():
                    yield span
            finally:
                for phase, ended in self._traced:
                    self._tracer.span(phase, consumer=self._consumer, within=span, begun=begun).end(at=ended)
                    begun = ended

    def plus(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the phases' times plus the times of earlier transactions."""
        return {phase: seconds.get(phase, 0.0) + self._seconds.get(phase, 0.0) for phase in PHASES}
