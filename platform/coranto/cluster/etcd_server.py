"""The cluster's own etcd server, and HTTP calls to it that avoid the start-up time of a client library."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import structlog

from coranto.cluster.etcd_program import CONSEQUENCE, INSTALL, EtcdProgram, find_etcd, record_version, recorded_version
from coranto.cluster.processes import ChildProcess, free_port, wait_ready
from coranto.errors import ClusterError
from coranto.security.tls import ClientTls

_READY_SECONDS = 60.0
_STOP_SECONDS = 5.0
_log = structlog.get_logger(__name__)


class EtcdServer:
    """A single-member etcd with its data in `data_dir/etcd`; its log in `data_dir/logs/etcd.log`.

    Use it as a context manager, or with `start` and `stop`, on a thread that outlives the server (see `ChildProcess`).
    With `fsync=False` a loss of power can lose data, but the end of the process cannot: for tests and throw-away
    clusters. `environment` has PATH and $CORANTO_ETCD_BINARY; by default this process's.
    """

    def __init__(self, data_dir: Path, *, fsync: bool = True, environment: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir.absolute()
        self._fsync = fsync
        self._environment = os.environ if environment is None else environment
        self._program: EtcdProgram | None = None
        self._process: ChildProcess | None = None
        self._port = 0
        self._peer_port = 0

    @property
    def endpoint(self) -> str:
        """The `host:port` for clients. It stays the same when the server is started again."""
        return f"127.0.0.1:{self._port}"

    @property
    def process(self) -> ChildProcess:
        if self._process is None:
            raise ClusterError("etcd is not started; call start(), or use it in `with`")
        return self._process

    def start(self, *, preferred_port: int = 0, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start the server, and return when it serves. Raises ClusterError."""
        if self._process is not None and self._process.alive:
            raise ClusterError("etcd is started already; stop it first")
        folder = self.data_dir / "etcd"
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)  # The permissions that etcd expects.
        port = free_port(self._port or preferred_port)
        if self._port not in (0, port):
            raise ClusterError(
                f"etcd cannot be started again at {self.endpoint}: something else listens there; free that port"
            )
        self._port = port
        self._peer_port = free_port(self._peer_port, taken=(self._port,))
        client, peer = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{self._peer_port}"
        command = [
            str(self._choose_program(folder).path),
            "--name=coranto",
            f"--data-dir={folder}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=coranto={peer}",
            # Makes the cluster's id unique. Used at the first start only.
            f"--initial-cluster-token={uuid.uuid4().hex}",
            # A lone member elects itself, so these times need not allow for slow peers.
            "--heartbeat-interval=25",
            "--election-timeout=125",
            # Watchers that were disconnected for longer load everything again.
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            "--log-level=warn",
            "--logger=zap",
        ]
        if not self._fsync:
            command.append("--unsafe-no-fsync")
        # etcd reads every option from the environment too. All options used here are on the command line.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        self._process = ChildProcess(
            "etcd", command, log=self.data_dir / "logs" / "etcd.log", cwd=folder, environment=environment
        )
        try:
            wait_ready(
                self._process, lambda: is_healthy(self.endpoint), timeout_seconds=_READY_SECONDS, cancelled=cancelled
            )
        except BaseException:
            self._process.kill()
            raise

    def _choose_program(self, folder: Path) -> EtcdProgram:
        """Return the program to start: the same one as long as it exists. Warn once if it is not good."""
        if self._program is None or not self._program.path.exists():
            self._program = find_etcd(self._environment, folder)
            if not self._program.is_good:
                written = recorded_version(folder)
                minor = "" if written is None else f". The data here need an etcd {'.'.join(map(str, written))}"
                _log.warning("etcd.unsound", program=str(self._program), problem=CONSEQUENCE, advice=INSTALL + minor)
        record_version(folder, self._program)
        return self._program

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop(_STOP_SECONDS)

    def kill(self) -> None:
        """Kill the server like `kill -9`. `start` brings it back with the same data on the same port."""
        self.process.kill()

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def etcd_tls(environment: Mapping[str, str]) -> ClientTls | None:
    """Return the certificates for an external etcd, from $CORANTO_ETCD_CA, $CORANTO_ETCD_CERT and $CORANTO_ETCD_KEY.

    None if none of these is set.
    """
    ca, cert, key = (
        Path(value) if (value := environment.get(f"CORANTO_ETCD_{name}")) else None for name in ("CA", "CERT", "KEY")
    )
    return ClientTls(ca, cert, key) if ca or cert or key else None


def is_healthy(endpoint: str, tls: ClientTls | None = None, *, timeout_seconds: float = 1.0) -> bool:
    """Return True if the etcd at `endpoint` (host:port, http:// or https://host:port) has a leader and serves."""
    try:
        return bool(ask_etcd(endpoint, tls, "/health", None, timeout_seconds).get("health") == "true")
    except (OSError, ValueError):
        return False


def keep_lease_alive(endpoint: str, lease: int, tls: ClientTls | None = None, *, timeout_seconds: float = 1.0) -> bool:
    """Refresh a lease on behalf of a process that is about to resume it. Return True if the lease is alive."""
    try:
        result = ask_etcd(endpoint, tls, "/v3/lease/keepalive", {"ID": str(lease)}, timeout_seconds).get("result")
    except (OSError, ValueError):
        return False
    return isinstance(result, dict) and int(result.get("TTL", 0)) > 0


def ask_etcd(
    endpoint: str,
    tls: ClientTls | None,
    path: str,
    question: dict[str, object] | None,
    timeout_seconds: float,
    headers: dict[str, str] | None = None,
) -> dict[str, object]:
    """Make one call of etcd's JSON gateway, and return the (first) answer.

    The answer's HTTP headers are added to `headers`. Raises OSError, and ValueError if etcd refuses the call.
    """
    data = None if question is None else json.dumps(question).encode()
    base = endpoint if "://" in endpoint else f"http://{endpoint}"
    request = urllib.request.Request(f"{base.rstrip('/')}{path}", data=data)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if base.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_ssl_context(tls or ClientTls())))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(request, timeout=timeout_seconds) as response:
            answer = json.loads(response.readline() if path.startswith("/v3/lease") else response.read())
            if headers is not None:
                headers.update(response.headers)
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(f"etcd answered {error.code}: {error.read(500).decode(errors='replace')}") from error
    except http.client.HTTPException as error:
        raise ValueError(f"no answer over HTTP: {error or type(error).__name__}") from error
    if not isinstance(answer, dict):
        raise ValueError("etcd did not answer with an object")
    return answer


def _ssl_context(tls: ClientTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context
