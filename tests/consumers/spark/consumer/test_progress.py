"""A consumer's progress as shown to users."""

from __future__ import annotations

from coranto_consumers.spark.consumer.progress import ConsumeReport, show_progress


class Lines:
    """A log that stores its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        self.events.append((event, facts))


def report(transactions: int, read: int) -> ConsumeReport:
    return ConsumeReport(transactions, read // 10, read // 10, 0, {"a": read}, {"a": 3000}, 0, 1)


def test_consumed_bytes_are_counted_up_to_the_initial_heads() -> None:
    log = Lines()
    with show_progress(log) as show:
        for number, read in enumerate((1000, 2000, 3000)):  # A thousand bytes were consumed in an earlier run.
            show(report(number, read))
    first, last = log.events[0], log.events[-1]
    assert first == ("task.started", {"task": "Consuming"})
    assert last[0] == "task.done"
    assert last[1]["done"] == "2.0 KiB"
