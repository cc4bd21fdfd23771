"""The schedule of retries."""

from __future__ import annotations

import itertools
import socket

import pytest
from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.client.retry import REPORT_SECONDS, Retry, RetryPolicy, wait_or_raise
from coranto.errors import Unavailable
from coranto.testing.clocks import HurriedClock


def test_waits_grow() -> None:
    assert [RetryPolicy().wait(attempt) for attempt in range(8)] == [0.05, 0.05, 0.1, 0.1, 0.25, 0.5, 1, 1]
    assert [RetryPolicy().wait(attempt) for attempt in (35, 36, 1000)] == [1, 5, 5]


def test_retry_timeout_counts_from_the_first_failure_since_progress() -> None:
    retry = Retry(1.5)
    assert [retry.failed(now) for now in (100.0, 100.05, 100.1, 100.2)] == [0.05, 0.05, 0.1, 0.1]
    assert retry.failed(100.3) == 0.25
    assert retry.failed(101.3) is None
    retry.progressed()
    assert retry.failures == 0
    assert retry.failed(200.0) == 0.05


def test_zero_and_endless_retry_timeouts() -> None:
    assert Retry(0).failed(5.0) is None
    endless = Retry()
    assert all(endless.failed(float(hour * 3600)) is not None for hour in range(1000))


def test_jitter_shortens_waits_by_the_seed_to_at_least_a_half() -> None:
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


def test_a_job_gives_up_after_ten_minutes_and_a_service_never() -> None:
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
            retry.progressed()  # Temporary conflicts must not fill the log either.
        now += wait or 0
    assert reports[0] == 1000.0
    assert all(after - before >= REPORT_SECONDS for before, after in itertools.pairwise(reports))
    assert len(reports) > (now - 1000.0) / (REPORT_SECONDS + 5)


class Hours:
    """A clock whose sleeps take no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_a_long_wait_is_logged_after_some_seconds_and_then_each_minute() -> None:
    clock, retry = Hours(), Retry(200)

    async def wait_until_timeout() -> None:
        while True:
            await wait_or_raise(retry, clock, Unavailable("the list of journals: nobody answers"))

    with capture_logs() as logs, pytest.raises(Unavailable):
        await wait_until_timeout()
    assert [each["event"] for each in logs] == ["client.waiting"] * 4
    assert [each["seconds"] // 10 for each in logs] == [0, 6, 12, 18]
    assert "nobody answers" in logs[0]["error"]
    assert logs[0]["log_level"] == "warning"


async def test_a_call_to_an_unavailable_broker_logs_long_before_it_fails(
    unused_endpoint: str, clock: HurriedClock
) -> None:
    with capture_logs() as logs:
        async with JournalClient(unused_endpoint, retry_timeout=7, clock=clock) as client:
            with pytest.raises(Unavailable):
                await client.list("")
    assert unused_endpoint in next(each["error"] for each in logs if each["event"] == "client.waiting")


@pytest.fixture
def unused_endpoint() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"
