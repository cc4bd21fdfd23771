"""The files of deploy/: valid settings, enough time to exit, large enough volumes, no secret and no registry."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from coranto_broker.settings import BrokerSettings
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from tests.installation.elsewhere.test_prometheus import ALERTS, CASES
from tests.installation.kustomize import ALL, DEPLOY, KUBERNETES, VARIANTS, containers, render

COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
BROKERS = {name: each for name, each in SERVICES.items() if name.startswith("broker-")}


UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


@pytest.fixture(params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> list[Any]:
    """The manifests of each kustomization of brokers in turn."""
    return render(KUBERNETES / request.param)


@pytest.fixture(params=ALL)
def all_manifests(request: pytest.FixtureRequest) -> list[Any]:
    """The manifests of each kustomization in turn."""
    return render(KUBERNETES / request.param)


def of_kind(manifests: list[Any], kind: str) -> list[Any]:
    return [each for each in manifests if each["kind"] == kind]


def settings_of(manifests: list[Any]) -> BrokerSettings:
    """Return the broker settings in the manifests."""
    (config,) = of_kind(manifests, "ConfigMap")
    prefix = "CORANTO_BROKER_"
    return BrokerSettings(
        **{name.removeprefix(prefix).lower(): each for name, each in config["data"].items() if name.startswith(prefix)}
    )


def size(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_settings_in_the_files_are_settings_of_the_processes() -> None:
    text = "\n".join(path.read_text() for path in DEPLOY.rglob("*.yaml"))
    for prefix, settings in (("CORANTO_BROKER_", BrokerSettings), ("CORANTO_CONSUMER_", ConsumerProcessSettings)):
        named = {name.lower() for name in re.findall(rf"\b{prefix}([A-Z_]+)\b", text)}
        assert len(named) > 5
        assert named <= settings.model_fields.keys()


def test_compose_brokers_have_more_time_to_exit_than_they_need() -> None:
    for broker in BROKERS.values():
        exit_seconds = float(broker["environment"]["CORANTO_BROKER_EXIT_SECONDS"])
        assert seconds(broker["stop_grace_period"]) > 4 * exit_seconds


def test_pods_have_more_time_to_exit_than_brokers_need(manifests: list[Any]) -> None:
    for each in of_kind(manifests, "StatefulSet"):
        pod = each["spec"]["template"]["spec"]
        if pod["containers"][0]["name"] == "broker":
            assert pod["terminationGracePeriodSeconds"] > 4 * settings_of(manifests).exit_seconds


def test_compose_brokers_are_in_two_zones_with_unique_names() -> None:
    places = [
        (each["environment"]["CORANTO_BROKER_ZONE"], each["environment"]["CORANTO_BROKER_ID"])
        for each in BROKERS.values()
    ]
    assert len(places) == 3
    assert len({name for _, name in places}) == 3
    assert {zone for zone, _ in places} == {"a", "b"}


@pytest.mark.parametrize(
    ("variant", "brokers"), [("base", (2, 1)), ("overlays/small", (2, 1)), ("overlays/large", (6, 6))]
)
def test_each_kustomization_has_brokers_in_two_zones_and_three_etcds(variant: str, brokers: tuple[int, int]) -> None:
    zones = {
        each["metadata"]["labels"].get("coranto/zone"): each["spec"]["replicas"]
        for each in of_kind(render(KUBERNETES / variant), "StatefulSet")
    }
    assert zones == {"a": brokers[0], "b": brokers[1], None: 3}


def test_probes_request_the_health_pages(manifests: list[Any]) -> None:
    for container in containers(manifests):
        if container["name"] == "broker":
            assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "health"}
            assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": "health"}
            assert {"name": "health", "containerPort": 8081} in container["ports"]


def test_every_stateful_set_has_volumes_and_a_disruption_budget(manifests: list[Any]) -> None:
    budgets = [each["spec"]["selector"]["matchLabels"].items() for each in of_kind(manifests, "PodDisruptionBudget")]
    for each in of_kind(manifests, "StatefulSet"):
        assert each["spec"]["volumeClaimTemplates"]
        labels = each["spec"]["template"]["metadata"]["labels"].items()
        assert sum(budget <= labels for budget in budgets) == 1


def test_services_with_state_have_volumes() -> None:
    for name, each in SERVICES.items():
        if name.startswith(("broker-", "etcd-")) or name in ("postgres", "s3", "dagster"):
            assert each["volumes"][0].partition(":")[0] in COMPOSE["volumes"]


def test_volumes_hold_the_cache_and_unstored_content(manifests: list[Any]) -> None:
    settings = settings_of(manifests)
    bounded = settings.cache_bytes + settings.max_unpersisted_bytes
    for each in of_kind(manifests, "StatefulSet"):
        (claim,) = each["spec"]["volumeClaimTemplates"]
        volume = size(claim["spec"]["resources"]["requests"]["storage"])
        if each["metadata"]["name"] == "etcd":
            assert volume >= 2 * (2 << 30)  # etcd's default quota, and a snapshot of as much.
        else:
            assert settings.max_unpersisted_journal_bytes <= settings.max_unpersisted_bytes
            assert bounded <= 0.75 * volume  # The rest is for incomplete fragments.


def test_container_memory_limits_are_at_least_their_requests(all_manifests: list[Any]) -> None:
    for container in containers(all_manifests):
        resources = container["resources"]
        assert size(resources["requests"]["memory"]) <= size(resources["limits"]["memory"])


def test_a_consumer_has_one_replica_and_time_for_its_transaction() -> None:
    (deployment,) = of_kind(render(KUBERNETES / "consumer"), "Deployment")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60
    (container,) = containers([deployment])
    (port,) = container["ports"]
    assert f"--metrics-port={port['containerPort']}" in container["args"]
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "livenessProbe")} == {port["name"]}


def test_images_are_parameters_without_a_registry() -> None:
    for each in SERVICES.values():
        assert re.fullmatch(r"\$\{[A-Z0-9_]+_IMAGE:\?[^}]+\}", each["image"])
    for variant in ALL:
        images = {container["image"].partition(":")[0] for container in containers(render(KUBERNETES / variant))}
        assert images == ({"coranto", "etcd"} if variant in VARIANTS else {"coranto"})
    for path in DEPLOY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            hosts = re.findall(r"\b[\w-]+\.(?:io|com|org|dev)/[\w./-]+", path.read_text())
            known = ("kubernetes.io/", "k8s.io/", "prometheus.io/")
            assert not [host for host in hosts if not any(name in host for name in known)], path


def test_the_files_have_no_secret(all_manifests: list[Any]) -> None:
    secret = re.compile(r"PASSWORD|SECRET|ACCESS_KEY|AUTH_KEYS|TOKEN", re.IGNORECASE)
    for each in SERVICES.values():
        assert not [name for name in each.get("environment", {}) if secret.search(name)]
    for container in containers(all_manifests):
        for variable in container.get("env", []):
            assert not secret.search(variable["name"]) or "secretKeyRef" in variable["valueFrom"]
    for each in of_kind(all_manifests, "ConfigMap"):
        assert not [name for name in each["data"] if secret.search(name)]
    assert not of_kind(all_manifests, "Secret")


def test_each_alert_has_a_test_case_that_makes_it_fire() -> None:
    assert {case.alert for case in CASES} == ALERTS.keys()
