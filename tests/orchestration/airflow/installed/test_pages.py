"""Recovery with approval, secrets, and Airflow's pages in a browser, on a real Airflow with a real cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.orchestration.airflow.installed.airflow_api import until
from tests.orchestration.airflow.installed.world import SHOP, TOKEN, AirflowWorld

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="module")
def run(world: AirflowWorld) -> str:
    """A finished run of the shop's job."""
    run = world.api.start("shop")
    world.api.await_task("shop", run, "audit", "success")
    return run


def test_damage_is_repaired_after_approval(world: AirflowWorld, run: str) -> None:
    folder = world.config.file_root
    assert folder is not None
    (damaged, *_) = until(lambda: sorted((folder / SHOP).rglob("*.zst")))
    damaged.write_bytes(damaged.read_bytes()[:-7])
    audit = world.api.start("shop_audit")
    failed = world.api.await_task("shop_audit", audit, "audit", "failed")
    assert failed["try_number"] == 1
    assert world.api.xcom("shop_audit", audit, "audit", "report")["findings"]
    links = world.api.call(f"/dags/shop_audit/dagRuns/{quote(audit)}/taskInstances/audit/links")
    assert links["extra_links"]["Report"].endswith("/tasks/audit/xcom")
    recovery = world.api.start("recovery")
    world.api.await_task("recovery", recovery, "recovery.plan", "success")
    plan = world.api.xcom("recovery", recovery, "recovery.plan")
    assert plan["steps"]
    world.api.await_task("recovery", recovery, "recovery.approve", "awaiting_input", "deferred")
    assert world.api.task("recovery", recovery, "recovery.recover")["state"] is None
    path = f"/dags/recovery/dagRuns/{quote(recovery)}/taskInstances/recovery.approve/-1/hitlDetails"
    # Answer only after the scheduler has received that the task waits, as a person would.
    until(lambda: _has_event_of(world, "recovery.approve"))
    details = world.api.call(path)
    assert f"Approve {plan['hash']}" in details["options"]
    assert plan["hash"] in details["body"]
    world.api.call(path, {"chosen_options": [f"Approve {plan['hash']}"], "params_input": {}}, "PATCH")
    world.api.await_task("recovery", recovery, "recovery.approve", "success")
    world.api.await_task("recovery", recovery, "recovery.recover", "success")
    assert world.api.xcom("recovery", recovery, "recovery.recover")["done"]
    assert not damaged.exists() or damaged.stat().st_size


def _has_event_of(world: AirflowWorld, task: str) -> bool:
    """Return True if the scheduler has received the end of a task from its worker."""
    log = (world.airflow.data_dir / "logs" / "airflow-scheduler.log").read_text()
    return any("Received executor event" in line and f"task_id='{task}'" in line for line in log.splitlines())


def test_no_log_contains_the_token(world: AirflowWorld, run: str) -> None:
    assert not world.files_containing(TOKEN.rpartition(".")[2])


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            headless=True,
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
            viewport={"width": 1500, "height": 850},
        )
        context.set_default_timeout(120_000)
        yield context.new_page()
        context.close()


def picture(page: Page, name: str) -> None:
    """Save a screenshot in the folder $CORANTO_PICTURES, if it is set."""
    if folder := os.environ.get("CORANTO_PICTURES"):
        page.screenshot(path=Path(folder) / name)


@pytest.mark.browser
def test_the_pages_of_the_job_in_a_browser(world: AirflowWorld, run: str, page: Page) -> None:
    page.add_init_script("localStorage.setItem('default_dag_view', JSON.stringify('graph'))")
    page.goto(world.airflow.url)  # Airflow 3.1 does not return to the requested page after the login.
    page.get_by_text("Welcome").first.wait_for()
    page.goto(f"{world.airflow.url}/dags/flights")
    for task in ("apply_specs", "publish_flights", "consume_flights", "audit"):
        page.get_by_text(task).first.wait_for()
    page.wait_for_load_state("networkidle")
    picture(page, "airflow-flights.png")
    page.goto(f"{world.airflow.url}/dags/shop/runs/{run}/tasks/audit/details")
    link: Any = page.get_by_role("link", name="Report")
    link.first.wait_for()
    page.goto(link.first.get_attribute("href"))
    page.get_by_text("report").first.wait_for()
    picture(page, "airflow-report.png")
    page.goto(f"{world.airflow.url}/assets")
    page.get_by_text("airflow/flights/alerts").first.wait_for()
    picture(page, "airflow-assets.png")
