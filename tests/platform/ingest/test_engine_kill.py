"""Ingest processes and brokers are killed with SIGKILL, two processes at a time: each row is written once."""

from __future__ import annotations

import asyncio
import json
import os
import random
from functools import partial
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.errors import StreamNotFound
from coranto.streams.control.lifecycle import Streams, default_template
from tests.platform.ingest.killing import Killing, crash_broker, two_brokers
from tests.platform.ingest.lists import events

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "4"))
"""The minimum number of processes to kill."""
STREAM = "kill/orders"
FILES, ROWS = 2, 2000
"""The number of files added before each turn, and of rows in each."""
SPEC = """
name: killed
stream: {stream}
source:
  files: {{url: "file://{folder}/"}}
key: key
poison: dead letters
batch: {{bytes: 20000, seconds: 0.2}}
"""


def put_files(folder: Path, before: int) -> list[tuple[int, int]]:
    """Add files after the first `before` files. Return their rows."""
    folder.mkdir(exist_ok=True)
    rows = []
    for file in range(before, before + FILES):
        lines = [json.dumps({"file": file, "n": n, "key": f"{file}-{n % 7}"}) for n in range(ROWS)]
        (folder / f"{file:04}.jsonl").write_text("\n".join(lines) + "\n")
        rows += [(file, n) for n in range(ROWS)]
    return rows


async def rows_of(client: JournalClient) -> list[tuple[int, int]]:
    try:
        return [(each["file"], each["n"]) for each in await events(client, STREAM)]
    except StreamNotFound:
        return []


@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "1"))])
async def test_each_row_is_written_once_and_each_key_in_order(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    file = tmp_path / "killed.yaml"
    file.write_text(SPEC.format(stream=STREAM, folder=tmp_path / "in"))
    with two_brokers(tmp_path) as cluster:
        async with JournalClient(",".join(cluster.info.endpoints), retry_timeout=120) as client:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            killing = Killing(client, STREAM, file, chance, [partial(crash_broker, cluster)])
            expected = list[tuple[int, int]]()
            while not killing.is_over(KILLS):
                expected += put_files(tmp_path / "in", len(expected) // ROWS)
                await killing.turn()
            await asyncio.to_thread(cluster.wait_ready)
            assert await rows_of(client)
            await killing.complete()
            found = await rows_of(client)
    assert sorted(found) == expected
    orders = dict[tuple[int, int], list[int]]()
    for number, n in found:
        orders.setdefault((number, n % 7), []).append(n)
    assert all(each == sorted(each) for each in orders.values())
