"""The files of deploy/: settings that exist, enough time to exit, no secret and no registry in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coranto_broker.settings import BrokerSettings
from coranto_consumers.runtime.settings import ConsumerProcessSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
MANIFESTS = [
    each
    for path in (DEPLOY / "kubernetes").glob("*.yaml")
    for each in yaml.safe_load_all(path.read_text())
    if each["kind"] != "Kustomization"
]
SERVICES: dict[str, Any] = COMPOSE["services"]
BROKERS = {name: each for name, each in SERVICES.items() if name.startswith("broker-")}


def of_kind(kind: str) -> Iterator[Any]:
    yield from (each for each in MANIFESTS if each["kind"] == kind)


def containers() -> Iterator[tuple[Any, Any]]:
    for each in of_kind("StatefulSet"):
        for container in each["spec"]["template"]["spec"]["containers"]:
            yield each, container


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_settings_in_the_files_are_settings_of_the_processes() -> None:
    text = "\n".join(path.read_text() for path in DEPLOY.rglob("*.yaml"))
    for prefix, settings in (("CORANTO_BROKER_", BrokerSettings), ("CORANTO_CONSUMER_", ConsumerProcessSettings)):
        named = {name.lower() for name in re.findall(rf"\b{prefix}([A-Z_]+)\b", text)}
        assert len(named) > 5
        assert named <= settings.model_fields.keys()


def test_brokers_have_more_time_to_exit_than_they_take() -> None:
    for broker in BROKERS.values():
        exit_seconds = float(broker["environment"]["CORANTO_BROKER_EXIT_SECONDS"])
        assert seconds(broker["stop_grace_period"]) > 4 * exit_seconds
    (settings,) = of_kind("ConfigMap")
    for owner, container in containers():
        if container["name"] == "broker":
            grace = owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert grace > 4 * float(settings["data"]["CORANTO_BROKER_EXIT_SECONDS"])


def test_brokers_are_in_two_zones_with_names_of_their_own() -> None:
    places = [
        (each["environment"]["CORANTO_BROKER_ZONE"], each["environment"]["CORANTO_BROKER_ID"])
        for each in BROKERS.values()
    ]
    assert len(places) == 3
    assert len({name for _, name in places}) == 3
    assert {zone for zone, _ in places} == {"a", "b"}
    zones = {
        each["metadata"]["labels"].get("coranto/zone"): each["spec"]["replicas"] for each in of_kind("StatefulSet")
    }
    assert zones == {"a": 2, "b": 1, None: 3}


def test_probes_ask_the_pages_that_say_it() -> None:
    for _, container in containers():
        if container["name"] == "broker":
            assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "health"}
            assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "health"}
            assert {"name": "health", "containerPort": 8081} in container["ports"]


def test_every_set_has_volumes_and_a_budget_of_disruptions() -> None:
    budgets = [each["spec"]["selector"]["matchLabels"].items() for each in of_kind("PodDisruptionBudget")]
    for each in of_kind("StatefulSet"):
        assert each["spec"]["volumeClaimTemplates"]
        labels = each["spec"]["template"]["metadata"]["labels"].items()
        assert sum(budget <= labels for budget in budgets) == 1
    for name, each in SERVICES.items():
        if name.startswith(("broker-", "etcd-")) or name in ("postgres", "s3", "dagster"):
            assert each["volumes"][0].partition(":")[0] in COMPOSE["volumes"]


def test_images_are_parameters_without_a_registry() -> None:
    for each in SERVICES.values():
        assert re.fullmatch(r"\$\{[A-Z0-9_]+_IMAGE:\?[^}]+\}", each["image"])
    assert {container["image"] for _, container in containers()} == {"coranto", "etcd"}
    for path in DEPLOY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            hosts = re.findall(r"\b[\w-]+\.(?:io|com|org|dev)/[\w./-]+", path.read_text())
            known = ("kubernetes.io/", "k8s.io/", "prometheus.io/")
            assert not [host for host in hosts if not any(name in host for name in known)], path


def test_no_secret_stands_in_the_files() -> None:
    secret = re.compile(r"PASSWORD|SECRET|ACCESS_KEY|AUTH_KEYS|TOKEN", re.IGNORECASE)
    for each in SERVICES.values():
        assert not [name for name in each.get("environment", {}) if secret.search(name)]
    for _, container in containers():
        for variable in container.get("env", []):
            assert not secret.search(variable["name"]) or "secretKeyRef" in variable["valueFrom"]
    for each in of_kind("ConfigMap"):
        assert not [name for name in each["data"] if secret.search(name)]
    assert not list(of_kind("Secret"))
