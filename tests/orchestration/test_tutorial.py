"""The tutorial's commands and files, run literally in a new folder, and then the blocks of other pages.

Three commands are not run: two that create the environment, as the present one is used, and one that installs the new
project into it. The project's sources are on Python's path instead.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.consumers.stores.iceberg.rest_server import rest_server
from tests.orchestration.pasted import LOADED, ROOT, Page, Project, environment_of, project_of

pytestmark = [pytest.mark.integration, pytest.mark.system, pytest.mark.exhaustive]

PAGE = ROOT / "docs" / "tutorial.md"
OMITTED = ("python3 -m venv", ". .venv/bin/activate", "pip install ")
BLOCK = re.compile(r"(?:^`(?P<file>[^`]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)


def script(omitted: tuple[str, ...] = OMITTED) -> tuple[str, list[str]]:
    """Return the page as a shell script, and the output lines that it shows.

    The script does not contain commands that begin with `omitted`.
    """
    lines, promised = ["set -e"], []
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["kind"] != "console":
            assert block["file"], f"no file is named for {block['content'][:60]!r}"
            lines.append(f"mkdir -p $(dirname {block['file']}) && cat > {block['file']} <<'END'\n{block['content']}END")
            continue
        for line in block["content"].splitlines():
            command = line.removeprefix("$ ")
            if command == line:
                promised.append(line)
            elif command.startswith("coranto up "):
                lines += [command, "echo $! > up.pid", "until [ -s data/cluster.json ]; do kill -0 $!; sleep 0.1; done"]
            elif not command.startswith(omitted):
                lines += [f"echo '>>>' {command.split()[0]}", command]
            if command == "cd shop":
                lines.append("export PYTHONPATH=$PYTHONPATH:$PWD/src")
    return "\n".join(lines), promised


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project after the whole tutorial, with a running cluster."""
    folder = tmp_path_factory.mktemp("tutorial")
    with following(*script(), folder, environment_of(folder)):
        yield project_of(folder)


def test_the_tutorial_runs_as_printed(project: Project) -> None:
    assert (project.folder / "orders.json").exists()


@contextmanager
def following(text: str, promised: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run the page's script in a folder, compare its output with the shown lines, and keep the cluster running."""
    assert text.count("\ndg ") == 9
    assert len(promised) == 10
    log = folder / "output"
    try:
        with log.open("w") as output:
            done = subprocess.run(
                ["bash", "-c", text], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        shown = log.read_text()
        assert done.returncode == 0, shown[-5000:]
        assert [line for line in shown.splitlines() if line in promised] == promised
        assert "RUN_FAILURE" not in shown
        assert shown.count("RUN_SUCCESS") == 5
        yield
    finally:
        _stop(folder / "up.pid")


def _stop(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return
    os.kill(pid, signal.SIGKILL)


def test_the_blocks_of_the_lake_run_in_the_tutorials_project(project: Project, tmp_path: Path) -> None:
    page = Page("lake.md")
    stored = [  # A fragment is stored when it has reached its length.
        "sed -i 's/length: 4194304/length: 65536/' src/shop/defs/orders/journals.yaml",
        "coranto journals apply --specs src/shop/defs/orders/journals.yaml --update",
        "stored() { coranto journals manifest shop/ 2> /dev/null | grep -c sha1; }",
        "until [ $(stored) -ge 3 ]; do python place_orders.py 1000; done",
    ]
    project.bash(stored)
    keys = "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA=="
    project.bash(page.commands("coranto journals manifest"), CORANTO_AUTH_KEYS=keys)
    catalogs = {
        "postgresql+psycopg://user@host/catalog": f"sqlite:///{tmp_path}/NAME.db",
        "s3://lake/": f"file://{tmp_path}/NAME/",
    }
    project.program(
        f"""
import json
import duckdb
{page.take("python", "coranto.lake.scan(")}
assert orders.polars().collect().height == len(orders.arrow()) >= 3000
duckdb.sql({page.take("sql", "SET VARIABLE files")!r})
"""
    )
    with project.pasted({"defs/compaction.py": page.take("python", "build_compaction_asset")}):
        project.program(
            f"""{LOADED}
key = dg.AssetKey(["shop", "orders", "compacted"])
job = defs.resolve_implicit_global_asset_job_def()
assert job.execute_in_process(instance=instance, asset_selection=[key]).success
"""
        )
    page.take("sql", "read_parquet(")  # No content is old enough yet for such files.
    shards = page.take("python", "class Orders(Application)", _named(catalogs, "shards"))
    merged, added = page.take("py", "CUSTOMERS, keys="), page.take("py", "store.add_table(")
    for name in ("shards", "merged", "spark", "rest"):
        (tmp_path / name).mkdir()
    with rest_server(tmp_path / "rest") as server:
        rest = page.take("py", "RestCatalog(", {"https://catalog.example.com": server.url, "…": "secret"})
        project.program(
            f"""
{shards}
store = Orders().new_store(None)
catalog = SqlCatalog("lake", uri="sqlite:///{tmp_path}/merged.db", warehouse="file://{tmp_path}/merged/")
CUSTOMERS = pa.schema([pa.field("customer", pa.string()), pa.field("is_gone", pa.bool_())])
SUMS = pa.schema([pa.field("customer", pa.string()), pa.field("cents", pa.int64())])
{merged}
{added}
{rest}
"""
        )
    spark = page.take("python", "IcebergStore(catalog, ORDERS)", _named(catalogs, "spark"))
    project.program(
        f"""
from coranto.client import ClientConfig
from coranto.cluster import locate
from coranto_consumers.spark.session.sessions import new_session
client, spark = ClientConfig(locate().endpoint, file_root=locate().file_root), new_session("pasted", short=True)
{spark}
assert IcebergStore(catalog, ORDERS).load("shop.orders").scan().to_arrow().num_rows >= 3000
spark.stop()
"""
    )
    page.require_all()


def _named(replaced: dict[str, str], name: str) -> dict[str, str]:
    return {before: after.replace("NAME", name) for before, after in replaced.items()}


def test_the_blocks_of_time_travel_run_in_the_tutorials_project(project: Project) -> None:
    page = Page("time-travel.md")
    block = page.take("python", "committed_messages", {'"127.0.0.1:8080"': "locate().endpoint", "1772323200": "then"})
    shown = project.program(
        f"""
import time
from coranto.cluster import locate
from coranto.offsets import vector_of_json
then = time.time() - 0.001
{block}
print(vector_of_json({page.take("json", "journal_id")}, "offsets"))
"""
    )
    assert shown.count("customer") >= 3000
    assert "'shop/refunds': 96" in shown
    page.require_all()


def test_the_blocks_of_recovery_run_in_the_tutorials_project(project: Project, tmp_path: Path) -> None:
    page = Page("recovery.md")
    plan, apply = page.commands("coranto recover plan")
    assert "nothing to recover" in project.run(*plan.split())
    assert "nothing to recover" in project.bash([f"{apply} || true"])
    _, plan, apply = page.commands("coranto consumer recover plan", {"/var/lib/coranto/audits": f"file://{tmp_path}/"})
    assert "nothing to recover" in project.bash([plan])
    assert "nothing to recover" in project.bash([f"{apply} || true"])
    with project.pasted({"defs/recovery.py": page.take("python", "build_journal_recovery(ORDERS)")}):
        project.program(
            f"""{LOADED}
for job in ("audit_shop__orders", "deep_audit_shop__orders", "journal_recovery_plan"):
    run(job)
assert defs.resolve_sensor_def("journal_recovery_sensor")
"""
        )
    block = page.take("python", "async def recover(")
    project.program(
        f"import asyncio\nfrom coranto.cluster import locate\n{block}\nasyncio.run(recover(locate().endpoint))"
    )
    page.require_all()


def test_the_blocks_of_dagster_run_in_the_tutorials_project(project: Project) -> None:
    page = Page("dagster.md")
    application, main = page.take("python", "class Refunds:"), page.take("python", "refunds_job")
    fragments = "\n".join(
        page.take("py", each)
        for each in ("build_left_out_check", "build_windowed_consumer", "class LoggedConsumer", "ShardConsumerResource")
    )
    together = (
        "defs = dg.Definitions.merge(defs, dg.Definitions(assets=[by_window.assets, by_window.windows, *sums.specs], "
        "asset_checks=[check], sensors=[keep_up, watch]))\n"
    )
    files = {
        "refunds.py": application,
        "defs/refunds.py": f"{main}\nfrom dagster_coranto import *\n{fragments}\n{together}",
        "defs/ours/defs.yaml": page.take("yaml", "JournalCollectionComponent"),
    }
    print_endpoint = "from coranto.cluster import locate; print(locate().endpoint, locate().file_root)"
    endpoint, file_root = project.run("python", "-c", print_endpoint).split()
    with project.pasted(files):
        shown = project.program(
            f"""{LOADED}
keys = [dg.AssetKey(["refund_specs"]), dg.AssetKey(["shop", "refunds"])]
job = defs.resolve_implicit_global_asset_job_def()
assert job.execute_in_process(instance=instance, asset_selection=keys).success
run_id = run("refunds_job").run_id
sensor = defs.resolve_sensor_def("refund_windows__window_sensor")
with dg.build_sensor_context(instance=instance, definitions=defs) as context:
    print(sensor(context))
from coranto_consumers.spark.session.sessions import new_session
spark, context, JOURNALS = new_session("pasted", short=True), SimpleNamespace(instance=instance), JournalResource()
found = (
{page.take("py", "AsOf.run(").replace('key = dg.AssetKey("refunded")', 'key := dg.AssetKey("refunded"),', 1)}
)
print("read", [row.cents for row in found[-1].collect()])
spark.stop()
""",
            CORANTO_ENDPOINT=endpoint,
            CORANTO_FILE_ROOT=file_root,
        )
        assert "read [1990]" in shown
    with project.pasted({"refunds.py": application}):
        project.bash([*page.commands("dg scaffold defs"), "dg check yaml", "dg check defs"])
    page.require_all()
