"""One HTTP port of a member."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from coranto.errors import ClusterError
from coranto.member.site import Site


def site() -> Site:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    application = web.Application()
    application.router.add_get("/", hello)
    return Site(application, grace_seconds=1)


async def test_a_site_serves_at_a_free_port_until_it_is_stopped() -> None:
    served = site()
    url = await served.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        async with http.get(url) as answer:
            assert await answer.text() == "hello"
        await served.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(url)


async def test_a_port_in_use_is_reported() -> None:
    first, second = site(), site()
    url = await first.start("127.0.0.1", 0)
    port = int(url.rpartition(":")[2])
    with pytest.raises(ClusterError, match=f"cannot listen on 127.0.0.1:{port}"):
        await second.start("127.0.0.1", port)
    await second.stop()
    await first.stop()
