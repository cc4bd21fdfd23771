"""`coranto attach-uuids`: every line becomes a message of its own."""

from __future__ import annotations

import json
from pathlib import Path

from coranto.messages import Flags, parse_uuid_text
from coranto.testing.command_line import CommandLine


def test_lines_get_uuids_of_one_producer_in_order(run: CommandLine) -> None:
    result = run("attach-uuids", input=b"one\ntwo,2\r\nlast")
    assert result.code == 0
    pairs = [line.split(",", 1) for line in result.output.splitlines()]
    assert [rest for _, rest in pairs] == ["one", "two,2", "last"]
    parts = [parse_uuid_text(uuid.encode()) for uuid, _ in pairs]
    assert len({part.producer for part in parts}) == 1
    assert [part.clock for part in parts] == sorted({part.clock for part in parts})
    assert {part.flags for part in parts} == {Flags.OUTSIDE_TXN}
    assert run("attach-uuids", input=b"one\n").output != result.output.splitlines(keepends=True)[0]


def test_files_templates_and_headers(run: CommandLine, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.csv", "b.csv")]
    for number, path in enumerate(files):
        path.write_text(f"header\n{number}\n")
    template = '{"_meta":{"uuid":"{uuid}"},"n":{line}}'

    result = run("attach-uuids", "--skip-header", "--template", template, *map(str, files))
    messages = [json.loads(line) for line in result.output.splitlines()]
    assert [message["n"] for message in messages] == [0, 1]
    assert parse_uuid_text(messages[0]["_meta"]["uuid"].encode()).clock


def test_a_placeholder_within_a_line_is_not_replaced(run: CommandLine) -> None:
    assert run("attach-uuids", input=b"{uuid}\n").output.endswith(",{uuid}\n")


def test_invalid_commands_are_reported(run: CommandLine, tmp_path: Path) -> None:
    for words, input, problem in (
        (["--template", "{line}"], b"x\n", "has no {uuid}"),
        (["--max-length", "3"], b"abc\nabcd\n", "line 2 is longer than 3 bytes"),
        ([], b"\xff\n", "not UTF-8"),
        ([str(tmp_path / "none")], b"", "No such file"),
    ):
        result = run("attach-uuids", *words, input=input)
        assert result.code == 1
        assert problem in result.errors
