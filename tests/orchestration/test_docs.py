from __future__ import annotations

import re
from pathlib import Path

import dagster as dg
import pytest

import dagster_coranto

DOCUMENT = Path(__file__).parents[2] / "docs" / "dagster.md"
BLOCKS = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_the_example_of_the_document_has_the_shown_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (each for each in BLOCKS.findall(DOCUMENT.read_text()) if "dg.Definitions(" in each)
    (tmp_path / "documented_definitions.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    from documented_definitions import defs  # type: ignore[import-not-found]  # written just now

    graph = defs.resolve_asset_graph()
    parents = {key: set(graph.get(key).parent_keys) for key in graph.get_all_asset_keys()}
    refunds, refunded, specs = (dg.AssetKey(path) for path in (["shop", "refunds"], ["refunded"], ["refund_specs"]))
    assert parents == {specs: set(), refunds: {specs}, refunded: {refunds}}
    assert defs.resolve_sensor_def("shop_refunds__polling_sensor").job.name == "refunds_job"


def test_the_documents_name_all_exports() -> None:
    text = DOCUMENT.read_text() + (DOCUMENT.parent / "spark.md").read_text()
    assert [name for name in dagster_coranto.__all__ if name not in text] == []
