"""Airflow with a real cluster, for all tests of a session, with DAGs for the flights and for a small shop."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from airflow_coranto.flights.standalone import DAGS, AirflowStandalone
from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.cluster import EmbeddedCluster
from coranto.messages import JsonLines
from tests.orchestration.airflow.installed.airflow_api import AirflowApi

ROOT = Path(__file__).parents[4]
SOURCES = ("platform", "broker", "consumers", "orchestration")
TOKEN = "eyJhbGciOiJIUzI1NiJ9.c2VjcmV0LXNjb3Bl.c2lnbmF0dXJlLXRoYXQtbm9ib2R5LW1heS1zZWU"
SHOP = "shop/orders"
SLOW = "slow/orders"
INGESTED = "ingested/orders"
INGESTED_ROWS = 20_000
STORED = "stored_in_airflow"
"""A connection stored in Airflow's database."""
SHOP_DAGS = f'''
import time
from datetime import timedelta
from pathlib import Path
from airflow.sdk import DAG, task
from airflow_coranto.operators.audit import AuditOperator
from airflow_coranto.operators.ingest import IngestOperator
from airflow_coranto.operators.publish import PublishOperator
from airflow_coranto.operators.recovery import recovery_with_approval
from airflow_coranto.operators.specs import ApplySpecsOperator
from airflow_coranto.operators.table import TableOperator

TREE = """
name: {SHOP}/
replication: 1
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment:
  length: 65536
  compression_codec: ZSTANDARD
  stores: ["file:///"]
  refresh_interval: 1s
flags: [O_RDWR]
children:
  - name: {SHOP}/part-000
"""

RETRY = {{"retries": 5, "retry_delay": timedelta(seconds=1)}}

with DAG("shop", schedule=None, default_args=RETRY):
    specs = ApplySpecsOperator(task_id="specs", specs=TREE)
    rows = [{{"order": number, "item": str(number) * 20}} for number in range(2000)]
    publish = PublishOperator(task_id="publish", group="{SHOP}", rows=rows, key="order")
    specs >> publish >> AuditOperator(task_id="audit", group="{SHOP}", depth="deep")

with DAG("recovery", schedule=None, default_args=RETRY):
    recovery_with_approval(group="{SHOP}")

with DAG("shop_audit", schedule=None, default_args=RETRY):
    AuditOperator(task_id="audit", group="{SHOP}", depth="deep")

with DAG("ingest", schedule=None, default_args=RETRY):
    IngestOperator(task_id="ingest", ingest="ingest.yaml", stream="{INGESTED}")

with DAG("table", schedule=None, default_args=RETRY):
    TableOperator(task_id="table", table="table.yaml", stream="{INGESTED}")

with DAG("slow_shop", schedule=None, default_args=RETRY):

    @task.journal_publish(group="{SLOW}", key="order", coranto_conn_id="{STORED}")
    def publish_slowly(params=None):
        for number in range(2000):
            yield {{"order": number, "item": str(number) * 100}}
        while not Path(params["gate"]).exists():
            time.sleep(0.1)
        yield {{"order": 2000}}

    slow_tree = TREE.replace("{SHOP}", "{SLOW}")
    ApplySpecsOperator(task_id="specs", specs=slow_tree, coranto_conn_id="{STORED}") >> publish_slowly()
'''


@dataclass(frozen=True)
class AirflowWorld:
    """Airflow and its cluster."""

    airflow: AirflowStandalone
    api: AirflowApi
    config: ClientConfig
    client: SyncJournalClient

    @property
    def store_url(self) -> str:
        return f"sqlite:///{self.airflow.data_dir / 'store.db'}"

    @property
    def table_url(self) -> str:
        """The store of the DAG `table`."""
        return f"sqlite:///{self.airflow.data_dir / 'table.db'}"

    def files_containing(self, secret: str) -> list[Path]:
        """Return the files of Airflow and the cluster's logs that contain a text."""
        kinds = (".log", ".db", ".db-wal", ".json")
        files = [path for path in self.airflow.home.rglob("*") if path.is_file() and path.suffix in kinds]
        files += list((self.airflow.data_dir / "logs").glob("*.log"))
        assert any("task_id=" in str(path) for path in files)
        return [path for path in files if secret.encode() in path.read_bytes()]

    def total(self, group: str) -> int:
        """Return the number of bytes in the journals of a group."""
        return sum(self.client.head(name) for name in self.client.list(f"name:prefix={group}/").names)

    def messages(self, group: str) -> int:
        """Return the number of committed messages of a group."""
        names = self.client.list(f"name:prefix={group}/").names
        return sum(1 for name in names for _ in committed_messages(self.client, name, JsonLines()))


@contextmanager
def airflow_world(data: Path, dags: Path) -> Iterator[AirflowWorld]:
    """Run a cluster below `data`, and Airflow with the DAGs in `dags`."""
    for path in DAGS.glob("*.py"):
        shutil.copy(path, dags)
    (dags / "shop.py").write_text(SHOP_DAGS)
    _put_ingest(dags / "rows", dags / "ingest.yaml")
    table = {"name": "numbers", "input": {"stream": INGESTED}, "columns": "n BIGINT", "table": "numbers"}
    (dags / "table.yaml").write_text(json.dumps({**table, "store": f"sqlite:///{data / 'table.db'}"}))
    connection = {"conn_type": "coranto", "password": TOKEN, "extra": {"data_dir": str(data), "cluster": "demo"}}
    settings = {
        "AIRFLOW_CONN_CORANTO_DEFAULT": json.dumps(connection),
        # The seconds until another triggerer takes over from a dead one.
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in SOURCES),
    }
    with EmbeddedCluster(data, brokers=1, lease_seconds=60, etcd_fsync=False) as cluster:
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root)
        with AirflowStandalone(data, dags=dags, settings=settings) as airflow, SyncJournalClient.of(config) as client:
            api = AirflowApi(airflow.url, data / "logs" / "airflow-api-server.log")
            api.await_dags("flights", "flight_alerts", "shop", "recovery", "shop_audit", "ingest", "table", "slow_shop")
            yield AirflowWorld(airflow, api, config, client)


def _put_ingest(rows: Path, file: Path) -> None:
    """Write rows, and the file of an ingest with many transactions."""
    rows.mkdir()
    (rows / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(INGESTED_ROWS)))
    ingest = {
        "name": "orders",
        "stream": INGESTED,
        "source": {"files": {"url": f"file://{rows}/", "pattern": "*.jsonl"}},
        "batch": {"bytes": "4000"},
        "create": {"segments": "2"},
    }
    file.write_text(json.dumps(ingest))
