"""A sensor keeps a consumer running, with one active run at a time from all sources."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import time as time_of_day
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.storage.tags import RUN_KEY_TAG, SENSOR_NAME_TAG

from coranto.errors import Fenced
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.specs.journal_tree import parse_tree
from coranto_consumers.stores.sql import SqlStore
from dagster_coranto import JournalGroup, JournalResource, build_journal_polling_sensor
from dagster_coranto.instance.heartbeat import ALIVE_TAG, Heartbeat
from dagster_coranto.instance.underway import CONSUMER_TAG
from tests.orchestration.instances import new_instance

GROUP = JournalGroup("shop/orders")
JOURNAL = "shop/orders/part-000"
ORDER = b"order\n"
SPEC = f"""
name: {JOURNAL}
replication: 1
fragment: {{length: 1048576, stores: ["file:///"], compression_codec: NONE, refresh_interval: 1m}}
"""
REVENUE = dg.AssetKey("revenue")
TRANSACTION_TICKS = 4


@dataclass
class Transaction:
    """A run with one transaction of several ticks: it reads up to the head, and commits with the fence."""

    run: dg.DagsterRun
    fence: int
    head: int
    ticks_left: int = TRANSACTION_TICKS


class Shop:
    """A cluster, a store, and a sensor of a consumer with transactions longer than the sensor's interval.

    One tick is the unit of time. The steps of the daemon and of run processes are interleaved instead of parallel.
    """

    def __init__(self, cluster: Path, folder: Path, instance: dg.DagsterInstance) -> None:
        self.journals = JournalResource(data_dir=str(cluster))
        self.client = self.journals.client()
        self.instance = instance
        self.store = SqlStore(f"sqlite:///{folder / 'store.db'}")
        self.open: list[Transaction] = []
        self.cursor: str | None = None
        spec = dg.AssetSpec("revenue", tags={CONSUMER_TAG: "c"})

        @dg.multi_asset(name="consume", specs=[spec])
        def consume() -> None: ...

        @dg.asset(deps=["revenue"])
        def report() -> None: ...

        everything = dg.define_asset_job("everything", selection=dg.AssetSelection.all())
        job = dg.define_asset_job("consume_job", selection=[REVENUE])
        self.sensor = build_journal_polling_sensor(journals=self.journals, group=GROUP, job=job)
        definitions = dg.Definitions(assets=[consume, report], jobs=[job, everything], sensors=[self.sensor])
        self.repository = definitions.get_repository_def()

    def write(self) -> None:
        self.client.append(JOURNAL, ORDER)

    def tick(self) -> dg.RunRequest | str:
        """Evaluate the sensor as the daemon does. Return its request, or the reason to skip."""
        context = dg.build_sensor_context(
            instance=self.instance, repository_def=self.repository, cursor=self.cursor, sensor_name=self.sensor.name
        )
        result = self.sensor.evaluate_tick(context)
        if not result.run_requests:
            return result.skip_message or ""
        self.cursor = result.cursor
        (request,) = result.run_requests
        return request

    def run(self, status: DagsterRunStatus, job: str = "consume_job", **options: Any) -> dg.DagsterRun:
        """Create a run with the given status."""
        if status is DagsterRunStatus.QUEUED:
            repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("shop"), "__repository__")
            options["remote_job_origin"] = RemoteJobOrigin(repository, job)
        return self.instance.create_run_for_job(job_def=self.repository.get_job(job), status=status, **options)

    def begin(self, request: dg.RunRequest) -> Transaction:
        """Start a requested run and its transaction."""
        run = self.run(DagsterRunStatus.STARTED, tags={**request.tags, **self.tags_of(request)})
        fence, _ = self.store.raise_fence("c")
        begun = Transaction(run, fence, self.client.head(JOURNAL))
        self.open.append(begun)
        return begun

    def tags_of(self, request: dg.RunRequest) -> dict[str, str]:
        """Return the tags that Dagster sets for a run requested by the sensor."""
        return {RUN_KEY_TAG: request.run_key or "", SENSOR_NAME_TAG: self.sensor.name}

    def pass_time(self) -> None:
        """Let one tick pass for the open transactions. Those at their end commit or fail."""
        for each in list(self.open):
            each.ticks_left -= 1
            if not each.ticks_left:
                self.open.remove(each)
                self.commit(each)

    def commit(self, begun: Transaction) -> None:
        try:
            with self.store.transaction("c", begun.fence) as transaction:
                transaction.commit(Checkpoint({JOURNAL: Source(begun.head)}, {}))
        except Fenced as error:
            self.instance.report_run_failed(begun.run, str(error))
        else:
            success = DagsterEvent(DagsterEventType.PIPELINE_SUCCESS.value, "consume_job")
            self.instance.report_dagster_event(success, begun.run.run_id)

    def pass_tick(self) -> None:
        """Let one tick pass: evaluate the sensor, and start its requested run."""
        outcome = self.tick()
        if isinstance(outcome, dg.RunRequest):
            self.begin(outcome)
        self.pass_time()

    @property
    def consumed(self) -> int:
        found = self.store.read("c")
        return found.checkpoint.sources[JOURNAL].read_through if found and found.checkpoint.sources else 0

    def statuses(self) -> list[DagsterRunStatus]:
        return [run.status for run in self.instance.get_runs()]

    def status(self, run: dg.DagsterRun) -> DagsterRunStatus:
        found = self.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.status


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with new_instance() as instance:
        yield instance


@pytest.fixture
def shop(cluster_dir: Path, tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Shop]:
    """A shop with its own store, and an unconsumed order."""
    for run in instance.get_runs():
        instance.delete_run(run.run_id)
    shop = Shop(cluster_dir, tmp_path, instance)
    if not shop.client.list(GROUP.selector).journals:
        shop.client.apply(parse_tree(SPEC))
    shop.write()
    yield shop
    shop.client.close()


def keep_writing(shop: Shop, ticks: int) -> int:
    """Let ticks pass with an external producer that writes one order in each. Return the maximum lag, in orders."""
    lag, start = 0, shop.client.head(JOURNAL)
    for _ in range(ticks):
        shop.write()
        shop.pass_tick()
        lag = max(lag, (shop.client.head(JOURNAL) - max(start, shop.consumed)) // len(ORDER))
    return lag


def test_transactions_longer_than_the_interval_do_not_starve_the_consumer(shop: Shop) -> None:
    """Without coordination this schedule failed five of five runs. Here none fails, and the lag is limited."""
    lag = keep_writing(shop, 4 * TRANSACTION_TICKS)
    assert shop.statuses() == [DagsterRunStatus.SUCCESS] * 4, "no run fails, and none fences off another"
    assert lag <= 2 * TRANSACTION_TICKS
    # The producer stops: one more run consumes the rest, and no run follows.
    for _ in range(3 * TRANSACTION_TICKS):
        shop.pass_tick()
    assert shop.statuses() == [DagsterRunStatus.SUCCESS] * 5
    assert shop.consumed == shop.client.head(JOURNAL)
    assert "has grown" in str(shop.tick())


@pytest.mark.exhaustive
def test_the_same_schedule_starves_a_consumer_if_active_runs_are_ignored(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_coranto.consumers.polling_sensor.runs_under_way", lambda *arguments, **options: [])
    keep_writing(shop, 2 * TRANSACTION_TICKS)
    assert DagsterRunStatus.SUCCESS not in shop.statuses()
    assert shop.statuses().count(DagsterRunStatus.FAILURE) >= 5


@pytest.mark.parametrize(
    ("status", "job", "options"),
    [
        (DagsterRunStatus.QUEUED, "consume_job", {}),
        (DagsterRunStatus.NOT_STARTED, "consume_job", {}),
        (DagsterRunStatus.STARTING, "everything", {}),
        (DagsterRunStatus.STARTED, "everything", {}),
        (DagsterRunStatus.CANCELING, "consume_job", {}),
        (DagsterRunStatus.QUEUED, "everything", {"asset_selection": {REVENUE}, "tags": {"dagster/backfill": "abc"}}),
    ],
    ids=["queued", "not started", "starting", "of a larger job", "canceling", "of a backfill"],
)
def test_new_heads_wait_for_any_active_run_of_the_consumer(
    shop: Shop, status: DagsterRunStatus, job: str, options: dict[str, Any]
) -> None:
    under_way = shop.run(status, job, **options)
    reason = str(shop.tick())
    assert reason.startswith(f"Run {under_way.run_id} is under way ({status.value.lower()})")
    assert reason.endswith("wait for it to end.")
    shop.instance.report_run_failed(under_way)
    request = shop.tick()
    assert isinstance(request, dg.RunRequest), "the waiting heads start one run"
    shop.begin(request)
    assert isinstance(shop.tick(), str)


def test_new_heads_wait_for_a_run_of_another_code_location(shop: Shop) -> None:
    """Two locations define the consumer. Neither has the other's jobs."""

    @dg.multi_asset(name="consume", specs=[dg.AssetSpec("revenue", tags={CONSUMER_TAG: "c"})])
    def consume() -> None: ...

    @dg.asset
    def other() -> None: ...

    jobs = [dg.define_asset_job("theirs", selection=[REVENUE]), dg.define_asset_job("others", selection=["other"])]
    elsewhere = dg.Definitions(assets=[consume, other], jobs=jobs).get_repository_def()
    shop.instance.create_run_for_job(job_def=elsewhere.get_job("others"), status=DagsterRunStatus.STARTED)
    run = shop.instance.create_run_for_job(job_def=elsewhere.get_job("theirs"), status=DagsterRunStatus.STARTED)
    assert f"Run {run.run_id} is under way" in str(shop.tick())
    shop.instance.report_run_failed(run)
    assert isinstance(shop.tick(), dg.RunRequest)


def test_a_failure_of_another_consumer_of_the_same_journals_does_not_delay_runs(shop: Shop) -> None:
    request = shop.tick()
    assert isinstance(request, dg.RunRequest)
    begun = shop.begin(request)
    tags = {RUN_KEY_TAG: request.run_key or "", SENSOR_NAME_TAG: "of_another_consumer"}
    theirs = shop.run(DagsterRunStatus.STARTED, "everything", asset_selection={dg.AssetKey("report")}, tags=tags)
    shop.instance.report_run_failed(theirs)
    shop.commit(begun)
    shop.write()
    assert isinstance(shop.tick(), dg.RunRequest)


def test_runs_of_other_assets_do_not_delay_the_consumer(shop: Shop) -> None:
    shop.run(DagsterRunStatus.STARTED, "everything", asset_selection={dg.AssetKey("report")})
    assert isinstance(shop.tick(), dg.RunRequest)


def test_a_killed_run_does_not_stop_the_consumer_permanently(shop: Shop) -> None:
    killed = shop.run(DagsterRunStatus.STARTED)
    shop.instance.add_run_tags(killed.run_id, {ALIVE_TAG: str(int(time.time()))})
    assert "is under way" in str(shop.tick())
    shop.instance.add_run_tags(killed.run_id, {ALIVE_TAG: str(int(time.time()) - 301)})
    assert isinstance(shop.tick(), dg.RunRequest)
    assert shop.status(killed) is DagsterRunStatus.FAILURE


def test_a_run_that_never_starts_is_waited_for_only_for_a_limited_time(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued, launched = shop.run(DagsterRunStatus.QUEUED), shop.run(DagsterRunStatus.STARTING)
    passed = 301
    sensor = "dagster_coranto.consumers.polling_sensor"
    monkeypatch.setattr(f"{sensor}.runs_under_way", at_that_time(lambda: time_of_day() + passed))
    assert f"Run {queued.run_id} is under way" in str(shop.tick()), "queued runs have no time limit"
    shop.instance.report_run_canceled(queued)
    assert isinstance(shop.tick(), dg.RunRequest)
    assert shop.status(launched) is DagsterRunStatus.STARTING, "the status of an unknown run does not change"


def at_that_time(wall: Any) -> Any:
    from dagster_coranto.instance.underway import runs_under_way

    return lambda *arguments, **options: runs_under_way(*arguments, wall=wall, **options)


def test_a_failed_run_is_followed_by_another_without_new_heads(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    passed = 0.0
    clock = SimpleNamespace(time=lambda: time_of_day() + passed, time_ns=time.time_ns)
    monkeypatch.setattr("dagster_coranto.instance.requests.time", clock)
    for failures, pause in ((1, 30), (2, 60), (3, 120)):
        request = shop.tick()
        assert isinstance(request, dg.RunRequest)
        keys.append(request.run_key)
        shop.instance.report_run_failed(shop.begin(request).run)
        assert str(shop.tick()).startswith(f"The last runs have failed ({failures} in a row); the next one follows in ")
        passed = pause - 28.0  # The real clock advances as well, on a busy machine by seconds.
        assert "the next one follows" in str(shop.tick())
        passed = pause + 1.0
    request = shop.tick()
    assert isinstance(request, dg.RunRequest)
    shop.commit(shop.begin(request))
    assert shop.consumed == shop.client.head(JOURNAL)
    assert "has grown" in str(shop.tick())
    assert len({*keys, request.run_key}) == 4


def test_a_deleted_or_never_created_run_is_requested_again(shop: Shop) -> None:
    request = shop.tick()
    assert isinstance(request, dg.RunRequest)
    assert shop.tick() == request, "Dagster has not created the run"
    begun = shop.begin(request)
    shop.commit(begun)
    assert "has grown" in str(shop.tick())
    shop.instance.delete_run(begun.run.run_id)
    assert isinstance(shop.tick(), dg.RunRequest)


def test_a_reset_cursor_starts_a_run_after_any_outcome_of_earlier_ones(shop: Shop) -> None:
    keys = []
    for end in (shop.commit, lambda begun: shop.instance.report_run_canceled(begun.run), shop.commit):
        request = shop.tick()
        assert isinstance(request, dg.RunRequest)
        keys.append(request.run_key)
        end(shop.begin(request))
        assert "has grown" in str(shop.tick())
        shop.cursor = None
    assert len(set(keys)) == 3, "Dagster launches one run per key"


def test_after_a_cancelled_run_the_next_one_needs_new_heads(shop: Shop) -> None:
    request = shop.tick()
    assert isinstance(request, dg.RunRequest)
    shop.instance.report_run_canceled(shop.begin(request).run)
    assert "has grown" in str(shop.tick())
    shop.write()
    assert isinstance(shop.tick(), dg.RunRequest)


def test_a_heartbeat_renews_the_tag_until_it_ends(shop: Shop) -> None:
    run = shop.run(DagsterRunStatus.STARTED)

    def shown() -> str:
        found = shop.instance.get_run_by_id(run.run_id)
        assert found is not None
        return found.tags.get(ALIVE_TAG, "")

    with Heartbeat(shop.instance, run.run_id, every_seconds=0.05):
        first = shown()
        assert first
        while shown() == first:
            threading.Event().wait(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name == "coranto-heartbeat"]
