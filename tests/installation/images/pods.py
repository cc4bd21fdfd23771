"""Pods of the manifests in deploy/kubernetes, as containers of the images of deploy/images.sh."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import trustme

from tests.installation.images.containers import TIMEOUT_SECONDS, Container, Containers

_NAMESPACE: Final = "default"
_OWNERS: Final = ("StatefulSet", "Deployment")


class Pods:
    """The pods of a namespace, with its ConfigMaps and secrets. The secrets with certificates are created here."""

    def __init__(self, containers: Containers, images: dict[str, str], secrets: dict[str, dict[str, str]]) -> None:
        """`images` maps image names of the manifests to local images."""
        self.containers = containers
        self.images = images
        self.config_maps: dict[str, dict[str, str]] = {}
        self._created: list[Pod] = []
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        # The names that brokers.yaml refers to.
        names = (f"*.coranto-brokers.{_NAMESPACE}.svc", "coranto")
        certificate = authority.issue_cert(*names, key_type=trustme.KeyType.ECDSA)
        self.secrets = {
            "coranto-tls-ca": {"ca.crt": authority.cert_pem.bytes().decode()},
            "coranto-broker-tls": {
                "tls.crt": b"".join(blob.bytes() for blob in certificate.cert_chain_pems).decode(),
                "tls.key": certificate.private_key_pem.bytes().decode(),
            },
            **secrets,
        }

    def create(self, manifests: list[Any]) -> dict[str, Pod]:
        """Return the pods of manifests by name, not yet started."""
        data = {each["metadata"]["name"]: each["data"] for each in manifests if each["kind"] == "ConfigMap"}
        self.config_maps |= data
        services = [each for each in manifests if each["kind"] == "Service"]
        names = [
            (f"{owner['metadata']['name']}-{number}", owner)
            for owner in manifests
            if owner["kind"] in _OWNERS
            for number in range(owner["spec"]["replicas"])
        ]
        pods = {name: Pod(self, owner, name, services) for name, owner in names}
        self._created += pods.values()
        return pods

    def start(self, manifests: list[Any]) -> dict[str, Pod]:
        """Start the pods of manifests, and wait until their probes succeed. Return them by name."""
        pods = self.create(manifests)
        for pod in pods.values():
            pod.start()
        for pod in pods.values():
            pod.await_probes()
        return pods

    def assert_nothing_written(self) -> None:
        """Fail if a pod has written to a path that is read-only in Kubernetes."""
        for pod in self._created:
            assert pod.has_read_only_files
            written = pod.container.written()
            assert not written, (pod.name, written)

    def folder(self, name: str, files: Mapping[str, str]) -> Path:
        made = self.containers.folder / "objects" / name
        made.mkdir(parents=True, exist_ok=True)
        for each, content in files.items():
            (made / each).write_text(content)
        return made


class Pod:
    """A pod of a StatefulSet or a Deployment, as a container. Services that select it route to it, ready or not."""

    def __init__(self, pods: Pods, owner: dict[str, Any], name: str, services: list[Any]) -> None:
        self.name, self._pods = name, pods
        template = owner["spec"]["template"]
        (self._spec,) = template["spec"]["containers"]
        self.has_read_only_files = self._spec["securityContext"]["readOnlyRootFilesystem"]
        self._grace_seconds = float(template["spec"].get("terminationGracePeriodSeconds", 30))
        labels = template["metadata"]["labels"].items()
        names = [
            host
            for service in services
            if service["spec"]["selector"].items() <= labels
            for own in [service["metadata"]["name"]]
            for host in (own, f"{name}.{own}", f"{name}.{own}.{_NAMESPACE}.svc")
        ]
        self.container = pods.containers.add(pods.images[self._spec["image"].partition(":")[0]], name, *names)
        self.container.working_directory = self._spec.get("workingDir", "")
        volumes = {each["name"]: each for each in template["spec"].get("volumes", [])}
        for mount in self._spec["volumeMounts"]:
            self._mount(volumes.get(mount["name"], {}), mount["name"], mount["mountPath"])
        self._environment: dict[str, str] = {}
        for source in self._spec.get("envFrom", []):
            is_secret = "secretRef" in source
            reference = source["secretRef" if is_secret else "configMapRef"]["name"]
            self._environment |= (pods.secrets if is_secret else pods.config_maps)[reference]
        fields = {"metadata.name": name, "metadata.namespace": _NAMESPACE}
        for variable in self._spec["env"]:
            if "value" in variable:
                value = self._expand(variable["value"])
            elif "fieldRef" in variable["valueFrom"]:
                value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                value = pods.secrets[reference["name"]][reference["key"]]
            self._environment[variable["name"]] = value

    def _mount(self, volume: dict[str, Any], name: str, target: str) -> None:
        """Mount a secret or a ConfigMap, or else an empty folder: for the pod alone, or for a claim."""
        if "secret" in volume:
            secret = volume["secret"]["secretName"]
            source = self._pods.folder(f"secret-{secret}", self._pods.secrets[secret])
        elif "configMap" in volume:
            config_map = self._pods.config_maps[volume["configMap"]["name"]]
            files = {each: text.replace("0.0.0.0", self.container.address) for each, text in config_map.items()}
            source = self._pods.folder(f"{self.name}-{name}", files)
        else:
            self.container.mount(self._pods.containers.folder / f"{self.name}-{name}", target)
            return
        self.container.mount(source, target, read_only=True)

    def _expand(self, text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: self._environment[found[1]], text)

    def start(self) -> None:
        words = self._spec.get("command") or ["coranto", *self._spec["args"]]
        self.container.start([self._expand(word) for word in words], self._environment)

    def await_probes(self) -> None:
        """Wait until all its probes succeed."""
        ports = {each["name"]: each["containerPort"] for each in self._spec["ports"]}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            while name in self._spec and not _succeeds(self.container, self._spec[name], ports):
                self.container.assert_starting(deadline)
                time.sleep(0.2)

    def stop(self) -> None:
        """End it as Kubernetes does. Fails if that takes longer than the manifest allows."""
        before = self._spec.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        assert before is None or not self.container.run(before, self._environment).returncode
        self.container.stop(self._grace_seconds)


def _succeeds(container: Container, probe: dict[str, Any], ports: dict[str, int]) -> bool:
    try:
        if "tcpSocket" in probe:
            container.connect(ports[probe["tcpSocket"]["port"]])
        else:
            container.call(ports[probe["httpGet"]["port"]], probe["httpGet"]["path"])
    except OSError:
        return False
    return True
