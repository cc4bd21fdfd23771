"""Steps with the same pool run one at a time, for runs from any source. Ended runs do not block others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.test_utils import create_run_for_test

from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import JournalResource
from dagster_coranto.instance.heartbeat import ALIVE_TAG, PRESUMED_DEAD_SECONDS, PROCESS_TAG, _process
from dagster_coranto.instance.pool_slot import PoolSlot
from tests.orchestration.instances import new_instance

POOL = "coranto_consume"


class Work:
    """Steps of separate runs in one pool, and the count of those at work."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.lock = threading.Lock()
        self.working = 0
        self.most = 0
        self.finish = threading.Event()
        self.waits = 0
        self.said: list[str] = []

    def wait(self, seconds: float) -> None:
        self.waits += 1
        time.sleep(0.01)

    def slot(self) -> PoolSlot:
        run = create_run_for_test(self.instance, status=DagsterRunStatus.STARTED)
        return PoolSlot(self.instance, run.run_id, POOL, self.said.append, wait=self.wait)

    def work(self) -> bool:
        with self.slot():
            with self.lock:
                self.working += 1
                self.most = max(self.most, self.working)
            finished = self.finish.wait(60)
            with self.lock:
                self.working -= 1
            return finished

    def limits(self) -> dict[str, int]:
        return {each.name: each.limit for each in self.instance.event_log_storage.get_pool_limits()}

    def held_by_run(self, status: DagsterRunStatus, **tags: str) -> dg.DagsterRun:
        """Return a run that holds the slot of the pool."""
        storage = self.instance.event_log_storage
        storage.set_concurrency_slots(POOL, 1)
        run = create_run_for_test(self.instance, status=status, tags=tags)
        assert storage.claim_concurrency_slot(POOL, run.run_id, POOL).is_claimed
        return run


def until(condition: Callable[[], bool], *running: Future[Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        for each in running:
            assert not each.done() or each.result()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def work() -> Iterator[Work]:
    with new_instance() as instance:
        yield Work(instance)


def test_only_one_of_three_runs_works_at_a_time(work: Work) -> None:
    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(work.work) for _ in range(3)]
        until(lambda: work.waits >= 10, *runs)
        assert work.working == 1
        work.finish.set()
        assert [run.result() for run in runs] == [True] * 3
    assert work.most == 1
    assert work.limits() == {POOL: 1}
    assert work.said[0].startswith("Waits for a slot in the pool coranto_consume. Runs with a slot: ")
    info = work.instance.event_log_storage.get_concurrency_info(POOL)
    assert not info.claimed_slots
    assert not info.pending_steps


def test_an_existing_limit_is_kept(work: Work) -> None:
    work.instance.event_log_storage.set_concurrency_slots(POOL, 2)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(work.work) for _ in range(2)]
        until(lambda: work.working == 2, *runs)
        work.finish.set()
        assert all(run.result() for run in runs)
    assert work.limits() == {POOL: 2}


def test_a_failed_step_releases_its_slot(work: Work) -> None:
    with pytest.raises(RuntimeError), work.slot():
        raise RuntimeError("no")
    with work.slot():
        pass
    assert not work.waits


def test_a_step_stopped_while_waiting_leaves_the_queue(work: Work) -> None:
    class Stopped(BaseException): ...

    def stop(seconds: float) -> None:
        raise Stopped

    with work.slot():
        run = create_run_for_test(work.instance, status=DagsterRunStatus.STARTED)
        waiting = PoolSlot(work.instance, run.run_id, POOL, work.said.append, wait=stop)
        with pytest.raises(Stopped), waiting:
            pytest.fail("the waiting step started during another run")
        assert not [
            each
            for each in work.instance.event_log_storage.get_concurrency_info(POOL).pending_steps
            if each.run_id == run.run_id
        ]
    assert not [thread for thread in threading.enumerate() if thread.name == "coranto-heartbeat"]


@pytest.mark.parametrize(
    ("status", "tags"),
    [
        (DagsterRunStatus.FAILURE, {}),
        (DagsterRunStatus.STARTED, {ALIVE_TAG: str(int(time.time() - PRESUMED_DEAD_SECONDS - 60))}),
    ],
    ids=["ended", "silent"],
)
def test_an_ended_or_silent_run_loses_its_slot(work: Work, status: DagsterRunStatus, tags: dict[str, str]) -> None:
    work.held_by_run(status, **tags)
    with work.slot():
        pass


def test_a_killed_process_of_this_machine_loses_its_slot_immediately(work: Work) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        work.held_by_run(
            DagsterRunStatus.STARTED, **{ALIVE_TAG: str(int(time.time())), PROCESS_TAG: _process(process.pid)}
        )
        work.finish.set()
        with ThreadPoolExecutor(1) as threads:
            run = threads.submit(work.work)
            until(lambda: work.waits >= 10, run)
            assert not run.done(), "the process is still alive"
            process.kill()
            assert run.result()
    finally:
        process.kill()
        process.communicate()


def test_a_process_of_another_machine_keeps_its_slot_until_its_run_ends(work: Work) -> None:
    held = work.held_by_run(
        DagsterRunStatus.STARTED, **{ALIVE_TAG: str(int(time.time())), PROCESS_TAG: "elsewhere/pid:[1] 999999 1"}
    )
    work.finish.set()
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(work.work)
        until(lambda: work.waits >= 10, run)
        assert not run.done()
        work.instance.report_run_failed(held)
        assert run.result()


def test_a_step_that_dagster_does_not_assign_is_queued_again(work: Work) -> None:
    """The slot became free before Dagster recorded the waiting step."""
    storage = work.instance.event_log_storage
    storage.set_concurrency_slots(POOL, 1)
    add: Any = type(storage).add_pending_step
    calls = 0

    def add_unchosen(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        add(self, *arguments, **{**options, "should_assign": calls > 1})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(storage), "add_pending_step", add_unchosen)
        with work.slot():
            pass
    assert calls == 2


def test_a_storage_without_pools_does_not_limit_steps() -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        work = Work(instance)
        with work.slot(), work.slot():
            pass


PROCESS = """
import sys, time
import dagster as dg
from dagster_coranto import *
from dagster_coranto.consumers.assets import spark_consumer_assets

endpoint, root, notes = sys.argv[1:]


def settings(context):
    with open(notes, "a") as file:
        print("begin", file=file, flush=True)
        time.sleep(0.5)
        print("end", file=file, flush=True)
    raise dg.Failure("enough")


consumer = spark_consumer_assets(
    name="consume", sources=[JournalGroup("shop/orders")], tables=[dg.AssetSpec("revenue")]
)(settings)
resources = {"journals": JournalResource(endpoint=endpoint, file_root=root), "spark": SparkResource()}
with dg.DagsterInstance.get() as instance:
    dg.materialize([consumer], instance=instance, resources=resources, raise_on_error=False)
"""


@pytest.mark.integration
def test_concurrently_launched_runs_of_a_consumer_work_one_at_a_time(
    broker: FakeBroker, journals: JournalResource, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("DAGSTER_HOME", work.instance.root_directory)
    work.instance.event_log_storage.get_maximum_record_id()
    work.instance.get_runs_count()
    arguments = [sys.executable, "-c", PROCESS, journals.endpoint, journals.file_root, str(notes)]
    processes = [subprocess.Popen(arguments, stderr=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert notes.read_text().split() == ["begin", "end"] * 3, "".join(said)[-6000:]
    assert [run.status for run in work.instance.get_runs()] == [DagsterRunStatus.FAILURE] * 3, (
        "each run fails at its end"
    )
