"""`coranto consumer run` with the command, variables and application of deploy/kubernetes/consumer."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
import pytest

from coranto.cli import main
from coranto.cluster.processes import free_port
from coranto.errors import InvalidInput
from coranto_consumers.cli.running import consumer_options, load_spark_application
from tests.consumers.conftest import Broker
from tests.installation.kustomize import DEPLOY, KUBERNETES, containers, render

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
MANIFESTS = render(KUBERNETES / "consumer")
JOURNAL = "shop/orders/part-000"


@dataclass
class Pod:
    """Processes of the manifest's container, with a fake broker and SQLite."""

    broker: Broker
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (config,) = (each for each in MANIFESTS if each["kind"] == "ConfigMap")
        for name, text in config["data"].items():
            (self.folder / name).write_text(text)
        self.broker.create(JOURNAL)

    @property
    def store(self) -> Path:
        return self.folder / "store.db"

    def start(self, stack: ExitStack, log: str, *more: str, port: int = 0) -> subprocess.Popen[bytes]:
        """Start the container's command, with local values for settings of the environment."""
        (container,) = containers(MANIFESTS)
        options = {"--metrics-port": f"--metrics-port={port}", "--spark-master": "--spark-master=local[1]"}
        words = [options.get(word.partition("=")[0], word) for word in container["args"]]
        values = {
            "CORANTO_ENDPOINT": self.broker.endpoint,
            "CORANTO_STORE_URL": f"sqlite:///{self.store}",
            "SPARK_LOCAL_DIRS": str(self.folder),
        }
        places = {"CORANTO_TLS_CA", "CORANTO_AUTH_KEYS"}
        assert {each["name"] for each in container["env"]} == values.keys() | places
        with (self.folder / log).open("wb") as output:
            command = [*COMMAND, *words, *more]
            env = {**os.environ, **values}
            process = subprocess.Popen(command, cwd=self.folder, env=env, stdout=output, stderr=output)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self.processes.append(process)
        return process

    def order(self, customer: str, cents: int) -> None:
        self.broker.write(JOURNAL, json.dumps({"customer": customer, "cents": cents}).encode() + b"\n")

    def totals(self) -> dict[str, int]:
        if not self.store.exists():
            return {}
        with closing(sqlite3.connect(self.store)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'totals'").fetchall():
                return {}
            return dict(connection.execute("SELECT customer, cents FROM totals").fetchall())

    def until(self, condition: Callable[[], bool], log: str) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < deadline, (self.folder / log).read_text()
            assert self.processes[-1].poll() is None, (self.folder / log).read_text()
            time.sleep(0.05)

    def events(self, log: str) -> list[dict[str, Any]]:
        lines = (self.folder / log).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def pod(broker: Broker, tmp_path: Path) -> Pod:
    return Pod(broker, tmp_path)


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.integration
def test_a_service_consumes_exposes_metrics_and_stops_after_its_transaction(pod: Pod) -> None:
    port = free_port()
    pod.order("ada", 5)
    with ExitStack() as stack:
        first = pod.start(stack, "first", port=port)
        pod.until(lambda: pod.totals() == {"ada": 5}, "first")
        pod.order("ada", 10)
        pod.order("grace", 1)
        pod.until(lambda: pod.totals() == {"ada": 15, "grace": 1}, "first")
        pod.until(lambda: 'coranto_spark_messages_total{consumer="totals"} 3.0' in metrics(port), "first")

        second = pod.start(stack, "second")
        assert first.wait(240) == 1
        assert "totals" in (pod.folder / "first").read_text().splitlines()[-1]
        pod.order("grace", 2)
        pod.until(lambda: pod.totals() == {"ada": 15, "grace": 3}, "second")
        second.send_signal(signal.SIGTERM)
        assert second.wait(120) == 0
    ended = pod.events("second")[-1]
    assert (ended["event"], ended["consumer"], ended["messages"]) == ("consumer.run_ended", "totals", 1)
    assert str(pod.store) not in (pod.folder / "second").read_text()


@pytest.mark.integration
@pytest.mark.exhaustive
def test_a_run_until_caught_up_ends_by_itself(pod: Pod) -> None:
    pod.order("ada", 5)
    with ExitStack() as stack:
        options = ("--until-caught-up", "--retry-timeout=30s", "--set=misfits=nulls", "--start=latest")
        assert pod.start(stack, "log", *options).wait(240) == 0, (pod.folder / "log").read_text()
        assert pod.totals() == {}, "it begins at the end"
        pod.order("ada", 7)
        assert pod.start(stack, "again", *options).wait(240) == 0, (pod.folder / "again").read_text()
    assert pod.totals() == {"ada": 7}


@pytest.mark.integration
@pytest.mark.exhaustive
def test_spark_submit_runs_the_program_of_deploy(pod: Pod) -> None:
    pod.order("ada", 5)
    words = ["--master", "local[1]", "--conf", "spark.ui.enabled=false", "--conf", "spark.driver.memory=512m"]
    words += [str(DEPLOY / "spark" / "run_consumer.py"), "totals:Totals", "--until-caught-up", "--log-json"]
    env = {
        **os.environ,
        "CORANTO_ENDPOINT": pod.broker.endpoint,
        "CORANTO_STORE_URL": f"sqlite:///{pod.store}",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(pod.folder),
    }
    with (pod.folder / "log").open("wb") as output:
        command = [Path(pyspark.__file__).parent / "bin" / "spark-submit", *words]
        done = subprocess.run(command, cwd=pod.folder, env=env, stdout=output, stderr=output, check=False, timeout=240)
    assert done.returncode == 0, (pod.folder / "log").read_text()
    assert pod.totals() == {"ada": 5}
    assert "consumer.run_ended" in {event.get("event") for event in pod.events("log")}


def test_command_line_options_become_consumer_options() -> None:
    options = consumer_options(["max_transaction_bytes=1024", "misfits={journals: 'name=a/letters'}"], "10s", "1m30s")
    assert (options.max_transaction_bytes, options.min_transaction_seconds, options.retry_timeout) == (1024, 10, 90)
    assert consumer_options([], "0s", None).retry_timeout == 600


@pytest.mark.parametrize(
    ("settings", "interval", "timeout", "problem"),
    [
        (["max_transaction_bytes"], "0s", None, r"--set: 'max_transaction_bytes' is not of the form NAME=VALUE"),
        (["misfits={"], "0s", None, r"--set: misfits: '\{' is not YAML"),
        (["max_bytes=1"], "0s", None, r"max_bytes: there is no such option of a consumer"),
        (["min_transaction_seconds=1"], "0s", None, r"--set: min_transaction_seconds is given by --trigger-interval"),
        (["retry_timeout=1"], "0s", None, r"--set: retry_timeout is given by --retry-timeout"),
        ([], "often", None, r"--trigger-interval: 'often' is not a duration"),
        ([], "0s", "-1s", r"retry_timeout: -1\.0 is not a number of seconds"),
    ],
)
def test_bad_options_are_refused_by_name(settings: list[str], interval: str, timeout: str | None, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        consumer_options(settings, interval, timeout)


def test_an_application_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kinds.py").write_text("class Shards:\n    def new_store(self, shard): ...\n\n\nnumber = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(InvalidInput, match=r"has no name; it is an application of shards, so use `coranto consumer se"):
        load_spark_application("kinds:Shards")
    with pytest.raises(InvalidInput, match=r"kinds:number is not a SparkApplication: it has no name; see coranto_cons"):
        load_spark_application("kinds:number")


def test_an_invalid_command_line_fails_before_a_session_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["consumer", "run", "absent:Totals", "--store", f"sqlite:///{tmp_path}/store.db"]
    assert main([*words, "--endpoint", "127.0.0.1:1"]) == 1
    assert "module absent cannot be imported" in capsys.readouterr().err
