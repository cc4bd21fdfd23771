"""The README's tour, verbatim, against brokers in this process."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from coranto.streams import SyncStreams, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto.testing.command_line import CommandLine

PAGE = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_tour_of_the_documents_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (specs,) = (each for each in blocks("yaml") if each.startswith("# journals.yaml"))
    (tmp_path / "journals.yaml").write_text(specs)
    append_and_read, publish, transaction, _spark, _consume = blocks("python")
    with SyncCluster(brokers=1) as cluster:
        endpoint = cluster.endpoint.removeprefix("http://")
        monkeypatch.setenv("CORANTO_ENDPOINT", endpoint)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("coranto.cluster.locate", lambda: SimpleNamespace(endpoint=endpoint, file_root=None))
        run = CommandLine(capfdbinary.readouterr)
        assert run("journals", "apply", "--specs", "journals.yaml").code == 0
        cluster.ready("orders/part-000", "orders/part-001")
        assert run("journals", "append", "orders/part-000", input=b'{"order": 7}\n').code == 0
        assert run("journals", "read", "orders/part-000").output == '{"order": 7}\n'
        assert run("journals", "fragments", "orders/part-000").code == 0
        with SyncStreams(cluster.client()) as streams:
            streams.create("shop/orders", template=default_template(stores=[STORE_URL]))
        names: dict[str, object] = {}
        for block in (append_and_read, publish, transaction):
            exec(compile(block, PAGE, "exec"), names)
        assert capfdbinary.readouterr().out.startswith(b"13 26\n0 b'")
        found = run("streams", "read", "shop/orders").output.splitlines()
        assert [line.partition("},")[2] for line in found] == ['"order":11}', '"order":11,"item":"lamp"}']


def test_the_default_path_creates_a_table_with_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As printed, except for the stores of the test's cluster, and commands that end when they have read all."""
    for text in blocks("yaml"):
        name = text.splitlines()[0].removeprefix("# ")
        stores = f'{{segments: 2, stores: ["{STORE_URL}"]}}'
        (tmp_path / name).write_text(text.replace("{segments: 2}", stores))
    (tmp_path / "orders.jsonl").write_text('{"id": 1, "customer": "ada"}\n{"id": 2}\n{"id": 1, "customer": "bob"}\n')
    page = PAGE.read_text()
    [ingest] = re.findall(r"^\$ coranto (ingest .*) --follow$", page, re.MULTILINE)
    [table] = re.findall(r"^\$ coranto (table .*)$", page, re.MULTILINE)
    with SyncCluster(brokers=1) as cluster:
        monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint.removeprefix("http://"))
        monkeypatch.setenv("PWD", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        run = CommandLine(capfdbinary.readouterr)
        for rows in (3, 0):
            assert run(*ingest.split()).output.startswith(f"orders: {rows} rows ")
            assert run(*table.split(), "--once").output.startswith(f"shop-orders: {rows} messages ")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT id, customer FROM orders ORDER BY id").fetchall() == [(1, "bob"), (2, None)]
