"""The `coranto` command against a fake broker: what it prints, and how it fails."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import typer

from coranto.cli.plugins import add_plugins
from coranto.labels import label_set
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, build_uuid
from coranto.specs.journal_tree import parse_tree
from coranto.testing.command_line import CommandLine, RemoteBroker

SPECS = """
name: orders/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 30s}
children: [{name: orders/part-000}, {name: orders/part-001}]
"""


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    path = tmp_path / "journals.yaml"
    path.write_text(SPECS)
    return path


def test_version(run: CommandLine) -> None:
    result = run("version")
    assert result.code == 0
    assert result.output.startswith(f"coranto {importlib.metadata.version('coranto')} (Python 3.")


def test_help_names_every_command_without_loading_plugins(run: CommandLine) -> None:
    result = run("--help")
    assert result.code == 0
    for command in ("up", "journals", "version", "broker", "demo"):
        assert command in result.output
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from coranto.cli import main; main(['--help']); print(sorted(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "'coranto.cli.app'" in done.stdout
    assert "'dagster'" not in done.stdout
    assert "'coranto_broker'" not in done.stdout


@pytest.mark.parametrize("words", [["nonsense"], ["journals", "read"], ["journals", "list", "--nonsense"]])
def test_wrong_usage(run: CommandLine, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 2
    assert result.output == ""
    assert "Usage" in result.errors


# -- Journals ------------------------------------------------------------------------------------------------------


def test_journals_are_applied_and_listed(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    assert run("journals", "list").output.split() == ["JOURNAL", "REPLICAS", "PRIMARY", "FRAGMENTS", "STORE", "LABELS"]
    dry = run("journals", "apply", "--specs", str(specs), "--dry-run")
    assert (dry.code, dry.output) == (0, "would create orders/part-000\nwould create orders/part-001\n")
    assert remote.fake.journals == {}
    assert run("journals", "apply", "--specs", "-", input=SPECS.encode()).output.count("create ") == 2
    assert set(remote.fake.journals) == {"orders/part-000", "orders/part-001"}
    remote.write("orders/part-001", b"four")
    table = run("journals", "list", "-l", "name=orders/part-001", "--heads").output.splitlines()
    assert table[1].split() == [
        "orders/part-001",
        "1/1",
        "fake-broker",
        "4.0",
        "MiB",
        "zstandard",
        "file:///",
        "content-type=application/x-ndjson",
        "4",
    ]
    assert len(table) == 2


def test_listed_yaml_can_be_applied(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    run("journals", "apply", "--specs", str(specs))
    listed = run("journals", "list", "-o", "yaml").output
    changes = parse_tree(listed)
    assert [change.expect_mod_revision for change in changes] == [2, 2]
    changed = listed.replace("length: 4194304", "length: 1048576")
    assert run("journals", "apply", "--specs", "-", input=changed.encode()).output.splitlines() == [
        "update orders/part-000",
        "update orders/part-001",
    ]
    assert remote.fake.journals["orders/part-000"].spec.fragment.length == 1 << 20


def test_specs_that_are_there_already_are_left_alone(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    run("journals", "apply", "--specs", str(specs))
    again = run("journals", "apply", "--specs", str(specs))
    assert (again.code, again.output) == (0, "unchanged orders/part-000\nunchanged orders/part-001\n")
    assert remote.fake.count("Apply") == 1


def test_conflicting_specs_are_explained(run: CommandLine, remote: RemoteBroker, specs: Path) -> None:
    remote.fake.create("orders/part-000")
    result = run("journals", "apply", "--specs", str(specs), "--dry-run")
    assert result.code == 1
    assert "orders/part-000 exists already, at revision 2: give that as its `revision`" in result.errors
    gone = "name: orders/part-009\ndelete: true\nrevision: 7\n"
    result = run("journals", "apply", "--specs", "-", input=gone.encode())
    assert (result.code, result.output) == (0, "absent orders/part-009\n"), "a deletion may be repeated"
    deletion = "name: orders/part-000\ndelete: true\nrevision: 9\n"
    assert "is at revision 2, not 9" in run("journals", "apply", "--specs", "-", input=deletion.encode()).errors
    deletion = deletion.replace("9", "2")
    assert run("journals", "apply", "--specs", "-", input=deletion.encode()).output == "delete orders/part-000\n"
    assert remote.fake.journals == {}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name: a/b\xff", r"is not text in UTF-8: .* at byte 9"),
        (b"# \nname: a\0b", r"line 2: this is not YAML: it has the character '\\x00'"),
        (b"[", "line 1: this is not YAML"),
        (b"name: a/b/c\ndelete: true", r"line 1: a/b/c: revision: 0: to delete it, give the revision .*, or -1"),
        (b"", "names no journals"),
    ],
)
def test_specs_that_cannot_be_read(
    run: CommandLine, remote: RemoteBroker, tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "specs.yaml"
    path.write_bytes(content)
    result = run("journals", "apply", "--specs", str(path))
    assert result.code == 1
    assert re.fullmatch(rf"coranto: .*{re.escape(str(path))}:? {problem}.*\n", result.errors)
    assert run("journals", "apply", "--specs", "-", input=content).code == 1


def test_an_interrupt_while_the_command_is_loaded_is_quiet() -> None:
    code = (
        "import builtins, os, signal, sys; from coranto.cli import main; real = builtins.__import__\n"
        "def slow(name, *rest):\n"
        "    if name == 'coranto.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest)\n"
        "builtins.__import__ = slow; sys.exit(main(['version']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_listing_as_json(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.create("a/journal", labels=label_set(kind="x"))
    document = json.loads(run("journals", "list", "-o", "json").output)
    assert document["journals"][0]["spec"]["name"] == "a/journal"
    assert document["journals"][0]["route"]["primary"] == 0


# -- Content -------------------------------------------------------------------------------------------------------


def test_content_goes_in_and_comes_out(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    remote.fake.create("a/journal")
    assert run("journals", "append", "a/journal", input=b"hello\n").output == "a/journal: appended 6 bytes at [0, 6)\n"
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 10_000)
    result = run("journals", "append", "-l", "a/journal", "-i", str(large))
    assert result.output == "a/journal: appended 2560000 bytes at [6, 2560006)\n"
    assert remote.fake.journals["a/journal"].content == b"hello\n" + large.read_bytes()
    assert remote.fake.count("Append") == 3, "the large one follows a barrier"
    assert run("journals", "read", "a/journal", "--end", "6").output == "hello\n"
    assert run("journals", "read", "a/journal", "--offset", "1", "--end", "4").output == "ell"
    assert run("journals", "read", "a/journal", "--offset", "-1").output == ""


def test_a_journal_is_named_once(run: CommandLine, remote: RemoteBroker) -> None:
    assert run("journals", "append").code == 1
    assert "name one journal" in run("journals", "append", "a/journal", "-l", "b/journal").errors
    assert "--tail" in run("journals", "read", "a/journal", "--tail", "--offset", "3").errors


def test_a_gap_is_reported_beside_the_content(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    journal = remote.fake.create("a/journal")
    for content in (b"0123", b"4567"):
        remote.write("a/journal", content)
        journal.roll(tmp_path)
    journal.drop_before(4)
    result = run("journals", "read", "a/journal")
    assert (result.code, result.output) == (0, "4567")
    assert "no content in [0, 4)" in result.errors


def test_blocking_reads_end_at_their_end(run: CommandLine, remote: RemoteBroker) -> None:
    remote.fake.create("a/journal")
    remote.write("a/journal", b"0123456789")
    assert run("journals", "read", "a/journal", "--block", "--end", "7").output == "0123456"


def test_committed_messages_only_and_once(run: CommandLine, remote: RemoteBroker) -> None:
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
    result = run("journals", "read", "a/journal", "--committed")
    assert result.output.encode() == outside + first + second
    remote.write("a/journal", b"no json\n")
    result = run("journals", "read", "a/journal", "--committed")
    assert result.code == 1
    assert "a/journal" in result.errors


def test_fragments(run: CommandLine, remote: RemoteBroker, tmp_path: Path) -> None:
    journal = remote.fake.create("a/journal")
    remote.write("a/journal", b"persisted")
    fragment = journal.roll(tmp_path)
    remote.write("a/journal", b"spool")
    lines = run("journals", "fragments", "a/journal").output.splitlines()
    assert lines[1].split() == ["0", "9", "9", "B", "none", fragment.sum.hex(), "file:///fragments/"]
    assert lines[2].endswith("brokers only")
    signed = run("journals", "fragments", "a/journal", "--url-seconds", "60").output
    assert "file:///fragments/a/journal/0000000000000000-" in signed
    document = json.loads(run("journals", "fragments", "a/journal", "-o", "json").output)
    assert [entry["spec"]["end"] for entry in document["fragments"]] == ["9", "14"]
    assert run("journals", "fragments", "a/journal", "-o", "yaml").code == 1


def test_a_reader_that_goes_away_is_no_failure_to_explain(remote: RemoteBroker) -> None:
    remote.fake.create("a/journal")
    remote.write("a/journal", bytes(5 << 20))
    command = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
    with subprocess.Popen(
        [*command, "journals", "read", "a/journal"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=120)
    assert errors == b""


# -- Failures ------------------------------------------------------------------------------------------------------


def test_a_failure_is_one_clear_line(run: CommandLine, remote: RemoteBroker) -> None:
    result = run("journals", "read", "no/such/journal")
    assert (result.code, result.output) == (1, "")
    assert result.errors.count("\n") == 1
    assert result.errors.startswith("coranto: read of no/such/journal")
    assert "coranto journals apply" in result.errors
    assert "coranto: selector" in run("journals", "list", "-l", "((").errors
    assert "No such file" in run("journals", "apply", "--specs", "/no/such/file").errors


def test_verbose_shows_the_traceback_wherever_it_stands(run: CommandLine, remote: RemoteBroker) -> None:
    for words in (
        ["--verbose", "journals", "read", "no/such/journal"],
        ["journals", "read", "no/such/journal", "--verbose"],
    ):
        result = run(*words)
        assert result.code == 1
        assert "Traceback" in result.errors
        assert "JournalNotFound" in result.errors


def test_a_journal_may_be_called_like_an_option(run: CommandLine, remote: RemoteBroker) -> None:
    result = run("journals", "read", "--", "--verbose")
    assert result.code == 1
    assert "Traceback" not in result.errors


def test_without_a_cluster(run: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CORANTO_ENDPOINT", raising=False)
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / "nothing"))
    result = run("journals", "list")
    assert (result.code, result.output) == (1, "")
    assert result.errors.count("\n") == 1
    assert "coranto up" in result.errors


# -- Plugins -------------------------------------------------------------------------------------------------------


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, "coranto.commands")


def use(plugin: importlib.metadata.EntryPoint, *words: str) -> object:
    app = typer.Typer()

    @app.callback()
    def root() -> None:
        """The root."""

    add_plugins(app, words, [plugin])
    return app(args=list(words), standalone_mode=False)


def test_a_plugins_commands_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin.py").write_text(
        "import typer\n"
        "app = typer.Typer()\n"
        "@app.callback()\n"
        "def root() -> None: ...\n"
        "@app.command()\n"
        "def greet(name: str) -> str: return f'hello {name}'\n"
        "nothing = 3\n"
    )
    (tmp_path / "needy_plugin.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert use(entry("greeter", "a_plugin:app"), "greeter", "greet", "you") == "hello you"
    with pytest.raises(Exception, match=r"a_plugin:nothing of `coranto bad` is not a typer\.Typer"):
        use(entry("bad", "a_plugin:nothing"), "bad")
    with pytest.raises(Exception, match=r"a_module_that_nobody_has.*pip install 'needy_plugin'"):
        use(entry("needy", "needy_plugin:app"), "needy", "any", "--thing")


@pytest.mark.parametrize(
    ("module", "extra"), [("coranto_broker", "broker"), ("dagster_coranto", "dagster"), ("pyspark_coranto", "spark")]
)
def test_a_missing_extra_is_named(module: str, extra: str) -> None:
    with pytest.raises(Exception, match=rf"pip install 'coranto\[{extra}\]'"):
        use(entry("part", f"{module}.no_such_module:app"), "part", "--help")
