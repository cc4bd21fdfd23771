"""What tells others how a broker is: `/metrics` for Prometheus, `/ready` and `/live` for whoever starts and routes.

*Ready* is a broker that has loaded the key space, is announced under a lease that it holds, and is not on its way out.
Fragment stores are not asked: one that is away is away for every broker alike, and all of them would be taken out of
service though appends and reads of recent content go on. Their health is in the answers of appends, in
FragmentStoreHealth and in `coranto_fragment_store_healthy`.

*Alive* is a process whose event loop answers. One that has lost its lease or its key space ends by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from coranto_broker.http.hosts import local_only

Checks = Callable[[], Mapping[str, bool]]


def application(registry: CollectorRegistry, checks: Checks, *, local: bool = False) -> web.Application:
    """`checks` names what must hold for the broker to be ready, and whether it does.

    With `local`, requests are served only that are addressed to this machine.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def ready(_: web.Request) -> web.Response:
        found = checks()
        well = all(found.values())
        return web.json_response({"ready": well, "checks": dict(found)}, status=200 if well else 503)

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"alive": True})

    result = web.Application(middlewares=[local_only()] if local else ())
    result.add_routes([web.get("/metrics", metrics), web.get("/ready", ready), web.get("/live", live)])
    return result
