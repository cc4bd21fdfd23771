"""A broker's slot in an embedded cluster, and the successive processes that run it."""

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

_log = structlog.get_logger(__name__)

_DELAYS_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STABLE_SECONDS = 30.0
_MAX_FAILURES = 10


@dataclass(slots=True)
class Restarts:
    """The schedule for restarts of a process that dies: first immediately, then after growing delays, up to a limit."""

    failures: int = 0
    noticed: ChildProcess | None = None
    not_before: float = 0.0

    def due(self, now: float, dead: ChildProcess) -> bool:
        """Return True if a restart is due. Raises ClusterError after too many deaths, each soon after a start."""
        if self.noticed is not dead:
            self.noticed = dead
            self.failures = 1 if now - dead.started > _STABLE_SECONDS else self.failures + 1
            if self.failures > _MAX_FAILURES:
                raise dead.failure()
            self.not_before = now + _DELAYS_SECONDS[min(self.failures, len(_DELAYS_SECONDS)) - 1]
        return now >= self.not_before


@dataclass(slots=True)
class BrokerSlot:
    """A broker's slot in the cluster, independent of the process that runs it."""

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
        """Mark the broker as not ready until a check succeeds."""
        self.ready, self.unready_since = False, time.monotonic()


def port_of(endpoint: str) -> int:
    """Return the port of `host:port`; 0 if there is none."""
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def serves(endpoint: str) -> bool:
    """Return True if the broker at `endpoint` answers List."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    # The selector matches no journal, so that the answer is small.
    selector = pb.LabelSelector(include=pb.LabelSet(labels=[pb.Label(name="name", value="no/such/journal")]))
    with grpc.insecure_channel(endpoint, options) as channel:
        try:
            for response in pb_grpc.JournalStub(channel).List(pb.ListRequest(selector=selector), timeout=2.0):
                return bool(response.status == pb.OK)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True  # It answers, so it is ready, even if it requires a token.
            _log.debug("cluster.broker_not_serving", endpoint=endpoint, error=str(error))
    return False
