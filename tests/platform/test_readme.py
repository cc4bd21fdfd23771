"""The README's tour of the parts, as it stands, against brokers in this process."""

from __future__ import annotations

import re
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


def test_the_tour_in_the_documents_works(
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


def test_the_default_path_ingests_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """As printed, but for the stores of the test's cluster, and without `--follow`, which does not end."""
    (ingest,) = (each for each in blocks("yaml") if each.startswith("# orders.yaml"))
    ((words, following),) = re.findall(r"^\$ coranto (ingest .*) (--follow)$", PAGE.read_text(), re.MULTILINE)
    assert following
    (tmp_path / "orders.yaml").write_text(ingest.replace("{segments: 2}", f'{{segments: 2, stores: ["{STORE_URL}"]}}'))
    (tmp_path / "orders.jsonl").write_text('{"customer": "ada"}\n{"customer": "bob"}\n')
    with SyncCluster(brokers=1) as cluster:
        monkeypatch.setenv("CORANTO_ENDPOINT", cluster.endpoint.removeprefix("http://"))
        monkeypatch.setenv("PWD", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        run = CommandLine(capfdbinary.readouterr)
        assert [run(*words.split()).output for _ in range(2)] == [
            "orders: 2 rows in 1 transactions\n",
            "orders: 0 rows in 0 transactions\n",
        ]
        assert len(run("streams", "read", "shop/orders").output.splitlines()) == 2
