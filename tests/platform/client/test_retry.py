"""The schedule of trying again."""

from __future__ import annotations

from coranto.client.retry import Retry, backoff


def test_waits_grow() -> None:
    assert [backoff(attempt) for attempt in range(8)] == [0.05, 0.05, 0.1, 0.1, 0.25, 0.5, 1, 1]
    assert [backoff(attempt) for attempt in (35, 36, 1000)] == [1, 5, 5]


def test_patience_counts_from_the_first_failure_since_progress() -> None:
    retry = Retry(patience=1.5)
    assert [retry.failed(now) for now in (100.0, 100.05, 100.1, 100.2)] == [0.05, 0.05, 0.1, 0.1]
    assert retry.failed(100.3) == 0.25
    assert retry.failed(101.3) is None
    retry.progressed()
    assert retry.failures == 0
    assert retry.failed(200.0) == 0.05


def test_no_patience_and_endless_patience() -> None:
    assert Retry(patience=0).failed(5.0) is None
    endless = Retry()
    assert all(endless.failed(float(hour * 3600)) is not None for hour in range(1000))
