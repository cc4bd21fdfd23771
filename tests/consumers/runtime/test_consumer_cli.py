"""A user's first consumer: `coranto consumer serve` and `coranto shards` over a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, text

from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import InvalidInput
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.cli.loading import load_application

pytestmark = pytest.mark.integration

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), etcd_fsync=False) as running:
        spec = pb.JournalSpec(name="numbers/part-000", replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
        spec.fragment.length = 1 << 20
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(60)
        with SyncJournalClient(running.info.endpoint) as client:
            client.apply([pb.ApplyRequest.Change(upsert=spec)])
        yield running


@pytest.fixture(scope="module")
def environment(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("app")
    (folder / "counting.py").write_text(APPLICATION)
    (folder / "edit.py").write_text(EDITOR)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    store = f"sqlite:///{folder}/store.db"
    return {**kept, "CORANTO_DATA": str(cluster.data_dir), "STORE": store, "PWD": str(folder)}


@pytest.fixture(scope="module")
def served(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """`coranto consumer serve counting:Counting`, once it is ready."""
    words = [*COMMAND, "consumer", "serve", "counting:Counting", "--id", "consumer-a"]
    with subprocess.Popen(words, env=environment, cwd=environment["PWD"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if b"ready" in line:
                break
        else:
            pytest.fail(b"".join(lines).decode())
        yield process
        if process.poll() is None:
            process.kill()


def run(environment: dict[str, str], *words: str, input: str = "", code: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *words], env=environment, input=input, capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_from_serve_to_lag_to_interrupt(environment, served):
    assert run(environment, "shards", "apply", "--specs", "-", input=SHARDS) == "create counting-000\n"
    template = '{"_meta":{"uuid":"{uuid}"},"n":{line}}'
    lines = "".join(f"{n}\n" for n in range(1000))
    messages = run(environment, "attach-uuids", "--template", template, input=lines)
    run(environment, "journals", "append", "numbers/part-000", input=messages)
    run(environment, "journals", "append", "numbers/part-000", input=messages)

    while not (listing := run(environment, "shards", "list", "--lag")).rstrip().endswith("numbers/part-000: 0"):
        assert served.poll() is None
    shown = ["counting-000", "primary", "consumer-a", "numbers/part-000", "app=counting", "numbers/part-000:", "0"]
    assert listing.splitlines()[1].split() == shown
    with create_engine(environment["STORE"]).connect() as connection:
        assert connection.execute(text("SELECT count(*), sum(n) FROM seen")).one() == (1000, sum(range(1000)))

    assert run(environment, "shards", "apply", "--specs", "-", input=SHARDS) == "unchanged counting-000\n"
    assert run(environment, "shards", "unassign", "--selector", "app=counting", "--dry-run") == (
        "would unassign counting-000\n"
    )
    assert run(environment, "shards", "unassign", "counting-000") == "unassigned counting-000\n"
    editor = f"{sys.executable} {environment['PWD']}/edit.py"
    assert run({**environment, "CORANTO_EDITOR": editor}, "shards", "edit") == "update counting-000\n"
    text_of = run(environment, "shards", "list", "-o", "yaml")
    assert "max_txn_duration: 2s" in text_of
    deletion = text_of.replace("- id: counting-000", "- id: counting-000\n  delete: true")
    assert run(environment, "shards", "apply", "--specs", "-", "--dry-run", input=deletion) == (
        "would delete counting-000\n"
    )
    served.send_signal(signal.SIGTERM)
    assert served.wait(30) == 0


def test_what_cannot_be_applied_is_said(environment, cluster):
    """Without a consumer the commands say so; see the test before for what they do with one."""
    assert "say which consumer" in run(environment, "shards", "list", code=1)
    assert "names no shards" in run(environment, "shards", "apply", "--specs", "-", code=1)


def test_applications_are_named_by_module_and_name(environment, monkeypatch):
    monkeypatch.chdir(environment["PWD"])
    monkeypatch.syspath_prepend(environment["PWD"])
    assert type(load_application("counting:Counting")).__name__ == "Counting"
    for target, problem in (
        ("counting", "not of the form"),
        ("no_such_module:App", "cannot be imported"),
        ("counting:Missing", "has no Missing"),
        ("counting:not_one", "is no Application"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            load_application(target)
