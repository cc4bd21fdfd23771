"""A first consumer: `coranto consumer serve` and `coranto shards` on a real cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from coranto.audit import Depth, Report
from coranto.client import ClientConfig, JournalClient, SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.cluster.processes import free_port
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.errors import ClusterError, CorantoError, InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, RECOVERY_LOG, label_set
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.testing.command_line import CommandLine
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.cli.loading import load_application
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.discovery import CONSUMERS_PREFIX, find_consumer
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.sync_client import SyncShardClient

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]

APPLICATION = """
import os

from sqlalchemy import BigInteger, Column, MetaData, Table

from coranto_consumers.runtime.application import Application
from coranto_consumers.stores import SqlShardStore

SEEN = Table("seen", MetaData(), Column("n", BigInteger, primary_key=True, autoincrement=False))


class Counting(Application):
    def new_store(self, shard):
        return SqlShardStore(os.environ["STORE"], SEEN)

    async def consume_message(self, shard, store, message, publisher):
        connection = await store.begin()
        connection.execute(SEEN.insert().values(n=message.message["n"]))


not_one = 7
"""

EDITOR = """
import pathlib
import sys

path = pathlib.Path(sys.argv[1])
path.write_text(path.read_text().replace("1s", "2s"))
"""

SHARDS = """
common:
  max_txn_duration: 1s
  labels: [{name: app, value: counting}]
shards:
- id: counting-000
  sources: [{journal: numbers/part-000}]
"""


def journal(name: str, content_type: str) -> pb.JournalSpec:
    spec = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: content_type}))
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.FromSeconds(60)
    return spec


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), lease_seconds=60, etcd_fsync=False) as running:
        with SyncJournalClient(running.info.endpoint) as client:
            client.apply([pb.ApplyRequest.Change(upsert=journal("numbers/part-000", JSON_LINES))])
        yield running


@pytest.fixture(scope="module")
def environment(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("app")
    (folder / "counting.py").write_text(APPLICATION)
    (folder / "edit.py").write_text(EDITOR)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    store = f"sqlite:///{folder}/store.db"
    return {**kept, "CORANTO_DATA": str(cluster.data_dir), "STORE": store, "PWD": str(folder)}


@pytest.fixture
def served(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A starting `coranto consumer serve counting:Counting`; commands wait until it is ready."""
    words = [*COMMAND, "consumer", "serve", "counting:Counting", "--id", "consumer-a"]
    folder = Path(environment["PWD"])
    with (folder / "served.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def command(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Run the command line in this process, with a longer retry timeout."""
    for name in ("coranto.cli.connect.RETRY_TIMEOUT", "coranto_consumers.cli.shards.RETRY_TIMEOUT"):
        monkeypatch.setattr(name, 120.0)
    monkeypatch.setattr("coranto_consumers.cli.shards.CONSUMER_TIMEOUT", 120.0)
    return CommandLine(capfdbinary.readouterr)


@pytest.fixture
def run(command: CommandLine, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that must end with the given exit code; return its output, or its errors if it fails."""
    monkeypatch.setenv("CORANTO_DATA", environment["CORANTO_DATA"])
    monkeypatch.delenv("CORANTO_ENDPOINT", raising=False)

    def call(*words: str, input: str = "", code: int = 0, whole: bool = False) -> str:
        done = command(*words, input=input.encode())
        assert done.code == code, done.errors
        return done.output if code == 0 or whole else done.errors

    return call


def test_from_serve_to_lag_to_interrupt(environment, served, run, monkeypatch):
    assert run("shards", "apply", "--specs", "-", input=SHARDS) == "create counting-000\n"
    template = '{"_meta":{"uuid":"{uuid}"},"n":{line}}'
    lines = "".join(f"{n}\n" for n in range(1000))
    messages = run("attach-uuids", "--template", template, input=lines)
    run("journals", "append", "numbers/part-000", input=messages)
    run("journals", "append", "numbers/part-000", input=messages)

    while not (listing := run("shards", "list", "--lag")).rstrip().endswith("numbers/part-000: 0"):
        assert served.poll() is None
    shown = ["counting-000", "primary", "consumer-a", "numbers/part-000", "app=counting", "numbers/part-000:", "0"]
    assert listing.splitlines()[1].split() == shown
    with create_engine(environment["STORE"]).connect() as connection:
        assert connection.execute(text("SELECT count(*), sum(n) FROM seen")).one() == (1000, sum(range(1000)))

    assert run("shards", "apply", "--specs", "-", input=SHARDS) == "unchanged counting-000\n"
    assert run("shards", "unassign", "--selector", "app=counting", "--dry-run") == ("would unassign counting-000\n")
    assert run("shards", "unassign", "counting-000") == "unassigned counting-000\n"
    monkeypatch.setenv("CORANTO_EDITOR", f"{sys.executable} {environment['PWD']}/edit.py")
    assert run("shards", "edit") == "update counting-000\n"
    text_of = run("shards", "list", "-o", "yaml")
    assert "max_txn_duration: 2s" in text_of
    deletion = text_of.replace("- id: counting-000", "- id: counting-000\n  delete: true")
    assert run("shards", "apply", "--specs", "-", "--dry-run", input=deletion) == ("would delete counting-000\n")
    served.send_signal(signal.SIGTERM)
    assert served.wait(120) == 0
    _audit(environment, run, monkeypatch)


def _recover(store: str, run: Callable[..., str], scope: list[str]) -> None:
    """Check that `coranto consumer recover` restores a deleted checkpoint after approval of exactly this plan."""

    def recover(command: str, *words: str, code: int = 0) -> str:
        return run("consumer", "recover", command, *scope, *words, code=code, whole=True)

    assert recover("plan") == "nothing to recover\n"
    with create_engine(store).begin() as connection:
        connection.execute(text("DELETE FROM gazette_checkpoints"))
    printed = recover("plan", code=1)
    assert "restore_checkpoint" in printed
    assert "1 step; nothing is lost for good" in printed
    hash_line = printed.splitlines()[-1]

    assert hash_line in recover("apply", "--approve", "0123456789abcdef", code=1).splitlines()
    printed = recover("apply", "--approve", hash_line.removeprefix("hash: "))
    assert "wrote it back under fence" in printed
    assert printed.splitlines()[-1] == "audit: sound: 1 examined"


def _audit(environment, run, monkeypatch) -> None:
    """Check that `coranto consumer audit` finds nothing, then lost rows of a table, then a lost checkpoint."""
    store, folder = environment["STORE"], environment["PWD"]
    monkeypatch.chdir(folder)
    words = ["consumer", "audit", "counting:Counting", "--store", store, "--memory", f"{folder}/memory"]
    expect = ["--expect", "SELECT COUNT(*) FROM seen == messages", "--expect", "SELECT SUM(n) FROM seen == sum(/n)"]

    report = Report.from_json(run(*words, *expect, "-o", "json"))
    assert report.sound
    assert report.depth is Depth.DEEP
    (facts,) = report.subjects.values()
    assert facts["messages"] == 1000
    assert run(*words, "--cheap").splitlines()[-1] == "sound: 1 examined"
    _recover(store, run, [*words[2:], *expect])

    with create_engine(store).begin() as connection:
        connection.execute(text("DELETE FROM seen WHERE n = 7"))
    table = run(*words, *expect, code=1, whole=True)
    assert "gives 999, and messages of the committed messages is 1000: rows were removed" in table
    assert table.splitlines()[-1] == "NOT sound: 2 errors; 1 examined"
    scope = [*words[2:], *expect]
    printed = run("consumer", "recover", "plan", *scope, code=1, whole=True)
    assert printed.count("GONE FOR GOOD: counting:Counting: `SELECT") == 2
    approved = printed.splitlines()[-1].removeprefix("hash: ")
    run("consumer", "recover", "apply", *scope, "--approve", approved, whole=True)
    assert run(*words, *expect, whole=True).splitlines()[-1] == "sound: 1 examined"
    with create_engine(store).begin() as connection:
        connection.execute(text("DELETE FROM gazette_checkpoints"))
    assert "checkpoint_gone" in run(*words, code=1, whole=True)


def test_specs_that_cannot_be_applied_are_reported(cluster, run, monkeypatch):
    """Without a consumer the commands wait, and then report it. The test above covers a running consumer."""
    monkeypatch.setattr("coranto_consumers.cli.shards.CONSUMER_TIMEOUT", 0.1)
    assert "names no shards" in run("shards", "apply", "--specs", "-", code=1)
    notice, error = run("shards", "list", code=1).splitlines()
    assert "no consumer answers on this cluster yet; waiting 0.1 s" in notice
    assert "none was ready within 0.1 s; start one with `coranto consumer serve`" in error


async def test_the_only_responding_consumer_is_found_even_if_it_starts_late(cluster):
    def member(consumer: str, port: int, zone: str = "zone") -> Put:
        spec = pc.ConsumerSpec(process_spec=pb.ProcessSpec(endpoint=f"http://127.0.0.1:{port}"))
        return Put(f"{CONSUMERS_PREFIX}{consumer}/members/{zone}#one", spec.SerializeToString())

    dead = free_port()  # The port of a killed process whose lease has not expired.
    async with (
        EtcdCoordinator(cluster.info.etcd) as coordinator,
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server,
    ):
        port: int = server.sockets[0].getsockname()[1]
        late: list[asyncio.Task[object]] = []

        def start() -> None:
            late.append(asyncio.create_task(coordinator.txn([], [member("late", port)])))

        put = [member("late", dead, "a"), member("gone", dead), member("late", port), member("other", port)]
        try:
            await coordinator.txn([], put[:2])
            with pytest.raises(ClusterError, match=rf"do not answer \(http://127.0.0.1:{dead}"):
                await find_consumer(cluster.data_dir)
            assert await find_consumer(cluster.data_dir, timeout=120.0, waiting=start) == f"http://127.0.0.1:{port}"
            await coordinator.txn([], put[3:])
            with pytest.raises(ClusterError, match=r"running: late, other"):
                await find_consumer(cluster.data_dir, timeout=120.0, waiting=start)
        finally:
            await asyncio.gather(*late)
            await coordinator.txn([], [Delete(each.key) for each in put])


def test_applications_are_named_by_module_and_name(environment, monkeypatch):
    monkeypatch.chdir(environment["PWD"])
    monkeypatch.syspath_prepend(environment["PWD"])
    assert type(load_application("counting:Counting")).__name__ == "Counting"
    for target, problem in (
        ("counting", "not of the form"),
        ("no_such_module:App", "cannot be imported"),
        ("counting:Missing", "has no Missing"),
        ("counting:not_one", "is not an Application"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            load_application(target)


LOCAL_APPLICATION = """
from coranto_consumers.runtime.application import Application
from coranto_consumers.stores.json_file import JsonFileStore


class Local(Application):
    def new_store(self, shard):
        return JsonFileStore(shard.recorder, [])

    def consume_message(self, shard, store, message, publisher):
        store.state.append(message.message["n"])
"""

LOCAL_SHARDS = """
shards:
- id: local-000
  sources: [{journal: local/part-000}]
  recovery_log_prefix: recovery
  hint_prefix: /local-hints
  hint_backups: 1
  max_txn_duration: 1s
"""


async def test_recovery_logs_are_recovered_and_pruned(cluster, environment, monkeypatch, command, tmp_path):
    """The consumer and the commands run in this process."""
    log = journal("recovery/local-000", RECOVERY_LOG)
    (Path(environment["PWD"]) / "local.py").write_text(LOCAL_APPLICATION)
    monkeypatch.chdir(environment["PWD"])
    monkeypatch.syspath_prepend(environment["PWD"])
    monkeypatch.setenv("CORANTO_DATA", environment["CORANTO_DATA"])
    info = cluster.info
    settings = ConsumerProcessSettings(etcd=info.etcd, etcd_prefix="/test/local", id="local-a", lease_seconds=60)
    async with JournalClient(info.endpoint, file_root=info.file_root) as client:
        numbers = journal("local/part-000", JSON_LINES)
        await client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in (log, numbers)])
        builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
        builder.add_outside("local/part-000", {"n": 123_456})
        ((_, content),) = builder.take_batches(1 << 20)
        head = (await client.append("local/part-000", content)).end
        async with ConsumerProcess(settings, load_application("local:Local"), client) as process:
            monkeypatch.setenv("CORANTO_CONSUMER", process.endpoint)

            async def run_here(*words: str, input: str = "") -> str:
                done = await asyncio.to_thread(command, *words, input=input.encode())
                assert done.code == 0, done.errors
                return done.output

            assert await run_here("shards", "apply", "--specs", "-", input=LOCAL_SHARDS) == "create local-000\n"
            idle = "common: {max_txn_duration: 1s, disable: true, sources: [{journal: local/part-000}]}\nshards:\n"
            many = idle + "".join(f"- id: idle-{number:03}\n" for number in range(300))
            words = ("shards", "apply", "--specs", "-", "--update", "--prune", "id:prefix=idle-")
            plan = await run_here(*words, "--dry-run", input=many)
            assert (plan.count("would create"), plan.count("transaction")) == (300, 3)
            assert (await run_here(*words, input=many)).count("create idle-") == 300
            assert (await run_here(*words, "--check", input=many)).count("unchanged") == 300
            left = await run_here(*words, input=idle + "- id: idle-000\n")
            assert (left.count("unchanged"), left.count("delete idle-")) == (1, 299)
            gone = "shards: [{id: idle-000, delete: true, revision: -1}]"
            assert await run_here("shards", "apply", "--specs", "-", input=gone) == "delete idle-000\n"
            async with ShardClient(ClientConfig(process.endpoint)) as shards:
                async with asyncio.timeout(120):
                    state = process.keyspace.state
                    while not (await shards.list())[0].status:
                        await process.keyspace.wait_for_change(state)
                        state = process.keyspace.state
                await shards.stat("local-000", {"local/part-000": head})

            def list_blocking() -> list[str]:
                with SyncShardClient(ClientConfig(process.endpoint)) as blocking:
                    return [shard.spec.id for shard in blocking.list("id=local-000")]

            assert await asyncio.to_thread(list_blocking) == ["local-000"]
            recovered = await run_here("shards", "recover", "local-000", "--dir", str(tmp_path / "files"))
            assert recovered.endswith(f"of recovery/local-000 into {tmp_path}/files\n")
            assert "123456" in (tmp_path / "files" / "state.json").read_text()
            audited = await run_here("consumer", "audit", "local-000", "--recovered", str(tmp_path / "files"))
            assert audited.splitlines()[-1] == "sound: 1 examined"
            again = await asyncio.to_thread(command, "shards", "recover", "local-000", "--dir", str(tmp_path / "files"))
            assert (again.code, "is not empty" in again.errors) == (1, True)
            assert await run_here("shards", "prune", "--selector", "") == (
                "recovery/local-000: removed nothing, because shard local-000 has not stored all of its hints yet\n"
            )


AGAIN_SHARDS = """
shards:
- id: again-000
  sources: [{journal: numbers/again}]
  recovery_log_prefix: recovery
  hint_prefix: /again-hints
  max_txn_duration: 1s
"""


async def test_a_shard_with_a_recovery_log_continues_as_its_error_says(
    cluster, environment, monkeypatch, command, tmp_path
):
    """The source is recreated with the same content. The consumer runs in this process."""
    (Path(environment["PWD"]) / "local.py").write_text(LOCAL_APPLICATION)
    monkeypatch.chdir(environment["PWD"])
    monkeypatch.syspath_prepend(environment["PWD"])
    monkeypatch.setenv("CORANTO_DATA", environment["CORANTO_DATA"])
    info, source = cluster.info, "numbers/again"
    settings = ConsumerProcessSettings(etcd=info.etcd, etcd_prefix="/test/again", id="again-a", lease_seconds=60)
    builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())

    def lines(*numbers: int) -> bytes:
        for number in numbers:
            builder.add_outside(source, {"n": number})
        ((_, content),) = builder.take_batches(1 << 20)
        return bytes(content)

    async def run_here(*words: str, input: str = "", code: int = 0) -> str:
        done = await asyncio.to_thread(command, *words, input=input.encode())
        assert done.code == code, done.errors
        return done.output if code == 0 else done.errors

    async with (
        JournalClient(info.endpoint, file_root=info.file_root) as client,
        ConsumerProcess(settings, load_application("local:Local"), client) as process,
        ShardClient(ClientConfig(process.endpoint)) as shards,
        asyncio.timeout(240),
    ):

        async def read_through(offset: int) -> None:
            while True:
                with contextlib.suppress(CorantoError):  # It has no primary yet.
                    await shards.stat("again-000", {source: offset})
                    return
                await asyncio.sleep(0.1)

        async def failed() -> str:
            while True:
                (shard,) = await shards.list("id=again-000")
                for status in shard.status:
                    if status.code == pc.ReplicaStatus.FAILED:
                        return "".join(status.errors)
                await asyncio.sleep(0.1)

        monkeypatch.setenv("CORANTO_CONSUMER", process.endpoint)
        specs = (journal(source, JSON_LINES), journal("recovery/again-000", RECOVERY_LOG))
        await client.apply([pb.ApplyRequest.Change(upsert=spec) for spec in specs])
        before = lines(1, 2, 3)
        await client.append(source, before)
        assert "create again-000" in await run_here("shards", "apply", "--specs", "-", input=AGAIN_SHARDS)
        await read_through(len(before))

        (info_of,) = (await client.list(f"name={source}")).journals
        delete = pb.ApplyRequest.Change(delete=source, expect_mod_revision=info_of.mod_revision)
        await client.apply([delete])
        specs[0].fragment.ClearField("stores")  # The new journal must not find fragments of the deleted one.
        await client.apply([pb.ApplyRequest.Change(upsert=specs[0])])
        await client.append(source, before + lines(4))

        error = await failed()
        assert f"journal {source} was deleted and created again" in error
        advised = error.partition("run `coranto ")[2].partition("`")[0]
        assert advised == f"consumer accept-journals again-000 {source} --consumer HOST:PORT"
        for wrong, problem in (
            (["again-001", source], "there is no shard again-001"),
            (["again-000", "numbers/none"], "there is no journal numbers/none"),
            (["again-000", "numbers/part-000"], "numbers/part-000 is not a source of shard again-000"),
        ):
            assert problem in await run_here("consumer", "accept-journals", *wrong, code=1)
        notice = await run_here(*advised.replace("HOST:PORT", process.endpoint).split())
        assert notice.startswith(f"{source}: shard again-000 takes id ")
        assert notice.endswith(" for the journal of its checkpoint now\n")
        await read_through(await client.head(source))
        folder = tmp_path / "recovered"
        await run_here("shards", "recover", "again-000", "--dir", str(folder))
        (state,) = folder.rglob("state.json")
        assert "[1,2,3,4]" in state.read_text()
        await run_here("shards", "apply", "--specs", "-", input="shards: [{id: again-000, delete: true, revision: -1}]")
