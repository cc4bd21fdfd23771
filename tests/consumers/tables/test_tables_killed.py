"""Processes of a table are killed with SIGKILL, two at a time: the table still equals the stream, row by row."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, Table, func, select
from sqlalchemy.exc import SQLAlchemyError

from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.streams import Split, SyncStreams, SyncStreamWriter, default_template
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables import read_table
from tests.consumers.tables.killed import process
from tests.consumers.tables.shop import message, model, ordered, rows_in, table_file
from tests.sampling import sampled

pytestmark = pytest.mark.timeout(900)

KILLS = int(os.environ.get("CORANTO_TABLE_KILLS", "4"))
"""The number of processes to kill."""
STREAM = "kill/items"


class Writer:
    """A thread that writes random events to the stream until the block ends."""

    def __init__(self, client: SyncJournalClient, chance: random.Random) -> None:
        self.events: list[dict[str, Any]] = []
        self._client = client
        self._chance = chance
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        with SyncStreamWriter(self._client, STREAM) as writer:
            while not self._ended.is_set():
                for _ in range(self._chance.randrange(1, 30)):
                    event = message(self._chance)
                    writer.write_event(str(event["id"]), event)
                    self.events.append(event)
                writer.flush()
                self._ended.wait(0.02)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(120)


def count(store: SqlStore) -> int:
    with contextlib.suppress(SQLAlchemyError), store.engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(Table("items", MetaData()))).scalar_one())
    return 0


@pytest.mark.integration
@pytest.mark.parametrize("mode", sampled(["changes", "append"], 2))
def test_the_table_has_the_rows_of_the_stream(tmp_path: Path, new_store: Callable[[str], str], mode: str) -> None:
    chance = random.Random(int(os.environ.get("CORANTO_TABLE_SEED", "1")))
    url = new_store("postgresql")
    store, file = SqlStore(url), tmp_path / "items.yaml"
    file.write_text(table_file(f"{{stream: {STREAM}}}", url, mode))
    with EmbeddedCluster(tmp_path / "cluster", brokers=1, lease_seconds=60, etcd_fsync=False) as cluster:
        endpoint = cluster.info.endpoint
        with SyncJournalClient(endpoint, retry_timeout=120) as client:
            streams = SyncStreams(client)
            streams.create(STREAM, 2, template=default_template(replication=1))
            killed, is_split = 0, False
            with Writer(client, chance) as writer:
                while killed < KILLS:
                    wanted = count(store) + chance.randrange(1, 60)
                    until = time.monotonic() + chance.uniform(0.2, 4.0)
                    with contextlib.ExitStack() as exits:
                        services = [exits.enter_context(process(file, endpoint)) for _ in range(chance.choice((1, 2)))]
                        while time.monotonic() < until and (mode == "changes" or count(store) < wanted):
                            services[0].poll()
                            threading.Event().wait(0.02)
                        killed += sum(each.poll() is None for each in services)
                        # A service ends by itself only when the other one fences it off.
                        fenced = [each for each in services if each.poll() is not None]
                        assert len(fenced) < len(services) or not fenced
                        for each in fenced:
                            assert "fence" in (each.communicate()[1] or "")
                    if killed >= KILLS // 2 and not is_split:
                        is_split = True
                        streams.scale(STREAM, [Split(streams.describe(STREAM).active()[0].number, 2)])
            with process(file, endpoint, "--once") as last:
                output, errors = last.communicate(timeout=300)
                assert last.returncode == 0, errors
            assert output.startswith(read_table(file.read_text()).name)
    assert rows_in(read_table(file.read_text())) == ordered(model(mode, writer.events))
    assert len(writer.events) > KILLS
