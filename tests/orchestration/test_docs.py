from __future__ import annotations

import re
from pathlib import Path

import dagster as dg
import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "dagster.md"


def test_the_documents_example_makes_the_definitions_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "documented_definitions.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    from documented_definitions import defs  # type: ignore[import-not-found]  # written just now

    graph = defs.resolve_asset_graph()
    parents = {key: set(graph.get(key).parent_keys) for key in graph.get_all_asset_keys()}
    orders, revenue, specs = (dg.AssetKey(path) for path in (["shop", "orders"], ["revenue"], ["journal_specs"]))
    assert parents == {specs: set(), orders: {specs}, revenue: {orders}}
    assert defs.resolve_sensor_def("shop_orders__polling_sensor").job.name == "consume_orders_job"
