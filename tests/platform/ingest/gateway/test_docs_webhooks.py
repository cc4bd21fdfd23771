"""The first example of docs/webhooks.md, run literally, the manifest of its gateways, and its tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import free_port
from coranto.ingest.gateway.metrics import WebhookMetrics
from coranto.ingest.metrics import IngestMetrics
from coranto.ingest.spec import read_spec
from coranto.ingest.webhook.options import WebhookOptions
from coranto.ingest.webhook.signatures import SCHEMES
from tests.installation.kustomize import KUBERNETES, containers, render
from tests.platform.ingest.killing import COMMAND

PAGE = (Path(__file__).parents[4] / "docs" / "webhooks.md").read_text()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    with EmbeddedCluster(tmp_path / "cluster", brokers=1, etcd_fsync=False) as cluster:
        yield cluster.info.endpoints[0]


@contextlib.contextmanager
def gateway(words: list[str], environment: dict[str, str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway's command, wait until it is ready, and end it with SIGTERM."""
    process = subprocess.Popen([*COMMAND, *words], env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not is_ready(url):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        yield process
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready") as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def posted(words: list[str], url: str) -> str:
    """Return the answer to a curl command of the page."""
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:8600/"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    headers = dict(each.split(": ") for name, each in zip(words[3::2], words[4::2], strict=True) if name == "-H")
    request = urllib.request.Request(f"{url}/", options["-d"].encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


@pytest.mark.integration
def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    [content] = re.findall(r"^`hooks.yaml`:\n\n```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("hooks.yaml").write_text(content.replace("8600", str(port)))
    console = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
    start, *steps = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", console, re.MULTILINE)
    assert start == ("coranto ingest run hooks.yaml --follow &", "")
    environment, url = {"CORANTO_ENDPOINT": endpoint}, f"http://127.0.0.1:{port}"
    with gateway(["ingest", "run", "hooks.yaml", "--follow"], environment, url):
        for command, output in steps:
            words = shlex.split(command)
            if words[0] == "curl":
                assert posted(words, url) == output.rstrip("\n")
    reading = [*COMMAND, *words[1:]]
    shown = subprocess.run(reading, env={**os.environ, **environment}, capture_output=True, check=True).stdout.decode()
    [event] = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert re.sub(r'"uuid":"[^"]*"', '"uuid":"…"', shown) == event
    told = subprocess.run(
        [*COMMAND, "ingest", "status", "hooks.yaml", "-o", "json"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    assert json.loads(told.stdout)["rows"] == 1


@pytest.mark.integration
def test_the_gateway_of_the_manifest(tmp_path: Path, endpoint: str) -> None:
    manifests = render(KUBERNETES / "webhooks")
    [container] = containers(manifests)
    [config] = [each for each in manifests if each["kind"] == "ConfigMap"]
    port, metrics, secret = free_port(), free_port(), tmp_path / "secret"
    secret.write_text("s3cret")
    text = config["data"]["hooks.yaml"].replace("8600", str(port)).replace("/etc/coranto/webhooks/secret", str(secret))
    text = text.replace("replication: 3", "replication: 1").replace("s3://coranto/fragments/", "file:///")
    (tmp_path / "hooks.yaml").write_text(text)
    replaced = {"/etc/coranto/ingest/hooks.yaml": str(tmp_path / "hooks.yaml"), "0.0.0.0:9464": f"127.0.0.1:{metrics}"}
    words = [replaced.get(word, word) for word in container["args"]]
    url = f"http://127.0.0.1:{port}"
    with gateway(words, {"CORANTO_ENDPOINT": endpoint}, url):
        headers = {"Content-Type": "application/json"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"{url}/", b"{}", headers))
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer:
            assert b'coranto_webhook_requests_total{ingest="hooks",status="401"} 1.0' in answer.read()


def test_the_manifest_probes_the_ports_that_it_opens() -> None:
    manifests = render(KUBERNETES / "webhooks")
    [container] = containers(manifests)
    [deployment] = [each for each in manifests if each["kind"] == "Deployment"]
    [service] = [each for each in manifests if each["kind"] == "Service"]
    [config] = [each for each in manifests if each["kind"] == "ConfigMap"]
    options: Any = read_spec(config["data"]["hooks.yaml"], {}).options
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports["http"] == options.port
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "http"}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert deployment["spec"]["replicas"] == 2
    seconds = pod["spec"]["terminationGracePeriodSeconds"]
    assert seconds > 5 + options.receive_seconds + options.commit_seconds
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    assert limit >= (100 << 20) + 4 * options.memory_bytes
    mounts = [each["mountPath"] for each in container["volumeMounts"]]
    assert str(options.secret_file.parent) in mounts


def test_the_page_names_every_option_scheme_status_and_metric() -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        assert read_spec(text, {"WEBHOOK_SECRET": "s"}).stream == "shop/events"
        assert yaml.safe_load(text)
    names = {"host": "listen", "port": "listen", "scheme": "signature", "window_seconds": "window.seconds"}
    names |= {"window_keys": "window.keys", "body_bytes": "body", "memory_bytes": "memory"}
    names |= {"receive_seconds": "receive", "commit_seconds": "timeout"}
    for field in WebhookOptions.__dataclass_fields__:
        assert f"`{names.get(field, field)}`" in PAGE, field
    for scheme in SCHEMES:
        assert f"`{scheme}`" in PAGE
    metrics = IngestMetrics()
    before = {family.name for family in metrics.registry.collect()}
    WebhookMetrics(metrics.registry)
    for family in metrics.registry.collect():
        assert family.name in before or re.search(rf"`{family.name}(_total)?`", PAGE), family.name
