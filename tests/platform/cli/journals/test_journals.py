"""`coranto journals …` against a fake broker: several journals, editing, and upkeep."""

from __future__ import annotations

import base64
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import grpc
import pytest

from coranto.labels import label_set
from coranto.messages.fixed_frame import encode_frame
from coranto.messages.mapping import modulo, rendezvous
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint
from coranto.wire import protocol_pb2 as pb

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
LINES = label_set({"content-type": "application/x-ndjson"})
PARTS = ("parts/part-000", "parts/part-001", "parts/part-002")


@pytest.fixture
def parts(remote: RemoteBroker) -> tuple[str, ...]:
    for name in PARTS:
        create(remote, name)
    return PARTS


def create(remote: RemoteBroker, name: str, **fields: object) -> None:
    """A journal whose spec is complete."""
    spec = remote.fake.create(name, **{"labels": LINES, **fields}).spec
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.refresh_interval.seconds = 30


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    """Runs `coranto journals` in this process."""
    return CommandLine(capfdbinary.readouterr, "journals")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `coranto journals` in a process of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*COMMAND, "journals", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[bytes]"]


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def interrupt(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGINT) -> bytes:
    """Interrupt the command, and return its further output."""
    process.send_signal(number)
    rest, errors = process.communicate(timeout=120)
    assert b"Traceback" not in errors
    return rest


# -- Which journals ------------------------------------------------------------------------------------------------


def test_journals_are_named_or_selected(run: CommandLine, parts: tuple[str, ...]) -> None:
    for words in (["prune"], ["suspend", parts[0], "-l", "a=b"], ["edit"], ["read"], ["fragments"], ["reset-head"]):
        result = run(*words)
        assert (result.code, result.output) == (2, ""), words
        assert "--selector" in result.errors
    assert "no journal matches 'kind=none'" in run("reset-head", "-l", "kind=none").errors
    missing = run("reset-head", parts[0], "no/journal")
    assert missing.code == 1
    assert missing.errors.startswith("coranto: no/journal: JOURNAL_NOT_FOUND")


def test_a_name_is_selector_enough(run: CommandLine, parts: tuple[str, ...]) -> None:
    assert run("reset-head", "-l", parts[1]).output == f"{parts[1]}: healthy, at 0\n"
    assert run("reset-head", "-l", "content-type").output.count("healthy") == 3
    assert run("reset-head", "-l", "").output.count("healthy") == 3


# -- list ----------------------------------------------------------------------------------------------------------


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


# -- apply ---------------------------------------------------------------------------------------------------------


TREE = """
name: orders/
replication: 1
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 30s}
children: [{name: orders/part-000}, {name: orders/part-001}, {name: orders/part-002}]
"""


def applied(remote: RemoteBroker) -> list[int]:
    """The sizes of the requested transactions."""
    return [len(request.changes) for request in remote.fake.requests if isinstance(request, pb.ApplyRequest)]


def test_specs_are_applied_in_several_transactions_which_continue_after_an_interruption(
    run: CommandLine, remote: RemoteBroker
) -> None:
    remote.fake.at(CallPoint.APPLY, None, grpc.StatusCode.INVALID_ARGUMENT)
    result = run("apply", "--specs", "-", "--max-txn-size", "2", input=TREE.encode())
    assert (result.code, result.output) == (1, "create orders/part-000\ncreate orders/part-001\n")
    assert "The first 2 of 3 changes were applied. Apply again to go on" in result.errors
    again = run("apply", "--specs", "-", "--max-txn-size", "2", input=TREE.encode())
    assert (again.code, again.output.count("unchanged"), again.output.count("create")) == (0, 2, 1)
    assert applied(remote) == [2, 1, 1]


def test_a_tree_of_more_changes_than_a_transaction_holds_is_applied(run: CommandLine, remote: RemoteBroker) -> None:
    children = ", ".join(f"{{name: orders/part-{number:03}}}" for number in range(300))
    tree = TREE[: TREE.index("children")] + f"children: [{children}]\n"
    plan = run("apply", "--specs", "-", "--dry-run", input=tree.encode()).output.splitlines()
    assert plan[0] == "transaction 1 of 3: 128 journals"
    assert plan.index("transaction 3 of 3: 44 journals") == 258
    assert len(remote.fake.journals) == 0
    result = run("apply", "--specs", "-", input=tree.encode())
    assert (result.code, result.output.count("create orders/part-")) == (0, 300), result.errors
    assert applied(remote) == [128, 128, 44]


def test_drift_is_found_shown_and_mended(run: CommandLine, remote: RemoteBroker) -> None:
    words = ("apply", "--specs", "-", "--update", "--prune", "name:prefix=orders/")
    assert run(*words, input=TREE.encode()).code == 0
    assert run(*words, "--check", input=TREE.encode()).code == 0
    remote.fake.journals["orders/part-001"].spec.replication = 3
    create(remote, "orders/left")
    create(remote, "other/one")
    drifted = run(*words, "--check", input=TREE.encode())
    assert drifted.code == 1
    assert drifted.output.splitlines() == [
        "unchanged orders/part-000",
        "unchanged orders/part-002",
        "would update orders/part-001",
        "  replication: 3 → 1",
        "would delete orders/left (the document does not name it)",
    ]
    assert "2 journals are not as the input says" in drifted.errors
    assert applied(remote) == [3]
    mended = run(*words, input=TREE.encode())
    assert mended.output.splitlines()[2:] == [
        "update orders/part-001",
        "delete orders/left (the document does not name it)",
    ]
    assert sorted(remote.fake.journals) == ["orders/part-000", "orders/part-001", "orders/part-002", "other/one"]


def test_without_update_a_journal_that_exists_must_be_given_its_revision(
    run: CommandLine, remote: RemoteBroker
) -> None:
    assert run("apply", "--specs", "-", input=TREE.encode()).code == 0
    result = run("apply", "--specs", "-", input=TREE.replace("replication: 1", "replication: 2").encode())
    assert (result.code, result.output) == (1, "")
    assert "orders/part-000 exists already, at revision" in result.errors


def test_specs_that_say_nothing_of_a_suspension_keep_it(run: CommandLine, remote: RemoteBroker) -> None:
    assert run("apply", "--specs", "-", input=TREE.encode()).code == 0
    suspended = pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=77)
    spec = remote.fake.journals["orders/part-000"].spec
    spec.suspend.CopyFrom(suspended)
    assert run("apply", "--specs", "-", input=TREE.encode()).output.count("unchanged") == 3
    changed = TREE.replace("{name: orders/part-000}", "{name: orders/part-000, revision: -1, replication: 2}")
    assert "update orders/part-000" in run("apply", "--specs", "-", input=changed.encode()).output
    spec = remote.fake.journals["orders/part-000"].spec
    assert (spec.replication, spec.suspend) == (2, suspended)
    moved = changed.replace("revision: -1", "revision: -1, suspend: {level: PARTIAL, offset: 99}")
    run("apply", "--specs", "-", input=moved.encode())
    assert remote.fake.journals["orders/part-000"].spec.suspend.offset == 99


# -- edit ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes an editor of Python statements about `text`, one for each time that it is opened."""

    def make(*steps: str) -> Path:
        seen = tmp_path / "seen"
        seen.mkdir()
        script = tmp_path / "editor.py"
        script.write_text(
            "import pathlib, sys\n"
            "path = pathlib.Path(sys.argv[1])\n"
            f"seen = pathlib.Path({str(seen)!r})\n"
            "text = path.read_text()\n"
            "turn = len(list(seen.iterdir()))\n"
            "(seen / str(turn)).write_text(text)\n"
            f"exec({list(steps)!r}[turn])\n"
            "path.write_text(text)\n"
        )
        monkeypatch.setenv("CORANTO_EDITOR", f"{sys.executable} {script}")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return seen

    return make


def left(folder: Path) -> list[Path]:
    return list(folder.parent.glob("coranto-journals-*"))


def test_an_edit_is_applied(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], editor: Callable[..., Path]
) -> None:
    seen = editor("text = text.replace('length: 1048576', 'length: 2097152')")
    result = run("edit", "-l", "name:prefix=parts/")
    assert result.output.splitlines() == [f"update {name}" for name in parts], result.errors
    assert remote.fake.journals[parts[2]].spec.fragment.length == 2 << 20
    assert left(seen) == []


def test_an_edit_that_cannot_be_applied_is_opened_again(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], editor: Callable[..., Path]
) -> None:
    remote.fake.at(CallPoint.APPLY, grpc.StatusCode.INVALID_ARGUMENT)
    seen = editor(
        "text = text.replace('length: 1048576', 'length: many')",
        "text = text.replace('length: many', 'length: 2097152')",
        "text = text.replace('length: 2097152', 'length: 4194304')",
    )
    result = run("edit", parts[0])
    assert (result.code, result.output) == (0, f"update {parts[0]}\n")
    assert remote.fake.journals[parts[0]].spec.fragment.length == 4 << 20
    assert "ERROR" not in (seen / "0").read_text()
    assert (seen / "1").read_text().startswith("# ERROR: line ")
    assert "'many' is not a whole number" in (seen / "1").read_text()
    assert (seen / "2").read_text().startswith("# ERROR: apply of 1 changes: ")
    assert (seen / "2").read_text().count("ERROR") == 1
    assert left(seen) == []


def test_unchanged_and_empty_edits_do_nothing(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], editor: Callable[..., Path]
) -> None:
    seen = editor("", "text = '# nothing\\n\\n'", "text += '?'", "", "sys.exit(3)")
    assert "nothing was changed" in run("edit", parts[0]).errors
    assert "nothing was left" in run("edit", parts[0]).errors
    assert left(seen) == []
    gave_up = run("edit", parts[0])
    assert gave_up.code == 1
    kept = left(seen)
    assert "is kept in " + str(kept[0]) in gave_up.errors
    assert "nothing was applied: line " in gave_up.errors
    assert kept[0].read_text().endswith("?")
    assert "exit code 3" in run("edit", parts[0]).errors
    assert left(seen) == kept
    assert remote.fake.count("Apply") == 0


def test_an_editor_that_is_not_there(
    run: CommandLine, parts: tuple[str, ...], editor: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = editor()
    monkeypatch.setenv("CORANTO_EDITOR", "/no/such/editor -x")
    result = run("edit", parts[0])
    assert result.code == 1
    assert "cannot start the editor '/no/such/editor -x'" in result.errors
    assert left(seen) == []


# -- append --------------------------------------------------------------------------------------------------------


def test_all_input_goes_to_one_of_the_selected(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
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


def test_options_of_append_that_do_not_go_together(run: CommandLine, parts: tuple[str, ...]) -> None:
    assert "--framing" in run("append", parts[0], "-m", "modulo").errors
    assert "--base64" in run("append", parts[0], "-f", "lines", "--base64").errors


def test_a_failed_append_of_records_is_reported(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, pb.NOT_ALLOWED)
    result = run("append", parts[0], "-f", "lines", input=b"one\ntwo\n")
    assert (result.code, result.output) == (1, "")
    assert "NOT_ALLOWED" in result.errors


# -- read ----------------------------------------------------------------------------------------------------------


def test_several_journals_are_read_a_line_at_a_time(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
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
def test_a_file_that_holds_no_offsets(run: CommandLine, parts: tuple[str, ...], tmp_path: Path, content: str) -> None:
    path = tmp_path / "offsets.json"
    path.write_text(content)
    result = run("read", parts[0], "--offsets", str(path))
    assert result.code == 1
    assert str(path) in result.errors
    missing = run("read", parts[0], "--offsets", f"{path}.none")
    assert missing.code == 1
    assert f"there is no file {path}.none; for a first run omit --offsets" in missing.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_tail_follows_journals_as_they_come_and_go(
    remote: RemoteBroker, parts: tuple[str, ...], start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    for name in parts:
        remote.write(name, b"old\n")
    offsets = tmp_path / "offsets.json"
    process = start("read", "-l", "name:prefix=parts/", "--tail", "--offsets-out", str(offsets))
    # Of each journal first the head is asked for, and then its content from there.
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


def test_suspended_journals_have_nothing_to_read(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    remote.fake.journals[parts[0]].spec.suspend.level = pb.JournalSpec.Suspend.FULL
    remote.write(parts[1], b"one\n")
    assert run("read", "-l", "name:prefix=parts/").output == "one\n"
    assert "SUSPENDED" in run("read", parts[0]).errors


def test_options_of_read_that_do_not_go_together(run: CommandLine, parts: tuple[str, ...], tmp_path: Path) -> None:
    assert "--offsets" in run("read", *parts, "--offset", "3").errors
    assert "--offsets" in run("read", "-l", "", "--end", "3").errors
    assert "--committed" in run("read", *parts, "--committed").errors
    assert "--from" in run("read", parts[0], "--from", "yesterday").errors


def test_content_may_be_chosen_by_when_it_was_stored(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    for text in ("1700000000", "2023-11-14T22:13:20", "2023-11-14T23:13:20+01:00"):
        assert run("read", parts[0], "--from", text).code == 0
        assert remote.fake.requests[-1].begin_mod_time == 1_700_000_000
    run("read", parts[0], "--from", "2h")
    assert 7200 <= time.time() - remote.fake.requests[-1].begin_mod_time < 7260


# -- fragments and prune -------------------------------------------------------------------------------------------


def persist(remote: RemoteBroker, name: str, content: bytes, root: Path, age: float) -> Path:
    """A fragment in the store, as old as that. Returns its file."""
    remote.write(name, content)
    journal = remote.fake.journals[name]
    journal.roll(root)
    stored = journal.stored[-1]
    stored.fragment = dataclasses.replace(stored.fragment, mod_time=int(time.time() - age))
    return root / "fragments" / stored.fragment.content_path


def test_fragments_of_several_journals(
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


def test_old_fragments_are_pruned(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    remote.fake.journals[parts[0]].spec.fragment.retention.seconds = 3600
    remote.fake.journals[parts[1]].spec.fragment.retention.seconds = -3600
    old = [persist(remote, name, b"old content", tmp_path, 3700) for name in parts]
    new = persist(remote, parts[0], b"new content", tmp_path, 3500)
    remote.write(parts[0], b"spool")
    line = f"file:///fragments/{old[0].relative_to(tmp_path / 'fragments')}\n"
    dry = run("prune", "-l", "name:prefix=parts/", "--dry-run")
    assert dry.output == f"would remove {line}would remove 1 fragments with 11 B of content\n"
    assert dry.errors.count("has no retention") == 2
    assert old[0].exists()
    assert (
        run("prune", "-l", "name:prefix=parts/").output == f"removed {line}removed 1 fragments with 11 B of content\n"
    )
    assert [path.exists() for path in (*old, new)] == [False, True, True, True]


def test_pruning_files_needs_to_know_where_they_are(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    remote.fake.journals[parts[0]].spec.fragment.retention.seconds = 3600
    old = persist(remote, parts[0], b"old content", tmp_path, 3700)
    persist(remote, parts[0], b"newest, which is kept", tmp_path, 3700)
    result = run("prune", parts[0])
    assert (result.code, result.output) == (1, "")
    assert "$CORANTO_FILE_ROOT" in result.errors
    assert old.exists()


# -- suspend, reset-head, store-health -----------------------------------------------------------------------------


def test_idle_journals_are_suspended(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    persist(remote, parts[1], b"content", tmp_path, 0)
    remote.write(parts[2], b"recent")
    assert run("suspend", "-l", "name:prefix=parts/").output.splitlines() == [
        f"{parts[0]}: suspended (FULL)",
        f"{parts[1]}: suspended (PARTIAL)",
        f"{parts[2]}: not idle; left as it is",
    ]
    assert run("suspend", *parts, "--force").output.splitlines() == [
        f"{parts[0]}: suspended (FULL)",
        f"{parts[1]}: suspended (PARTIAL)",
        f"{parts[2]}: suspended (FULL)",
    ]


def test_heads_are_reset(run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]) -> None:
    remote.write(parts[0], b"well")
    remote.fake.journals[parts[1]].index_end = 1000
    remote.fake.journals[parts[2]].spec.suspend.level = pb.JournalSpec.Suspend.FULL
    assert "INDEX_HAS_GREATER_OFFSET" in run("append", parts[1], input=b"content").errors
    # Somebody else is faster once.
    remote.fake.at(CallPoint.APPEND_BEGUN, None, None, pb.WRONG_APPEND_OFFSET)
    assert run("reset-head", "-l", "name:prefix=parts/").output.splitlines() == [
        f"{parts[0]}: healthy, at 4",
        f"{parts[1]}: reset to 1000",
        f"{parts[2]}: suspended; left as it is",
    ]
    assert "[1000, 1007)" in run("append", parts[1], input=b"content").output


def test_a_failure_of_one_journal_leaves_the_others_done(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...]
) -> None:
    remote.fake.at(CallPoint.APPEND_BEGUN, pb.NOT_ALLOWED)
    result = run("reset-head", *parts)
    assert result.code == 1
    assert result.output.count("healthy") == 2
    assert result.errors.count("\n") == 1
    assert "NOT_ALLOWED" in result.errors


def test_stores_are_checked(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.at(CallPoint.STORE_HEALTH, None, pb.FRAGMENT_STORE_UNHEALTHY)
    result = run("store-health", "s3://one/", "s3://two/", "--check-delete-prefix", "probe/")
    assert result.output == "s3://one/: healthy\ns3://two/: unhealthy: asked for, of s3://two/\n"
    assert result.code == 1
    assert result.errors.startswith("coranto: unhealthy: s3://two/.")
    assert remote.fake.requests[-1].check_delete_prefix == "probe/"
    assert "check_delete_prefix" in run("store-health", "s3://one/", "--check-delete-prefix", "../x").errors
