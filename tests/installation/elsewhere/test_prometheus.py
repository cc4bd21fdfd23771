"""Alerts and dashboard of deploy/ in a real Prometheus: on synthetic series, and on brokers that it scrapes.

Prometheus and promtool come from PATH, or from Debian's packages, unpacked into a folder of the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import ChildProcess, free_port
from coranto.wire import protocol_pb2 as pb
from tests.installation.elsewhere.environments import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

RULES = ROOT / "deploy" / "prometheus" / "coranto-alerts.yml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "coranto-brokers.json").read_text())
TIMEOUT = 300.0


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `prometheus` and `promtool`."""
    if (found := shutil.which("prometheus")) and shutil.which("promtool"):
        return Path(found).parent
    folder = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "-qq", "download", "prometheus"], cwd=folder, check=True)
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    return folder / "usr" / "bin"


@dataclass(frozen=True)
class Case:
    """Series that make an alert fire, with a value each minute; the minute of evaluation, and the expected summary."""

    alert: str
    series: dict[str, str]
    minute: int
    summary: str
    labels: str = "instance"

    def as_test(self) -> dict[str, Any]:
        every = {"instance": "b:1", "job": "coranto-broker", "store": "s3://bucket/"}
        every |= {"quota": "appends", "limit": "caller"}
        labels = {name: every[name] for name in self.labels.split()} | ALERTS[self.alert]["labels"]
        expected = {"exp_labels": labels, "exp_annotations": {"summary": self.summary}}
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "alert_rule_test": [
                {"eval_time": "1m", "alertname": self.alert, "exp_alerts": []},
                {"eval_time": f"{self.minute}m", "alertname": self.alert, "exp_alerts": [expected]},
            ],
        }


def one(name: str, values: str, more: str = "") -> dict[str, str]:
    return {f'{name}{{instance="b:1"{more}}}': values}


JOB = ',job="coranto-broker"'
SLOW = "coranto_append_seconds_bucket"
CASES = [
    Case("CorantoBrokerDown", one("up", "1x4 0x9", JOB), 9, "Broker b:1 does not answer.", "instance job"),
    Case(
        "CorantoJournalsHeldBack",
        one("coranto_journals_held_back", "0x4 3x9"),
        9,
        "3 journals of b:1 refuse appends: too much content is not stored yet.",
    ),
    Case(
        "CorantoStoreUnhealthy",
        one("coranto_fragment_store_healthy", "1x4 0x9", ',store="s3://bucket/"'),
        12,
        "b:1 cannot use the store s3://bucket/; its journals refuse appends.",
        "instance store",
    ),
    Case(
        "CorantoSpoolUnreadable",
        one("coranto_spools_unreadable", "0x4 2x9"),
        9,
        "2 spools of b:1 cannot be read from its disk.",
    ),
    Case(
        "CorantoFragmentWithoutCopy",
        one("coranto_fragments_without_copy", "0x4 2x9"),
        12,
        "2 fragments of b:1 are damaged, and no good copy was found.",
    ),
    Case(
        "CorantoFragmentDamaged",
        one("coranto_fragments_damaged_total", "0x4 1x9"),
        9,
        "The disk of b:1 has damaged a fragment.",
    ),
    Case(
        "CorantoDiskFailure",
        one("coranto_disk_failures_total", "0x4 1x9"),
        9,
        "The disk of b:1 lost content that was written.",
    ),
    Case(
        "CorantoStoreFailures",
        one("coranto_fragment_store_failures_total", "0+1x60"),
        40,
        "b:1 fails to store fragments.",
    ),
    Case(
        "CorantoContentNotStored",
        one("coranto_unpersisted_age_seconds", "90000x60"),
        40,
        "Content of b:1 has been waiting for the store for 1d 1h 0m 0s.",
    ),
    Case(
        "CorantoFragmentsPileUp",
        one("coranto_fragments_pending", "90+5x120"),
        100,
        "590 fragments of b:1 wait for the store, and the number grows.",
    ),
    Case(
        "CorantoAppendsRefused",
        one("coranto_appends_refused_total", "0+1x60"),
        20,
        "b:1 refuses appends: too many are in flight.",
    ),
    Case(
        "CorantoAppendsWait",
        one("coranto_append_stream_waits_total", "0+1x60"),
        30,
        "Streams of appends wait at b:1: too many appends are in flight.",
    ),
    Case(
        "CorantoAppendsSlow",
        {
            **one(SLOW, "0x60", ',le="1"'),
            **one(SLOW, "0+10x60", ',le="5"'),
            **one(SLOW, "0+10x60", ',le="+Inf"'),
        },
        40,
        "The 99th percentile of append latency at b:1 is 4.96s.",
    ),
    Case(
        "CorantoRetentionFails",
        one("coranto_fragment_removal_failures_total", "0+1x180"),
        150,
        "b:1 fails to remove old fragments.",
    ),
    Case(
        "CorantoFilesRunOut",
        {**one("process_open_fds", "900x60", JOB), **one("process_max_fds", "1000x60", JOB)},
        30,
        "b:1 uses 90% of the files that it may open.",
        "instance job",
    ),
    Case(
        "CorantoMixedVersions",
        {
            'coranto_broker_info{instance="b:1",version="0.1.0",fsync="commit"}': "1x180",
            'coranto_broker_info{instance="b:2",version="0.2.0",fsync="commit"}': "1x180",
        },
        150,
        "Brokers have 2 different versions.",
        "",
    ),
    Case(
        "CorantoAppendsBelowDemand",
        one("coranto_appends_below_demand_total", "0x10 1+1x60"),
        20,
        "Appends to b:1 have less durability than their journals require.",
    ),
    Case(
        "CorantoDurabilityDiffers",
        {
            'coranto_broker_info{instance="b:1",version="0.1.0",fsync="commit"}': "1x60",
            'coranto_broker_info{instance="b:2",version="0.1.0",fsync="never"}': "1x60",
        },
        20,
        "Brokers differ in fsync, so acknowledgements differ in durability.",
        "",
    ),
    Case(
        "CorantoQuotaExceeded",
        {'coranto_quota_rejections_total{instance="b:1",quota="appends"}': "0x2 1+10x30"},
        20,
        "b:1 rejects calls of a client beyond its quota (appends).",
        "instance quota",
    ),
    Case(
        "CorantoEtcdWritesRefused",
        {'coranto_etcd_writes_refused_total{instance="b:1",limit="caller"}': "0x2 1+10x30"},
        20,
        "b:1 refuses changes: too much was written to etcd (limit: caller).",
        "instance limit",
    ),
    Case(
        "CorantoOidcKeysOld",
        one("coranto_oidc_keys_age_seconds", "60x2 3660x9"),
        9,
        "b:1 has not fetched the keys of its OpenID Connect provider for 1h 1m 0s.",
    ),
]
WELL = {
    **one("up", "1x180", JOB),
    **one("coranto_fragment_store_healthy", "1x180", ',store="s3://bucket/"'),
    **one("coranto_unpersisted_age_seconds", "600x180"),
    **one("coranto_fragments_pending", "5x180"),
    **one("process_open_fds", "90x180", JOB),
    **one("process_max_fds", "1000x180", JOB),
    **one(SLOW, "0+100x180", ',le="1"'),
    **one(SLOW, "0+100x180", ',le="+Inf"'),
    **{
        name: "0x180"
        for metric in (
            "coranto_journals_held_back",
            "coranto_spools_unreadable",
            "coranto_fragments_without_copy",
            "coranto_fragments_damaged_total",
            "coranto_disk_failures_total",
            "coranto_fragment_store_failures_total",
            "coranto_appends_refused_total",
            "coranto_append_stream_waits_total",
            "coranto_fragment_removal_failures_total",
            "coranto_oidc_keys_age_seconds",
        )
        for name in one(metric, "")
    },
    'coranto_broker_info{instance="b:1",version="0.1.0",fsync="commit"}': "1x180",
    'coranto_broker_info{instance="b:2",version="0.1.0",fsync="commit"}': "1x180",
    'coranto_quota_rejections_total{instance="b:1",quota="appends"}': "0x180",
    'coranto_etcd_writes_refused_total{instance="b:1",limit="total"}': "0x180",
}
"""A cluster without problems."""


def test_each_alert_fires_for_its_problem_only(programs: Path, tmp_path: Path) -> None:
    well = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in WELL.items()],
        "alert_rule_test": [{"eval_time": "170m", "alertname": alert, "exp_alerts": []} for alert in ALERTS],
    }
    path = tmp_path / "alerts-test.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(RULES)],
                "evaluation_interval": "1m",
                "tests": [well, *(case.as_test() for case in CASES)],
            }
        )
    )
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(path)]):
        done = subprocess.run([programs / "promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout + done.stderr


class Prometheus:
    """A Prometheus that scrapes brokers each second."""

    def __init__(self, programs: Path, folder: Path, targets: list[str]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "coranto-broker", "static_configs": [{"targets": targets}]}],
        }
        config.write_text(yaml.safe_dump(settings))
        command = [
            str(programs / "prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus-data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self.process = ChildProcess(
            "prometheus", command, log=folder / "prometheus.log", cwd=folder, environment=os.environ
        )

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            reply = json.load(answer)
        assert reply["status"] == "success", reply
        return reply["data"]

    def values(self, expression: str) -> list[Any]:
        """Return the current values of an expression."""
        found = self.ask("query", query=expression)["result"]
        return [each["value"][1] for each in found]

    def ready(self) -> bool:
        assert self.process.alive, self.process.failure()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def states(self) -> dict[str, str]:
        """Return the state of each alert. Fails if a rule cannot be evaluated."""
        rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
        assert not [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] == "err"]
        return {rule["name"]: rule["state"] for rule in rules if rule["health"] == "ok"}


def until(holds: Callable[[], object], reply: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, reply()
        time.sleep(0.2)


class Work:
    """Appends and reads over gRPC and HTTP inside the `with` block, so that every metric has samples."""

    def __init__(self, client: SyncJournalClient, gateway: str) -> None:
        self._client, self._gateway = client, gateway
        self._end = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        spec = pb.JournalSpec(name="work/part-000", replication=2, flags=pb.JournalSpec.O_RDWR)
        spec.fragment.length = 1024
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.seconds = 1
        self._client.apply([pb.ApplyRequest.Change(upsert=spec)])
        self._running = self._threads.submit(self._run)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._running.result()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self._client.append("work/part-000", b"content\n" * 40)
            for _ in self._client.read("work/part-000", 0, end_offset=40):
                pass
            with urllib.request.urlopen(f"{self._gateway}/work/part-000?offset=0&end_offset=8", timeout=60):
                pass


def facts(cluster: EmbeddedCluster, broker: int) -> dict[str, str]:
    """Return the fields that a broker logs at its start."""
    for line in (cluster.data_dir / "logs" / f"broker-{broker}.log").read_text().splitlines():
        if line.startswith("{") and (found := json.loads(line))["event"] == "member.ready":
            return {name: str(value) for name, value in found.items()}
    raise AssertionError("the broker's log does not say that it is ready")


@pytest.fixture
def scraped(programs: Path, tmp_path: Path) -> Iterator[tuple[Prometheus, EmbeddedCluster, Work]]:
    """Two brokers that Prometheus scrapes, and work for them."""
    arguments = ("--metrics-port", "0", "--http-port", "0", "--log-json")
    with ExitStack() as stack:
        cluster = stack.enter_context(
            EmbeddedCluster(
                tmp_path / "data",
                brokers=2,
                zones=("a", "b"),
                lease_seconds=60,
                supervise=False,
                etcd_fsync=False,
                broker_arguments=arguments,
            )
        )
        brokers = [facts(cluster, number) for number in range(2)]
        targets = [each["metrics"].removeprefix("http://") for each in brokers]
        made = Prometheus(programs, tmp_path, targets)
        stack.callback(made.process.kill)
        until(made.ready, lambda: made.process.log_tail(40))
        client = stack.enter_context(SyncJournalClient(cluster.info.endpoint, retry_timeout=TIMEOUT))
        yield made, cluster, Work(client, brokers[0]["http"])


def shown() -> dict[str, str]:
    """Return the expressions of the dashboard as Grafana queries them, by panel."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for number, target in enumerate(panel["targets"]):
            text = target["expr"].replace("$__rate_interval", "15s").replace("$instance", ".*")
            assert "$" not in text, text
            found[f"{panel['title']}, {number}"] = text
    return found


def measured(expression: str) -> Iterator[str]:
    """Yield the expressions that an alert compares with a bound, without the bound."""
    for part in expression.split(" and "):
        yield re.sub(r" (?:==|>) [\d.]+$", "", part)


def test_every_expression_has_values_on_real_brokers(scraped: tuple[Prometheus, EmbeddedCluster, Work]) -> None:
    server, cluster, work = scraped
    wanted = shown()
    for name, alert in ALERTS.items():
        for number, expression in enumerate(measured(alert["expr"])):
            assert expression not in alert["expr"].split(" and "), f"{name} compares nothing"
            wanted[f"{name}, {number}"] = expression
    assert len(wanted) > 45

    def without() -> list[str]:
        return [name for name, text in wanted.items() if set(server.values(text)) <= {"NaN"}]

    def answering() -> float:
        return float(server.values(wanted["Brokers that answer, 0"])[0])

    with work:
        until(lambda: not without(), without)
    (ask,) = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", ask["query"])
    assert found is not None
    assert len(server.ask(f"label/{found[2]}/values", **{"match[]": found[1]})) == 2
    until(lambda: server.states().keys() == ALERTS.keys(), server.states)
    assert set(server.states().values()) == {"inactive"}, server.states()
    assert answering() == 2
    cluster.kill_broker(1)
    until(lambda: answering() == 1, answering)
    until(lambda: server.states()["CorantoBrokerDown"] == "pending", server.states)
