"""`coranto journals fork` against a real etcd, brokers and files: interrupted, finished, read, and dropped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import RpcFailed
from coranto.fragments.codecs import decompress
from coranto.fragments.fragment import Fragment, sum_of
from coranto.labels import CONTENT_TYPE, FORK_HOLD, FORK_STATE, JSON_LINES, label_set, value_of
from coranto.lake import Manifest
from coranto.testing.command_line import CommandLine
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
SOURCE, FORK = "shop/orders", "what-if/orders"
LINE = b'{"pad":"' + b"x" * 4000 + b'"}\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=2, etcd_fsync=False) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root, timeout=120) as client:
        yield client


@pytest.fixture
def environment(cluster: EmbeddedCluster) -> dict[str, str]:
    return {"CORANTO_ENDPOINT": cluster.info.endpoint, "CORANTO_FILE_ROOT": str(cluster.info.file_root)}


@pytest.fixture
def run(
    environment: dict[str, str], capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> CommandLine:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return CommandLine(capfdbinary.readouterr, "journals")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.005)


def spec() -> pb.JournalSpec:
    made = pb.JournalSpec(name=SOURCE, replication=2, flags=pb.JournalSpec.O_RDWR)
    made.labels.CopyFrom(label_set({CONTENT_TYPE: JSON_LINES}))
    made.fragment.length, made.fragment.compression_codec = 1 << 25, pb.GZIP
    made.fragment.stores.append("file:///")
    made.fragment.refresh_interval.FromSeconds(1)
    return made


def labels_of(client: SyncJournalClient, journal: str) -> pb.LabelSet | None:
    found = client.list(f"name={journal}").journals
    return found[0].spec.labels if found else None


def test_a_fork_killed_during_creation_is_finished_read_and_dropped(
    cluster: EmbeddedCluster,
    client: SyncJournalClient,
    environment: dict[str, str],
    run: CommandLine,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    client.apply([pb.ApplyRequest.Change(upsert=spec(), expect_mod_revision=0)])
    client.append(SOURCE, LINE * 9000)  # More than a fragment.
    tail = client.append(SOURCE, LINE * 6000).begin  # Not stored, and slow to copy.
    until(lambda: any(each.persisted for each in client.fragments(SOURCE)))
    head = client.head(SOURCE)

    words = [*COMMAND, "journals", "fork", SOURCE, FORK, "--at", str(head)]
    process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: labels_of(client, FORK) is not None)
    process.kill()
    process.communicate()
    forming = labels_of(client, FORK)
    assert forming is not None
    assert value_of(forming, FORK_STATE) == "forming"

    assert f"has {head - tail} bytes of its own" in run("fork", SOURCE, FORK, "--at", str(head)).output
    assert "complete" in run("forks", SOURCE).output
    assert "diverges from" in run("fork", SOURCE, FORK, "--at", str(tail)).errors
    assert client.append(FORK, b"{}\n").begin == head
    assert client.append(SOURCE, b"[]\n").begin == head
    for journal, end in ((FORK, b"{}\n"), (SOURCE, b"[]\n")):
        assert client.read_all(journal, 0, head + 3) == LINE * 15000 + end

    # A client of Gazette reads a fragment by its URL, and checks it by its name.
    channel = grpc.insecure_channel(cluster.info.endpoint.split(",")[0].removeprefix("http://"))
    with channel:
        request = pb.ReadRequest(journal=FORK, offset=5, metadata_only=True)
        answer = next(iter(pb_grpc.JournalStub(channel).Read(request)))
    fragment = Fragment.from_wire(answer.fragment)
    assert (answer.status, fragment.journal, fragment.begin) == (pb.OK, SOURCE, 0)
    stored = cluster.info.file_root / answer.fragment_url.removeprefix("file:///")
    content = decompress(fragment.codec, stored.read_bytes(), fragment.length)
    assert sum_of(content) == fragment.sum
    assert content == (LINE * 15000)[: fragment.end]

    # A manifest names the source, and an audit finds all shared content.
    made = Manifest.from_json(run("manifest", FORK).output)
    (part,) = made.journals
    assert (part.sources, part.begin, made.fragments[0].journal) == ([SOURCE], 0, SOURCE)
    audit = CommandLine(capfdbinary.readouterr, "audit")
    assert audit("run", FORK).code == audit("run", SOURCE).code == 0

    # The source stays while it has a fork, even if a tree of specs deletes it.
    (info,) = client.list(f"name={SOURCE}").journals
    with pytest.raises(RpcFailed, match=f"its fork {FORK}"):
        client.apply([pb.ApplyRequest.Change(delete=SOURCE, expect_mod_revision=info.mod_revision)])
    assert value_of(info.spec.labels, FORK_HOLD) == f"0/{FORK}"
    run("drop-fork", FORK)
    assert labels_of(client, FORK) is None
    (info,) = client.list(f"name={SOURCE}").journals
    assert not value_of(info.spec.labels, FORK_HOLD)
    client.apply([pb.ApplyRequest.Change(delete=SOURCE, expect_mod_revision=info.mod_revision)])
    assert "JOURNAL_NOT_FOUND" in run("drop-fork", FORK).errors
