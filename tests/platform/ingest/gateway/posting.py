"""Webhook gateways for tests, and the clients that post to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from coranto.client import JournalClient
from coranto.client.retry import RetryPolicy
from coranto.ingest.gateway.service import WebhookIngest
from coranto.ingest.spec import IngestSpec, read_spec
from coranto.testing.cluster import STORE_URL
from tests.platform.ingest.lists import events, until

STREAM = "shop/hooks"
SPEC = """
name: hooks
stream: shop/hooks
source:
  webhook: {{listen: "127.0.0.1:0"{options}}}
create: {{segments: {segments}, stores: ["{stores}"]}}
{more}
"""


def spec(options: str = "", more: str = "", segments: int = 2) -> IngestSpec:
    comma = ", " if options else ""
    return read_spec(SPEC.format(options=comma + options, more=more, segments=segments, stores=STORE_URL))


@contextlib.asynccontextmanager
async def gateway(client: JournalClient, given: IngestSpec | None = None) -> AsyncIterator[WebhookIngest]:
    """Run a gateway within the context."""
    ingest = WebhookIngest(client, given or spec(), policy=RetryPolicy(5.0, seed=1, scale=0.02))
    running = asyncio.create_task(ingest.run(follow=True))
    try:
        await until(lambda: ingest.is_ready or running.done())
        if running.done():
            await running
        yield ingest
    finally:
        ingest.stop()
        await running


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, *, key: str = "", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Post JSON, or bytes unchanged. Return the status and the answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        named["Idempotency-Key"] = key
    content: dict[str, Any] = {"json": body}
    if isinstance(body, bytes):
        content = {"data": body}
        named.setdefault("Content-Type", "application/json")
    async with session.post(url, headers=named, **content) as response:
        return response.status, await response.json()


async def found(client: JournalClient, stream: str = STREAM) -> list[dict[str, Any]]:
    """Return the events of the stream, without their metadata."""
    return [{name: each[name] for name in each if name != "_meta"} for each in await events(client, stream)]
