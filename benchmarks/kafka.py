"""Kafka on this machine, for the benchmarks that compare it with journals (`--kafka`).

This repository contains no part of Kafka. `fetched` downloads the broker and Spark's connector with Maven, and a client
that writes transactions with pip, into `~/.cache/coranto/kafka` (or `$XDG_CACHE_HOME/coranto/kafka`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pyspark

from coranto.cluster.processes import free_port, is_free
from coranto.errors import InvalidInput, Unavailable
from coranto.process.java import java_program

_WRITER: Final = Path(__file__).with_name("kafka_writer.py")
_JDBC: Final = "42.7.4"
_TIMEOUT: Final = 300.0
_FETCH_SECONDS: Final = 900.0
_NONE: Final[Mapping[str, str]] = MappingProxyType({})

_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>coranto.benchmarks</groupId><artifactId>kafka</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
  </dependencies>
</project>
"""

_PROPERTIES: Final = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=CLIENTS
listener.security.protocol.map=CONTROLLER:PLAINTEXT,CLIENTS:{protocol}
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


@dataclass(frozen=True, slots=True)
class Kafka:
    """The downloaded parts of Kafka."""

    connector: tuple[Path, ...]
    """The jars that Spark needs in addition to its own to read and write Kafka."""
    connector_version: str
    broker: Path
    """The folder with the broker's jars."""
    client: Path
    """The folder of Python packages with the client that writes transactions."""

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a Spark session with Kafka's connector."""
        return {"spark.jars": ",".join(map(str, self.connector))}


def fetched() -> Kafka:
    """Return Kafka's broker and connector, and download them if they are not in the cache.

    Raises InvalidInput without Maven, and Unavailable if a download fails.
    """
    folder = cache_folder()
    scala = _scala_version()
    jars, version = _connector(folder, scala)
    [clients] = jars.glob("kafka-clients-*.jar")
    release = clients.stem.removeprefix("kafka-clients-")
    broker = _by_maven(folder / f"broker-{release}", "org.apache.kafka", f"kafka_{scala}", release)
    return Kafka(spark_lacks(jars, _spark_jars()), version, broker, _by_pip(folder, "confluent-kafka"))


def jdbc_driver() -> Path:
    """Return PostgreSQL's driver for Spark, and download it if it is not in the cache. Raises as `fetched`."""
    folder = _by_maven(cache_folder() / f"jdbc-{_JDBC}", "org.postgresql", "postgresql", _JDBC)
    return folder / f"postgresql-{_JDBC}.jar"


def cache_folder() -> Path:
    """Return the folder that caches downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "coranto" / "kafka"


def python_version() -> str:
    """Return the Python version of the downloaded packages."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def connector_versions(spark: str) -> list[str]:
    """Return the versions of the connector to try, best first.

    The connector of a new release of Spark may be unpublished. The connector of the previous release works with it.
    """
    major, minor = (int(part) for part in spark.split(".")[:2])
    earlier = [f"{major}.{minor - 1}.0"] if minor else []
    return list(dict.fromkeys([spark, f"{major}.{minor}.0", *earlier]))


def spark_lacks(jars: Path, spark: Path) -> tuple[Path, ...]:
    """Return the jars of a folder that are not among Spark's, in any version."""
    known = {_artifact(path) for path in spark.glob("*.jar")}
    return tuple(sorted(path for path in jars.glob("*.jar") if _artifact(path) not in known))


def _artifact(jar: Path) -> str:
    """Return the name of a jar without its version."""
    return re.split(r"-[0-9]+[.]", jar.stem, maxsplit=1)[0]


def _spark_jars() -> Path:
    return Path(pyspark.__file__).parent / "jars"


def _scala_version() -> str:
    [library] = _spark_jars().glob("scala-library-*.jar")
    return ".".join(library.stem.removeprefix("scala-library-").split(".")[:2])


def _connector(folder: Path, scala: str) -> tuple[Path, str]:
    folders = {folder / f"connector-{version}": version for version in connector_versions(pyspark.__version__)}
    for kept, version in folders.items():
        if kept.exists():
            return kept, version
    failures = []
    for new, version in folders.items():
        try:
            return _by_maven(new, "org.apache.spark", f"spark-sql-kafka-0-10_{scala}", version), version
        except Unavailable as failure:
            failures.append(str(failure))
    raise Unavailable("; ".join(failures))


def _by_maven(folder: Path, group: str, artifact: str, version: str) -> Path:
    """Return a folder with the jars of an artifact and of its runtime dependencies."""
    if folder.exists():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise InvalidInput(
            f"Kafka is fetched by Maven, and there is no command mvn to fetch {artifact}: install Maven (on Debian the "
            "package maven), or leave Kafka out",
            field="--kafka",
        )
    with _made(folder) as making:
        (making / "pom.xml").write_text(_POM.format(group=group, artifact=artifact, version=version))
        print(f"Fetching {artifact} {version} …", flush=True)
        into = ("-DincludeScope=runtime", f"-DoutputDirectory={making}")
        _run([maven, "-B", "-q", "-f", str(making / "pom.xml"), "dependency:copy-dependencies", *into])
    return folder


def _by_pip(folder: Path, package: str) -> Path:
    """Return a folder of Python packages that contains `package`."""
    target = folder / f"python-{python_version()}"
    if not target.exists():
        with _made(target) as making:
            print(f"Fetching {package} …", flush=True)
            _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(making), package])
    return target


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Yield a new folder, and move it to `folder` when the block succeeds, so that `folder` is always complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as making:
        whole = Path(making) / "whole"
        whole.mkdir()
        yield whole
        whole.rename(folder)


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Return a command's standard output. Raises Unavailable if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False, env=environment)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        raise Unavailable(f"{command[0]} ended with {done.returncode} and said: {said[0]}")
    return done.stdout


class KafkaServer:
    """A Kafka broker that is also the controller, on free loopback ports. Leaving the context ends it.

    Writes create their topics, with `partitions` partitions. `protocol` is the protocol of clients, and `properties`
    are further settings of the broker, such as TLS and SASL.
    """

    def __init__(
        self, kafka: Kafka, *, partitions: int, protocol: str = "PLAINTEXT", properties: Mapping[str, str] = _NONE
    ) -> None:
        self._kafka = kafka
        self._partitions = partitions
        self._protocol = protocol
        self._properties = properties
        self._folder = tempfile.TemporaryDirectory(prefix="coranto-kafka-")
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> KafkaServer:
        self._port = free_port()
        text = _PROPERTIES.format(
            port=self._port,
            controller=free_port(taken=[self._port]),
            protocol=self._protocol,
            data=Path(self._folder.name) / "data",
            partitions=self._partitions,
        )
        self._file.write_text(text + "".join(f"{name}={value}\n" for name, value in self._properties.items()))
        identity = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        _run([*self._program, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(self._file)])
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _file(self) -> Path:
        return Path(self._folder.name) / "server.properties"

    @property
    def _program(self) -> list[str]:
        java = java_program()
        if java is None:
            raise Unavailable("Kafka needs Java 17 or later: install it, or set JAVA_HOME")
        return [str(java), "-Xmx1g", "-cp", f"{self._kafka.broker}/*"]

    def start(self) -> None:
        """Start the broker with its stored data, and return when it listens. Raises Unavailable."""
        log = self._file.with_name("log")
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._program, "kafka.Kafka", str(self._file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + _TIMEOUT
        while is_free(self._port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-1000:]
                self.close()
                raise Unavailable(f"Kafka's broker did not start: {said}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the broker, as a machine failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    @property
    def client_path(self) -> str:
        """The import path of Kafka's client."""
        return str(self._kafka.client)

    def write(self, topic: str, files: Sequence[Path], *, transactions: int) -> float:
        """Write the lines of each file to a partition of a topic, in `transactions` committed transactions.

        A line may begin with the key of its record and a tab. Returns the time when the first commit began, in seconds
        since 1970: readers of committed records get no record before it. Raises Unavailable.
        """
        environment = {**os.environ, "PYTHONPATH": self.client_path}
        arguments = [self.address, topic, str(transactions), *map(str, files)]
        return float(_run([sys.executable, str(_WRITER), *arguments], environment))
