"""The examples of docs/dlt.md, verbatim."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import dagster
import pytest

from coranto.client import SyncJournalClient
from coranto.destinations.columns import _KINDS
from coranto.destinations.factory import CorantoClientConfiguration
from coranto.testing.command_line import CommandLine
from tests.platform.destinations.conftest import Running
from tests.platform.destinations.shop import DATASET

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "dlt.md").read_text()

pytestmark = pytest.mark.integration


def block(language: str, begins: str) -> str:
    [found] = [each for each in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if begins in each]
    return found


def test_the_first_example_runs(running: Running, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "load.py").write_text(block("python", "orders = [\n"))
    (tmp_path / "orders.yaml").write_text(block("yaml", "shop-orders"))
    steps = re.findall(r"^\$ (\w+) (.*)\n((?:[^$].*\n)*)", block("console", "python load.py"), re.MULTILINE)
    assert [program for program, _, _ in steps] == ["python", "coranto", "coranto", "coranto"]
    command = CommandLine(capfdbinary.readouterr)
    for program, words, output in steps:
        if program == "python":
            subprocess.run([sys.executable, *words.split()], check=True)
            continue
        done = command(*words.split())
        assert done.code == 0, done.errors
        assert not output or done.output == output
        if "read" in words:
            assert '"id":1,"customer":"ada"' in done.output


def test_the_dagster_assets_run(
    running: Running, client: SyncJournalClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "example_of_dlt.py").write_text(block("python", "dlt_assets"))
    example = importlib.import_module("example_of_dlt")
    done = dagster.materialize([example.shop_assets], resources=example.defs.resources)
    assert done.success
    [made] = done.get_asset_materialization_events()
    assert made.asset_key.path[-1].endswith("orders")
    found = [info.spec.name for info in client.list("").journals]
    assert {"shop/orders/000", "shop/orders__lines/000", "shop/_dlt_loads/000"} <= set(found)


def test_the_page_names_every_setting_and_type() -> None:
    inherited = {
        field for base in CorantoClientConfiguration.__mro__[1:] for field in vars(base).get("__annotations__", ())
    }
    settings = set(CorantoClientConfiguration.__annotations__) - inherited
    assert settings == {"endpoint", "prefix", "journals", "replication", "stores", "registry", "replace", "accept_loss"}
    table = PAGE.partition("## Settings")[2].partition("## In Dagster")[0]
    for name in settings:
        assert f"`{name}`" in table
    for kind in (*_KINDS, "decimal"):
        assert f"`{kind}`" in PAGE
    assert DATASET not in PAGE
