"""Processes of an ingest and brokers are killed with SIGKILL, two processes at a time: each row is there once."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import StreamNotFound
from coranto.streams.control.lifecycle import Streams, default_template
from tests.platform.ingest.killing import live, moment
from tests.platform.ingest.lists import events

pytestmark = pytest.mark.timeout(900)

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
"""The least number of processes to kill."""
STREAM = "kill/orders"
FILES, ROWS = 12, 1500 * KILLS
SPEC = """
name: killed
stream: {stream}
source:
  files: {{url: "file://{folder}/"}}
key: key
poison: dead letters
batch: {{bytes: 20000, seconds: 0.2}}
"""


def put_files(folder: Path) -> list[tuple[int, int]]:
    folder.mkdir()
    rows = []
    for file in range(FILES):
        lines = [json.dumps({"file": file, "n": n, "key": f"{file}-{n % 7}"}) for n in range(ROWS // FILES)]
        (folder / f"{file:02}.jsonl").write_text("\n".join(lines) + "\n")
        rows += [(file, n) for n in range(ROWS // FILES)]
    return rows


async def rows_of(client: JournalClient) -> list[tuple[int, int]]:
    try:
        return [(each["file"], each["n"]) for each in await events(client, STREAM)]
    except StreamNotFound:
        return []


@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "1"))])
async def test_each_row_is_there_once_and_each_key_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    expected = put_files(tmp_path / "in")
    file = tmp_path / "killed.yaml"
    file.write_text(SPEC.format(stream=STREAM, folder=tmp_path / "in"))
    with EmbeddedCluster(tmp_path / "cluster", brokers=2, lease_seconds=60, etcd_fsync=False) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            killed, is_broker_killed = 0, False
            while killed < KILLS:
                # Some die while they start, most while they commit; two at a time compete.
                lives = [live(file, endpoint, moment(client, STREAM, chance)) for _ in range(chance.choice((1, 2)))]
                if killed >= KILLS // 2 and not is_broker_killed:
                    is_broker_killed = True
                    await asyncio.to_thread(cluster.kill_broker, 1)
                ends = await asyncio.gather(*lives)
                killed += ends.count(None)
                assert 0 not in ends, "all was there too soon: give more rows"
            await asyncio.to_thread(cluster.wait_ready)
            assert await rows_of(client)
            assert await live(file, endpoint, None) == 0
            found = await rows_of(client)
    assert sorted(found) == expected
    for key in range(7):
        for each in range(FILES):
            mine = [n for number, n in found if number == each and n % 7 == key]
            assert mine == sorted(mine)
