"""An ingest and its table in Dagster's UI, in headless Chromium: from files of rows to a table without code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from playwright.sync_api import Page, expect

from dagster_coranto import JournalResource, build_ingest_asset, build_table_asset
from dagster_coranto.flights.ui import DagsterUi
from tests.orchestration.flights.test_ui import browser, metadata_value, page, pytestmark
from tests.orchestration.verification.test_ui import execute_all, picture

__all__ = ["browser", "page", "pytestmark"]

DEFINITIONS = """
import os
from pathlib import Path

import dagster as dg
from dagster_coranto import (
    JournalResource, build_ingest_asset, build_ingest_check, build_table_asset, build_table_check
)

folder = Path(os.environ["CORANTO_DATA"])
stream, table = build_ingest_asset(folder / "ingest.yaml"), build_table_asset(folder / "table.yaml")
defs = dg.Definitions(
    assets=[stream, table],
    asset_checks=[build_ingest_check(stream), build_table_check(table)],
    resources={"journals": JournalResource()},
    executor=dg.in_process_executor,
)
"""


@pytest.fixture(scope="module")
def ui(cluster_dir: Path) -> Iterator[DagsterUi]:
    """The UI with an ingested stream, and a table of its events."""
    rows = cluster_dir / "rows"
    rows.mkdir()
    source = {"files": {"url": f"file://{rows}/", "pattern": "*.jsonl"}}
    ingest = {"name": "orders", "stream": "shop/orders", "source": source, "create": {"segments": "2"}, "key": "id"}
    (cluster_dir / "ingest.yaml").write_text(json.dumps(ingest))
    table = {"name": "shop-orders", "input": {"stream": "shop/orders"}, "table": "orders", "mode": "append"}
    store = f"sqlite:///{cluster_dir}/shop.db"
    columns = "id BIGINT, customer STRING, cents BIGINT"
    (cluster_dir / "table.yaml").write_text(json.dumps({**table, "store": store, "columns": columns}))
    assets = [build_ingest_asset(cluster_dir / "ingest.yaml"), build_table_asset(cluster_dir / "table.yaml")]
    for number in range(4):  # Several runs for the plots.
        (rows / f"{number}.jsonl").write_text(
            "".join(
                json.dumps({"id": 100 * number + row, "customer": "ada", "cents": row}) + "\n"
                for row in range(10 * (number + 1))
            )
        )
        with dg.DagsterInstance.get() as instance:
            assert dg.materialize(assets, instance=instance, resources={"journals": JournalResource()}).success
    (cluster_dir / "definitions.py").write_text(DEFINITIONS)
    (cluster_dir / "workspace.yaml").write_text(
        "load_from: [python_file: {relative_path: definitions.py, location_name: shop}]"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cluster_dir)
        with DagsterUi(cluster_dir, daemon=None, stop_seconds=2) as running:
            yield running


def test_the_pages_of_the_stream_and_of_the_table(ui: DagsterUi, page: Page) -> None:
    page.set_viewport_size({"width": 1400, "height": 940})  # The screenshot ends above the folder of the source.
    page.goto(f"{ui.url}/assets/shop/orders")
    expect(metadata_value(page, "dagster-coranto/rows")).to_have_text(re.compile("^40"))
    expect(metadata_value(page, "dagster-coranto/lag")).to_have_text(re.compile("^0"))
    picture(page, "dagster-ingest")
    execute_all(page, f"{ui.url}/assets/orders?view=checks")
    expect(page.get_by_text("100 rows are sound.").first).to_be_visible()
    page.goto(f"{ui.url}/assets/orders")
    expect(page.get_by_text("Row count").first).to_be_visible()
    expect(metadata_value(page, "dagster-coranto/lag_messages")).to_have_text(re.compile("^0"))
    expect(metadata_value(page, "dagster-coranto/last_commit")).to_be_visible()
    page.set_viewport_size({"width": 1400, "height": 1400})
    picture(page, "dagster-table")
