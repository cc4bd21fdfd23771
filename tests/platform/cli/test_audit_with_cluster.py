"""`coranto audit` over a journal of a real broker, with output for people and for programs."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.client import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.fragments.fragment import Fragment
from coranto.testing.command_line import CommandLine
from coranto.wire import protocol_pb2 as pb

pytestmark = pytest.mark.timeout(600)

PIECE = b"".join(b"%05d\n" % number for number in range(300))
KEY = base64.b64encode(b"k" * 32).decode()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), etcd_fsync=False, lease_seconds=60) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, cluster: EmbeddedCluster) -> None:
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
    """A journal of five appends, all but the last one stored."""

    name = "audited/the-command/file-1"

    def __init__(self, client: SyncJournalClient, root: Path) -> None:
        self.client, self.root = client, root
        fragment = pb.JournalSpec.Fragment(
            length=1024, compression_codec=pb.NONE, stores=["file:///"], refresh_interval=Duration(seconds=1)
        )
        client.apply([pb.ApplyRequest.Change(upsert=pb.JournalSpec(name=self.name, replication=1, fragment=fragment))])
        for _ in range(5):
            client.append(self.name, PIECE, retry_timeout=60)
        self.until(lambda: len(self.stored) == 4 and len(self.spools) == 1)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def spools(self) -> list[Path]:
        """Return the files of content that the broker has of it."""
        return list((self.root.parent / "brokers").rglob("*.content"))

    @property
    def stored(self) -> list[Fragment]:
        return [each.fragment for each in self.client.fragments(self.name) if each.persisted]

    def lose(self, fragment: Fragment) -> None:
        """Remove a stored fragment, and wait until the broker's index no longer lists it."""
        (self.root / fragment.content_path).unlink()
        self.until(lambda: all(each.begin != fragment.begin for each in self.stored))


@pytest.fixture
def journal(cluster: EmbeddedCluster, client: SyncJournalClient) -> Journal:
    return Journal(client, cluster.info.file_root)


def test_the_command_reports_to_people_and_programs(
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
    result = run(journal.name)
    assert result.code == 1
    assert "memory_damaged" in result.output  # The record is from before the first key.
    monkeypatch.setenv("CORANTO_AUTH_KEYS", f"AA== {KEY}")
    assert run(journal.name).code == 0
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
    # A loss, its acceptance, and another memory without that record.
    monkeypatch.delenv("CORANTO_AUTH_KEYS")
    result = run(journal.name)
    assert result.code == 1
    assert "this audit has no key to verify it with" in result.output
    monkeypatch.setenv("CORANTO_AUTH_KEYS", KEY)
    journal.lose(journal.stored[0])
    assert run(journal.name).code == 1
    result = run(journal.name, "--accept", "the disk is gone")
    assert result.code == 1
    assert "content_lost" in result.output
    assert run(journal.name).code == 0
    result = run(journal.name, "--memory", "file:///elsewhere/")
    assert result.code == 1
    assert "beginning_unexplained" in result.output
    # Yesterday's records are restored.
    records = sorted((journal.root / ".coranto-audit").glob("*/*.json.gz"), key=lambda path: path.name)
    records[-1].unlink()
    for _ in range(2):
        result = run(journal.name)
        assert result.code == 1
        assert "contradict the brokers' note of them" in result.output
    assert run("--accept", "the folder was restored").code == 1
    assert run(journal.name).code == 0
