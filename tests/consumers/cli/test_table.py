"""`coranto table …` with brokers in this process, and as a service that receives signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog

from coranto.testing import SyncCluster
from coranto.testing.command_line import CommandLine
from coranto_consumers.tables import read_table
from tests.consumers.stores.iceberg.named_catalog import named_catalog
from tests.consumers.tables.shop import Shop, rows_in, table_file


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture
def shop(cluster: SyncCluster) -> Shop:
    return Shop(cluster)


@pytest.fixture
def shell(
    shop: Shop, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    monkeypatch.setenv("CORANTO_ENDPOINT", shop.endpoint)
    yield CommandLine(capfdbinary.readouterr)
    structlog.reset_defaults()


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "items.yaml"
    file.write_text(text)
    return str(file)


def test_run_status_and_check(shell: CommandLine, shop: Shop, tmp_path: Path) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2})
    file = written(tmp_path, table_file(f"{{journal: {journal}}}", f"sqlite:///{tmp_path}/s.db", name="shop-items"))
    before = shell("table", "check", file)
    assert (before.code, before.output.splitlines()[1:]) == (
        0,
        [
            "shop-items: the table does not exist; `coranto table run` creates it",
            "shop-items: no message is committed yet, so there is nothing to audit",
        ],
    )
    assert "shop-items: there is no table items yet; " in shell("table", "status", file).output
    done = shell("table", "run", file, "--once")
    assert (done.code, done.output) == (0, "shop-items: 2 messages in 1 transactions\n"), done.errors
    assert f"shop-items: from journal {journal} to table items (append, runner shard)" in done.errors
    shop.publish(journal, {"id": 3})
    shown = shell("table", "status", file).output.splitlines()
    assert shown[0].split() == ["PART", "POSITION", "BEHIND", "PROBLEM"]
    facts = json.loads(shell("table", "status", file, "-o", "json").output)
    assert (facts["rows"], facts["messages_behind"], facts["target"]) == (2, 1, "table items")
    [part] = facts["parts"]
    assert (part["part"], part["problem"], part["behind"]) == (journal, "", facts["behind"])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(facts["last_commit"])).total_seconds() < 600
    sums = f"{facts['behind']} bytes behind; 1 messages behind; last commit: {facts['last_commit']}"
    assert shown[-1] == f"shop-items: 2 rows in table items; {sums}"
    checked = shell("table", "check", file)
    assert checked.code == 0, checked.output + checked.errors
    assert "SELECT COUNT(*) FROM items == messages" in checked.output


def test_a_check_finds_missing_rows_and_columns(shell: CommandLine, shop: Shop, tmp_path: Path) -> None:
    from sqlalchemy import text

    from coranto_consumers.stores.sql import SqlStore

    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2})
    store = f"sqlite:///{tmp_path}/s.db"
    given = table_file(f"{{journal: {journal}}}", store, name="shop-items", columns="id BIGINT")
    file = written(tmp_path, given)
    assert shell("table", "run", file, "--once").code == 0
    with SqlStore(store).engine.begin() as connection:
        connection.execute(text("DELETE FROM items WHERE id = 1"))
    checked = shell("table", "check", file)
    assert checked.code == 1
    assert "expectation_failed" in checked.output
    file = written(tmp_path, given.replace("id BIGINT", "id BIGINT, note STRING"))
    lacks = shell("table", "check", file)
    assert lacks.code == 1
    assert "has no column 'note' (ALTER TABLE items ADD COLUMN note TEXT)" in lacks.output
    evolves = shell("table", "check", written(tmp_path, Path(file).read_text() + "evolve: true\n"))
    assert "`coranto table run` makes the change: ALTER TABLE items ADD COLUMN note TEXT" in evolves.output


def test_a_table_in_iceberg(shell: CommandLine, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named_catalog(tmp_path, monkeypatch)
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1}, {"id": 2})
    file = written(tmp_path, table_file(f"{{journal: {journal}}}", "iceberg://lake", table="shop.items"))
    assert "there is no table shop.items yet" in shell("table", "status", file).output
    assert shell("table", "run", file, "--once").code == 0
    assert (
        ": 2 rows in table shop.items; 0 bytes behind; 0 messages behind; last commit: 20"
        in shell("table", "status", file).output
    )
    checked = shell("table", "check", file)
    assert checked.code == 0, checked.output + checked.errors
    assert "== messages" in checked.output


def test_invalid_files_are_refused(shell: CommandLine, shop: Shop, tmp_path: Path) -> None:
    file = written(tmp_path, "name: items\n")
    wrong = shell("table", "run", file)
    assert (wrong.code, wrong.errors) == (1, f"coranto: {file}: line 1: the field 'input' is missing\n")
    Path(file).write_bytes(b"\xff")
    assert f"{file} is not UTF-8" in shell("table", "status", file).errors
    assert "No such file" in shell("table", "check", str(tmp_path / "missing.yaml")).errors
    good = written(tmp_path, table_file("{journal: no/such/journal}", f"sqlite:///{tmp_path}/s.db"))
    assert "no journal matches" in shell("table", "run", good, "--once").errors
    assert "'x' is not the code of a change" in shell("table", "run", good, "--accept-changes", "x").errors


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_ends_after_a_signal(shop: Shop, tmp_path: Path, number: signal.Signals) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1})
    file = written(tmp_path, table_file(f"{{journal: {journal}}}", f"sqlite:///{tmp_path}/s.db", name="shop-items"))
    spec = read_table(Path(file).read_text())
    command = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
    with subprocess.Popen(
        [*command, "table", "run", file, "--endpoint", shop.endpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        try:
            while process.poll() is None and not _has_rows(spec):
                threading.Event().wait(0.05)
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "shop-items: 1 messages in 1 transactions\n"), errors


def _has_rows(spec: object) -> bool:
    try:
        return bool(rows_in(spec))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - there is no table yet
        return False


def test_a_message_that_is_not_a_row_can_be_skipped_and_reset(shell: CommandLine, shop: Shop, tmp_path: Path) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1})
    shop.publish(journal, {"name": "no key"})
    behind = shop.client.head(journal)
    shop.publish(journal, {"id": 2})
    store = f"sqlite:///{tmp_path}/s.db"
    file = written(tmp_path, table_file(f"{{journal: {journal}}}", store, "upsert", name="shop-items"))
    failed = shell("table", "run", file, "--once")
    assert failed.code == 1
    assert f"{journal}" in failed.errors
    assert "does not fit the columns" in failed.errors
    skipped = shell("consumer", "skip", "shop-items", "--to", f"{journal}={behind}", "--store", store, "--yes")
    assert skipped.code == 0, skipped.errors
    assert shell("table", "run", file, "--once").code == 0
    assert [row["id"] for row in rows_in(read_table(Path(file).read_text()))] in ([2], [1, 2])
    again = shell("consumer", "reset", "shop-items", "--to", f"{journal}={behind}", "--store", store, "--yes")
    assert again.code == 0, again.errors
    done = shell("table", "run", file, "--once")
    assert done.output == "shop-items: 1 messages in 1 transactions\n", done.errors


@pytest.mark.integration
@pytest.mark.parametrize(
    ("missing", "code", "wanted"),
    [("sqlalchemy", 1, "coranto[consumers]"), ("pyspark", 0, "1 messages"), ("pyiceberg", 0, "1 messages")],
)
def test_missing_packages_are_named_or_not_needed(
    shop: Shop, tmp_path: Path, missing: str, code: int, wanted: str
) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    shop.publish(journal, {"id": 1})
    file = written(tmp_path, table_file(f"{{journal: {journal}}}", f"sqlite:///{tmp_path}/s.db", "upsert"))
    program = f"import sys; sys.modules['{missing}'] = None; from coranto.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, "table", "run", file, "--once", "--endpoint", shop.endpoint],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, wanted in done.stdout + done.stderr) == (code, True), done.stderr
