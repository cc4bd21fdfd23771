"""The schedule of trying again."""

from __future__ import annotations

import itertools

from coranto.client.retry import REPORT_SECONDS, Retry, RetryPolicy


def test_waits_grow() -> None:
    assert [RetryPolicy().wait(attempt) for attempt in range(8)] == [0.05, 0.05, 0.1, 0.1, 0.25, 0.5, 1, 1]
    assert [RetryPolicy().wait(attempt) for attempt in (35, 36, 1000)] == [1, 5, 5]


def test_patience_counts_from_the_first_failure_since_progress() -> None:
    retry = Retry(1.5)
    assert [retry.failed(now) for now in (100.0, 100.05, 100.1, 100.2)] == [0.05, 0.05, 0.1, 0.1]
    assert retry.failed(100.3) == 0.25
    assert retry.failed(101.3) is None
    retry.progressed()
    assert retry.failures == 0
    assert retry.failed(200.0) == 0.05


def test_no_patience_and_endless_patience() -> None:
    assert Retry(0).failed(5.0) is None
    endless = Retry()
    assert all(endless.failed(float(hour * 3600)) is not None for hour in range(1000))


def test_jitter_shortens_waits_by_the_seed_and_never_below_a_half() -> None:
    exact = [RetryPolicy().wait(attempt) for attempt in range(50)]
    jittered = [RetryPolicy(seed=7).wait(attempt) for attempt in range(50)]
    assert jittered == [RetryPolicy(seed=7).wait(attempt) for attempt in range(50)]
    assert jittered != [RetryPolicy(seed=8).wait(attempt) for attempt in range(50)]
    assert all(wait / 2 <= short <= wait for wait, short in zip(exact, jittered, strict=True))


def test_a_policy_yields_the_waits_within_its_timeout() -> None:
    waits = list(RetryPolicy(timeout=20.0).waits())
    assert 19.0 < sum(waits) <= 20.0
    assert sum(RetryPolicy(timeout=2.0, scale=0.2).waits()) <= 2.0
    assert list(itertools.islice(RetryPolicy().waits(), 4)) == [0.05, 0.05, 0.1, 0.1]


def test_a_job_gives_up_ten_minutes_after_its_first_failure_and_a_service_never() -> None:
    job, service, now = Retry(RetryPolicy(600.0, seed=3)), Retry(RetryPolicy(seed=3)), 50.0
    while (wait := job.failed(now)) is not None:
        assert service.failed(now) is not None
        now += wait
    assert 590 < job.seconds(now) <= 600


def test_one_report_is_due_per_minute() -> None:
    retry, now, reports = Retry(), 1000.0, []
    for _ in range(300):
        wait = retry.failed(now)
        if retry.is_report_due(now):
            reports.append(now)
        if retry.failures == 100:
            retry.progressed()  # Conflicts that pass must not fill the log either.
        now += wait or 0
    assert reports[0] == 1000.0
    assert all(after - before >= REPORT_SECONDS for before, after in itertools.pairwise(reports))
    assert len(reports) > (now - 1000.0) / (REPORT_SECONDS + 5)
