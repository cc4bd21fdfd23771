"""The first example of docs/ingest.md, run literally, and its tables."""

from __future__ import annotations

import json
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
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.spec import read_spec
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.command_line import CommandLine
from tests.platform.ingest.postgres.database import SETTINGS, Database
from tests.servers.sql import PostgresServer

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


@pytest.mark.integration
def test_the_example_of_tables(run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PAGE.split("## PostgreSQL")[1].split("## In Dagster")[0]
    [statements] = re.findall(r"^```sql\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    [content] = re.findall(r"^`tables.yaml`:\n\n```yaml\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    [console] = re.findall(r"^```console\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    [shown] = re.findall(r"^```json\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("tables.yaml").write_text(content.replace("{segments: 2}", f'{{segments: 2, stores: ["{STORE_URL}"]}}'))
    with PostgresServer(*SETTINGS) as server, Database(server) as database:
        monkeypatch.setenv("DATABASE_URL", database.url)
        database.execute(statements)
        steps = re.findall(r"^\$ (\w+) (.*)\n((?:[^$].*\n)*)", console, re.MULTILINE)
        assert [program for program, _, _ in steps] == ["coranto", "psql", "coranto", "coranto"]
        for program, words, output in steps:
            if program == "psql":
                [statement] = re.findall(r'-c "(.*)"$', words)
                database.execute(statement)
                continue
            done = run(*words.split())
            assert done.code == 0, done.errors
            # A slow machine may divide the rows among several transactions.
            assert done.output.partition(" in ")[0].startswith(output.partition(" in ")[0].strip())
    lines = map(json.loads, run("streams", "read", "shop/order-changes").output.splitlines())
    [event] = [each for each in lines if each["_meta"]["op"] == "update"]
    expected = json.loads(shown)
    changing = {"uuid", "lsn", "xid", "committed"}
    assert set(event["_meta"]) == set(expected["_meta"])
    for each in (event, expected):
        each["_meta"] = {name: value for name, value in each["_meta"].items() if name not in changing}
    assert event == expected


def test_each_file_of_the_page_can_be_read() -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        assert read_spec(text, {"PWD": "/in", "DATABASE_URL": "postgresql://db/shop"}).name == "orders"
        assert yaml.safe_load(text)


def test_the_tables_name_every_option_and_metric() -> None:
    kafka, files = PAGE.split("## Kafka")[1].split("## Files")
    files, postgres = files.split("## PostgreSQL")
    names = {"client": "options", "from_end": "start", "accepts_loss": "lost", "restarts": "recreated"}
    names |= {"poll_seconds": "look", "ignores_changes": "changed"}
    names |= {"omits_toast": "toast", "transaction_bytes": "transaction", "divides": "larger"}
    for part, kind in ((kafka, KafkaOptions), (files, FileOptions), (postgres, PostgresOptions)):
        for field in kind.__dataclass_fields__:
            assert f"`{names.get(field, field)}`" in part, f"{kind.__name__}.{field}"
    for family in IngestMetrics().registry.collect():
        assert re.search(rf"`{family.name}(_total)?`", PAGE), family.name
