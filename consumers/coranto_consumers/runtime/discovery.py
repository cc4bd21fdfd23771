"""Finding the consumer of an embedded cluster."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import ClusterError
from coranto.wire import consumer_pb2 as pc

CONSUMERS_PREFIX = "/gazette/consumers/"
"""The beginning of all default key prefixes of consumers."""


async def find_consumer(data_dir: Path | None = None) -> str:
    """Return the endpoint of a process of the only consumer of the cluster below `data_dir`.

    Without it, the cluster is found as by commands. Raises ClusterError if there is no consumer, or more than one.
    """
    from coranto.cluster import locate

    found: dict[str, list[bytes]] = defaultdict(list)
    async with EtcdCoordinator(locate(data_dir).etcd) as coordinator:
        for kv in (await coordinator.range(CONSUMERS_PREFIX)).kvs:
            prefix, _, member = kv.key.rpartition("/members/")
            if prefix and member:
                found[prefix].append(kv.value)
    if len(found) != 1:
        running = ", ".join(sorted(prefix.removeprefix(CONSUMERS_PREFIX) for prefix in found)) or "none"
        raise ClusterError(f"say which consumer with --consumer or $CORANTO_CONSUMER (running: {running})")
    ((spec, *_),) = found.values()
    return pc.ConsumerSpec.FromString(spec).process_spec.endpoint
