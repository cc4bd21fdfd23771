"""deploy/compose/compose.yaml as plain processes: its commands, variables and health checks, on this machine.

Not run here: containers, their images and networks. Replacements: service names become ports of this machine, volumes
become folders, and the tests provide PostgreSQL and the S3 server. `make images` runs the images.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import sqlalchemy as sa
import yaml

from coranto.cluster.etcd_program import find_etcd
from coranto.cluster.etcd_server import is_healthy
from coranto.cluster.processes import ChildProcess, free_port, stop_all
from tests.installation.elsewhere.environments import ROOT
from tests.installation.kustomize import ALL, KUBERNETES, render
from tests.servers.s3 import AwsKey, S3Server
from tests.servers.sql import PostgresServer

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

FILE = ROOT / "deploy" / "compose" / "compose.yaml"
SERVICES: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
PORTS = (2379, 2380, 8080, 8081, 8082, 8090, 8091, 3000)
TIMEOUT = 300.0


class Machine:
    """The services of the file, as processes of this machine."""

    def __init__(self, folder: Path, stand_ins: dict[str, str], variables: dict[str, str]) -> None:
        self.folder = folder
        self._stand_ins = stand_ins
        self._variables = variables
        self._ports: dict[tuple[str, int], int] = {}
        for service in SERVICES:
            for port in PORTS:
                self._ports[service, port] = free_port(taken=self._ports.values())
        self.processes: dict[str, ChildProcess] = {}

    def port(self, service: str, port: int) -> int:
        return self._ports[service, port]

    def local(self, service: str, text: str) -> str:
        """Replace service names and volumes in a text with this machine's ports and folders."""
        every = ",".join(f"127.0.0.1:{self.port(f'etcd-{number}', 2379)}" for number in (1, 2, 3))
        text = re.sub(r"(?<![\w-])etcd:2379", every, text)
        for name, address in self._stand_ins.items():
            text = text.replace(name, address)

        def here(found: re.Match[str]) -> str:
            owner = service if found[1] in ("0.0.0.0", "127.0.0.1") else found[1]
            return f"127.0.0.1:{self.port(owner, int(found[2]))}"

        names = "|".join(map(re.escape, (*SERVICES, "0.0.0.0", "127.0.0.1")))
        text = re.sub(rf"(?<![\w.-])({names}):({'|'.join(map(str, PORTS))})\b", here, text)
        text = re.sub(r"^0\.0\.0\.0$", "127.0.0.1", text)
        text = re.sub(r"^(\d{4})$", lambda found: str(self._ports.get((service, int(found[1])), found[1])), text)
        for volume in SERVICES[service].get("volumes", []):
            source, target = volume.split(":")[:2]
            folder = FILE.parent / source if source.startswith(".") else self.folder / source
            folder.mkdir(exist_ok=True, mode=0o700)
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?=/|$)", str(folder), text)
        return text

    def environment(self, service: str) -> dict[str, str]:
        own = {name: self.local(service, value) for name, value in SERVICES[service].get("environment", {}).items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CORANTO_", "ETCD_"))}
        found = {**kept, **self._variables, **own}
        if "PYTHONPATH" in own and "PYTHONPATH" in kept:
            found["PYTHONPATH"] = os.pathsep.join([own["PYTHONPATH"], kept["PYTHONPATH"]])
        return found

    def command(self, service: str) -> list[str]:
        words = [*SERVICES[service].get("entrypoint", []), *SERVICES[service]["command"]]
        words = [self.local(service, word) for word in words]
        if words[0] == "etcd":
            return [str(find_etcd(os.environ).path), *words[1:]]
        program = "dagster" if words[0] == "dagster" else "coranto"
        return [str(Path(sys.executable).parent / program), *words[program == "dagster" :]]

    def start(self, service: str) -> None:
        self.processes[service] = ChildProcess(
            service,
            self.command(service),
            log=self.folder / f"{service}.log",
            cwd=self.folder,
            environment=self.environment(service),
        )

    def run(self, service: str) -> None:
        """Run a service that ends; retry if the file requires it."""
        assert SERVICES[service]["restart"] == "on-failure"
        deadline = time.monotonic() + TIMEOUT
        while True:
            done = subprocess.run(
                self.command(service), env=self.environment(service), capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline, f"{service}: {done.stdout}\n{done.stderr}"

    def healthy(self, service: str) -> bool:
        """Run the service's health check once."""
        test = [self.local(service, word) for word in SERVICES[service]["healthcheck"]["test"]]
        assert test[0] == "CMD"
        if test[1] == "etcdctl":  # The package with etcd does not include it.
            return is_healthy(f"127.0.0.1:{self.port(service, 2379)}")
        assert test[1] == "python"
        return subprocess.run([sys.executable, *test[2:]], capture_output=True, check=False).returncode == 0

    def await_healthy(self, *services: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        for service in services:
            while not self.healthy(service):
                process = self.processes[service]
                assert process.alive, process.failure()
                assert time.monotonic() < deadline, process.log_tail(60)
                time.sleep(0.2)


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.new_database()


def read(url: str) -> dict[str, int]:
    engine = sa.create_engine(url.partition("?")[0])
    try:
        with engine.connect() as connection:
            if not sa.inspect(connection).has_table("totals"):
                return {}
            return {row.customer: int(row.cents) for row in connection.execute(sa.text("SELECT * FROM totals"))}
    finally:
        engine.dispose()


def test_the_compose_cluster_survives_a_stopped_broker_and_ends_in_time(tmp_path: Path, store_url: str) -> None:
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server(tmp_path / "s3-server"))
        s3.create_bucket("coranto")
        variables = AwsKey("key", "secret").environment | {"TOTALS_STORE_URL": store_url}
        machine = Machine(tmp_path, {"http://s3:9000": s3.endpoint}, variables)
        # Dagster ends its child processes only if it is asked to.
        stack.callback(lambda: stop_all(list(machine.processes.values()), 60.0))
        etcds, brokers = ("etcd-1", "etcd-2", "etcd-3"), ("broker-1", "broker-2", "broker-3")
        for service in etcds:
            machine.start(service)
        machine.await_healthy(*etcds)
        for service in brokers:
            machine.start(service)
        machine.await_healthy(*brokers)
        machine.run("journals")
        machine.start("consumer")
        machine.await_healthy("consumer")
        machine.run("shards")
        machine.start("dagster")

        coranto = str(Path(sys.executable).parent / "coranto")

        def append(customer: str, cents: int, part: str = "sales/part-000") -> None:
            line = json.dumps({"customer": customer, "cents": cents}).encode() + b"\n"
            command = [coranto, "journals", "append", part]
            done = subprocess.run(
                command, input=line, env=machine.environment("journals"), capture_output=True, check=False
            )
            assert done.returncode == 0, done.stderr

        def await_totals(expected: dict[str, int]) -> None:
            deadline = time.monotonic() + TIMEOUT
            while read(store_url) != expected:
                assert time.monotonic() < deadline, (read(store_url), machine.processes["consumer"].log_tail(40))
                time.sleep(0.2)

        append("ada", 1990)
        append("grace", 5, "sales/part-001")
        await_totals({"ada": 1990, "grace": 5})

        # One broker ends gracefully, within its time, and its journals continue.
        grace = float(SERVICES["broker-2"]["stop_grace_period"].removesuffix("s"))
        assert machine.processes["broker-2"].stop(grace), "the broker had to be killed"
        assert machine.processes["broker-2"].exit_code == 0
        append("ada", 10)
        await_totals({"ada": 2000, "grace": 5})

        machine.start("broker-2")
        machine.await_healthy("broker-2", "dagster")
        url = f"http://127.0.0.1:{machine.port('broker-2', 8081)}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b'zone="b"' in answer.read()


def test_the_compose_file_is_valid_by_its_schema(tmp_path: Path) -> None:
    """The schema of docker-compose 1.29, the last version packaged for Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, "docker-compose==1.29.2"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        schema = json.loads(archive.read("compose/config/compose_spec.json"))
    content = {name: value for name, value in yaml.safe_load(FILE.read_text()).items() if not name.startswith("x-")}
    jsonschema.validate(content, schema)


def test_the_manifests_are_valid_by_the_kubernetes_schema(tmp_path: Path) -> None:
    made = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", made], check=True)
    subprocess.run([made / "bin" / "pip", "install", "--quiet", "kubernetes-validate", "setuptools"], check=True)
    for variant in ALL:
        file, manifests = tmp_path / "manifests.yaml", render(KUBERNETES / variant)
        file.write_text(yaml.safe_dump_all(manifests))
        done = subprocess.run(
            [made / "bin" / "kubernetes-validate", "--strict", file], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count("passed") >= len(manifests)
