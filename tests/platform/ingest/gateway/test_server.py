"""Refused requests get a status and an error in JSON, and nothing of them is committed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from coranto.client import JournalClient
from coranto.errors import ClusterError, InvalidInput
from coranto.ingest.gateway.server import sender_of
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.model.stream import transactions_journal
from coranto.testing.cluster import STORE_URL
from coranto.types import JsonForm, MessageType, TypeRegistry, parse_fields
from tests.platform.ingest.gateway.posting import STREAM, found, gateway, post, spec
from tests.platform.ingest.lists import dead_letters, until

SECRET = "s3cret"


async def raw(url: str, content: bytes) -> bytes:
    """Send bytes, and return all content until the connection is closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(content)
    answer = await reader.read()
    writer.close()
    return answer


async def test_bodies_are_objects_arrays_or_lines(client: JournalClient) -> None:
    async with gateway(client) as ingest, aiohttp.ClientSession() as session:
        lines = b'\xef\xbb\xbf{"id": 1.50}\n\n {"id": 2}\r\n'
        for type in ("application/x-ndjson", "application/jsonl"):
            assert (await post(session, ingest.url, lines, Content_Type=type))[1]["events"] == 2
        assert (await post(session, ingest.url, b'{"id": 3}', Content_Type="application/cloudevents+json"))[0] == 200
        status, answer = await post(session, ingest.url, b" [] ", key="empty")
        assert (status, answer["events"]) == (200, 0)
    assert sorted(each["id"] for each in await found(client)) == [1.5, 1.5, 2, 2, 3]


async def test_large_bodies_are_committed(client: JournalClient) -> None:
    rows = [{"id": n, "text": "x" * 100} for n in range(5000)]
    async with gateway(client) as ingest, aiohttp.ClientSession() as session:
        both = await asyncio.gather(*(post(session, ingest.url, rows, key="a") for _ in range(2)))
        assert [(status, answer["events"]) for status, answer in both] == [(200, 5000)] * 2
        assert sorted(answer["duplicate"] for _, answer in both) == [False, True]
        assert ingest.held_bytes == 0
    assert sorted(each["id"] for each in await found(client)) == list(range(5000))


async def test_events_of_a_request_keep_their_order_and_keys(client: JournalClient) -> None:
    async with gateway(client, spec(more="key: user")) as ingest, aiohttp.ClientSession() as session:
        assert (await post(session, ingest.url, [{"user": f"u{n % 3}", "n": n} for n in range(30)]))[0] == 200
        status, answer = await post(session, ingest.url, [{"user": "a"}, {"n": 1}])
        assert (status, answer) == (400, {"error": "item 1 has no field 'user', which is the key of the stream"})
    for user in ("u0", "u1", "u2"):
        numbers = [each["n"] for each in await found(client) if each["user"] == user]
        assert numbers == sorted(numbers)
        assert len(numbers) == 10


@pytest.mark.parametrize(
    ("body", "headers", "status", "error"),
    [
        (b'{"id": 1', {}, 400, "the body is not JSON: "),
        (b'[{"id": 1}, 2', {}, 400, "the body is not JSON: "),
        (b'[{"id": 1}, 2]', {}, 400, "item 1 is JSON, but int and not an object"),
        (b"[" * 100000, {}, 400, "the body is not JSON: "),
        (b"", {}, 400, "the body is not JSON: "),
        (b'{"id": NaN}', {}, 400, "the body is not JSON: "),
        (b'{"id": 1}\n\n{"id": oops}\n', {"Content_Type": "application/x-ndjson"}, 400, "line 3 is not JSON: "),
        (b"id=1", {"Content_Type": "application/x-www-form-urlencoded"}, 415, "send application/json or"),
        (b"{}", {"Content_Encoding": "gzip"}, 415, "the body is compressed"),
        (b"{}", {"key": "k" * 256}, 400, "the Idempotency-Key has 256 characters; it may have 255"),
        (b" " * 1001, {}, 413, "the body is too large; it may have 1000 bytes"),
    ],
    ids=str,
)
async def test_invalid_bodies_are_refused(
    client: JournalClient, body: bytes, headers: dict[str, str], status: int, error: str
) -> None:
    limit = 1000 if status == 413 else 1 << 20
    async with gateway(client, spec(f"body: {limit}")) as ingest, aiohttp.ClientSession() as session:
        got, answer = await post(session, ingest.url, body, **headers)
        assert (got, set(answer)) == (status, {"error"})
        assert error in answer["error"]
        assert (await post(session, ingest.url, {"id": 7}))[0] == 200
        assert ingest.held_bytes == 0
    assert await found(client) == [{"id": 7}]


async def test_other_paths_and_methods(client: JournalClient) -> None:
    async with gateway(client, spec("path: /in")) as ingest, aiohttp.ClientSession() as session:
        base = ingest.url.removesuffix("/in")
        assert (await post(session, base, {}))[0] == 404
        async with session.get(ingest.url) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        for path in ("/live", "/ready"):
            async with session.get(base + path) as response:
                assert response.status == 200


async def test_a_request_larger_than_the_limit_is_refused_before_it_is_sent(client: JournalClient) -> None:
    async with gateway(client) as ingest:
        head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        answer = await raw(ingest.url, f"{head}Content-Length: 104857600\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 413")
        async with aiohttp.ClientSession() as session:
            async with session.post(ingest.url, json={"id": 1}, expect100=True) as response:
                assert response.status == 200

        async def endless() -> Any:
            for _ in range(1600):
                yield b" " * 65536

        async with aiohttp.ClientSession() as session:
            with contextlib.suppress(aiohttp.ClientError):  # The connection may be closed while the body is sent.
                headers = {"Content-Type": "application/json"}
                async with session.post(ingest.url, data=endless(), headers=headers) as response:
                    assert response.status == 413
        assert ingest.held_bytes == 0


async def test_slow_requests_are_cut_off(client: JournalClient) -> None:
    async with gateway(client, spec("receive: 0.3, requests: 3")) as ingest, aiohttp.ClientSession() as session:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        answers = await asyncio.gather(
            raw(ingest.url, head + b"{"), raw(ingest.url, b"POST / HT"), raw(ingest.url, b"")
        )
        assert answers[0].startswith(b"HTTP/1.1 408")
        assert b"did not arrive within 0.3 s" in answers[0]
        assert answers[1:] == [b"", b""]
        assert (await post(session, ingest.url, {"id": 1}))[0] == 200


async def test_connections_beyond_the_limit_are_refused(client: JournalClient) -> None:
    async with gateway(client, spec("requests: 2")) as ingest:
        parts = urlsplit(ingest.url)
        held = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(2)]
        async with aiohttp.ClientSession() as session:
            async with session.post(ingest.url, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
            for _, writer in held:
                writer.close()

            async def is_served() -> bool:
                return (await post(session, ingest.url, {"id": 1}))[0] == 200

            await until(is_served)


async def test_one_address_cannot_hold_all_connections(client: JournalClient) -> None:
    async with gateway(client, spec("requests: 8")) as ingest:
        parts = urlsplit(ingest.url)
        held = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(6)]
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession() as flood, aiohttp.ClientSession(connector=connector) as other:
            assert (await post(flood, ingest.url, {"id": 1}))[0] == 429
            assert (await post(other, ingest.url, {"id": 2}))[0] == 200
            for _, writer in held:
                writer.close()

            async def is_served() -> bool:
                return (await post(flood, ingest.url, {"id": 3}))[0] == 200

            await until(is_served)


@pytest.mark.parametrize(
    ("address", "sender"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
    ],
)
def test_ipv6_senders_are_identified_by_their_network(address: str, sender: str) -> None:
    assert sender_of(address) == sender


async def test_connections_by_ipv6_are_limited(client: JournalClient) -> None:
    given = spec("requests: 4")
    async with gateway(client, replace(given, options=replace(given.options, host="::1"))) as ingest:
        port = urlsplit(ingest.url).port
        held = [await asyncio.open_connection("::1", port) for _ in range(3)]
        async with aiohttp.ClientSession() as session:
            assert (await post(session, ingest.url, {"id": 1}))[0] == 429
            held[0][1].close()

            async def is_served() -> bool:
                return (await post(session, ingest.url, {"id": 2}))[0] == 200

            await until(is_served)
        for _, writer in held:
            writer.close()


async def test_memory_is_bounded_with_a_reserve_for_small_bodies(client: JournalClient) -> None:
    async with gateway(client, spec("memory: 1048576, body: 500000")) as ingest, aiohttp.ClientSession() as session:
        ingest.hold(700_000)
        status, answer = await post(session, ingest.url, b'{"id": "%b"}' % (b"x" * 200_000))
        assert (status, answer["error"]) == (429, "the gateway has no room for the request; send it again")
        assert (await post(session, ingest.url, {"id": 1}))[0] == 200
        ingest.hold(400_000)
        assert (await post(session, ingest.url, {"id": 2}))[0] == 429
        ingest.release(1_100_000)
        assert ingest.held_bytes == 0


async def test_a_full_window_refuses_new_keys_until_old_ones_are_forgotten(client: JournalClient) -> None:
    async with gateway(client, spec("window: {keys: 2, seconds: 1.5}")) as ingest, aiohttp.ClientSession() as session:
        for key in "ab":
            assert (await post(session, ingest.url, {"id": key}, key=key))[0] == 200
        assert (await post(session, ingest.url, {"id": "c"}, key="c"))[0] == 429
        assert (await post(session, ingest.url, {"id": "a"}, key="a"))[1]["duplicate"]
        assert (await post(session, ingest.url, {"id": "d"}))[0] == 200

        async def is_committed(key: str) -> bool:
            status, answer = await post(session, ingest.url, {"id": key}, key=key)
            return status == 200 and not answer["duplicate"]

        for key in "ca":  # Each can only be committed after another key is forgotten.
            await until(lambda key=key: is_committed(key))


async def test_signatures_cover_the_bytes_of_the_body(client: JournalClient) -> None:
    def signed(body: bytes, secret: str = SECRET) -> str:
        return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()

    options = 'signature: {scheme: github, secrets: [old, "s3cret"]}'
    async with gateway(client, spec(options)) as ingest, aiohttp.ClientSession() as session:
        body = b'{ "id": 1 }'
        right = {"X_Hub_Signature_256": signed(body), "X_GitHub_Delivery": "d-1"}
        first = await post(session, ingest.url, body, **right)
        assert first[0] == 200
        assert (await post(session, ingest.url, body, **right))[1] == {**first[1], "duplicate": True}
        old = {"X_Hub_Signature_256": signed(body, "old"), "X_GitHub_Delivery": "d-2"}
        assert (await post(session, ingest.url, body, **old))[0] == 200
        for wrong in (signed(b'{"id": 1}'), signed(body, "other"), signed(body)[7:], "sha256=", "é", "sha256=é"):
            status, answer = await post(session, ingest.url, body, X_Hub_Signature_256=wrong)
            assert (status, set(answer)) == (401, {"error"})
            assert SECRET not in answer["error"]
        status, answer = await post(session, ingest.url, b"not JSON")
        assert (status, answer) == (401, {"error": "the request has no header X-Hub-Signature-256"})
    assert await found(client) == [{"id": 1}] * 2


async def test_stripe_and_slack(client: JournalClient, tmp_path: Any) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")

    def code(text: bytes) -> str:
        return hmac.new(SECRET.encode(), text, hashlib.sha256).hexdigest()

    now = int(time.time())
    options = f"signature: {{scheme: stripe, secret_file: {file}}}"
    async with gateway(client, spec(options)) as ingest, aiohttp.ClientSession() as session:
        # Stripe changes a field of the event when it repeats the event.
        answers = []
        for pending in (1, 0):
            body = b'{"id": "evt_1", "pending_webhooks": %d}' % pending
            header = f"t={now},v1={code(f'{now}.'.encode() + body)},v0=0"
            answers.append(await post(session, ingest.url, body, Stripe_Signature=header))
        assert [(status, answer["duplicate"]) for status, answer in answers] == [(200, False), (200, True)]
        late = f"t={now - 400},v1={code(f'{now - 400}.'.encode() + body)}"
        status, answer = await post(session, ingest.url, body, Stripe_Signature=late)
        assert status == 401
        assert "more than 300 s" in answer["error"]
        file.write_text("")
        assert await post(session, ingest.url, body, Stripe_Signature=header) == (
            503,
            {"error": "the gateway has no secret to verify signatures with"},
        )
        file.write_text("rotated\n")
        assert (await post(session, ingest.url, body, Stripe_Signature=header))[0] == 401
    options = f'signature: {{scheme: slack, secrets: ["{SECRET}"]}}'
    async with gateway(client, spec(options)) as ingest, aiohttp.ClientSession() as session:
        body = b'{"type": "url_verification", "challenge": "c-1"}'
        headers = {
            "X_Slack_Signature": "v0=" + code(f"v0:{now}:".encode() + body),
            "X_Slack_Request_Timestamp": str(now),
        }
        assert await post(session, ingest.url, body, **headers) == (200, {"challenge": "c-1"})
    assert await found(client) == [{"id": "evt_1", "pending_webhooks": 1}]


async def test_rows_that_do_not_fit_their_type_are_refused_or_dead_letters(client: JournalClient) -> None:
    await Streams(client).create(STREAM, 1, template=default_template(stores=[STORE_URL]))
    registry = TypeRegistry(client, "types/registry")
    definition = MessageType("shop.N", JsonForm(), parse_fields("id BIGINT"))
    await registry.register(definition, like=transactions_journal(STREAM))
    typed = "type: shop.N\nregistry: types/registry"
    async with gateway(client, spec(more=typed)) as ingest, aiohttp.ClientSession() as session:
        status, answer = await post(session, ingest.url, [{"id": 1}, {"id": "two"}], key="a")
        assert status == 400
        assert answer["error"].startswith("item 1 does not fit shop.N@1: id is 'two' (str)")
        assert (await post(session, ingest.url, [{"id": 1}], key="a"))[1]["events"] == 1
    async with gateway(client, spec(more=f"{typed}\npoison: dead letters")) as ingest:
        async with aiohttp.ClientSession() as session:
            rows = [{"id": 2}, [3], {"id": "four"}]
            status, answer = await post(session, ingest.url, rows, key="b")
            assert (status, answer["events"], answer["dead_letters"]) == (200, 1, 2)
            assert (await post(session, ingest.url, rows, key="b"))[1]["duplicate"]
    assert [letter["place"] for letter in await dead_letters(client, STREAM)] == ["item 1", "item 2"]
    assert sorted(each["id"] for each in await found(client)) == [1, 2]


async def test_an_address_in_use_and_a_missing_secret_are_errors(client: JournalClient, tmp_path: Any) -> None:
    async with gateway(client) as ingest:
        port = urlsplit(ingest.url).port
        used = spec()
        with pytest.raises(ClusterError, match="cannot listen on"):
            async with gateway(client, replace(used, options=replace(used.options, port=port))):
                pass
    with pytest.raises(InvalidInput, match="cannot be read"):
        async with gateway(client, spec(f"signature: {{scheme: shopify, secret_file: {tmp_path}/none}}")):
            pass


async def test_a_stopping_gateway_waits_for_its_requests(client: JournalClient) -> None:
    async with gateway(client) as ingest:
        parts = urlsplit(ingest.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        writer.write(head + b'{"id"')
        await until(lambda: ingest.held_bytes)
        ingest.stop()
        writer.write(b": 1}")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["events"] == 1
        writer.close()
    assert await found(client) == [{"id": 1}]
