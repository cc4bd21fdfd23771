"""`coranto journals fragments` against a fake broker."""

from __future__ import annotations

import json
from pathlib import Path

from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.wire import protocol_pb2 as pb
from tests.platform.cli.journals.conftest import persist


def test_fragments_of_several_journals_are_listed(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    for name in parts:
        persist(remote, name, b"persisted", tmp_path, 0)
    remote.fake.journals[parts[1]].spec.suspend.level = pb.JournalSpec.Suspend.FULL
    lines = run("fragments", "-l", "name:prefix=parts/", "--url-ttl", "15m", "--from", "1h", "--to", "1m").output
    assert [line.split()[0] for line in lines.splitlines()] == ["JOURNAL", parts[0], parts[2]]
    request = remote.fake.requests[-1]
    assert request.signatureTTL.seconds == 900
    assert request.end_mod_time - request.begin_mod_time == 3540
    assert "--url-ttl" in run("fragments", parts[0], "--url-ttl", "soon").errors


def test_stored_and_local_fragments_are_listed(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    journal = remote.fake.create("a/journal")
    remote.write("a/journal", b"persisted")
    fragment = journal.roll(tmp_path)
    remote.write("a/journal", b"spool")
    lines = run("fragments", "a/journal").output.splitlines()
    assert lines[1].split() == ["0", "9", "9", "B", "none", fragment.sum.hex(), "file:///fragments/"]
    assert lines[2].endswith("brokers only")
    signed = run("fragments", "a/journal", "--url-seconds", "60").output
    assert "file:///fragments/a/journal/0000000000000000-" in signed
    document = json.loads(run("fragments", "a/journal", "-o", "json").output)
    assert [entry["spec"]["end"] for entry in document["fragments"]] == ["9", "14"]
    assert run("fragments", "a/journal", "-o", "yaml").code == 1
