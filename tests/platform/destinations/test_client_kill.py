"""Processes that load a package, and brokers, are killed at random times: each row is published once."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from tests.platform.destinations.conftest import Running
from tests.platform.destinations.shop import loaded, messages, pipeline, serving, source

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

TABLES = ("orders", "visits")
PROGRAM = """
import sys
from pathlib import Path
from tests.platform.destinations.shop import pipeline
pipe = pipeline(Path(sys.argv[1]))
print("loading", flush=True)
pipe.load()
"""


class Loader:
    """A process that loads the pending package of a folder."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).parents[3]
        command = [sys.executable, "-c", PROGRAM, str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root, text=True)

    def is_killed(self, seconds: float) -> bool:
        """Kill the process some time after it starts to load. Returns False if it ended by itself."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "loading\n", self._process.communicate()[1]
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return True
        self.finish()
        return False

    def finish(self) -> None:
        _, errors = self._process.communicate()
        assert self._process.returncode == 0, errors


def prepare(folder: Path, rows: int) -> None:
    """Make a package with a file for each ten rows. Each row has a list of two items."""
    with serving() as shop:
        for table in TABLES:
            shop.rows[table] = [{"id": n, "version": n, "lines": [{"n": n}, {"n": -n}]} for n in range(1, rows + 1)]
        pipe = pipeline(folder)
        pipe.extract(source(shop.url, *TABLES))
        pipe.normalize()


def check(client: SyncJournalClient, rows: int) -> None:
    for table in TABLES:
        assert sorted(row["id"] for row in messages(client, table)) == list(range(1, rows + 1))
        lines = sorted(abs(row["n"]) for row in messages(client, f"{table}__lines"))
        assert lines == sorted([*range(1, rows + 1)] * 2)
    assert len(messages(client, "_dlt_loads")) == 1


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_each_row_is_published_once_when_loaders_are_killed(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setenv("NORMALIZE__DATA_WRITER__FILE_MAX_ITEMS", "10")
    chance, rows = random.Random(kills), 100 * kills
    folders = [tmp_path / "one", tmp_path / "two"]
    prepare(folders[0], rows)
    shutil.copytree(*folders)
    killed = 0
    while killed < kills:
        loaders = [Loader(folder) for folder in chance.choice((folders, folders[:1], folders[1:]))]
        ends = [loader.is_killed(chance.uniform(0, 0.6)) for loader in loaders]
        assert all(ends), "the load ended too soon: use more rows"
        killed += len(ends)
    for folder in folders:
        Loader(folder).finish()
    check(client, rows)
    place = tmp_path / "shop.db"
    loaded(client.config.endpoint, f"sqlite:///{place}", "orders", "id BIGINT, version BIGINT")
    with sqlite3.connect(place) as database:
        found = database.execute("SELECT id, version FROM orders ORDER BY id").fetchall()
    assert found == [(n, n) for n in range(1, rows + 1)]


@pytest.mark.parametrize("brokers", [3])
def test_each_row_is_published_once_when_brokers_are_killed(
    running: Running, client: SyncJournalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMALIZE__DATA_WRITER__FILE_MAX_ITEMS", "10")
    monkeypatch.setenv("DESTINATION__CORANTO__REPLICATION", "2")
    chance, rows = random.Random(3), 300
    prepare(tmp_path / "work", rows)
    pipe, ends = pipeline(tmp_path / "work"), list[object]()
    loading = threading.Thread(target=lambda: ends.append(pipe.load()))
    loading.start()
    kills = 0
    while loading.is_alive() and kills < 6:
        time.sleep(chance.uniform(0, 0.3))
        victim = chance.randrange(3)
        running.loop.run(running.cluster.kill(victim))
        time.sleep(chance.uniform(0, 0.5))
        running.loop.run(running.cluster.start(victim))
        kills += 1
    loading.join()
    assert kills > 1
    assert ends
    check(client, rows)
