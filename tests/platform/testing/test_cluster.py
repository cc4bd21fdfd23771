"""`coranto.testing.Cluster`: real brokers within this process, which start immediately and leave no resources."""

from __future__ import annotations

import ast
import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import ClusterError, CorantoError, InvalidInput, RegisterMismatch, Unavailable
from coranto.streams import TransactionState
from coranto.testing import Cluster, SyncCluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb

JOURNAL = "my/journal"


def virtually(main: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> None:
    """Run a test in virtual time, where waiting takes no real time and can be measured."""
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main(loop))
        assert not loop.problems
        assert not loop.unnoticed()


def test_a_cluster_starts_without_waiting() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=3) as cluster:
            # Mirrors of etcd apply changes in batches of 10 ms. Each broker waits for one batch, and the creation of a
            # journal for two consecutive ones.
            assert loop.time() < 0.011
            assert loop.steps < 300
            await cluster.create(JOURNAL)
            assert loop.time() < 0.033
            assert loop.steps < 600
            client = cluster.client()
            result = await client.append(JOURNAL, b"content")
            assert await client.read_all(JOURNAL, result.begin, result.end) == b"content"
            assert loop.time() < 0.044
            assert loop.steps < 1000

    virtually(main)


class _Resources:
    """Resources that a test might leave in this process."""

    def __init__(self) -> None:
        self.tasks = len(asyncio.all_tasks())
        self.threads = {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}
        self.files = len(os.listdir("/proc/self/fd"))
        self.factory = asyncio.get_running_loop().get_task_factory()

    def is_within(self, before: _Resources) -> bool:
        """Return True if no resource was added. gRPC objects of earlier tests may end concurrently."""
        return (
            self.tasks == before.tasks
            and self.threads <= before.threads
            and self.files <= before.files
            and self.factory == before.factory
        )

    def __repr__(self) -> str:
        return repr(vars(self))


@pytest.mark.parametrize("error", [None, ValueError, asyncio.CancelledError])
async def test_a_cluster_leaves_no_resources(error: type[BaseException] | None) -> None:
    async def use() -> None:
        async with Cluster(brokers=2) as cluster:
            await cluster.create(JOURNAL)
            tail = cluster.client().read(JOURNAL, block=True)
            waiting = asyncio.ensure_future(anext(tail))
            await cluster.client().append(JOURNAL, b"content")
            assert (await waiting).content == b"content"
            asyncio.get_running_loop().call_soon(lambda: None)
            await cluster.kill(1)
            if error is not None:
                raise error

    await use() if error is None else await _raises(error, use())  # The first one creates shared resources.
    before = _Resources()
    await use() if error is None else await _raises(error, use())
    assert _Resources().is_within(before)


async def _raises(error: type[BaseException], work: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(error):
        await work


async def test_a_failed_start_leaves_no_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise CorantoError("no luck today")

    monkeypatch.setattr("coranto.testing.cluster.find_broker", lambda: broken)
    before = _Resources()
    cluster = Cluster()
    with pytest.raises(ClusterError, match="broker-0 could not be started: no luck today"):
        await cluster.__aenter__()
    assert _Resources().is_within(before)
    with pytest.raises(ClusterError, match="does not run"):
        cluster.client()


async def test_another_task_factory_is_kept() -> None:
    loop, made = asyncio.get_running_loop(), []

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(work)
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(factory)
    try:
        async with Cluster(brokers=1):
            assert made
            async with Cluster(brokers=1) as inner:
                await inner.create(JOURNAL)
        assert loop.get_task_factory() is factory
    finally:
        loop.set_task_factory(None)


def test_all_clients_see_the_same_journals() -> None:
    async def main(_: SimLoop) -> None:
        async with Cluster(brokers=3, zones=("here", "there")) as cluster:
            await cluster.create(JOURNAL, labels={"owner": "me"})
            client, other = cluster.client(), cluster.client(name="other", zone="there")
            found = await other.list(f"name={JOURNAL}")
            spec = found.journals[0].spec
            assert spec.replication == 2
            assert labels.value_of(spec.labels, "owner") == "me"
            assert {member.zone for member in found.journals[0].route.members} == {"here", "there"}
            at = cluster.revision
            mine = labels.label_set(owner="me")
            await client.append(JOURNAL, b"one", union_registers=mine)
            with pytest.raises(RegisterMismatch):
                await client.append(JOURNAL, b"two", check_registers=pb.LabelSelector(exclude=mine))
            assert cluster.appends() == 2
            assert cluster.appends(client="other") == 0
            assert cluster.revision == at  # An append changes nothing in etcd.
            copies = [
                sum(b"one" in content for path, content in cluster.files(n).items() if str(path).endswith(".content"))
                for n in range(3)
            ]
            assert sorted(copies) == [0, 1, 1]
            assert not cluster.fragments(JOURNAL)

    virtually(main)


def test_a_journal_survives_a_killed_broker() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=3) as cluster:
            await cluster.create(JOURNAL)
            client = cluster.client()
            for number in range(3):
                await client.append(JOURNAL, b"%d" % number)
                await cluster.kill(number, expire=True)
                assert not cluster.is_up(number)
                await client.append(JOURNAL, b"-")
                await cluster.start(number)
                await cluster.ready(JOURNAL)
            assert loop.time() < 1.0  # No lease had to expire.
            assert await client.read_all(JOURNAL, 0, 6) == b"0-1-2-"
            await cluster.kill(0)
            with pytest.raises(ClusterError, match=r"no full set of replicas after 0\.1 s"):
                await cluster.create(JOURNAL + "-of-all", replication=3, timeout=0.1)
            await cluster.start(0)
            await cluster.ready(JOURNAL + "-of-all")

    virtually(main)


def test_a_single_broker_keeps_content_over_a_kill_and_stores_it_on_stop() -> None:
    async def main(_: SimLoop) -> None:
        async with Cluster(brokers=1) as cluster:
            await cluster.create(JOURNAL)
            client = cluster.client()
            await client.append(JOURNAL, b"kept")
            await cluster.kill(0)
            await cluster.kill(0)  # It is down already.
            with pytest.raises(Unavailable):
                await cluster.client(retry_timeout=0.0).head(JOURNAL)
            await cluster.start(0)
            assert await client.read_all(JOURNAL, 0, 4) == b"kept"
            await cluster.stop(0)
            assert list(cluster.fragments(JOURNAL).values()) == [b"kept"]
            await cluster.start(0)
            assert await client.read_all(JOURNAL, 0, 4) == b"kept"

    virtually(main)


def test_a_cut_link_carries_nothing_until_it_is_healed() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=2, lease_seconds=3) as cluster:
            await cluster.create(JOURNAL, replication=2)
            far = cluster.client(name="far", retry_timeout=0.0)
            assert await far.head(JOURNAL) == 0
            for number in range(2):
                cluster.cut("far", number)
            with pytest.raises(Unavailable):
                await far.head(JOURNAL)
            assert await cluster.client().head(JOURNAL) == 0
            cluster.heal()
            await far.append(JOURNAL, b"back")
            cluster.cut(0, "etcd", one_way=True)
            await asyncio.sleep(6)  # Two leases, in virtual time.
            assert not cluster.is_up(0)
            cluster.heal()
            await cluster.start(0)
            await cluster.ready(JOURNAL)

    virtually(main)


def test_messages_are_delayed_as_configured() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=1, delay=0.5) as cluster:
            await cluster.create(JOURNAL)
            client = cluster.client()
            await client.append(JOURNAL, b"content")
            began = loop.time()
            await client.append(JOURNAL, b"content")
            assert 1.0 <= loop.time() - began < 1.1

    virtually(main)


async def test_other_programs_connect_to_a_cluster_by_grpc() -> None:
    async with Cluster(brokers=2, grpc=True) as cluster:
        await cluster.create(JOURNAL)
        async with JournalClient(cluster.endpoint) as client:
            await client.append(JOURNAL, b"by gRPC")
            endpoints = cluster.endpoints
            for number in range(2):
                await cluster.kill(number)
                await cluster.start(number)
            assert cluster.endpoints == endpoints
            assert await client.read_all(JOURNAL, 0, 7) == b"by gRPC"
        assert await cluster.client().head(JOURNAL) == 7
    async with JournalClient(endpoints[0], retry_timeout=0.0) as client:
        with pytest.raises(Unavailable):
            await client.list()


def test_a_cluster_has_a_blocking_form() -> None:
    with SyncCluster(brokers=2) as cluster:
        cluster.create(JOURNAL)
        client = cluster.client()
        client.append(JOURNAL, b"content")
        assert cluster.is_up(0)
        cluster.kill(0)
        assert not cluster.is_up(0)
        cluster.start(0)
        cluster.ready(JOURNAL)
        assert client.read_all(JOURNAL, 0, 7) == b"content"
        assert repr(cluster) == "<SyncCluster of 2 brokers, running>"
        assert len(cluster.endpoint.split(",")) == len(cluster.endpoints) == 2
        with pytest.raises(InvalidInput, match="'nowhere' is not a node; there are broker-0, broker-1, "):
            cluster.cut(0, "nowhere")
        cluster.cut(0, 1)
        cluster.heal()
        cluster.stop(1)
        cluster.stop(0)
        assert list(cluster.fragments(JOURNAL).values()) == [b"content"]


def test_an_unconfigured_log_shows_only_warnings_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    before = structlog.get_config()
    structlog.reset_defaults()
    try:

        async def main(_: SimLoop) -> None:
            async with Cluster(brokers=1) as cluster:
                await cluster.create(JOURNAL)
                structlog.get_logger().warning("this is seen")

        virtually(main)
        assert not structlog.is_configured()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert "this is seen" in lines[0]
    finally:
        structlog.configure(**before)


@pytest.mark.parametrize("entry_points", [[], [importlib.metadata.EntryPoint("broker", "nowhere:run", "x")]])
async def test_without_a_broker_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, entry_points: list[importlib.metadata.EntryPoint]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: entry_points)
    with pytest.raises(ClusterError, match=r"pip install 'coranto\[broker\]'"):
        await Cluster().__aenter__()


async def test_contradictory_options_are_refused() -> None:
    for options, message in (
        ({"brokers": 0}, "0 brokers; give at least one"),
        ({"zones": ()}, "at least one zone"),
        ({"lease_seconds": 1}, "shortest lease"),
        ({"delay": -1}, "cannot take -1 s"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Cluster(**options)
    structlog.reset_defaults()
    with pytest.raises(InvalidInput, match="'loud' is not a log level"):
        await Cluster(log_level="loud").__aenter__()
    async with Cluster(brokers=1) as cluster:
        for wrong in (
            cluster.create(JOURNAL, replication=2),
            cluster.kill(1),
        ):
            with pytest.raises(InvalidInput):
                await wrong
        with pytest.raises(InvalidInput, match="cannot be the name of a client"):
            cluster.client(name="etcd")
        with pytest.raises(ClusterError, match="kill it first"):
            cluster.expire(0)
        with pytest.raises(ClusterError, match="is running already"):
            await cluster.start(0)
        with pytest.raises(ClusterError, match="create another one"):
            await cluster.__aenter__()


PAGE = Path(__file__).parents[3] / "docs" / "testing.md"


def _examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_the_examples_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(_examples()[number], f"example {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == {0: ["b'some content'"], 3: ["12"], 4: []}[number]


async def test_the_example_of_a_notebook_runs() -> None:
    """As a notebook does: a cell with `await` is a coroutine."""
    names: dict[str, Any] = {}
    cell = eval(compile(_examples()[1], "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    await cell
    assert names["txn"].state is TransactionState.COMMITTED
    assert repr(names["cluster"]) == "<Cluster of 3 brokers, not running>"


async def test_a_cluster_may_run_over_several_cells_of_a_notebook() -> None:
    made = Cluster(brokers=2)
    assert repr(made) == "<Cluster of 2 brokers, not running>"
    await made.close()  # It is not running.
    cluster = await made
    assert cluster is made
    await cluster.create(JOURNAL)
    await cluster.client().append(JOURNAL, b"content")
    assert repr(cluster) == "<Cluster of 2 brokers, running>"
    await cluster.kill(1)
    assert repr(cluster) == "<Cluster of 2 brokers, without broker-1>"
    await cluster.close()
    await cluster.close()
    assert repr(cluster) == "<Cluster of 2 brokers, not running>"
    async with cluster:  # It can be started again, empty.
        assert not (await cluster.client().list()).journals


def test_importing_the_package_imports_no_cluster() -> None:
    script = "import sys, coranto.testing; sys.exit('grpc' in sys.modules or 'coranto_broker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
