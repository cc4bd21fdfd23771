"""The first example of docs/ingest.md, word by word, and its tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import yaml

from coranto.client.loop import LoopThread
from coranto.ingest.files.options import FileOptions
from coranto.ingest.kafka.options import KafkaOptions
from coranto.ingest.metrics import IngestMetrics
from coranto.ingest.spec import read_spec
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.command_line import CommandLine

PAGE = (Path(__file__).parents[3] / "docs" / "ingest.md").read_text()


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    loop = LoopThread("cluster")
    cluster = Cluster(brokers=1, grpc=True)
    loop.run(cluster.__aenter__())
    try:
        monkeypatch.setenv("CORANTO_ENDPOINT", loop.run(_endpoint(cluster)))
        yield CommandLine(capfdbinary.readouterr)
    finally:
        loop.run(cluster.__aexit__(None, None, None))
        loop.stop()
        structlog.reset_defaults()


async def _endpoint(cluster: Cluster) -> str:
    return cluster.endpoint.removeprefix("http://")


def test_the_first_example(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    for name, language in (("orders.jsonl", "json"), ("orders.yaml", "yaml")):
        [content] = re.findall(rf"^`{re.escape(name)}`:\n\n```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        if language == "yaml":  # The stores of the test's cluster.
            content = content.replace("{segments: 2}", f'{{segments: 2, stores: ["{STORE_URL}"]}}')
        Path(name).write_text(content)
    console = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    steps = re.findall(r"^\$ coranto (.*)\n((?:[^$].*\n)*)", console, re.MULTILINE)
    assert len(steps) == 3
    for words, output in steps:
        done = run(*words.split())
        assert done.code == 0, done.errors
        assert not output or done.output == output
    event = run("streams", "read", "shop/orders").output
    assert '"file":"orders.jsonl","position":0},"id": 1, "customer": "ada", "cents": 500}' in event


def test_each_file_in_the_page_can_be_read() -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        assert read_spec(text, {"PWD": "/in"}).name == "orders"
        assert yaml.safe_load(text)


def test_the_tables_name_every_option_and_metric() -> None:
    kafka, files = PAGE.split("## Kafka")[1].split("## Files")
    names = {"client": "options", "from_end": "start", "accepts_loss": "lost", "restarts": "recreated"}
    names |= {"look_seconds": "look", "ignores_changes": "changed"}
    for part, kind in ((kafka, KafkaOptions), (files, FileOptions)):
        for field in kind.__dataclass_fields__:
            assert f"`{names.get(field, field)}`" in part, f"{kind.__name__}.{field}"
    for family in IngestMetrics().registry.collect():
        assert re.search(rf"`{family.name}(_total)?`", PAGE), family.name
