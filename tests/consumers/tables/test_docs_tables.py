"""The first example of docs/tables.md, run literally, and its other files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto.testing.command_line import CommandLine
from coranto_consumers.tables import read_table
from coranto_consumers.tables.spec import _FIELDS

PAGE = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
FILES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    with SyncCluster(brokers=1) as cluster:
        monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint.removeprefix("http://"))
        yield CommandLine(capfdbinary.readouterr)
    structlog.reset_defaults()


def test_the_first_example(shell: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("orders.yaml").write_text(FILES[0])
    console = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    for line, output in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", console, re.MULTILINE):
        piped, _, command = line.rpartition(" | ")
        words = command.removeprefix("coranto ").split()
        if words[:2] == ["streams", "create"]:
            words += ["--store", STORE_URL]  # The stores of the test's cluster.
        given = piped.removeprefix("printf '").removesuffix("'").replace("\\t", "\t").replace("\\n", "\n")
        done = shell(*words, input=given.encode())
        assert done.code == 0, f"{line}: {done.errors}"
        if output:
            assert done.output == output, line
    assert "shop-orders: 1 rows in table orders; 0 bytes behind; " in shell("table", "status", "orders.yaml").output


def test_each_file_on_the_page_is_valid() -> None:
    assert len(FILES) == 3
    for text in FILES:
        assert read_table(text, {"SHOP_PASSWORD": "secret"}).name.startswith("shop-")


def test_the_page_names_every_field() -> None:
    for field in _FIELDS:
        assert re.search(rf"^\| [^|]*`{field}`", PAGE, re.MULTILINE), field
