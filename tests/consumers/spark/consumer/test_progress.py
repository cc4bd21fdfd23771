"""A consumer's progress as people see it."""

from __future__ import annotations

from coranto_consumers.spark.consumer.progress import ConsumeReport, catching_up


class Lines:
    """A log that keeps its events."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        self.said.append((event, facts))


def report(transactions: int, read: int) -> ConsumeReport:
    return ConsumeReport(transactions, read // 10, read // 10, 0, {"a": read}, {"a": 3000}, 0, 1)


def test_bytes_that_were_consumed_are_counted_to_the_heads_of_the_beginning() -> None:
    log = Lines()
    with catching_up(log) as show:
        for number, read in enumerate((1000, 2000, 3000)):  # A thousand bytes were consumed in an earlier run.
            show(report(number, read))
    first, last = log.said[0], log.said[-1]
    assert first == ("task.started", {"task": "Consuming"})
    assert last[0] == "task.done"
    assert last[1]["done"] == "2.0 KiB"
