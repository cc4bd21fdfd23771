"""The examples of docs/message-types.md on a real cluster."""

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

PAGE = Path(__file__).parents[4] / "docs" / "message-types.md"


def test_the_first_type_is_registered_and_read_as_the_page_says(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text().partition("## A first type\n")[2].partition("\n## ")[0]
    monkeypatch.chdir(tmp_path)
    shell = Shell(capsys, monkeypatch, ["wrong.yaml"])
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    with EmbeddedCluster(tmp_path / "data", lease_seconds=30, etcd_fsync=False):
        assert shell.follow(text) == Followed(commands=12, promised=14)
        with pytest.raises(InvalidInput, match=r"does not fit shop\.Order@2: id is NOT NULL, and missing: give it"):
            shell.run("""python publish.py '{"customer": "eve"}'""")
