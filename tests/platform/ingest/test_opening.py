"""A source is opened by its kind and imported only then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.errors import MissingExtra
from coranto.ingest import Ingest, open_source, read_spec
from coranto.ingest.files.source import FileSource
from coranto.ingest.gateway.service import WebhookIngest
from coranto.ingest.opening import lag_of, open_ingest

FILES = '{name: a, stream: b, source: {files: {url: "file:///in/"}}}'
POSTGRES = '{name: a, stream: b, source: {postgres: {url: "postgresql://db/shop", publication: shop}}}'
WEBHOOK = '{name: a, stream: b, source: {webhook: {listen: ":0"}}}'
KAFKA = '{name: a, stream: b, source: {kafka: {brokers: "k:9092", topics: [t]}}}'


async def test_files_are_below_the_root_of_the_machine_by_default(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("{}\n")
    source = open_source(read_spec(FILES), tmp_path)
    assert isinstance(source, FileSource)
    assert await source.lag({}) == {"a.jsonl": 3}


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    for name in ("source", "cluster"):
        monkeypatch.delitem(sys.modules, f"coranto.ingest.kafka.{name}", raising=False)
    with pytest.raises(MissingExtra, match=r"confluent_kafka is not installed.*coranto\[kafka\]"):
        open_source(read_spec(KAFKA))


def test_tables_need_a_smaller_extra_than_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"psycopg is not installed.*coranto\[postgres\]"):
        open_source(read_spec(POSTGRES))


async def test_webhooks_are_served_and_not_read(client: JournalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(WEBHOOK)
    assert isinstance(open_ingest(client, spec), WebhookIngest)
    assert isinstance(open_ingest(client, read_spec(FILES)), Ingest)
    assert await lag_of(spec, {"gateway-1": [1, 2.0]}) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"aiohttp is not installed.*coranto\[webhook\]"):
        open_ingest(client, spec)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import coranto, coranto.client, coranto.streams", ("coranto.ingest", "confluent_kafka", "fastavro")),
        (f"import coranto.ingest as i; i.read_spec({POSTGRES!r})", ("psycopg",)),
        (f"import coranto.ingest as i; i.open_source(i.read_spec({POSTGRES!r}))", ("sqlalchemy", "numpy", "pyarrow")),
        ("from coranto.cli import main; main(['--help'])", ("coranto.ingest", "confluent_kafka", "fastavro")),
        (
            f"import coranto.ingest as i; i.open_source(i.read_spec({FILES!r}))",
            ("confluent_kafka", "fastavro", "pyarrow", "numpy", "aiohttp"),
        ),
        (f"import coranto.ingest as i; i.read_spec({WEBHOOK!r})", ("aiohttp", "coranto.ingest.gateway")),
        (f"import coranto.ingest as i; i.Ingest; i.read_spec({KAFKA!r})", ("confluent_kafka", "pyarrow", "numpy")),
    ],
)
def test_unused_sources_are_not_imported(code: str, absent: tuple[str, ...]) -> None:
    script = f"import sys; {code}; sys.exit(str([name for name in {absent!r} if name in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""
