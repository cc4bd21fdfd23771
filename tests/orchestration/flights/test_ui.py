"""Dagster's UI with a real cluster, in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.freshness import FreshnessState, FreshnessStateChange
from dagster._core.definitions.freshness_evaluator import TimeWindowFreshnessPolicyEvaluator
from dagster._core.loader import LoadingContextForTest
from playwright.sync_api import BrowserContext, Locator, Page, expect, sync_playwright

from coranto.client.loop import run_blocking
from coranto.client.positions import heads_of
from coranto.offsets import vector_of_json
from coranto_flights.data import expected_alerts, load_flights
from dagster_coranto import JournalResource
from dagster_coranto.flights.definitions import EVENTS, defs, flights_observation
from dagster_coranto.flights.materialize import Job, materialize
from dagster_coranto.flights.ui import DagsterUi

ROOT = Path(__file__).parents[3]
FLIGHTS = 2000
RUN_SECONDS = 450
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def skip_reason() -> str:
    """Return the reason to skip these tests; empty if they can run, or if the set-up should have installed Chromium."""
    installable = os.geteuid() == 0 and shutil.which("apt-get") is not None
    if CHROMIUM.exists() or installable:
        return ""
    return f"needs Debian's Chromium at {CHROMIUM}; `make browser` installs it for root on Debian"


TIMEOUT_MS = 180_000
expect.set_options(timeout=TIMEOUT_MS)  # Lazily loaded parts of pages appear late on a busy machine.
pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()),
]


@pytest.fixture(scope="module")
def ui(cluster_dir: Path) -> Iterator[DagsterUi]:
    """The UI of a cluster with published and unconsumed flights."""
    assert materialize(Job(limit=FLIGHTS), ["journal_specs", "flights/events"], log_level="WARNING")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # The folder with workspace.yaml.
        with DagsterUi(cluster_dir, daemon=None, stop_seconds=2) as running:
            yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            headless=True,
            timeout=TIMEOUT_MS,
            args=ARGUMENTS,
            viewport={"width": 1400, "height": 700},
        )
        context.set_default_timeout(TIMEOUT_MS)
        yield context
        context.close()


@pytest.fixture
def page(browser: BrowserContext) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def node(page: Page, name: str) -> Locator:
    """Return the box of an asset in the graph, by the last part of its key."""
    return page.locator("foreignObject").filter(has_text=re.compile(rf"{name}.*Latest event", re.DOTALL)).last


def open_graph(page: Page, ui: DagsterUi) -> None:
    page.goto(f"{ui.url}/asset-groups")
    for name in ("journal_specs", "events", "carrier_delays", "alerts"):
        expect(node(page, name)).to_be_visible()


def lefts(page: Page) -> list[float]:
    """Return the left edges of the visible boxes of specs, events, delays and alerts."""
    boxes = [node(page, name).bounding_box() for name in ("journal_specs", "events", "carrier_delays", "alerts")]
    return [box["x"] for box in boxes if box is not None]


def are_in_order(left: list[float]) -> bool:
    """Return True if specs, events, and the column of delays and alerts are in this order from the left."""
    return len(left) == 4 and left[0] < left[1] < left[2] == left[3]


def await_run(page: Page) -> dg.DagsterRunStatus:
    """Wait for the run started by the page, and return its final status."""
    with dg.DagsterInstance.get() as instance:
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            runs = instance.get_runs(dg.RunsFilter(job_name="__ASSET_JOB"), limit=1)
            if runs and runs[0].is_finished:
                return runs[0].status
            page.wait_for_timeout(200)
    raise AssertionError(f"the run did not end within {RUN_SECONDS} s")


def metadata_value(page: Page, key: str) -> Locator:
    """Return the cell with the latest value of a metadata key, on an asset's page."""
    return page.locator("tr").filter(has=page.get_by_text(key, exact=True)).locator("td").last


def test_the_graph_shows_the_lineage_from_specs_to_delays_and_alerts(ui: DagsterUi, page: Page) -> None:
    open_graph(page, ui)
    # Boxes move during the layout.
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not are_in_order(left := lefts(page)):
        assert time.monotonic() < deadline, left
        page.wait_for_timeout(100)
    expect(node(page, "events")).to_contain_text("1 / 1 Passed")
    expect(node(page, "carrier_delays")).to_contain_text("Never materialized")


def test_a_materialisation_started_by_a_click_succeeds_and_shows_its_metadata(ui: DagsterUi, page: Page) -> None:
    page.goto(f"{ui.url}/assets/flights/alerts")
    expect(page.get_by_text("Never materialized")).to_be_visible()
    page.get_by_role("button").filter(has_text=re.compile("^Materialize$")).click()
    assert await_run(page) is dg.DagsterRunStatus.SUCCESS

    # One consumer writes both, so the table is materialised with the alerts.
    page.goto(f"{ui.url}/assets/carrier_delays")
    expect(metadata_value(page, "dagster-coranto/messages")).to_have_text(re.compile(rf"^{FLIGHTS}$|^{FLIGHTS:,}$"))
    expect(metadata_value(page, "dagster-coranto/transactions")).to_have_text("1")
    expect(metadata_value(page, "dagster-coranto/lag_bytes")).to_have_text("0")
    expect(metadata_value(page, "dagster-coranto/published")).to_have_text(
        str(len(expected_alerts(load_flights(FLIGHTS))))
    )
    shown = json.loads(metadata_value(page, "dagster-coranto/offsets_read").inner_text())
    assert vector_of_json(shown, "offsets_read") == heads_of(JournalResource().positions(EVENTS))

    page.goto(f"{ui.url}/runs")
    expect(page.get_by_text("Success").first).to_be_visible()


def test_after_the_run_the_graph_shows_all_assets_materialised(ui: DagsterUi, page: Page) -> None:
    open_graph(page, ui)
    for name in ("journal_specs", "events", "carrier_delays", "alerts"):
        expect(node(page, name)).to_contain_text("Materialized")
    expect(node(page, "alerts")).to_contain_text("1 / 1 Passed")
    if os.environ.get("CORANTO_SCREENSHOTS") == "1":
        target = ROOT / "docs" / "images" / "dagster-lineage.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=target, animations="disabled")


def observe(instance: dg.DagsterInstance) -> None:
    """Report journals and their freshness, as the daemon does periodically."""
    result = flights_observation.evaluate_tick(dg.build_sensor_context(instance=instance))
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    key = dg.AssetKey(["flights", "events"])
    context = LoadingContextForTest(instance)
    evaluator = TimeWindowFreshnessPolicyEvaluator()
    state = run_blocking(evaluator.evaluate_freshness(context, defs.resolve_asset_graph().get(key)))
    change = FreshnessStateChange(
        key=key, new_state=state, previous_state=FreshnessState.UNKNOWN, state_change_timestamp=time.time()
    )
    instance.report_runless_asset_event(change)


def test_a_journals_page_shows_freshness_lag_and_its_head_over_time(ui: DagsterUi, page: Page) -> None:
    with dg.DagsterInstance.get() as instance, JournalResource().client() as client:
        for size in (40, 90, 20, 160, 60, 120):
            client.append(f"{EVENTS.name}/part-000", b'{"carrier": "XX"}\n' * size)
            observe(instance)
    page.goto(f"{ui.url}/assets/flights/events")
    expect(page.get_by_text("Passing").first).to_be_visible()
    expect(metadata_value(page, "dagster-coranto/lag_bytes/carrier-delays")).to_have_text(re.compile("^[1-9]"))
    page.get_by_role("button").filter(has_text=re.compile("^Plots$")).click()
    expect(page.locator("canvas").first).to_be_visible()
    expect(page.get_by_text("dagster-coranto/head", exact=True).first).to_be_visible()
    if os.environ.get("CORANTO_SCREENSHOTS") == "1":
        page.set_viewport_size({"width": 1400, "height": 1360})
        page.wait_for_timeout(3000)
        page.screenshot(path=ROOT / "docs" / "images" / "dagster-journal.png", animations="disabled")
