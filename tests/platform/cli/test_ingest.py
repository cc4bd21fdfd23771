"""`coranto ingest …` against brokers in this process, and as a service that receives signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from coranto.client.loop import LoopThread
from coranto.cluster.processes import free_port
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.command_line import CommandLine

SPEC = """
name: loads
stream: {stream}
source:
  files: {{url: "file://{folder}/", pattern: "*.jsonl", look: 0.1}}
create: {{stores: ["{store}"]}}
batch: {{seconds: 0.1}}
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    loop = LoopThread("cluster")
    cluster = Cluster(brokers=1, grpc=True)
    loop.run(cluster.__aenter__())
    try:
        yield loop.run(_endpoint(cluster))
    finally:
        loop.run(cluster.__aexit__(None, None, None))
        loop.stop()


async def _endpoint(cluster: Cluster) -> str:
    return cluster.endpoint.removeprefix("http://")


@pytest.fixture
def run(
    endpoint: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("CORANTO_ENDPOINT", endpoint)
    yield CommandLine(capfdbinary.readouterr)
    structlog.reset_defaults()


def written(tmp_path: Path, stream: str, more: str = "") -> tuple[str, Path]:
    folder = tmp_path / "in"
    folder.mkdir()
    file = tmp_path / "loads.yaml"
    file.write_text(SPEC.format(stream=stream, folder=folder, store=STORE_URL) + more)
    return str(file), folder


def put(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.partial").write_text("".join(f"{line}\n" for line in lines))
    (folder / f"{name}.partial").rename(folder / name)


def test_a_run_commits_rows_and_the_status_shows_them(run: CommandLine, tmp_path: Path) -> None:
    file, folder = written(tmp_path, "shop/one")
    put(folder, "a.jsonl", '{"n": 1}', '{"n": 2}')
    done = run("ingest", "run", file)
    assert (done.code, done.output) == (0, "loads: 2 rows in 1 transactions\n")
    assert done.errors == "coranto: loads: from files to stream shop/one\n"
    assert run("ingest", "run", file).output == "loads: 0 rows in 0 transactions\n"
    put(folder, "b.jsonl", '{"n": 3}')
    shown = run("ingest", "status", file)
    assert shown.code == 0
    lines = shown.output.splitlines()
    assert lines[0].split() == ["PART", "POSITION", "BEHIND", "PROBLEM"]
    assert [line.split()[0] for line in lines[1:3]] == ["a.jsonl", "b.jsonl"]
    assert [line.split()[-1] for line in lines[1:3]] == ["0", "9"]
    assert lines[3] == "loads: 2 rows in stream shop/one; 9 rows or bytes behind; 0 dead letters"
    facts = json.loads(run("ingest", "status", file, "-o", "json").output)
    assert (facts["rows"], facts["behind"], facts["target"]) == (2, 9, "stream shop/one")
    assert [(each["part"], each["behind"]) for each in facts["parts"]] == [("a.jsonl", 0), ("b.jsonl", 9)]
    assert facts["parts"][0]["position"][1:] == [18, True]
    events = run("streams", "read", "shop/one").output.splitlines()
    assert [json.loads(each)["n"] for each in events] == [1, 2]


def test_dead_letters_and_problems_are_listed(run: CommandLine, tmp_path: Path) -> None:
    file, folder = written(tmp_path, "shop/two")
    put(folder, "a.jsonl", '{"n": 1}', "none")
    failed = run("ingest", "run", file)
    assert failed.code == 1
    assert "coranto: files a.jsonl, offset 9: the row is not JSON" in failed.errors
    Path(file).write_text(Path(file).read_text() + "poison: dead letters\n")
    assert run("ingest", "run", file).output == "loads: 1 rows, 1 dead letters in 1 transactions\n"
    folder.rename(folder.with_name("away"))
    shown = run("ingest", "status", file)
    assert shown.code in (0, 1)


def test_unreadable_files_are_reported(run: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("name: a b\n")
    wrong = run("ingest", "run", str(file))
    assert (wrong.code, wrong.errors) == (1, f"coranto: {file}: line 1: the field 'stream' is missing\n")
    file.write_bytes(b"\xff")
    assert f"{file} is not UTF-8" in run("ingest", "status", str(file)).errors
    assert "No such file" in run("ingest", "run", str(tmp_path / "missing.yaml")).errors
    good, _ = written(tmp_path, "shop/three")
    assert "'x' is not an address; give [host:]port" in run("ingest", "run", good, "--metrics", "x").errors
    assert "there is no stream shop/three" in run("ingest", "status", good).errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_serves_metrics_and_ends_after_a_signal(
    endpoint: str, tmp_path: Path, number: signal.Signals
) -> None:
    file, folder = written(tmp_path, f"shop/service-{number}")
    put(folder, "a.jsonl", '{"n": 1}')
    port = free_port()
    command = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
    words = ["ingest", "run", file, "--follow", "--metrics", str(port), "--endpoint", endpoint]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        try:
            await_rows(port, process, 1)
            put(folder, "b.jsonl", '{"n": 2}')
            await_rows(port, process, 2)
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "loads: 2 rows in 2 transactions\n"), errors


def await_rows(port: int, process: subprocess.Popen[str], count: int) -> None:
    """Wait until the metrics show this number of committed rows."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            continue
        if f'coranto_ingest_rows_total{{ingest="loads"}} {count}.0' in text:
            return
    pytest.fail("the service ended")
