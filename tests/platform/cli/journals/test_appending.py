"""`coranto journals append` against a fake broker."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from coranto.labels import CONTENT_TYPE, CSV, FIXED_FRAMES, JSON_LINES, LINES, label_set
from coranto.messages.fixed_frame import encode_frame
from coranto.messages.mapping import modulo, rendezvous
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb


def test_all_input_goes_to_one_selected_journal(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    assert run("append", "-l", "name:prefix=parts/", input=b"one\ntwo\n").code == 0
    assert sorted(remote.contents().values()) == [b"", b"", b"one\ntwo\n"]
    assert run("append", "-l", "kind=none", input=b"one").code == 1


def test_lines_go_to_random_journals(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    lines = [b"%04d\n" % number for number in range(300)]
    result = run("append", "-l", "name:prefix=parts/", "-f", "lines", input=b"".join(lines))
    assert result.code == 0
    contents = remote.contents()
    assert sum(int(line.split()[2]) for line in result.output.splitlines()) == 300
    for content in contents.values():
        assert content, "of 300 lines, each of three journals gets some"
        assert content.splitlines() == sorted(content.splitlines()), "in their order"
    assert sorted(b"".join(contents.values()).splitlines(keepends=True)) == lines


@pytest.mark.parametrize("mapping", ["modulo", "rendezvous", "direct"])
@pytest.mark.parametrize("framing", ["lines", "fixed", "base64"])
def test_records_follow_their_keys(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], mapping: str, framing: str
) -> None:
    expected: dict[str, bytes] = dict.fromkeys(parts, b"")
    content = b""
    for number in range(12):
        key = parts[number % 3].encode() if mapping == "direct" else b"key %d" % number
        record = b'{"n": %d}\n' % number if framing != "fixed" else encode_frame(b"\n%d" % number)
        if framing == "fixed":
            content += encode_frame(key) + record
        else:
            content += (base64.b64encode(key) if framing == "base64" else key) + b"\r\n" + record
        chosen = {"modulo": modulo, "rendezvous": rendezvous}.get(mapping)
        expected[chosen(key, parts) if chosen else key.decode()] += record
    words = ["-f", "lines", "--base64"] if framing == "base64" else ["-f", framing]
    result = run("append", "-l", "name:prefix=parts/", *words, "-m", mapping, input=content)
    assert result.code == 0, result.errors
    assert remote.contents() == expected


@pytest.mark.parametrize(
    ("words", "content", "problem"),
    [
        (["-f", "lines"], b"whole\nhalf", "record 2 of the input: the input ends within a line"),
        (["-f", "fixed"], encode_frame(b"whole") + b"half", "record 2 of the input: 68 61 6c 66 is not where"),
        (["-f", "fixed"], encode_frame(b"whole") + encode_frame(b"half")[:-1], "record 2 of the input: the input ends"),
        (["-f", "lines", "-m", "modulo"], b"k\nv\nk\n", "record 3 of the input: no record follows the key b'k'"),
        (["-f", "lines", "-m", "modulo", "--base64"], b"aw==\nv\n?\nv\n", "record 3 of the input: the key b'?' is not"),
        (["-f", "lines", "-m", "direct"], b"parts/part-000\nv\nparts/nine\nv\n", "'parts/nine' is not one of the 3"),
    ],
)
def test_records_before_a_malformed_one_are_appended(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], words: list[str], content: bytes, problem: str
) -> None:
    result = run("append", "-l", "name:prefix=parts/", *words, input=content)
    assert result.code == 1
    assert problem in result.errors
    assert "appended 1 records" in result.output
    assert len([each for each in remote.contents().values() if each]) == 1


def test_contradictory_options_of_append_are_reported(run: CommandLine, parts: tuple[str, ...]) -> None:
    assert "--framing" in run("append", parts[0], "-m", "modulo").errors
    assert "--base64" in run("append", parts[0], "-f", "lines", "--base64").errors


def test_a_failed_append_of_records_is_reported(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, pb.NOT_ALLOWED)
    result = run("append", parts[0], "-f", "lines", input=b"one\ntwo\n")
    assert (result.code, result.output) == (1, "")
    assert "NOT_ALLOWED" in result.errors


def test_an_append_survives_the_loss_of_a_broker(
    run: CommandLine, remote: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto.cli.connect.RETRY_TIMEOUT", 0.0)  # Other commands give up immediately.
    remote.fake.create("a/journal")
    for content in (b"small\n", b"large" * 1_000_000 + b"\n"):
        remote.fake.at(CallPoint.APPEND_BEGUN, pb.NO_JOURNAL_PRIMARY_BROKER, pb.NO_JOURNAL_PRIMARY_BROKER)
        assert run("append", "a/journal", input=content).code == 0
    assert remote.contents()["a/journal"] == b"small\n" + b"large" * 1_000_000 + b"\n"


def test_appended_content_is_read_back(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    remote.fake.create("a/journal")
    assert run("append", "a/journal", input=b"hello\n").output == "a/journal: appended 6 bytes at [0, 6)\n"
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 10_000)
    result = run("append", "-l", "a/journal", "-i", str(large))
    assert result.output == "a/journal: appended 2560000 bytes at [6, 2560006)\n"
    assert remote.fake.journals["a/journal"].content == b"hello\n" + large.read_bytes()
    assert remote.fake.count("Append") == 3, "the large one follows a barrier"
    assert run("read", "a/journal", "--end", "6").output == "hello\n"
    assert run("read", "a/journal", "--offset", "1", "--end", "4").output == "ell"
    assert run("read", "a/journal", "--offset", "-1").output == ""


def test_one_journal_is_named_exactly_once(run: CommandLine, remote: RemoteBroker) -> None:
    assert run("append").code == 1
    assert "name one journal" in run("append", "a/journal", "-l", "b/journal").errors
    assert "--tail" in run("read", "a/journal", "--tail", "--offset", "3").errors


@pytest.mark.parametrize(
    ("told", "content", "problem"),
    [
        ({CONTENT_TYPE: JSON_LINES}, b'{"customer":"torn"}', "record 1 of the input: the input ends within a line"),
        ({CONTENT_TYPE: CSV}, b"a,b\nc,d", "record 2 of the input: the input ends within a line"),
        ({LINES: "whole"}, b"text", "the input ends within a line"),
        ({CONTENT_TYPE: FIXED_FRAMES}, encode_frame(b"whole") + encode_frame(b"half")[:-1], "ends within a frame"),
        ({CONTENT_TYPE: FIXED_FRAMES}, b"no frame", "is not where a frame begins"),
        ({CONTENT_TYPE: JSON_LINES}, b"x\n" * 2_000_000 + b"x", "record 2000001 of the input: the input ends"),
    ],
)
def test_appends_to_a_journal_end_with_whole_records_of_its_framing(
    run: CommandLine, remote: RemoteBroker, told: dict[str, str], content: bytes, problem: str
) -> None:
    remote.fake.create("a/journal", labels=label_set(told))
    result = run("append", "a/journal", input=content)
    assert (result.code, result.output) == (1, "")
    assert problem in result.errors
    assert not remote.contents()["a/journal"]
    # All of it is one append, and only the named framing is checked.
    assert run("append", "a/journal", "-f", "none", input=content).code == 0
    assert remote.contents()["a/journal"] == content


def test_whole_records_are_one_append(run: CommandLine, remote: RemoteBroker) -> None:
    for number, (told, content) in enumerate(
        [
            ({CONTENT_TYPE: JSON_LINES}, b'{"n":1}\n{"n":2}\n'),
            ({CONTENT_TYPE: JSON_LINES}, b'{"n":1}\n' * 500_000),
            ({CONTENT_TYPE: JSON_LINES}, b""),
            ({CONTENT_TYPE: FIXED_FRAMES}, encode_frame(b"x" * 3_000_000) * 3),
            ({CONTENT_TYPE: JSON_LINES, LINES: "any"}, b"half"),
            ({}, b"half"),
        ]
    ):
        remote.fake.create(f"a/journal-{number}", labels=label_set(told))
        result = run("append", f"a/journal-{number}", input=content)
        assert result.output == f"a/journal-{number}: appended {len(content)} bytes at [0, {len(content)})\n", (
            result.errors
        )
        assert remote.contents()[f"a/journal-{number}"] == content
