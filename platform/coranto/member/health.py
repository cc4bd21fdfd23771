"""A member's health over HTTP: `/metrics` for Prometheus, `/ready` and `/live` for orchestrators and load balancers.

A member is *ready* if it has loaded the key space, is announced under a lease that it holds, and is not exiting.
Readiness ignores fragment stores: if one fails, it fails for all brokers, and all of them would be taken out of service
although appends and reads of recent content still work. The stores' health is in the responses to appends, in
FragmentStoreHealth and in `coranto_fragment_store_healthy`.

A member is *alive* if its event loop responds. A member that has lost its lease or its key space exits by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from coranto.member.hosts import local_only

Checks = Callable[[], Mapping[str, bool]]


def application(registry: CollectorRegistry, checks: Checks, *, local: bool = False) -> web.Application:
    """Return the application. `checks` returns the conditions of readiness by name; True for each that holds.

    With `local`, it serves only requests addressed to this machine.
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
