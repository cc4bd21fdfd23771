"""A consumer transaction is stopped at each of its steps, and another process takes over the shard.

In half of the runs the process is killed there. In the other half it hangs until the takeover, and then resumes as a
zombie. Each input must count once in the store, a read-committed reader of each output must find each message once, and
the zombie must be fenced off.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import text

from coranto_consumers.stores import SqlStore
from tests.sampling import PARTS, part_of
from tests.servers.sql import MariadbServer, PostgresServer, why_no_mariadb
from tests.system.crash_matrix_control import RESUME

pytestmark = pytest.mark.timeout(900)
needs_mariadb = pytest.mark.skipif(bool(why_no_mariadb()), reason=why_no_mariadb())

STEPS = ("read", "consume", "publish", "flush", "fence", "commit", "ack1", "ack2")
POINTS = [f"{step}.{side}" for step in STEPS for side in ("before", "after")]
LOCKS = {
    # A SQLite file has one writer at a time, and the store is flushed while messages are published.
    "sqlite": ("publish.before", "publish.after", "flush.after", "fence.before", "fence.after", "commit.before"),
    "postgresql": ("fence.after", "commit.before"),
    "mariadb": ("fence.after", "commit.before"),
}
"""The steps where a hanging process may hold a lock that the new owner needs to raise the fence.

The process then resumes before the fence is raised, and may commit. The new owner finds its commit.
"""
POINTS_OF = {
    "sqlite": POINTS,
    "postgresql": POINTS,
    # Steps that do not concern the store are covered by the other kinds.
    "mariadb": [point for point in POINTS if point.startswith(("flush", "fence", "commit"))],
}


async def run_cell(matrix: Any, cell: str, job: dict[str, Any]) -> None:
    source = job["input"]
    await matrix.create(source, *job["outputs"])
    old = await matrix.workers.start(job)
    await old.expect("restoring")
    await old.expect("restored")
    old.send(await matrix.publish(source, 1, 2))
    await old.expect("read")
    old.send(await matrix.publish(source, 3, 4, 5))
    # A dead process sends no word.
    await old.expect("" if job["dies"] else "stopped")

    new = await matrix.workers.start({key: value for key, value in job.items() if key != "point"})
    await new.expect("restoring")
    if job["dies"]:
        await new.expect("restored")
    elif job["locks"]:
        old.send(RESUME)
        await new.expect("restored")
    else:
        await new.expect("restored")
        old.send(RESUME)
    last = await matrix.publish(source, 6)
    if not job["dies"]:
        # It may report its earlier read first. Then it processes the last message.
        committed = job["locks"] or POINTS.index(job["point"]) >= POINTS.index("commit.after")
        if await old.expect("read", "fenced") == "read":
            assert committed
            old.send(last)
            await old.expect("fenced")
    new.send(last)
    await new.expect("read")
    new.send("finish")
    await new.expect("finished")
    old.close()
    new.close()

    if "iceberg" in job:
        table = SqlCatalog("lake", **job["iceberg"]).load_table("cells.counts")
        rows = table.scan().to_arrow().select(["n", "count"]).sort_by("n").to_pylist()
        assert [tuple(row.values()) for row in rows] == [(n, 1) for n in range(1, 7)]
        named = {Path(path).name for path in table.inspect.all_data_files()["file_path"].to_pylist()}
        assert files_below(Path(job["iceberg"]["warehouse"].removeprefix("file://"))) == named, (
            "unnamed files are deleted"
        )
    else:
        store = SqlStore(job["store"])
        with store.engine.connect() as connection:
            rows = connection.execute(text("SELECT n, count FROM counts WHERE cell = :cell ORDER BY n"), {"cell": cell})
            assert [tuple(row) for row in rows] == [(n, 1) for n in range(1, 7)]
    for journal in job["outputs"]:
        assert await matrix.read_committed(journal) == list(range(1, 7))


@pytest.fixture(scope="module")
def databases() -> Iterator[Mapping[str, Future[str]]]:
    """Yield an empty database of each server. The servers start while the first cells run."""
    kinds = {"postgresql": PostgresServer} | ({} if why_no_mariadb() else {"mariadb": MariadbServer})
    with contextlib.ExitStack() as servers, ThreadPoolExecutor(len(kinds)) as starting:

        def start(kind: type[PostgresServer | MariadbServer]) -> str:
            return servers.enter_context(kind()).new_database()

        yield {name: starting.submit(start, kind) for name, kind in kinds.items()}


def half_of(points: list[str]) -> list[tuple[str, bool]]:
    """Return each step once, half of them for killed processes and half for hanging ones."""
    return [(point, number % 4 < 2) for number, point in enumerate(points)]


@PARTS
@pytest.mark.parametrize("kind", ["sqlite", "postgresql", pytest.param("mariadb", marks=needs_mariadb)])
async def test_a_stop_at_any_step_keeps_exactly_once(
    kind: str, part: str, tmp_path: Path, databases: Mapping[str, Future[str]], matrix: Any
) -> None:
    shared = databases[kind].result() if kind in databases else ""
    jobs = {}
    cells = part_of(part, itertools.product(POINTS_OF[kind], (True, False)), half_of(POINTS_OF[kind]))
    for point, dies in cells:
        cell = f"{kind}-{point}-{'killed' if dies else 'zombie'}"
        jobs[cell] = {
            "cell": cell,
            "point": point,
            "dies": dies,
            "locks": point in LOCKS[kind],
            # Single messages and batches alternate: the rules are the same.
            "in_batches": dies == (POINTS.index(point) % 2 == 0),
            "endpoint": matrix.client.config.endpoint,
            "input": f"{cell}/in",
            "outputs": [f"{cell}/out-a", f"{cell}/out-b"],
            # A SQLite file has one writer at a time, and cells must not block each other.
            "store": shared or f"sqlite:///{tmp_path}/{cell}.db",
        }
    assert len(jobs) == len(POINTS_OF[kind])
    await matrix.run({cell: partial(run_cell, matrix, cell, job) for cell, job in jobs.items()})


def files_below(folder: Path) -> set[str]:
    """Return the names of the files that shards have written to a table."""
    return {path.name for path in folder.rglob("coranto-*/*/*.parquet")}


ICEBERG_POINTS = ["flush.before", "commit.before", "fence.before", "fence.after", "commit.after", "ack1.before"]
"""The steps of the store. Other steps are covered by the other kinds."""


@PARTS
async def test_a_stop_at_any_step_of_an_iceberg_commit_keeps_exactly_once(
    part: str, tmp_path: Path, matrix: Any
) -> None:
    jobs = {}
    for point, dies in part_of(part, itertools.product(ICEBERG_POINTS, (True, False)), half_of(ICEBERG_POINTS)):
        cell = f"iceberg-{point}-{'killed' if dies else 'zombie'}"
        folder = tmp_path / cell
        folder.mkdir()
        jobs[cell] = {
            "cell": cell,
            "point": point,
            "dies": dies,
            "locks": False,
            "in_batches": dies == (ICEBERG_POINTS.index(point) % 2 == 0),
            "endpoint": matrix.client.config.endpoint,
            "input": f"{cell}/in",
            "outputs": [f"{cell}/out-a", f"{cell}/out-b"],
            "iceberg": {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"},
        }
    await matrix.run({cell: partial(run_cell, matrix, cell, job) for cell, job in jobs.items()})
