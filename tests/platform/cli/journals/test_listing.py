"""`coranto journals list` against a fake broker."""

from __future__ import annotations

import json

from coranto.labels import label_set
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.wire import protocol_pb2 as pb
from tests.platform.cli.journals.conftest import Start, create, interrupt, pipe


def test_a_watched_listing_is_printed_again_when_it_changes(remote: RemoteBroker, start: Start) -> None:
    create(remote, "a/journal")
    process = start("list", "-o", "json", "--watch")
    output = pipe(process.stdout)
    assert [each["spec"]["name"] for each in json.loads(output.readline())["journals"]] == ["a/journal"]
    create(remote, "b/journal")
    names = [each["spec"]["name"] for each in json.loads(output.readline())["journals"]]
    assert names == ["a/journal", "b/journal"]
    assert interrupt(process).count(b"\n") <= 1, "the spec was completed in place after its creation"
    assert process.returncode == 130


def test_suspended_journals_are_marked(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    suspend = remote.fake.journals[parts[0]].spec.suspend
    suspend.level, suspend.offset = pb.JournalSpec.Suspend.FULL, 77
    lines = run("list", "--heads").output.splitlines()
    assert lines[1].startswith(f"{parts[0]} <FULL>")
    assert lines[1].endswith("  77")
    assert lines[2].endswith("  0")


def test_listing_as_json(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.create("a/journal", labels=label_set(kind="x"))
    document = json.loads(run("list", "-o", "json").output)
    assert document["journals"][0]["spec"]["name"] == "a/journal"
    assert document["journals"][0]["route"]["primary"] == 0
