"""Finding the consumer of an embedded cluster."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import ClusterError
from coranto.wire import consumer_pb2 as pc

CONSUMERS_PREFIX = "/gazette/consumers/"
"""The beginning of all default key prefixes of consumers."""


_LOOK_AGAIN_SECONDS = 0.2


async def find_consumer(
    data_dir: Path | None = None, *, patience: float = 0.0, waiting: Callable[[], None] | None = None
) -> str:
    """Return the endpoint of a process of the only consumer of the cluster below `data_dir`.

    Without it, the cluster is found as by commands. While no consumer runs, one is waited for during `patience`
    seconds, since one that was just started announces itself only when it is ready; `waiting` is called before that.
    Raises ClusterError if there is no consumer, or more than one.
    """
    from coranto.cluster import locate

    async with EtcdCoordinator(locate(data_dir).etcd) as coordinator:
        found = await _processes(coordinator)
        if not found and patience > 0:
            if waiting is not None:
                waiting()
            clock = asyncio.get_running_loop().time
            deadline = clock() + patience
            while not found and clock() < deadline:
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                found = await _processes(coordinator)
    if not found:
        waited = f", and none was ready within {patience:g} s" if patience > 0 else ""
        raise ClusterError(
            f"no consumer runs on this cluster{waited}; start one with `coranto consumer serve`, and see its log if it "
            "runs, or name a process of another one with --consumer or $CORANTO_CONSUMER"
        )
    if len(found) > 1:
        running = ", ".join(sorted(prefix.removeprefix(CONSUMERS_PREFIX) for prefix in found))
        raise ClusterError(f"say which consumer with --consumer or $CORANTO_CONSUMER (running: {running})")
    ((spec, *_),) = found.values()
    return pc.ConsumerSpec.FromString(spec).process_spec.endpoint


async def _processes(coordinator: EtcdCoordinator) -> dict[str, list[bytes]]:
    """Return what the processes of consumers have announced, by the key prefix of the consumer."""
    found: dict[str, list[bytes]] = defaultdict(list)
    for kv in (await coordinator.range(CONSUMERS_PREFIX)).kvs:
        prefix, _, member = kv.key.rpartition("/members/")
        if prefix and member:
            found[prefix].append(kv.value)
    return found
