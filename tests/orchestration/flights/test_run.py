"""The demo's second pass, with a consumer killed half-way. `tests/system/test_main_job` runs the whole demo."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from coranto.client import ClientConfig
from coranto.errors import ClusterError
from dagster_coranto.flights import run
from dagster_coranto.flights.materialize import Job
from dagster_coranto.flights.run import Demo

TOTAL = 600
WAITS = "import time; time.sleep(600)"


class Passes(Demo):
    """A demo that materialises nothing. Its consumers run `programs`, one after the other."""

    def __init__(self, data_dir: Path, *programs: str) -> None:
        super().__init__(data_dir, console=Console(quiet=True))
        self._programs = list(programs)
        self.materialized: list[Job] = []

    def _materialize(self, job: Job, selection: Sequence[str] = ()) -> None:
        self.materialized.append(job)

    def _start(self, job: Job, selection: Sequence[str]) -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", self._programs.pop(0)])
        self._children.append(child)
        return child


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ClientConfig:
    monkeypatch.setattr(run, "_total_bytes", lambda *_: TOTAL)
    return ClientConfig("127.0.0.1:1")


def test_a_consumer_that_ends_before_the_kill_is_followed_by_one_with_new_journals(
    tmp_path: Path, config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Passes(tmp_path, "", WAITS)
    # The first consumer ends before any progress is seen. The second one is found half-way.
    monkeypatch.setattr(run, "_consumed", lambda *_: TOTAL // 2 if len(demo._children) == 2 else 0)
    job, killed = demo.second_pass(config)
    assert job.prefix == "second-2/"
    assert "kill -9" in killed
    assert [child.returncode for child in demo._children] == [0, -signal.SIGKILL]
    assert [each.prefix for each in demo.materialized] == ["second/", "second-2/", "second-2/"]


def test_it_is_an_error_if_no_consumer_could_be_killed(
    tmp_path: Path, config: ClientConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_consumed", lambda *_: 0)
    with pytest.raises(ClusterError, match="3 consumers finished before they could be killed"):
        Passes(tmp_path, "", "", "").second_pass(config)


def test_a_failed_consumer_is_an_error(tmp_path: Path, config: ClientConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_consumed", lambda *_: 0)
    with pytest.raises(ClusterError, match="the consumer failed"):
        Passes(tmp_path, "raise SystemExit(3)").second_pass(config)
