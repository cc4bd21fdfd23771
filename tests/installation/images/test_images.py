"""The files in deploy/, run in the images of deploy/images.sh: their commands, variables, probes and names.

`make images` builds the images and runs these tests. They need root, and Debian's buildah.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from tests.installation.elsewhere.environments import ROOT
from tests.installation.elsewhere.test_deployment import read
from tests.installation.images.containers import TIMEOUT_SECONDS, Container, Containers
from tests.installation.images.pods import Pods
from tests.installation.kustomize import KUBERNETES, render
from tests.servers.oidc import oidc_server
from tests.servers.s3 import AwsKey, S3Server
from tests.servers.sql import PostgresServer
from tests.spans import Receiver

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

VERSION = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
assert VERSION is not None
FULL, BROKER, ETCD = (
    f"localhost/{name}" for name in (f"coranto:{VERSION[1]}", f"coranto-broker:{VERSION[1]}", "coranto-etcd:bookworm")
)
ETCDS, BROKERS = ("etcd-1", "etcd-2", "etcd-3"), ("broker-1", "broker-2", "broker-3")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
KEY = AwsKey("key", "secret")
KEYS = base64.b64encode(bytes(range(32))).decode()
TRACE_ID = bytes(range(16))
TRACE = f"00-{TRACE_ID.hex()}-{TRACE_ID[8:].hex()}-01"
PUT = """
import ssl, sys, urllib.error, urllib.request

tls = ssl.create_default_context(cafile="/etc/coranto/ca/ca.crt")
headers = {"Authorization": f"Bearer {sys.argv[2]}", "traceparent": sys.argv[3]}
for _ in range(2):
    request = urllib.request.Request(sys.argv[1], b"one\\n", headers, method="PUT")
    try:
        print(urllib.request.urlopen(request, context=tls).status, end=" ")
    except urllib.error.HTTPError as error:
        print(error.code, end=" ")
"""
PROVIDER = """
issuer = "{issuer}"
audience = "coranto"

[[grants]]
when = {{ groups = "shop" }}
capabilities = ["APPEND"]
selector = "name:prefix=shop/"
"""

logging.getLogger("botocore").setLevel(logging.WARNING)  # Only the containers' log is useful.


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
def store_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.new_database().replace("127.0.0.1", "localhost")  # Containers have addresses of their own.


class Compose:
    """The services of the compose file as containers. PostgreSQL and the S3 server run on this machine."""

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
        """Run the command of a service that ends; retry a failure if the file requires it."""
        assert COMPOSE[name]["restart"] == "on-failure"
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (done := self[name].run(self.words(name), self.environment(name))).returncode:
            assert time.monotonic() < deadline, (done.stdout + done.stderr).decode()


def succeed(container: Container, words: list[str], environment: dict[str, str], content: bytes = b"") -> bytes:
    """Run a command once, because a repeated append may be duplicated. Return its output."""
    done = container.run(words, environment, input=content)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout


def inspect(image: str, template: str) -> str:
    command = ["buildah", "inspect", "--type", "image", "--format", template, image]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_broker_image_has_at_most_250_megabytes() -> None:
    command = ["buildah", "images", "--no-trunc", "--format", "{{.ID}} {{.Size}}"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = inspect(BROKER, "{{.FromImageID}}")
    (size,) = {line.partition(" ")[2] for line in listed.splitlines() if found in line}
    number, unit = size.split()
    assert unit == "MB"
    assert float(number) <= 250


@pytest.mark.parametrize("image", [BROKER, FULL])
def test_the_images_run_coranto_without_root(image: str) -> None:
    config = "{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.User}} {{.OCIv1.Config.StopSignal}}"
    assert inspect(image, config) == "[coranto] 10001 SIGTERM"


def test_the_compose_file_runs_survives_a_lost_broker_and_upgrades_one(
    tmp_path: Path, s3: S3Server, store_url: str, containers: Containers
) -> None:
    cluster = Compose(containers, tmp_path, s3, store_url)
    cluster.start(*ETCDS)
    cluster.start(*BROKERS)
    cluster.launch("dagster")  # As in the file, it waits only for the first broker.
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
    assert b'zone="a"' in upgraded.call(8081, "/metrics")

    cluster.await_healthy("dagster")
    query = b'{"query": "{assetNodes {assetKey {path}}}"}'
    nodes = json.loads(cluster["dagster"].call(3000, "/graphql", data=query))["data"]["assetNodes"]
    assert ["sales"] in [node["assetKey"]["path"] for node in nodes]
    words = ["dagster", "asset", "materialize", "--select", "journal_specs", "--python-file", "/app/definitions.py"]
    succeed(cluster["dagster"], words, cluster.environment("dagster"))


def coranto(containers: Containers, *words: str, content: str = "") -> str:
    """Run a command in the container of the name `client`."""
    environment = {"CORANTO_ENDPOINT": "https://coranto:8080", "CORANTO_TLS_CA": "/etc/coranto/ca/ca.crt"}
    environment["CORANTO_AUTH_KEYS"] = KEYS
    return succeed(containers.by_name["client"], ["coranto", *words], environment, content.encode()).decode()


def apply(containers: Containers, folder: str, *names: str) -> None:
    """Create journals of three replicas in a folder."""
    fragment = "{length: 1048576, compression_codec: NONE, refresh_interval: 30s, stores: ['s3://coranto/journals/']}"
    children = ", ".join(f"{{name: {folder}{name}}}" for name in names)
    spec = f"name: {folder}\nreplication: 3\nfragment: {fragment}\nchildren: [{children}]\n"
    coranto(containers, "journals", "apply", "--specs", "-", content=spec)


@pytest.fixture
def pods(containers: Containers, s3: S3Server) -> Iterator[Pods]:
    containers.name_this_machine("s3")
    store = KEY.environment | {"AWS_ENDPOINT_URL": f"http://s3:{s3.endpoint.rpartition(':')[2]}"}
    secrets = {"coranto-store": store, "coranto-broker-keys": {"auth_keys": KEYS}}
    pods = Pods(containers, {"coranto": BROKER, "etcd": ETCD}, secrets)
    client = containers.add(BROKER, "client")
    client.mount(pods.folder("ca", pods.secrets["coranto-tls-ca"]), "/etc/coranto/ca", read_only=True)
    yield pods
    pods.assert_nothing_written()


def test_the_small_overlay_runs_with_tls_and_tokens_and_upgrades_a_broker(pods: Pods, containers: Containers) -> None:
    pod = pods.start(render(KUBERNETES / "overlays" / "small"))["broker-b-0"]
    apply(containers, "a/", "journal")
    coranto(containers, "journals", "append", "a/journal", content="before\n")
    pod.stop()
    pod.container.replace_image(FULL)
    pod.start()
    pod.await_probes()
    coranto(containers, "journals", "append", "a/journal", content="after\n")
    assert coranto(containers, "journals", "read", "a/journal") == "before\nafter\n"


def test_the_large_overlay_runs_with_journals_on_all_its_brokers(pods: Pods, containers: Containers) -> None:
    """Run the overlay without its volumes and nodes."""
    started = pods.start(render(KUBERNETES / "overlays" / "large"))
    brokers = [pod.container for name, pod in started.items() if name.startswith("broker-")]
    assert len(brokers) == 12
    journals = [f"journal-{number:02}" for number in range(24)]
    apply(containers, "a/", *journals)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    for broker in brokers:
        while re.search(rb"^coranto_journals [1-9]", broker.call(8081, "/metrics"), re.MULTILINE) is None:
            broker.assert_starting(deadline)
            time.sleep(0.2)
    for each in journals[:3]:
        coranto(containers, "journals", "append", f"a/{each}", content=f"{each}\n")
        assert coranto(containers, "journals", "read", f"a/{each}") == f"{each}\n"


def test_the_webhook_gateways_commit_posted_events(pods: Pods, containers: Containers) -> None:
    pods.secrets["coranto-webhooks"] = {"secret": "a secret\n"}
    pods.start(render(KUBERNETES / "overlays" / "small"))
    first, second = pods.start(render(KUBERNETES / "webhooks")).values()
    body = b'{"order": 7}'
    signature = hmac.new(b"a secret", body, "sha256").hexdigest()
    headers = {"X-Signature-256": signature, "Idempotency-Key": "order-7"}
    answers = [json.loads(each.container.call(8600, "/", data=body, headers=headers)) for each in (first, second)]
    assert [(each["events"], each["duplicate"]) for each in answers] == [(1, False), (1, True)]
    with pytest.raises(HTTPError, match="401"):
        second.container.call(8600, "/", data=body, headers=headers | {"X-Signature-256": "0" * 64})
    for gateway in (first, second):
        gateway.stop()
    (line,) = coranto(containers, "streams", "read", "shop/events").splitlines()
    assert json.loads(line)["order"] == 7


def test_the_consumer_adds_up_orders(store_url: str, pods: Pods, containers: Containers) -> None:
    pods.secrets["coranto-consumer-store"] = {"url": store_url}
    pods.start(render(KUBERNETES / "overlays" / "small"))
    apply(containers, "shop/orders/", "part-000", "part-001")
    pods.images["coranto"] = FULL
    (consumer,) = pods.create(render(KUBERNETES / "consumer")).values()
    consumer.start()
    consumer.await_probes()
    orders = [("part-000", "ada", 1990), ("part-001", "ada", 10), ("part-001", "grace", 5)]
    for journal, customer, cents in orders:
        line = json.dumps({"customer": customer, "cents": cents}) + "\n"
        coranto(containers, "journals", "append", f"shop/orders/{journal}", content=line)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while read(store_url) != {"ada": 2000, "grace": 5}:
        consumer.container.assert_starting(deadline)
        time.sleep(0.2)
    consumer.stop()


def test_brokers_accept_a_providers_tokens_limit_callers_and_export_traces(pods: Pods, containers: Containers) -> None:
    containers.name_this_machine("collector")
    manifests = render(KUBERNETES / "overlays" / "small")
    with Receiver() as collector, oidc_server() as provider:
        pods.config_maps["options"] = {
            "provider.toml": PROVIDER.format(issuer=provider.issuer),
            "quotas.yaml": "delay_seconds: 0.001\ncallers: {ada: {appends: 1}}\n",
        }
        for each in manifests:
            if each["metadata"]["name"] == "coranto-broker":
                each["data"]["CORANTO_BROKER_HTTP_PORT"] = "8083"
                each["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"] = (
                    f"http://collector:{collector.endpoint.rpartition(':')[2]}"
                )
                each["data"]["OTEL_BSP_SCHEDULE_DELAY"] = "50"
            if each["metadata"]["name"] in ("broker-a", "broker-b"):
                spec = each["spec"]["template"]["spec"]
                spec["volumes"].append({"name": "options", "configMap": {"name": "options"}})
                (container,) = spec["containers"]
                container["volumeMounts"].append({"name": "options", "mountPath": "/etc/coranto/options"})
                container["args"] += ["--oidc=/etc/coranto/options/provider.toml"]
                container["args"] += ["--quotas=/etc/coranto/options/quotas.yaml", "--traces"]
        broker = pods.start(manifests)["broker-a-0"]
        apply(containers, "shop/", "orders")

        def await_answers(expected: str, **claims: Any) -> None:
            """Append repeatedly until the answers are as expected."""
            url = "https://broker-a-0.coranto-brokers.default.svc:8083/shop/orders"
            words = ["python", "-c", PUT, url, provider.token(**claims), TRACE]
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while (found := succeed(containers.by_name["client"], words, {}).decode().strip()) != expected:
                assert time.monotonic() < deadline, (found, broker.container.log())

        await_answers("204 429", groups=["shop"])
        await_answers("403 403", groups=["others"])
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while ("coranto-broker", "a#broker-a-0", "append shop/orders") not in [
            (service, instance, span.name)
            for service, instance, span in collector.received
            if span.trace_id == TRACE_ID
        ]:
            broker.container.assert_starting(deadline)
            time.sleep(0.05)
