"""A shop's journals in Dagster's UI, in headless Chromium: a backfill, a failed check, and an approved recovery."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus
from playwright.sync_api import Locator, Page, TimeoutError, expect

from coranto.audit import Report, audit_journals
from coranto.client import JournalClient
from coranto.client.loop import run_blocking
from coranto.client.publishing import sync_publisher
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines
from coranto.recovery import JournalsRecovery
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import JournalResource
from dagster_coranto.flights.ui import DagsterUi
from tests.orchestration.flights.test_ui import (
    ROOT,
    RUN_SECONDS,
    TIMEOUT_MS,
    browser,
    page,
    pytestmark,
)
from tests.orchestration.metadata import without_namespace

__all__ = ["browser", "page", "pytestmark"]

LOOK_MS = 10_000
QUEUE = "class: QueuedRunCoordinator\n  config: {max_concurrent_runs: 2, dequeue_interval_seconds: 1}"
"""Runs are queued, as Dagster advises for backfills."""
DAEMON = (str(Path(__file__).with_name("quick_daemon.py")), "run")
ORDERS = ("shop/orders/part-000", "shop/orders/part-001")


@pytest.fixture(scope="module")
def ui(cluster_dir: Path) -> Iterator[DagsterUi]:
    """The UI of a cluster with the shop's audited orders."""
    place_orders()
    home = cluster_dir / "dagster" / "dagster.yaml"
    home.write_text(home.read_text().replace("class: DefaultRunCoordinator", QUEUE))
    definitions = Path(__file__).with_name("shop_definitions.py")
    (cluster_dir / "workspace.yaml").write_text(
        f"load_from: [python_file: {{relative_path: {definitions}, location_name: shop}}]"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cluster_dir)
        with DagsterUi(cluster_dir, daemon=DAEMON, stop_seconds=2) as running:
            yield running


def place_orders() -> None:
    """Fill the shop's journals, and audit them for the first time."""
    labels = label_set([(CONTENT_TYPE, JSON_LINES)])
    resource = JournalResource()
    with resource.client() as client:
        for name in ORDERS:
            spec = pb.JournalSpec(name=name, replication=1, labels=labels)
            spec.fragment.MergeFrom(
                pb.JournalSpec.Fragment(length=1024, compression_codec=pb.GZIP, stores=["file:///"])
            )
            spec.fragment.refresh_interval.FromSeconds(1)
            client.apply([pb.ApplyRequest.Change(upsert=spec)])
        for number in range(12):
            publisher = sync_publisher(client, JsonLines())
            for order in range(10):
                publisher.add(ORDERS[order % 2], {"customer": f"c{order % 3}", "cents": number * 10 + order})
            publisher.commit()

    async def audit() -> Report:
        async with JournalClient.of(resource.client_config()) as client:
            return await audit_journals(client, resource.stores(), "name:prefix=shop/orders/")

    assert run_blocking(audit()).sound


def picture(page: Page, name: str) -> None:
    """Save a screenshot for the documentation, if requested."""
    if os.environ.get("CORANTO_SCREENSHOTS") == "1":
        page.mouse.move(0, 0)
        page.wait_for_timeout(3000)
        page.screenshot(path=ROOT / "docs" / "images" / f"{name}.png", animations="disabled")


def execute_checks(page: Page, ui: DagsterUi) -> None:
    """Execute the checks by clicking, and reload the page to show their results."""
    execute_all(page, f"{ui.url}/assets/shop/orders?view=checks")


def execute_all(page: Page, checks: str) -> None:
    """Execute the checks of a page by clicking, and reload it."""
    with dg.DagsterInstance.get() as instance:
        before = instance.get_runs_count()
        page.goto(checks)
        page.get_by_role("button").filter(has_text=re.compile("^Execute all$")).click()
        await_true(page, lambda: len(runs := instance.get_runs()) > before and runs[0].is_finished)
    page.reload()


def await_true(page: Page, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(200)


def launch(page: Page, ui: DagsterUi, job: str, config: str) -> dict[str, Any]:
    """Launch a job of the shop by clicking, with a configuration, and return the metadata of its result."""
    page.goto(f"{ui.url}/locations/shop/jobs/{job}/playground")
    button = page.get_by_role("button").filter(has_text="Launch Run")
    page.locator(".CodeMirror").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(config)
    expect(page.locator(".CodeMirror")).to_contain_text(config)
    expect(button).to_be_enabled()
    picture(page, "dagster-approval")
    button.click()
    expect(page.get_by_text(f"Run of {job}")).to_be_visible()
    expect(page.get_by_text("Success", exact=True).first).to_be_visible()
    with dg.DagsterInstance.get() as instance:
        (run,) = instance.get_runs(dg.RunsFilter(job_name=job), limit=1)
        (output,) = (
            each.dagster_event.event_specific_data
            for each in instance.all_logs(run.run_id)
            if each.dagster_event is not None and each.dagster_event.is_successful_output
        )
    metadata: Any = output.metadata  # type: ignore[union-attr]
    return without_namespace(metadata)


def open_until(page: Page, url: str, shown: Locator) -> None:
    """Reload a page until it shows an element: a UI does not refresh new assets right after its start."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while True:
        page.goto(url)
        try:
            shown.wait_for(timeout=LOOK_MS)
        except TimeoutError:
            assert time.monotonic() < deadline
        else:
            return


@pytest.mark.exhaustive
def test_a_backfill_of_windows_is_launched_by_clicking(ui: DagsterUi, page: Page) -> None:
    page.set_viewport_size({"width": 1400, "height": 1000})
    partitions = f"{ui.url}/assets/order_counts?view=partitions"
    with dg.DagsterInstance.get() as instance:
        await_true(page, lambda: len(instance.get_dynamic_partitions("coranto_revenue_windows_windows")) == 2)
    times = page.get_by_text("dagster-coranto/stored_until").first
    open_until(page, f"{ui.url}/assets/windows/revenue_windows?view=partitions&partition=00000002", times)
    picture(page, "dagster-window")
    open_until(page, partitions, page.get_by_text(re.compile(r"Missing \(2\)")))
    page.get_by_role("button").filter(has_text=re.compile("^Materialize…$")).click()
    page.get_by_role("button").filter(has_text=re.compile("^All$")).click()
    begin = page.get_by_role("button").filter(has_text=re.compile("^Launch backfill|^Launch 2-run backfill"))
    expect(begin).to_be_enabled()
    picture(page, "dagster-backfill-launch")
    begin.click()
    with dg.DagsterInstance.get() as instance:
        await_true(page, lambda: any(each.status.value.startswith("COMPLETED") for each in instance.get_backfills()))
        (backfill,) = instance.get_backfills()
        assert backfill.status is BulkActionStatus.COMPLETED_SUCCESS
    page.goto(f"{partitions}&partition=00000002")
    expect(page.get_by_text(re.compile(r"Materialized \(2\)"))).to_be_visible()
    row = page.locator("tr").filter(has=page.get_by_text("orders", exact=True))
    expect(row.locator("td").nth(1)).to_have_text(re.compile("^[1-9]"))
    picture(page, "dagster-backfill")


@pytest.mark.exhaustive
def test_a_failed_check_names_the_loss_and_a_recovery_is_approved_by_clicking(
    ui: DagsterUi, page: Page, cluster_dir: Path
) -> None:
    with JournalResource().client() as client:
        (_, lost, *_) = [each.fragment for each in client.fragments(ORDERS[0]) if each.persisted]
        deadline = time.monotonic() + TIMEOUT_MS / 1000
        while [*(cluster_dir / "brokers").glob(f"*/spools/shop_orders*/**/{lost.begin:016x}.content")]:
            assert time.monotonic() < deadline
            page.wait_for_timeout(200)
    (cluster_dir / "fragments" / lost.content_path).unlink()
    page.set_viewport_size({"width": 1400, "height": 1000})
    execute_checks(page, ui)
    expect(page.get_by_text(f"{lost.length} bytes of content are gone").first).to_be_visible()
    expect(page.get_by_text("In Progress")).to_have_count(0)
    picture(page, "dagster-failed-check")

    # The planning run is in `test_recovery.py`.
    plan = run_blocking(JournalsRecovery(JournalResource().audit_config(), "name:prefix=shop/orders/").plan())
    assert {f"[{lost.begin}, {lost.end})" in loss.message for loss in plan.losses} == {True}
    done = launch(page, ui, "journal_recovery", f"ops: {{recover: {{config: {{approved: '{plan.hash}'}}}}}}")
    assert done["audit"] == "sound: 2 examined"
    expect(page.get_by_text("sound: 2 examined").first).to_be_visible()
    picture(page, "dagster-recovery")
