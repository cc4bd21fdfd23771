"""The subset of kustomize that deploy/kubernetes uses: resources, images, replicas, and JSON patches by kind and name.

A kustomization that uses more fails here, so that tests check the same manifests that users apply.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VARIANTS = ("base", "overlays/small", "overlays/large")
"""The kustomizations of brokers."""
ALL = (*VARIANTS, "consumer", "webhooks")


def render(folder: Path) -> list[Any]:
    """Return the manifests of a kustomization, as `kubectl kustomize` makes them."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert content.pop("apiVersion") == "kustomize.config.k8s.io/v1beta1"
    assert content.pop("kind") == "Kustomization"
    manifests: list[Any] = []
    for name in content.pop("resources"):
        path = folder / name
        manifests += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for patch in content.pop("patches", []):
        _patch(manifests, **patch)
    for replicas in content.pop("replicas", []):
        (found,) = _matching(manifests, "StatefulSet", replicas["name"])
        found["spec"]["replicas"] = replicas["count"]
    for image in content.pop("images", []):
        for container in containers(manifests):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    assert not content, f"{folder} uses {', '.join(content)}, which this module does not apply"
    return manifests


def containers(manifests: list[Any]) -> list[Any]:
    """Return the containers of all StatefulSets and Deployments."""
    return [
        container
        for each in manifests
        if each["kind"] in ("StatefulSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


def _matching(manifests: list[Any], kind: str, name: str) -> list[Any]:
    return [each for each in manifests if each["kind"] == kind and re.fullmatch(name, each["metadata"]["name"])]


def _patch(manifests: list[Any], *, target: dict[str, str], patch: str) -> None:
    matching = _matching(manifests, **target)
    assert matching, f"{target} matches nothing"
    for each in matching:
        for operation in yaml.safe_load(patch):
            *parents, key = [part.replace("~1", "/") for part in operation["path"].removeprefix("/").split("/")]
            place = each
            for parent in parents:
                place = place[int(parent) if isinstance(place, list) else parent]
            assert isinstance(place, dict)
            assert (key in place) == {"add": False, "replace": True}[operation["op"]], operation["path"]
            place[key] = operation["value"]
