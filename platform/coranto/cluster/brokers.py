"""A broker's place in an embedded cluster, and the processes that fill it one after the other."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

from coranto.cluster.processes import ChildProcess
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

log = structlog.get_logger(__name__)

_DELAYS_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STABLE_SECONDS = 30.0
_MAX_FAILURES = 10


@dataclass(slots=True)
class Restarts:
    """When to start a process again that died: at once the first time, then after growing pauses, and not for ever."""

    failures: int = 0
    noticed: ChildProcess | None = None
    not_before: float = 0.0

    def due(self, now: float, dead: ChildProcess) -> bool:
        """Whether it is time. Raises ClusterError when it died too often since it last lived for a while."""
        if self.noticed is not dead:
            self.noticed = dead
            self.failures = 1 if now - dead.started > _STABLE_SECONDS else self.failures + 1
            if self.failures > _MAX_FAILURES:
                raise dead.failure()
            self.not_before = now + _DELAYS_SECONDS[min(self.failures, len(_DELAYS_SECONDS)) - 1]
        return now >= self.not_before


@dataclass(slots=True)
class BrokerSlot:
    """A broker's place in the cluster, whatever process fills it."""

    index: int
    id: str
    zone: str
    data_dir: Path
    port: int = 0
    process: ChildProcess | None = None
    ready: bool = False
    wanted: bool = True
    unready_since: float = field(default_factory=time.monotonic)
    restarts: Restarts = field(default_factory=Restarts)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def expect(self) -> None:
        """It is not ready from now on, until it is found to be."""
        self.ready, self.unready_since = False, time.monotonic()


def port_of(endpoint: str) -> int:
    """The port of `host:port`; 0 when there is none."""
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def serves(endpoint: str) -> bool:
    """Whether the broker at `endpoint` answers List."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    # Selects no journal, so that the answer is small however many there are.
    selector = pb.LabelSelector(include=pb.LabelSet(labels=[pb.Label(name="name", value="no/such/journal")]))
    with grpc.insecure_channel(endpoint, options) as channel:
        try:
            for response in pb_grpc.JournalStub(channel).List(pb.ListRequest(selector=selector), timeout=2.0):
                return bool(response.status == pb.OK)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True  # It answers; that it wants a token is no concern of its being ready.
            log.debug("cluster.broker_not_serving", endpoint=endpoint, error=str(error))
    return False
