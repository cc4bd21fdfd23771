"""Discovery of the consumer of an embedded cluster."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coranto.client.config import parse_endpoint
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import ClusterError, InvalidInput
from coranto.wire import consumer_pb2 as pc

CONSUMERS_PREFIX = "/gazette/consumers/"
"""The common prefix of all default key prefixes of consumers."""

_RECHECK_SECONDS = 0.2
_CONNECT_SECONDS = 2.0


async def find_consumer(
    data_dir: Path | None = None, *, timeout: float = 0.0, waiting: Callable[[], None] | None = None
) -> str:
    """Return the endpoint of a process of the only consumer of the cluster below `data_dir`.

    Without `data_dir`, the cluster is found as by commands. A dead process stays announced until its lease expires, so
    only processes that accept connections count. If there is none, wait for up to `timeout` seconds, since a process
    that was just started announces itself only when it is ready; `waiting` is called before the wait. Raises
    ClusterError if there is no consumer, or more than one.
    """
    from coranto.cluster import locate

    async with EtcdCoordinator(locate(data_dir).etcd) as coordinator:
        known = await announced(coordinator)
        found = await _answering(known)
        if not found and timeout > 0:
            if waiting is not None:
                waiting()
            clock = asyncio.get_running_loop().time
            deadline = clock() + timeout
            while not found and clock() < deadline:
                await asyncio.sleep(_RECHECK_SECONDS)
                known = await announced(coordinator)
                found = await _answering(known)
    if not found:
        waited = f", and none was ready within {timeout:g} s" if timeout > 0 else ""
        silent = ", ".join(sorted(endpoint for endpoints in known.values() for endpoint in endpoints))
        reason = f"; those that were announced do not answer ({silent})" if silent else ""
        raise ClusterError(
            f"no consumer runs on this cluster{waited}{reason}; start one with `coranto consumer serve`, and see its "
            "log if it runs, or name a process of another one with --consumer or $CORANTO_CONSUMER"
        )
    if len(found) > 1:
        running = ", ".join(sorted(prefix.removeprefix(CONSUMERS_PREFIX) for prefix in found))
        raise ClusterError(f"say which consumer with --consumer or $CORANTO_CONSUMER (running: {running})")
    (endpoint,) = found.values()
    return endpoint


async def announced(coordinator: EtcdCoordinator) -> dict[str, list[str]]:
    """Return the endpoints that processes of consumers have announced, by the key prefix of the consumer."""
    found: dict[str, list[str]] = defaultdict(list)
    for kv in (await coordinator.range(CONSUMERS_PREFIX)).kvs:
        prefix, _, member = kv.key.rpartition("/members/")
        if prefix and member:
            found[prefix].append(pc.ConsumerSpec.FromString(kv.value).process_spec.endpoint)
    return found


async def _answering(announced: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return an endpoint of each consumer that takes connections."""

    async def first(endpoints: Sequence[str]) -> str | None:
        taken = await asyncio.gather(*(_takes_connections(each) for each in endpoints))
        return next((endpoint for endpoint, takes in zip(endpoints, taken, strict=True) if takes), None)

    found = await asyncio.gather(*(first(endpoints) for endpoints in announced.values()))
    return {prefix: endpoint for prefix, endpoint in zip(announced, found, strict=True) if endpoint is not None}


async def _takes_connections(endpoint: str) -> bool:
    try:
        address = parse_endpoint(endpoint).address
        async with asyncio.timeout(_CONNECT_SECONDS):
            if address.startswith("unix:"):
                _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, InvalidInput):
        return False
    writer.close()
    return True
