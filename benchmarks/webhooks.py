"""Webhooks in batches against a bare aiohttp server that parses the same JSON (`request.json()`).

Each server is a separate process. The floor stores nothing. The subject answers when the events are committed to a
stream of two segments. One client sends the same requests to both. The second figure divides by the processor time of
the server's process alone. The first figure also depends on the client and the broker, which share the machine's cores
with the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from benchmarks.runner import Figure, measure_pairs
from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import free_port

ROWS: Final = 1000
REQUESTS: Final = 120
CONCURRENCY: Final = 8
_FLOOR: Final = """
import sys
from aiohttp import web

async def take(request):
    return web.json_response({"events": len(await request.json())})

async def ready(request):
    return web.json_response({"ready": True})

application = web.Application(client_max_size=1 << 30)
application.add_routes([web.post("/", take), web.get("/ready", ready)])
web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""
_SPEC: Final = """
name: bench
stream: bench/hooks
source:
  webhook: {{listen: "127.0.0.1:{port}"}}
key: customer
create: {{segments: 2}}
"""
_COMMAND: Final = "import sys; from coranto.cli import main; sys.exit(main())"


def run(rounds: int) -> list[Figure]:
    """Measure rows per second, in requests of a thousand rows."""
    row = {"id": 12345, "customer": "customer-17", "cents": 995, "at": "2026-11-28T21:00:00.000000Z", "note": "x" * 80}
    body = json.dumps([{**row, "customer": f"customer-{n % 97}"} for n in range(ROWS)]).encode()
    ports = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder), brokers=1) as cluster:
        file = Path(folder) / "hooks.yaml"
        file.write_text(_SPEC.format(port=ports[1]))
        serving = [
            subprocess.Popen([sys.executable, "-c", _FLOOR, str(ports[0])]),
            subprocess.Popen(
                [sys.executable, "-c", _COMMAND, "ingest", "run", str(file), "--follow"],
                env={**os.environ, "CORANTO_ENDPOINT": cluster.info.endpoints[0]},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ),
        ]
        try:
            spent: tuple[list[float], list[float]] = [], []
            floor, subject = (lambda at=at: _measured(ports[at], body, serving[at].pid, spent[at]) for at in range(2))
            found = measure_pairs(rounds, floor, subject)
        finally:
            for each in serving:
                each.terminate()
                each.wait()
    note = f"requests of {ROWS} rows and {len(body)} bytes, {CONCURRENCY} at a time"
    floor_name = "aiohttp that parses the JSON"
    return [
        Figure("webhooks in batches", "rows/s", *found, floor_name, note),
        Figure("the same by its processor time", "rows/s of processor", spent[1][1:], spent[0][1:], floor_name, note),
    ]


def _measured(port: int, body: bytes, pid: int, spent: list[float]) -> float:
    """Return the rate by elapsed time, and add the rate by a process's processor time to `spent`."""
    before = _processor_seconds(pid)
    rate = asyncio.run(_rate(port, body))
    spent.append(ROWS * REQUESTS / (_processor_seconds(pid) - before))
    return rate


def _processor_seconds(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


async def _rate(port: int, body: bytes) -> float:
    url, headers = f"http://127.0.0.1:{port}/", {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            if await _is_ready(session, f"{url}ready"):
                break
            await asyncio.sleep(0.05)
        numbers = iter(range(REQUESTS))

        async def send() -> None:
            for _ in numbers:
                async with session.post(url, data=body, headers=headers) as response:
                    assert (await response.json())["events"] == ROWS

        began = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(CONCURRENCY)))
        return ROWS * REQUESTS / (time.perf_counter() - began)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
