"""`coranto journals …` against real brokers: the effect of each command on a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from coranto.client import SyncJournalClient
from coranto.client.publishing import sync_publisher
from coranto.cluster import EmbeddedCluster
from coranto.errors import IndexHasGreaterOffset
from coranto.fragments import codecs
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.lake import load_manifest, scan
from coranto.messages import JsonLines
from coranto.offsets import id_of, vector_of_json
from coranto.testing.command_line import CommandLine
from coranto.wire import protocol_pb2 as pb

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]

TREE = """
name: {folder}/
replication: 1
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment: {{length: 1024, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}}
children: [{{name: {folder}/part-000}}, {{name: {folder}/part-001}}]
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"), brokers=2, broker_arguments=["--no-retention"], etcd_fsync=False
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root, timeout=120) as client:
        yield client


@pytest.fixture
def run(cluster: EmbeddedCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `coranto journals`, which must succeed, and returns its output."""
    monkeypatch.setenv("CORANTO_ENDPOINT", cluster.info.endpoint)
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(cluster.info.file_root))
    command = CommandLine(capfdbinary.readouterr, "journals")

    def run(*words: str, input: bytes = b"") -> str:
        result = command(*words, input=input)
        assert result.code == 0, result.errors
        return result.output

    return run


@pytest.fixture
def folder(run: Run, client: SyncJournalClient, request: pytest.FixtureRequest) -> str:
    """Create two new journals below a folder, and wait until they accept appends."""
    name = str(request.node.name)
    run("apply", "--specs", "-", "--max-txn-size", "1", input=TREE.format(folder=name).encode())
    for part in ("part-000", "part-001"):
        client.append(f"{name}/{part}", b"")
    return name


def spec_of(journal: str, *, replication: int) -> str:
    """Return a tree that changes one journal's replication, for any revision."""
    folder = journal.rpartition("/")[0]
    tree = TREE.format(folder=folder).replace("replication: 1", f"replication: {replication}")
    return tree[: tree.index("children")] + f"children: [{{name: {journal}, revision: -1}}]\n"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def persist(client: SyncJournalClient, journal: str) -> int:
    """Append enough content to store a fragment, wait until it is stored, and return its end."""
    end = 0
    for letter in b"xyz":
        end = client.append(journal, bytes([letter]) * 2000 + b"\n").end
    until(lambda: any(item.persisted for item in client.fragments(journal)))
    return end


def test_a_tree_of_many_journals_is_applied_drifts_and_is_pruned(run: Run, client: SyncJournalClient) -> None:
    words = ("apply", "--specs", "-", "--update", "--prune", "name:prefix=many/")
    head = TREE.format(folder="many").partition("children")[0]
    parts = [f"{{name: many/part-{number:03}}}" for number in range(300)]
    assert run(*words, input=f"{head}children: [{', '.join(parts)}]".encode()).count("create many/part-") == 300
    run("suspend", "many/part-007", "--force")

    def suspension() -> pb.JournalSpec.Suspend:
        return client.list("name=many/part-007").journals[0].spec.suspend

    until(lambda: suspension().level == pb.JournalSpec.Suspend.FULL)  # The other broker may lag for a moment.
    suspended = suspension()
    changed = f"{head}children: [{', '.join(['{name: many/part-000/eu}', *parts[1:]])}]".replace(": 1024", ": 2048")
    plan = run(*words, "--dry-run", input=changed.encode()).splitlines()
    assert plan[:2] == [
        "transaction 1 of 4: 1 journals",
        "would delete many/part-000 (the document does not name it)",
    ], "journals must not nest"
    assert run(*words, input=changed.encode()).count("update many/part-") == 299
    assert run(*words, "--check", input=changed.encode()).count("unchanged") == 300
    listed = {info.name: info.spec for info in client.list("name:prefix=many/").journals}
    assert len(listed) == 300
    assert listed["many/part-007"].suspend == suspended


def test_a_watch_shows_changes_and_primaries(cluster: EmbeddedCluster, run: Run, folder: str) -> None:
    words = ["journals", "list", "--watch", "-o", "json", "-l", f"name:prefix={folder}/", "--endpoint"]
    with subprocess.Popen([*COMMAND, *words, cluster.info.endpoint], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:  # A broker may lag for a moment.
            if [entry["route"]["primary"] for entry in json.loads(line)["journals"]] == [0, 0]:
                break
        else:
            pytest.fail("the watch ended")
        tree = TREE.format(folder=folder).replace("part-001", "part-002").replace(f"{{name: {folder}/part-000}}, ", "")
        run("apply", "--specs", "-", input=tree.encode())
        for line in process.stdout:
            journals = json.loads(line)["journals"]
            if len(journals) == 3 and journals[2]["route"]["primary"] == 0:
                break
        else:
            pytest.fail("the watch ended")
        process.kill()


def test_an_edit_is_applied(
    run: Run, client: SyncJournalClient, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_EDITOR", "sed -i 's/length: 1024/length: 4096/'")
    assert run("edit", "-l", f"name:prefix={folder}/").count("update") == 2
    assert {info.spec.fragment.length for info in client.list(f"name:prefix={folder}/").journals} == {4096}


def test_records_are_spread_over_journals_and_read(
    run: Run, client: SyncJournalClient, folder: str, tmp_path: Path
) -> None:
    selector = f"name:prefix={folder}/"
    lines = [b'{"n": %d}\n' % number for number in range(2000)]
    keyed = b"".join(b"key-%d\n" % (number % 7) + line for number, line in enumerate(lines))
    run("append", "-l", selector, "-f", "lines", "-m", "rendezvous", input=keyed)
    offsets = tmp_path / "offsets.json"
    found = run("read", "-l", selector, "--offsets-out", str(offsets))
    assert sorted(found.encode().splitlines(keepends=True)) == sorted(lines)
    reached = vector_of_json(json.loads(offsets.read_text()), "file")
    assert reached == {name: client.head(name) for name in client.list(selector).names}
    assert all(map(id_of, reached.values()))
    assert min(reached.values()) > 0
    client.append(f"{folder}/part-001", b"more\n")
    assert run("read", "-l", selector, "--offsets", str(offsets), "--offsets-out", str(offsets)) == "more\n"


def test_a_tail_follows_several_journals(cluster: EmbeddedCluster, client: SyncJournalClient, folder: str) -> None:
    client.append(f"{folder}/part-000", b"old\n")
    words = ["journals", "read", "-l", f"name:prefix={folder}/", "--block", "--endpoint"]
    with subprocess.Popen([*COMMAND, *words, cluster.info.endpoint], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"old\n"
        client.append(f"{folder}/part-001", b"new\n")
        assert process.stdout.readline() == b"new\n"
        process.kill()


def test_fragments_are_listed_with_urls(run: Run, client: SyncJournalClient, folder: str) -> None:
    persist(client, f"{folder}/part-000")
    document = json.loads(
        run("fragments", "-l", f"name:prefix={folder}/", "--url-ttl", "1m", "--to", "1s", "-o", "json")
    )
    listed = run("fragments", "-l", f"name:prefix={folder}/", "--from", "1h", "--url-ttl", "1m")
    assert f"file:///{folder}/part-000/" in listed
    assert all(entry["spec"]["mod_time"] != "0" for entry in document["fragments"])


def test_pruning_applies_the_retention(
    cluster: EmbeddedCluster, run: Run, client: SyncJournalClient, folder: str
) -> None:
    journal = f"{folder}/part-000"
    for _ in range(2):
        persist(client, journal)

    def files() -> list[Path]:
        # A leading dot marks a fragment that is being written.
        return sorted(path for path in (cluster.info.file_root / journal).iterdir() if path.name[0] != ".")

    until(lambda: len(files()) > 1)
    assert "removed 0 fragments" in run("prune", journal), "without a retention, everything is kept"
    tree = TREE.format(folder=folder).replace("refresh_interval: 1s", "refresh_interval: 1s, retention: 1s")
    tree = tree.replace("part-000}", "part-000, revision: -1}").replace("part-001}", "part-001, revision: -1}")
    run("apply", "--specs", "-", input=tree.encode())
    until(lambda: "would remove 0" not in run("prune", journal, "--dry-run"))
    until(lambda: f"would remove {len(files()) - 1} fragments" in run("prune", journal, "--dry-run"))
    before = files()
    assert len(before) > 1
    assert f"removed {len(before) - 1} fragments" in run("prune", journal)
    assert files() == before[-1:], "the last fragment is kept"


def test_suspended_journals_resume_with_an_append(run: Run, client: SyncJournalClient, folder: str) -> None:
    full, partial = f"{folder}/part-000", f"{folder}/part-001"
    end = persist(client, partial)
    assert run("suspend", partial) == f"{partial}: not idle; left as it is\n"
    assert run("suspend", "-l", f"name:prefix={folder}/", "--force").splitlines() == [
        f"{full}: suspended (FULL)",
        f"{partial}: suspended (PARTIAL)",
    ]

    def levels() -> list[int]:  # One broker may lag for a moment.
        return [info.spec.suspend.level for info in client.list(f"name:prefix={folder}/").journals]

    Suspend = pb.JournalSpec.Suspend
    until(lambda: levels() == [Suspend.FULL, Suspend.PARTIAL])
    until(lambda: f"{full} <FULL>" in run("list", "-l", f"name:prefix={folder}/", "--heads"))
    assert run("read", partial).encode().startswith(b"xxx")
    assert f"[{end}, {end + 3})" in run("append", partial, input=b"up\n")
    assert "[0, 3)" in run("append", full, input=b"up\n")
    until(lambda: levels() == [Suspend.NONE, Suspend.NONE])


def test_lost_heads_are_reset(cluster: EmbeddedCluster, run: Run, client: SyncJournalClient, folder: str) -> None:
    single, replicated = f"{folder}/part-000", f"{folder}/part-001"
    content = b"unknown to the brokers\n"
    end = 1000 + len(content)
    run("apply", "--specs", "-", input=spec_of(replicated, replication=2).encode())
    for journal in (single, replicated):
        client.append(journal, b"known\n")
        # Another writer has continued, and only the store has its content.
        fragment = Fragment(journal, 1000, end, sum_of(content), Codec.GZIP)
        path = cluster.info.file_root / fragment.content_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(codecs.compress(Codec.GZIP, content))

    def is_stuck(journal: str) -> bool:
        try:
            client.append(journal, b"")
        except IndexHasGreaterOffset:
            return True
        return False

    until(lambda: is_stuck(single) and is_stuck(replicated))
    selector = f"name:prefix={folder}/"
    assert run("reset-head", "-l", selector) == f"{single}: reset to {end}\n{replicated}: reset to {end}\n"
    for journal in (single, replicated):
        assert f"[{end}, {end + 3})" in run("append", journal, input=b"on\n")
        assert run("read", journal, "--offset", "1000") == "unknown to the brokers\non\n"
    assert run("reset-head", "-l", selector).count(f"healthy, at {end + 3}") == 2


def test_stores_are_checked(run: Run) -> None:
    assert run("store-health", "file:///", "--check-delete-prefix", "probe/") == "file:///: healthy\n"


def test_a_manifest_is_scanned_and_read_by_duckdb_without_brokers(
    run: Run, client: SyncJournalClient, folder: str, tmp_path: Path
) -> None:
    journal, path = f"{folder}/part-000", tmp_path / "manifest.json"
    publisher = sync_publisher(client, JsonLines())
    for number in range(60):
        publisher.add(journal, {"n": number, "text": "x" * 30})
    publisher.commit()
    publisher.add(journal, {"n": -1})
    publisher.flush()

    def stored() -> bool:
        client.append(journal, b'{"n":-2}\n')
        path.write_text(run("manifest", f"{folder}/"))
        return load_manifest(path).journals[0].end > acknowledged

    acknowledged = client.head(journal)
    until(stored)
    first, second = load_manifest(path).journals
    assert (first.begin, second.begin, second.end) == (0, 0, 0)
    assert first.unstored_end == client.head(journal)
    with duckdb.connect() as connection:
        totals = "SELECT sum(n), count(*) FROM {} WHERE n >= -1"
        connection.register("scanned", scan(path, {"n": "int64"}))
        assert connection.sql(totals.format("scanned")).fetchall() == [(59 * 30, 60)]
        files = [each.url for each in load_manifest(path).fragments]
        lines = f"read_json({files}, format='nd', columns={{n: 'BIGINT'}})"
        assert connection.sql(totals.format(lines)).fetchall() == [(59 * 30 - 1, 61)], "all lines, committed or not"
