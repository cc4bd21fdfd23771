"""Runs of one window run one at a time, from any source, and each window counts once after any failure."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus
from sqlalchemy import select

from coranto.client.loop import run_blocking
from coranto.errors import Fenced, InvalidInput
from coranto.fragments.windows import Window, find
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.spark.consumer.windows import WindowConsumer, WindowReport
from coranto_consumers.stores.window_growth import grow
from coranto_consumers.stores.windows import WindowLog
from dagster_coranto import JournalResource, SqlStoreResource
from dagster_coranto.windows.pools import POOLS, materialize_exclusively, pool_of
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import BY_WINDOW, ORDERS

JOURNAL = "shop/orders/part-000"
ROOT = str(Path(__file__).parents[3])


def numbered(first: int, last: int = 0) -> Window:
    return Window(first, last or first, {})


class Windows:
    """Windows that can be merged at any time, and a record of materialisations with their pools."""

    name = "revenue"

    def __init__(self, *windows: Window) -> None:
        self.windows = list(windows)
        self.slot = ""
        self.pools: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.before_slot: Callable[[], None] = lambda: None
        self.before_commit: Callable[[], None] = lambda: None

    def window(self, name: str) -> Window:
        return find(self.windows, name)

    def materialize(self, name: str) -> WindowReport:
        window = self.window(name)
        self.before_commit()
        if window not in self.windows:
            raise Fenced("was merged")
        self.done.append((name, self.slot))
        return WindowReport(window, 1, 1, 1)

    @contextmanager
    def new_slot(self, pool: str) -> Iterator[None]:
        self.before_slot()
        assert not self.slot, "a run holds one slot at a time, to prevent deadlocks"
        self.slot = pool
        self.pools.append(pool)
        try:
            yield
        finally:
            self.slot = ""

    def merge(self) -> None:
        self.windows = [numbered(1, 4)]

    def run(self, name: str) -> Window:
        return materialize_exclusively(cast(WindowConsumer, self), name, self.new_slot).window


def test_a_window_merged_while_its_run_waits_or_works_uses_the_slot_of_the_larger() -> None:
    larger = pool_of("revenue", numbered(1))
    waiting = Windows(numbered(1, 2), numbered(3, 4))
    waiting.before_slot = waiting.merge
    assert waiting.run("00000003").name == "00000001-00000004"
    assert waiting.done == [("00000001-00000004", larger)]
    assert waiting.pools == [pool_of("revenue", numbered(3)), larger]

    working = Windows(numbered(1, 2), numbered(3, 4))
    working.before_commit = working.merge
    assert working.run("00000003").name == "00000001-00000004"
    assert working.done == [("00000001-00000004", larger)]

    for same in (Windows(numbered(1, 2), numbered(3, 4)), Windows(numbered(1), numbered(2, 4))):
        same.before_commit = same.merge
        assert same.run("00000001").name == "00000001-00000004"
        assert same.pools == [larger, larger]


def test_a_run_overtaken_by_another_one_outside_of_dagster_fails() -> None:
    def overtaken() -> None:
        raise Fenced("another run of the window has started")

    windows = Windows(numbered(1), numbered(2))
    windows.before_commit = overtaken
    with pytest.raises(Fenced, match="another run of the window"):
        windows.run("00000002")
    assert windows.pools == [pool_of("revenue", numbered(2))]
    with pytest.raises(InvalidInput):
        windows.run("00000009")


@pytest.mark.parametrize("length", [1, 2, 8, 16, 100])
def test_windows_of_any_length_use_all_pools(length: int) -> None:
    pools = {pool_of("revenue", numbered(1 + length * place)) for place in range(POOLS)}
    assert len(pools) == POOLS


PROCESS = """
import os, sys, time
from pathlib import Path

import dagster as dg
from dagster_coranto import *

root, endpoint, files, url, notes, role = sys.argv[1:]
sys.path.insert(0, root)
from tests.orchestration.revenue import ORDERS, RevenueByWindow


class Slow(RevenueByWindow):
    def outputs(self, committed):
        with open(notes, "a") as file:
            print("begin", role, file=file, flush=True)
        while role == "blocked":
            time.sleep(0.1)
        return super().outputs(committed)


def settings(context):
    with open(notes, "a") as file:
        print("starts", role, file=file, flush=True)
    return ConsumerSettings(Slow(), url)


windowed = build_windowed_consumer(
    name="revenue_windows", settings=settings, sources=[ORDERS], tables=[dg.AssetSpec("revenue_by_window")]
)
resources = {"journals": JournalResource(endpoint=endpoint, file_root=files), "spark": SparkResource()}
with dg.DagsterInstance.get() as instance:
    result = dg.materialize(
        [windowed.assets], instance=instance, resources=resources, partition_key="00000001", raise_on_error=False
    )
with open(notes, "a") as file:
    print("success" if result.success else "failure", role, file=file, flush=True)
"""


@pytest.mark.integration
@pytest.mark.exhaustive  # `tests/orchestration/instance/test_pool_slot.py` has processes without Spark.
def test_concurrent_runs_of_a_window_count_it_once_even_if_the_first_is_killed(
    broker: FakeBroker, journals: JournalResource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = ("second", "third")
    store = SqlStoreResource(url=f"sqlite:///{tmp_path / 'store.db'}")
    broker.create(JOURNAL)
    run_blocking(broker.write(JOURNAL, b'{"customer": "ada", "cents": 7}\n{"customer": "ada", "cents": 5}\n'))
    broker.journals[JOURNAL].roll(tmp_path)
    with journals.client() as client:
        grow(WindowLog(store.store(), "revenue_windows"), client, [ORDERS.selector], partial=True)
    notes = tmp_path / "notes"
    notes.touch()
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def launch(role: str) -> None:
        arguments = [ROOT, journals.endpoint, journals.file_root, store.url_with_password(), str(notes), role]
        with (tmp_path / f"{role}.log").open("wb") as log:
            processes[role] = subprocess.Popen(
                [sys.executable, "-c", PROCESS, *arguments], stdout=log, stderr=subprocess.STDOUT
            )

    def until(noted: str) -> None:
        deadline = time.monotonic() + 180
        while noted not in notes.read_text().splitlines():
            said = "".join(log.read_text(errors="replace")[-4000:] for log in sorted(tmp_path.glob("*.log")))
            assert time.monotonic() < deadline, notes.read_text() + said
            time.sleep(0.1)

    with new_instance() as instance:
        monkeypatch.setenv("DAGSTER_HOME", instance.root_directory)
        instance.add_dynamic_partitions("coranto_revenue_windows_windows", ["00000001"])
        try:
            launch("blocked")
            until("begin blocked")
            for role in waiting:
                launch(role)
            for role in waiting:
                until(f"starts {role}")
            storage, pool = instance.event_log_storage, pool_of("revenue_windows", numbered(1))
            deadline = time.monotonic() + 60
            while len(storage.get_concurrency_info(pool).pending_steps) < 1 + len(waiting):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            processes["blocked"].kill()
            for role in waiting:
                processes[role].wait(240)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
        finished = [line for line in notes.read_text().splitlines() if "starts" not in line and "blocked" not in line]
        order = [line.split()[1] for line in finished if line.startswith("begin")]
        said = "".join((tmp_path / f"{role}.log").read_text(errors="replace")[-4000:] for role in waiting)
        assert finished == [f"{what} {role}" for role in order for what in ("begin", "success")], said
        assert sorted(order) == sorted(waiting)
        statuses = [run.status for run in instance.get_runs()]
        assert statuses.count(DagsterRunStatus.SUCCESS) == len(waiting)
        assert instance.get_materialized_partitions(dg.AssetKey("revenue_by_window")) == {"00000001"}
        assert not storage.get_concurrency_info(pool).claimed_slots
    with store.store().engine.connect() as connection:
        assert [tuple(row) for row in connection.execute(select(BY_WINDOW))] == [(1, "ada", 12)]
