"""What an in-process cluster and the broker agree on, so that the platform need not import the broker.

The broker is found by the entry point `broker` of the group `coranto.testing`, which is a `RunBroker`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from coranto.coordination.etcd import Coordinator
from coranto.coordination.layout import Layout
from coranto.effects import Clock, Disk
from coranto.errors import ClusterError
from coranto.fragments.stores import StoreRegistry
from coranto.wire import protocol_pb2_grpc as pb_grpc

GROUP = "coranto.testing"


@dataclass(frozen=True, slots=True)
class BrokerPlace:
    """Who a broker is, and where it is reached. Times are seconds.

    With a `port` it also serves gRPC on this machine, 0 choosing a free one, and tells others that endpoint rather
    than `endpoint`.
    """

    zone: str
    id: str
    endpoint: str
    data_dir: Path
    layout: Layout
    lease_seconds: float
    exit_seconds: float
    port: int | None = None


@dataclass(frozen=True, slots=True)
class BrokerEffects:
    """The outside world of one broker process. `stub` is of the broker at an endpoint."""

    clock: Clock
    disk: Disk
    coordinator: Coordinator
    stores: StoreRegistry
    stub: Callable[[str], pb_grpc.JournalAsyncStub]


Listen: TypeAlias = Callable[[str, Any], AbstractContextManager[None]]
"""Has a servicer of `protocol.Journal` serve calls to an endpoint for as long as the block lasts."""


class RunBroker(Protocol):
    """Runs a broker until `stop` is set, when it exits gracefully, or until it cannot go on."""

    async def __call__(
        self, place: BrokerPlace, effects: BrokerEffects, listen: Listen, stop: asyncio.Event
    ) -> None: ...


def find_broker() -> RunBroker:
    """The broker that is installed here. Raises ClusterError when there is none."""
    advice = "an in-process cluster needs the broker; install it: pip install 'coranto[broker]'"
    found = [entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == "broker"]
    if not found:
        raise ClusterError(f"no broker is installed here: {advice}")
    try:
        return cast("RunBroker", found[0].load())
    except ImportError as error:
        raise ClusterError(f"the broker cannot be loaded ({error}): {advice}") from error
