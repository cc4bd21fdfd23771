"""Gateways, tables and brokers are killed with SIGKILL under load. Each acknowledged request is committed once.

DuckDB compares the table of the stream with the acknowledged requests, row by row.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pytest

from coranto.client import JournalClient
from coranto.cluster.processes import free_port
from coranto.streams.control.lifecycle import Streams, default_template
from tests.consumers.tables.killed import KilledTables, differences, rows_of
from tests.consumers.tables.shop import table_file
from tests.platform.ingest.gateway.posting import post
from tests.platform.ingest.killing import COMMAND, crash_broker, two_brokers
from tests.platform.ingest.lists import events, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("CORANTO_INGEST_KILLS", "6"))
STREAM = "kill/hooks"
SECRET = b"s3cret"
SPEC = """
name: killed
stream: {stream}
source:
  webhook:
    listen: "127.0.0.1:{port}"
    signature: {{scheme: hmac, secrets: ["s3cret"]}}
    receive: 1
    timeout: 5
    memory: 16777216
    requests: 200
"""


class Gateway:
    """A gateway process at a fixed port, which can be killed and restarted."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        port = free_port(taken=[int(each.stem.rpartition("-")[2]) for each in folder.glob("gateway-*.yaml")])
        self.url = f"http://127.0.0.1:{port}/"
        self._file = folder / f"gateway-{port}.yaml"
        self._file.write_text(SPEC.format(stream=STREAM, port=port))
        self._endpoint = endpoint
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *("ingest", "run", str(self._file), "--follow", "--endpoint", self._endpoint),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert await self.process.wait() == 0

    async def ready(self, session: aiohttp.ClientSession) -> None:
        async def is_ready() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}ready") as response:
                    return response.status == 200
            return False

        await until(is_ready, 60)


class Sender:
    """A sender that repeats each request until it is acknowledged, and repeats some of them afterwards."""

    def __init__(self, name: str, urls: list[str], chance: random.Random) -> None:
        self._name = name
        self._urls = urls
        self._chance = chance
        self.acknowledged: dict[str, list[tuple[str, int]]] = {}
        self.refusals: list[int] = []

    async def send(self, session: aiohttp.ClientSession, number: int) -> None:
        key = f"{self._name}-{number}"
        rows = [{"key": key, "n": n} for n in range(self._chance.randrange(1, 6))]
        body = json.dumps(rows).encode()
        signature = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
        repeated = self._chance.random() < 0.2
        while True:
            urls = self._urls if self._chance.random() < 0.2 else [self._chance.choice(self._urls)]
            sending = [post(session, url, body, key=key, X_Signature_256=signature) for url in urls]
            answers = await asyncio.gather(*sending, return_exceptions=True)
            statuses = [each[0] for each in answers if isinstance(each, tuple)]
            assert {200, 429, 503} >= set(statuses), answers
            self.refusals += [each for each in statuses if each != 200]
            if 200 in statuses and not repeated:
                self.acknowledged[key] = [(key, row["n"]) for row in rows]
                return
            repeated = repeated and 200 not in statuses
            await asyncio.sleep(0.02)

    async def send_until(self, session: aiohttp.ClientSession, is_over: Callable[[], bool]) -> None:
        number = 0
        while not is_over():
            numbers = list(range(number, number + 8))
            self._chance.shuffle(numbers)
            await asyncio.gather(*(self.send(session, each) for each in numbers))
            number += 8


async def stream_rows(client: JournalClient) -> list[tuple[str, int]]:
    return [(each["key"], each["n"]) for each in await events(client, STREAM)]


def expected_of(senders: list[Sender]) -> list[tuple[str, int]]:
    return sorted(row for sender in senders for rows in sender.acknowledged.values() for row in rows)


@pytest.mark.parametrize("seed", [int(os.environ.get("CORANTO_INGEST_SEED", "11"))])
async def test_the_stream_and_its_table_equal_the_acknowledged_requests(tmp_path: Path, seed: int) -> None:
    chance, file = random.Random(seed), tmp_path / "table.yaml"
    with two_brokers(tmp_path) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client, aiohttp.ClientSession() as session:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            gateways = [Gateway(tmp_path, endpoint) for _ in range(2)]
            await asyncio.gather(*(each.start() for each in gateways))
            await asyncio.gather(*(each.ready(session) for each in gateways))
            columns = "key STRING, n BIGINT"
            file.write_text(table_file(f"{{stream: {STREAM}}}", f"sqlite:///{tmp_path}/store.db", columns=columns))
            tables = KilledTables(endpoint, chance, file)
            over = False
            urls = [each.url for each in gateways]
            senders = [Sender(f"s{n}", urls, random.Random(seed + n)) for n in range(2)]
            sending = [asyncio.create_task(each.send_until(session, lambda: over)) for each in senders]
            for kill in range(KILLS):
                with tables.running():
                    seen = sum(len(each.acknowledged) for each in senders)
                    await until(lambda seen=seen: sum(len(each.acknowledged) for each in senders) > seen, 120)
                    await asyncio.sleep(chance.uniform(0, 0.3))
                    killed = chance.choice(gateways)
                    await killed.kill()
                    if kill == KILLS // 2:
                        await asyncio.to_thread(crash_broker, cluster)
                    await killed.start()
                    if chance.random() < 0.7:
                        await killed.ready(session)
            over = True
            await asyncio.gather(*sending)
            await asyncio.to_thread(cluster.wait_ready)
            await asyncio.gather(*(each.ready(session) for each in gateways))
            await asyncio.gather(*(each.end() for each in gateways))
            await tables.complete()
            found = await stream_rows(client)
    expected = expected_of(senders)
    assert len(expected) > 5 * KILLS
    assert sorted(found) == expected
    assert differences(pa.Table.from_pylist([{"key": key, "n": n} for key, n in expected]), rows_of(file)) == []


async def test_hostile_senders_do_not_affect_others(tmp_path: Path) -> None:
    with two_brokers(tmp_path) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=120) as client, aiohttp.ClientSession() as session:
            await Streams(client).create(STREAM, 2, template=default_template(replication=2))
            gateway = Gateway(tmp_path, endpoint)
            await gateway.start()
            await gateway.ready(session)
            sender = Sender("good", [gateway.url], random.Random(5))
            hostile = Hostile(gateway.url)
            attacks = [asyncio.create_task(each) for each in hostile.attacks()]
            try:
                async with asyncio.timeout(90):
                    await sender.send_until(session, lambda: len(sender.acknowledged) >= 100 and hostile.all_refused())
            except TimeoutError:
                raise AssertionError(f"{len(sender.acknowledged)} acknowledged, {hostile.refused}") from None
            finally:
                for each in attacks:
                    each.cancel()
                await asyncio.gather(*attacks, return_exceptions=True)
            peak = _peak_bytes(gateway.process)
            await gateway.end()
            assert sorted(await stream_rows(client)) == expected_of([sender])
    assert peak < 400 << 20


class Hostile:
    """Senders that flood, stall, send too much, or sign incorrectly. `refused` contains their statuses."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.refused: dict[str, set[int]] = {"unsigned": set(), "large": set(), "slow": set(), "flood": set()}

    def all_refused(self) -> bool:
        return all(self.refused.values())

    def attacks(self) -> list[Any]:
        flood = [self._repeat("flood", b'[{"x": "%b"}]' % (b"y" * 1_000_000), X_Signature_256="00") for _ in range(12)]
        lengths = (b"Content-Length: 104857600", b"Transfer-Encoding: chunked")
        unsigned = [self._repeat("unsigned", b"{}") for _ in range(5)]
        return [*flood, *unsigned, *(self._slow() for _ in range(30)), *map(self._large, lengths)]

    async def _repeat(self, kind: str, body: bytes, **headers: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    status, _ = await post(session, self._url, body, **headers)
                    assert status in (401, 429)
                    self.refused[kind].add(status)
                await asyncio.sleep(0.05)

    async def _large(self, length: bytes) -> None:
        """Send 100 MB, whatever the gateway answers."""
        while True:
            reader, writer = await self._connect(length)
            with contextlib.suppress(OSError):
                for _ in range(1600):
                    writer.write((b"10000\r\n%b\r\n" if b"chunked" in length else b"%b") % (b" " * 65536))
                    await writer.drain()
            await self._answered("large", reader, writer)

    async def _slow(self) -> None:
        while True:
            reader, writer = await self._connect(b"Content-Length: 1000000")
            writer.write(b"[" * 60_000)
            await self._answered("slow", reader, writer)

    async def _connect(self, length: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._url.removeprefix("http://").strip("/").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\n\r\n" % length)
        return reader, writer

    async def _answered(self, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            answer = await reader.read()
            if answer:
                self.refused[kind].add(int(answer.split()[1]))
        writer.close()


def _peak_bytes(process: asyncio.subprocess.Process | None) -> int:
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
