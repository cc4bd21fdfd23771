"""`coranto audit` over journals of real brokers: one and three replicas, in files and in an S3 server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.audit import Kind, Report
from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto.testing.command_line import CommandLine, CommandResult
from coranto.testing.s3_server import ANY_KEY, S3Server
from coranto.wire import protocol_pb2 as pb

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BUCKET = "audits"
PIECE = b"".join(b"%05d\n" % number for number in range(300))
KEY = base64.b64encode(b"k" * 32).decode()
COMBINATIONS = [(store, replication) for store in ("file", "s3") for replication in (1, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, server: S3Server) -> Iterator[EmbeddedCluster]:
    environment = ANY_KEY.environment | server.environment
    with EmbeddedCluster(
        tmp_path_factory.mktemp("cluster"), brokers=3, environment=environment, etcd_fsync=False, lease_seconds=60
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, server: S3Server, cluster: EmbeddedCluster) -> None:
    for name, value in (ANY_KEY.environment | server.environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CORANTO_ENDPOINT", cluster.info.endpoint)
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(cluster.info.file_root))


@pytest.fixture
def client(cluster: EmbeddedCluster) -> Iterator[SyncJournalClient]:
    with SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root, timeout=120) as client:
        yield client


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(capfdbinary.readouterr, "audit")


class Journal:
    """A journal of five appends, all but the last one stored, and its store as a vandal reaches it."""

    def __init__(self, client: SyncJournalClient, root: Path, name: str, store: str, replication: int) -> None:
        self.client = client
        self.root = root
        self.name = name
        self.store: FragmentStore = StoreRegistry(root).get(store)
        fragment = pb.JournalSpec.Fragment(
            length=1024, compression_codec=pb.NONE, stores=[store], refresh_interval=Duration(seconds=1)
        )
        spec = pb.JournalSpec(name=name, replication=replication, fragment=fragment)
        client.apply([pb.ApplyRequest.Change(upsert=spec)])
        for _ in range(5):
            self.head = client.append(name, PIECE, patience=60).end
        self.until(lambda: len(self.stored) == 4 and len(client.fragments(name)) == 5)
        self.until(lambda: all(head.in_sync for head in client.heads(f"name={name}")))
        self.until(self._only_the_store_has_it)

    def _only_the_store_has_it(self) -> bool:
        """Return True once no replica has a file of its own of what is stored, and all have listed the store."""
        (info,) = self.client.list(f"name={self.name}").journals
        found = []
        for endpoint in info.route.endpoints:
            with SyncJournalClient(endpoint, route_cache=0) as replica:
                found.append(sum(each.persisted for each in replica.fragments(self.name)))
        return found == [4] * len(found) and len(self.spools) == len(found)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def spools(self) -> list[Path]:
        """The files of content that brokers have of it."""
        folder = f"-{hashlib.sha256(self.name.encode()).hexdigest()[:16]}/"
        return [path for path in (self.root.parent / "brokers").rglob("*.content") if folder in str(path)]

    @property
    def stored(self) -> list[Fragment]:
        async def listed() -> list[Fragment]:
            return [each async for each in self.store.list(self.name)]

        return sorted(asyncio.run(listed()), key=lambda each: each.begin)

    def remove(self, fragment: Fragment) -> None:
        asyncio.run(self.store.remove(fragment))

    def put(self, fragment: Fragment, content: bytes) -> None:
        asyncio.run(self.store.put(fragment, content))

    def refreshed(self, *, lacks: Fragment) -> None:
        """Wait until the brokers' index has noticed that a fragment is gone."""
        self.until(lambda: all(info.fragment.begin != lacks.begin for info in self.client.fragments(self.name)))


@pytest.fixture(params=COMBINATIONS, ids=[f"{store}-{replication}" for store, replication in COMBINATIONS])
def journal(
    request: pytest.FixtureRequest, cluster: EmbeddedCluster, client: SyncJournalClient, server: S3Server
) -> Journal:
    store, replication = request.param
    url = "file:///" if store == "file" else server.store_url(BUCKET, "p/")
    name = f"audited/{request.node.name.partition('[')[0].replace('_', '-')}/{store}-{replication}"
    return Journal(client, cluster.info.file_root, name, url, replication)


def report_of(result: CommandResult) -> Report:
    return Report.from_json(result.output)


def kinds(result: CommandResult) -> set[Kind]:
    return report_of(result).kinds() - {Kind.FIRST_AUDIT}


def test_losses_are_found_at_once_and_after_the_index_was_refreshed(journal: Journal, run: CommandLine) -> None:
    assert run(journal.name, "-o", "json").code == 0
    first, second = journal.stored[0], journal.stored[1]
    journal.remove(first)
    result = run(journal.name, "-o", "json")
    assert result.code == 1
    assert Kind.CONTENT_LOST in kinds(result)  # Also FRAGMENT_MISSING, unless brokers have just listed the store.
    journal.refreshed(lacks=first)
    result = run(journal.name, "-o", "json")
    assert (result.code, kinds(result)) == (1, {Kind.CONTENT_LOST})
    (lost,) = report_of(result).errors
    assert lost.facts["spans"] == [[0, len(PIECE)]]
    journal.put(first, PIECE)
    changed = b"X" + PIECE[1:]
    journal.put(second, changed)
    journal.until(lambda: journal.client.fragments(journal.name)[0].fragment.begin == 0)
    assert run(journal.name, "-o", "json").code == 0
    result = run(journal.name, "-o", "json", "--deep", "--budget", "all")
    assert result.code == 1
    assert Kind.CONTENT_DIFFERS in kinds(result)
    journal.put(second, PIECE)
    assert run(journal.name, "-o", "json", "--deep", "--budget", "1").code == 0


@pytest.mark.parametrize("journal", [("file", 1), ("file", 3)], indirect=True, ids=["file-1", "file-3"])
def test_a_flipped_byte_in_any_replicas_spool_is_found(
    journal: Journal, run: CommandLine, cluster: EmbeddedCluster
) -> None:
    assert run(journal.name, "--deep", "-o", "json").code == 0
    # Any one of the replicas, and not the primary if there is another.
    (head,) = journal.client.heads(f"name={journal.name}")
    primary = head.broker.partition("#")[2]
    spools = sorted(journal.spools, key=lambda path: primary in str(path))
    content = bytearray(spools[0].read_bytes())
    content[0] ^= 1
    with spools[0].open("r+b") as file:
        file.write(bytes(content[:1]))
    result = run(journal.name, "--deep", "-o", "json")
    assert result.code == 1
    assert Kind.SPOOL_DIFFERS in kinds(result)


@pytest.mark.parametrize("journal", [("file", 1)], indirect=True, ids=["file-1"])
def test_the_command_tells_people_and_programs(
    journal: Journal, run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = journal.name.rpartition("/")[0]
    result = run(f"{folder}/")
    assert result.code == 0
    assert f"{journal.name}  0" in result.output
    assert "sound: 1 info; 1 examined" in result.output
    assert "journals: 1 journals examined" in result.output
    result = run("no/such/journal")
    assert result.code == 1
    assert "nothing_selected" in result.output
    assert run("no/such/journal", "--allow-empty").code == 0
    for words in (["--budget", "lots"], ["--budget", "0"], ["-o", "yaml"], ["--memory", "nowhere://"]):
        assert run(journal.name, *words).code != 0, words
    # Signed reports.
    result = run(journal.name, "--sign")
    assert (result.code, result.output) == (1, "")
    assert "$CORANTO_AUTH_KEYS: is not set" in result.errors
    monkeypatch.setenv("CORANTO_AUTH_KEYS", KEY)
    file = tmp_path / "report.jwt"
    result = run(journal.name, "--sign", "--deep", "--save", str(file))
    assert result.code == 0
    assert "stored content: 7.0 KiB examined" in result.output
    assert run("verify", str(file)).code == 0
    signed = run(journal.name, "--sign")
    assert len(signed.output.splitlines()) == 1
    verified = run("verify", "-", "-o", "json", input=signed.output.encode())
    assert verified.code == 0
    assert json.loads(verified.output)["selector"] == f"name={journal.name}"
    file.write_text(file.read_text()[:-9] + "AAAAAAAA\n")
    result = run("verify", str(file))
    assert (result.code, result.output) == (1, "")
    assert "changed after it was signed" in result.errors
    # A loss, its acceptance, and another memory, which does not know of it.
    monkeypatch.delenv("CORANTO_AUTH_KEYS")
    lost = journal.stored[0]
    journal.remove(lost)
    journal.refreshed(lacks=lost)
    assert run(journal.name).code == 1
    result = run(journal.name, "--accept", "the disk is gone")
    assert result.code == 1
    assert "content_lost" in result.output
    assert run(journal.name).code == 0
    result = run(journal.name, "--memory", "file:///elsewhere/")
    assert result.code == 1
    assert "beginning_unexplained" in result.output
