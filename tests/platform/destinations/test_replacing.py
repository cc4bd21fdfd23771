"""A journal keeps earlier rows: `replace` is refused, or adds rows by a setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from dlt.pipeline.exceptions import PipelineStepFailed

from coranto.client import SyncJournalClient
from tests.platform.destinations.conftest import Running
from tests.platform.destinations.shop import messages, pipeline

pytestmark = pytest.mark.integration


def test_replace_is_refused_and_writes_nothing(running: Running, client: SyncJournalClient, tmp_path: Path) -> None:
    with pytest.raises(PipelineStepFailed, match="orders: write_disposition replace is not possible"):
        pipeline(tmp_path / "work").run([{"id": 1}], table_name="orders", write_disposition="replace")
    assert not client.list("").journals


def test_with_the_setting_the_latest_load_has_the_rows_of_the_table(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESTINATION__CORANTO__REPLACE", "append")
    pipe = pipeline(tmp_path / "work")
    for ids in ((1, 2), (2, 3)):
        data = [{"id": id, "lines": [{"of": id}]} for id in ids]
        pipe.run(data, table_name="orders", write_disposition="replace")
    found, lines = messages(client, "orders"), messages(client, "orders__lines")
    latest = max(row["_dlt_load_id"] for row in found)
    assert [row["id"] for row in found] == [1, 2, 2, 3]
    assert [row["id"] for row in found if row["_dlt_load_id"] == latest] == [2, 3]
    assert [row["of"] for row in lines if row["_dlt_load_id"] == latest] == [2, 3]


def test_an_invalid_setting_is_refused(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESTINATION__CORANTO__REPLACE", "truncate")
    with pytest.raises(PipelineStepFailed, match="'truncate' is not a value of replace; give refuse or append"):
        pipeline(tmp_path / "work").run([{"id": 1}], table_name="orders")
