"""The commands and programs of docs/forks.md, unchanged, on a real cluster and in this process's Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from coranto.cluster import EmbeddedCluster
from coranto.cluster.info import DATA_VARIABLE
from coranto.errors import InvalidInput
from tests.consumers.page_shell import Followed, Shell

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[3] / "docs" / "forks.md"
DIFFERENT = "compare"
"""The command that exits with 1, because the compared tables differ."""


def test_the_walk_through_works_as_written(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text().partition("## A changed application next to the old one\n")[2].partition("\n### ")[0]
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, monkeypatch, [DIFFERENT])
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    with EmbeddedCluster(tmp_path / "data", lease_seconds=30, etcd_fsync=False):
        assert shell.follow(text) == Followed(commands=17, promised=23)
        for zombie in ("totals-2 totals-2/shop/orders totals_2", "totals-1 totals-1/totals-2/shop/orders totals_1"):
            with pytest.raises(
                InvalidInput, match=r"is promoted already: it continues as 'totals-live'|and is dropped"
            ):
                shell.run(f"python totals.py {zombie} changed")
