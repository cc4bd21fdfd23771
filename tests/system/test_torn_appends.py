"""A program that omits a newline, another process that publishes, and readers: on real brokers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from coranto.client.committed import committed_messages
from coranto.cluster import EmbeddedCluster
from coranto.errors import CorruptMessage, TornMessage
from coranto.labels import CONTENT_TYPE, JSON_LINES, LINES, label_set
from coranto.messages import JsonLines
from coranto.wire import protocol_pb2 as pb
from tests.sampling import sampled

LABELLED, UNCHECKED = "torn/labelled", "torn/unchecked"
COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
PUBLISH = """
import sys
from coranto.client import SyncJournalClient
from coranto.client.publishing import sync_publisher
from coranto.messages import JsonLines

endpoint, journal = sys.argv[1:]
with SyncJournalClient(endpoint) as client:
    publisher = sync_publisher(client, JsonLines())
    for n in range(1000):
        publisher.add(journal, {"n": n})
    publisher.flush()
    print("flushed", flush=True)
    sys.stdin.readline()
    publisher.commit()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path, brokers=2, etcd_fsync=False) as cluster:
        changes = []
        for name, more in ((LABELLED, {}), (UNCHECKED, {LINES: "any"})):
            labels = label_set({CONTENT_TYPE: JSON_LINES, **more})
            spec = pb.JournalSpec(name=name, replication=2, labels=labels)
            spec.fragment.length = 1 << 20
            spec.fragment.compression_codec = pb.NONE
            spec.fragment.stores.append("file:///")
            spec.fragment.refresh_interval.FromSeconds(1)
            changes.append(pb.ApplyRequest.Change(upsert=spec))
        with SyncJournalClient(cluster.info.endpoint) as client:
            client.apply(changes)
            for name in (LABELLED, UNCHECKED):
                client.append(name, b"")
        yield cluster


def append(cluster: EmbeddedCluster, journal: str, content: bytes, *words: str) -> tuple[int, str]:
    """Run `coranto journals append` in another process."""
    command = [*COMMAND, "journals", "append", journal, "--endpoint", cluster.info.endpoint, *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    done = subprocess.run(command, input=content, capture_output=True, timeout=120, check=False, env=environment)
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("torn", sampled([b'{"customer":"to', b'{"customer":"torn"}'], 2))
def test_a_torn_append_loses_no_message_of_another_process(cluster: EmbeddedCluster, torn: bytes) -> None:
    endpoint = cluster.info.endpoint
    for journal in (LABELLED, UNCHECKED):
        is_checked = journal == LABELLED

        def tear(journal: str = journal, is_checked: bool = is_checked) -> None:
            if is_checked:
                code, output = append(cluster, journal, torn)
                assert code == 1
                assert "the input ends within a line" in output
            code, output = append(cluster, journal, torn, "--framing", "none")
            assert code == is_checked, output
            assert ("does not end with a newline" in output) is is_checked

        tear()
        command = [sys.executable, "-c", PUBLISH, endpoint, journal]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as publishing:
            assert publishing.stdout is not None
            assert publishing.stdout.readline() == "flushed\n"
            tear()  # Between the messages and their acknowledgement.
            publishing.communicate("commit\n", timeout=120)
        assert publishing.returncode == 0
        errors: list[CorruptMessage] = []
        with SyncJournalClient(endpoint) as client:
            read = [each.message for each in committed_messages(client, journal, JsonLines(), on_corrupt=errors.append)]
        assert [each["n"] for each in read if "n" in each] == list(range(1000))
        whole = [each for each in read if "n" not in each]
        assert whole == ([{"customer": "torn"}] * 2 if torn.endswith(b"}") and not is_checked else [])
        assert len({error.offset for error in errors}) == (0 if torn.endswith(b"}") or is_checked else 2)
        assert all(isinstance(error, TornMessage) for error in errors)
