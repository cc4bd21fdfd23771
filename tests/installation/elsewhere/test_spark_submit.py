"""`spark-submit` of a consumer with an archived environment, on a standalone master whose workers have no Coranto."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coranto.testing import SyncCluster
from tests.installation.elsewhere.environments import ROOT, Environment
from tests.servers.spark import standalone_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

JOURNALS = [f"shop/orders/part-00{n}" for n in range(3)]
ORDERS = 60_000
"""Their content is larger than the driver's own read limit."""
APPLICATION = """
import pyarrow as pa
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table

from coranto_consumers.spark import Add, Outputs, TableOutput

COLUMNS = Column("place", String(500), primary_key=True), Column("orders", BigInteger), Column("cents", BigInteger)
PLACES = Table("places", MetaData(), *COLUMNS)


def placed(batches):
    import sys

    for batch in batches:
        yield pa.record_batch({"place": [sys.prefix] * batch.num_rows, "cents": batch.column("cents")})


class Places:
    name = "places"
    sources = "name:prefix=shop/orders/"
    value_schema = "cents BIGINT"

    def outputs(self, committed):
        rows = committed.select("cents").mapInArrow(placed, "place STRING, cents BIGINT")
        sums = rows.groupBy("place").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
        merge = {"orders": Add(), "cents": Add()}
        return Outputs(tables=[TableOutput(PLACES, sums, keys=["place"], merge=merge)])
"""
SETTINGS = {
    "spark.pyspark.python": "./environment/bin/python",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def archived(made: Environment, path: Path) -> Path:
    """Return an archive of an environment without Spark's Java files, which workers have."""
    omitted = ("--exclude=*/pyspark/jars", "--exclude=./work")
    subprocess.run(["tar", "-czf", path, *omitted, "-C", made.folder, "."], check=True)
    return path


def test_a_consumer_runs_on_workers_with_an_archived_environment(wheel: Path, tmp_path: Path) -> None:
    made = Environment.make(tmp_path / "env", Path(sys.executable), wheel, "broker,spark", ROOT / "constraints.txt")
    home = Path(made.run("python", "-c", "import pyspark; print(*pyspark.__path__)").strip())
    archive = archived(made, tmp_path / "environment.tar.gz")
    (made.work / "places.py").write_text(APPLICATION)
    program = shutil.copy(ROOT / "deploy" / "spark" / "run_consumer.py", made.work)
    store = made.work / "places.db"
    env = {**made.variables(), "SPARK_LOCAL_IP": "127.0.0.1", "PATH": "/usr/bin:/bin"}
    with SyncCluster(brokers=1) as cluster, standalone_cluster(tmp_path, home, env) as url:
        client = cluster.client()
        for n, journal in enumerate(JOURNALS):
            cluster.create(journal)
            lines = [json.dumps({"cents": cents, "note": "x" * 40}) for cents in range(n, ORDERS, len(JOURNALS))]
            client.append(journal, "\n".join([*lines, ""]).encode())
        settings = {**SETTINGS, "spark.pyspark.driver.python": str(made.python)}
        words = [
            *(home / "bin" / "spark-submit", "--master", url, "--archives", f"{archive}#environment"),
            *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
            *("--py-files", "places.py", program, "places:Places", "--until-caught-up"),
            *(
                "--endpoint",
                client.config.endpoint,
                "--store",
                f"sqlite:///{store}",
                "--set=max_partition_bytes=400000",
            ),
        ]
        done = subprocess.run(words, cwd=made.work, env=env, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT place, orders, cents FROM places").fetchall()
    assert sum(orders for _, orders, _ in rows) == ORDERS
    assert sum(cents for _, _, cents in rows) == sum(range(ORDERS))
    assert {Path(place).name for place, _, _ in rows} == {"environment"}
    assert all(Path(place).is_relative_to(tmp_path / "work") for place, _, _ in rows)
