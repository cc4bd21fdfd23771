"""Web pages whose own name leads to this machine: requests of a browser on it to a broker without keys."""

from __future__ import annotations

import base64

import aiohttp
from pydantic import SecretStr

from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.running import create, running_broker

KEY = base64.b64encode(bytes([1]) * 32).decode()
HERE = ("127.0.0.1", "localhost", "LOCALHOST:1234", "127.1.2.3:80", "[::1]:80", "broker.example:80", "Broker.Example")
ELSEWHERE = (
    *("page.example", "page.example:80", "127.0.0.1.page.example", "localhost.page.example", "10.0.0.1", "0.0.0.0"),
    *("localhost@page.example", "page.example#localhost", "[::ffff:10.0.0.1]", "[", "a b", ""),
)


async def test_a_page_of_another_name_reads_and_appends_nothing(broker_settings: BrokerSettings) -> None:
    settings = broker_settings.model_copy(update={"http_port": 0, "metrics_port": 0})
    spec = pb.JournalSpec(name="a/journal", replication=1, fragment={"length": 1 << 20, "compression_codec": pb.NONE})
    spec.fragment.refresh_interval.seconds = 60
    async with running_broker(settings) as (process, client), aiohttp.ClientSession() as http:
        await create(client, spec)

        async def ask(method: str, url: str, host: str) -> int:
            content = b"x" if method == "PUT" else None
            async with http.request(method, url, headers={"Host": host}, data=content) as answer:
                text = await answer.text()
                assert answer.status != 421 or "this machine only" in text or method == "HEAD"
                return answer.status

        journal = f"{process.http_endpoint}/a/journal"
        for host in ELSEWHERE:
            for method in ("GET", "HEAD", "PUT", "OPTIONS"):
                assert await ask(method, journal, host) in (400, 421), host  # 400: an invalid host.
            assert await ask("GET", f"{process.metrics_endpoint}/metrics", host) in (400, 421), host
        assert (await client.read("a/journal", offset=0))[-1].write_head == 0, "nothing was appended"
        for host in HERE[:-2]:
            assert await ask("PUT", journal, host) == 204, host
            assert await ask("GET", f"{process.metrics_endpoint}/ready", host) == 200


async def test_the_advertised_name_of_a_broker_is_accepted(broker_settings: BrokerSettings) -> None:
    more = {"http_port": 0, "advertise": "http://broker.example:80"}
    async with running_broker(broker_settings.model_copy(update=more)) as (process, _), aiohttp.ClientSession() as http:
        for host in HERE:
            async with http.get(f"{process.http_endpoint}/no/journal", headers={"Host": host}) as answer:
                assert answer.status == 404, host
        async with http.get(f"{process.http_endpoint}/no/journal", headers={"Host": "other.example"}) as answer:
            assert answer.status == 421


async def test_with_keys_any_host_name_is_accepted(broker_settings: BrokerSettings) -> None:
    """For example through a proxy on this machine that keeps the name."""
    secured = broker_settings.model_copy(update={"http_port": 0, "auth_keys": SecretStr(KEY)})
    async with running_broker(secured) as (process, _), aiohttp.ClientSession() as http:
        async with http.get(f"{process.http_endpoint}/a/journal", headers={"Host": "journals.example"}) as answer:
            assert answer.status == 401
