"""The interface between an in-process cluster and the broker, so that the platform need not import the broker.

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
    """A broker's identity and address. Times are seconds.

    With a `port` it also serves gRPC on this machine (0 chooses a free port), and announces that address instead of
    `endpoint`.
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
    """The outside world of one broker process. `stub` returns a stub of the broker at an endpoint."""

    clock: Clock
    disk: Disk
    coordinator: Coordinator
    stores: StoreRegistry
    stub: Callable[[str], pb_grpc.JournalAsyncStub]


Listen: TypeAlias = Callable[[str, Any], AbstractContextManager[None]]
"""Makes a servicer of `protocol.Journal` serve calls to an endpoint for the duration of the block."""


class RunBroker(Protocol):
    """Runs a broker until it fails, or until `stop` is set: then it exits gracefully."""

    async def __call__(
        self, place: BrokerPlace, effects: BrokerEffects, listen: Listen, stop: asyncio.Event
    ) -> None: ...


def find_broker() -> RunBroker:
    """Return the installed broker. Raises ClusterError if there is none."""
    advice = "an in-process cluster needs the broker; install it: pip install 'coranto[broker]'"
    found = [entry for entry in importlib.metadata.entry_points(group=GROUP) if entry.name == "broker"]
    if not found:
        raise ClusterError(f"no broker is installed here: {advice}")
    try:
        return cast("RunBroker", found[0].load())
    except ImportError as error:
        raise ClusterError(f"the broker cannot be loaded ({error}): {advice}") from error
