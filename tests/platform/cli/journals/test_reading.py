"""`coranto journals read` against a fake broker."""

from __future__ import annotations

import json
import signal
import time
import uuid
from pathlib import Path

import pytest

from coranto.labels import label_set
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, build_uuid
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb
from tests.platform.cli.journals.conftest import Start, create, interrupt, pipe


def test_several_journals_are_read_line_by_line(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    lines = {name: [b"%s %06d\n" % (name.encode(), number) for number in range(3000)] for name in parts}
    for name in parts:
        remote.write(name, b"".join(lines[name]))
    remote.fake.chunk_bytes = lambda: 1001
    found = run("read", "-l", "name:prefix=parts/").output.encode().splitlines(keepends=True)
    assert len(found) == 9000
    for name in parts:
        assert [line for line in found if line.startswith(name.encode())] == lines[name]


def test_appends_of_several_journals_are_kept_whole(run: CommandLine, remote: RemoteBroker) -> None:
    for name in ("a/journal", "b/journal"):
        create(remote, name, labels=label_set(kind="binary"))
        remote.write(name, name[:1].encode() * 5000)
    remote.fake.chunk_bytes = lambda: 100
    found = run("read", "a/journal", "b/journal").output
    assert found in ("a" * 5000 + "b" * 5000, "b" * 5000 + "a" * 5000)


def test_reads_continue_at_their_offsets(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    offsets, output = tmp_path / "offsets.json", tmp_path / "output"
    both = ["--offsets", str(offsets), "--offsets-out", str(offsets), "-o", str(output)]
    missing = run("read", "-l", "name:prefix=parts/", *both)
    assert missing.code == 1
    assert "there is no file" in missing.errors
    offsets.write_text('{"another/journal": 7, "parts/part-001": 2}')
    for name in parts:
        remote.write(name, b"0\n1\n")
    assert run("read", "-l", "name:prefix=parts/", *both).code == 0
    assert sorted(output.read_bytes().split()) == [b"0", b"0", b"1", b"1", b"1"]
    assert json.loads(offsets.read_text()) == {"another/journal": 7, **dict.fromkeys(parts, 4)}
    previous = tmp_path / "offsets.json.previous"
    assert json.loads(previous.read_text()) == {"another/journal": 7, "parts/part-001": 2}
    remote.write(parts[0], b"2\n")
    assert run("read", parts[0], *both).code == 0
    assert output.read_bytes() == b"2\n"
    assert json.loads(previous.read_text()) == {"another/journal": 7, **dict.fromkeys(parts, 4)}


@pytest.mark.parametrize("content", ["no json", "[1]", '{"a/journal": -1}', '{"a/journal": "x"}'])
def test_files_without_offsets_are_refused(
    run: CommandLine, parts: tuple[str, ...], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "offsets.json"
    path.write_text(content)
    result = run("read", parts[0], "--offsets", str(path))
    assert result.code == 1
    assert str(path) in result.errors
    missing = run("read", parts[0], "--offsets", f"{path}.none")
    assert missing.code == 1
    assert f"there is no file {path}.none; for a first run omit --offsets" in missing.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_tail_follows_journals_that_are_created_and_ends_with_a_signal(
    remote: RemoteBroker, parts: tuple[str, ...], start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    for name in parts:
        remote.write(name, b"old\n")
    offsets = tmp_path / "offsets.json"
    process = start("read", "-l", "name:prefix=parts/", "--tail", "--offsets-out", str(offsets))
    # Each journal gets a request for its head, and then one for its content from there.
    remote.reached(CallPoint.READ_BEGUN, 6)
    output = pipe(process.stdout)
    remote.write(parts[1], b"new\n")
    assert output.readline() == b"new\n"
    create(remote, "parts/part-003")
    remote.write("parts/part-003", b"newer\n")
    assert output.readline() == b"newer\n"
    assert interrupt(process, number) == b""
    assert process.returncode == 130
    assert json.loads(offsets.read_text()) == {parts[0]: 4, parts[1]: 8, parts[2]: 4, "parts/part-003": 6}


def test_suspended_journals_have_no_content(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    remote.fake.journals[parts[0]].spec.suspend.level = pb.JournalSpec.Suspend.FULL
    remote.write(parts[1], b"one\n")
    assert run("read", "-l", "name:prefix=parts/").output == "one\n"
    assert "SUSPENDED" in run("read", parts[0]).errors


def test_contradictory_options_of_read_are_reported(run: CommandLine, parts: tuple[str, ...], tmp_path: Path) -> None:
    assert "--offsets" in run("read", *parts, "--offset", "3").errors
    assert "--offsets" in run("read", "-l", "", "--end", "3").errors
    assert "--committed" in run("read", *parts, "--committed").errors
    assert "--from" in run("read", parts[0], "--from", "yesterday").errors


def test_content_is_selected_by_the_time_it_was_stored(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    for text in ("1700000000", "2023-11-14T22:13:20", "2023-11-14T23:13:20+01:00"):
        assert run("read", parts[0], "--from", text).code == 0
        assert remote.fake.requests[-1].begin_mod_time == 1_700_000_000
    run("read", parts[0], "--from", "2h")
    assert 7200 <= time.time() - remote.fake.requests[-1].begin_mod_time < 7260


def test_a_gap_is_reported_in_addition_to_the_content(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    journal = remote.fake.create("a/journal")
    for content in (b"0123", b"4567"):
        remote.write("a/journal", content)
        journal.roll(tmp_path)
    journal.drop_before(4)
    result = run("read", "a/journal")
    assert (result.code, result.output) == (0, "4567")
    assert "no content in [0, 4)" in result.errors


def test_blocking_reads_end_at_the_end_offset(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.create("a/journal")
    remote.write("a/journal", b"0123456789")
    assert run("read", "a/journal", "--block", "--end", "7").output == "0123456"


def test_committed_reads_return_each_committed_message_once(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.create("a/journal")
    clock = ProducerClock(lambda: 1_700_000_000_000_000_000)
    producer = ProducerId(b"\x01produ")

    def message(number: int, flags: Flags) -> bytes:
        text: uuid.UUID = build_uuid(producer, clock.tick(), flags)
        return json.dumps({"_meta": {"uuid": str(text)}, "n": number}).encode() + b"\n"

    outside = message(1, Flags.OUTSIDE_TXN)
    first, second = message(2, Flags.CONTINUE_TXN), message(3, Flags.CONTINUE_TXN)
    acknowledgement = message(0, Flags.ACK_TXN)
    pending = message(4, Flags.CONTINUE_TXN)
    remote.write("a/journal", outside + outside + first + second + first + acknowledgement + pending)
    result = run("read", "a/journal", "--committed")
    assert result.output.encode() == outside + first + second
    remote.write("a/journal", b"no json\n")
    result = run("read", "a/journal", "--committed")
    assert result.code == 1
    assert "a/journal" in result.errors
