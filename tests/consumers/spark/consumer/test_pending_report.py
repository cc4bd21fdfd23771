"""Reports about producers' open transactions: once they are large, and then at each doubling."""

from __future__ import annotations

from dataclasses import replace

from structlog.testing import capture_logs

from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark import ConsumeReport
from coranto_consumers.spark.committed.sequencing import LongTransaction
from coranto_consumers.spark.consumer.metrics import SparkConsumerMetrics
from coranto_consumers.spark.consumer.pending_report import OldestTransaction, OldestTransactions, log_long_transactions
from coranto_consumers.spark.consumer.progress import describe_open_transaction

A, B = (ProducerId(bytes([n] * 6)) for n in (1, 2))


def state(read_through: int, **begins: int) -> Source:
    producers = {"a": A, "b": B}
    return Source(read_through, {producers[name]: ProducerState(7, begin) for name, begin in begins.items()})


def test_the_oldest_open_transaction_of_each_journal_is_reported() -> None:
    now = 100.0
    seen = OldestTransactions(1000, lambda: now)
    quiet = state(50, b=10)
    assert seen.observe({"j": state(400, a=300, b=100), "k": quiet, "m": state(5)}) == (
        OldestTransaction("j", B, 100, 300, 1, 0.0),
        OldestTransaction("k", B, 10, 40, 1, 0.0),
    )
    now = 105.0
    assert seen.observe({"j": state(600, a=300, b=100), "k": quiet}) == (
        OldestTransaction("j", B, 100, 500, 2, 5.0),
        OldestTransaction("k", B, 10, 40, 1, 5.0),
    )
    assert seen.observe({"j": state(700, a=300)}) == (OldestTransaction("j", A, 300, 400, 1, 0.0),)
    assert seen.observe({"j": state(700, a=-1)}) == ()


def test_a_large_open_transaction_is_logged_and_again_at_each_doubling() -> None:
    now = 0.0
    seen = OldestTransactions(1000, lambda: now)
    with capture_logs() as logs:
        for read_through in range(500, 10_000, 500):
            seen.observe({"j": state(read_through, a=0)})
        for seconds in (599.0, 601.0, 900.0, 1201.0, 1300.0):
            now = seconds
            seen.observe({"j": state(9_500, a=0)})
    logged = [(each["bytes_read_again"], each["checkpoints"], each["seconds"]) for each in logs]
    assert logged == [(1500, 3, 0), (3500, 7, 0), (7500, 15, 0), (9500, 21, 601), (9500, 24, 1300)]
    assert {each["event"] for each in logs} == {"consumer.transaction_stays_open"}


def test_parts_of_a_long_transaction_are_logged_together() -> None:
    seen = OldestTransactions(1000)
    long = LongTransaction("j", A, 5_000)
    with capture_logs() as logs:
        log_long_transactions([long], {"j": state(5_000, a=0)}, 1000)
        for begin in range(0, 5_000, 1_000):
            seen.observe({"j": state(5_000, a=begin)})
    [logged] = logs
    assert (logged["event"], logged["bytes_read_again"], logged["parts"]) == ("consumer.long_transaction", 5_000, 5)


def test_progress_and_metrics_show_the_open_transaction() -> None:
    lasting = (OldestTransaction("j", A, 0, 3 << 20, 5, 60.0), OldestTransaction("k", A, 0, 9 << 20, 1, 0.0))
    begun = ConsumeReport(5, 0, 9, 0, {}, {}, 0, fence=1, open_transactions=lasting)
    assert describe_open_transaction(begun) == "; open over 5 checkpoints: a transaction in j, 3.0 MiB to read again"
    assert describe_open_transaction(replace(begun, open_transactions=lasting[1:])) == ""

    metrics = SparkConsumerMetrics("delays")
    values = {"consumer": "delays", "journal": "j"}
    metrics.observe(begun)
    assert metrics.registry.get_sample_value("coranto_spark_open_transaction_bytes", values) == 3 << 20
    metrics.observe(ConsumeReport(6, 5, 9, 0, {}, {}, 0, fence=1))
    assert metrics.registry.get_sample_value("coranto_spark_open_transaction_bytes", values) is None
