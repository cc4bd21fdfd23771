"""The root of the command line: usage, failures, interrupts and closed output."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coranto.checkup import Condition
from coranto.testing.command_line import CommandLine, RemoteBroker


@pytest.mark.parametrize("words", ["version", "--version"])
def test_version_is_printed(run: CommandLine, words: str) -> None:
    result = run(words)
    assert result.code == 0
    assert result.output.startswith(f"coranto {importlib.metadata.version('coranto')} (Python 3.")


def test_help_names_every_command_without_loading_plugins(run: CommandLine) -> None:
    result = run("--help")
    assert result.code == 0
    groups = re.split(r"─ ([A-Z][A-Za-z ]+) ─", result.output)
    listed = dict(zip(groups[1::2], groups[2::2], strict=True))
    for group, command in (
        ("Cluster", "up"),
        ("Cluster", "broker"),
        ("Data", "journals"),
        ("Consumers", "shards"),
        ("Audit and repair", "recover"),
        ("Demo", "demo"),
        ("Other", "version"),
    ):
        assert f" {command} " in listed[group]
    assert " demo " not in listed["Cluster"] + listed["Data"]
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
def test_wrong_usage_is_reported(run: CommandLine, words: list[str]) -> None:
    result = run(*words)
    assert result.code == 2
    assert result.output == ""
    assert "Usage" in result.errors


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


def test_a_closed_output_pipe_is_not_reported_as_a_failure(remote: RemoteBroker) -> None:
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


def test_a_failure_is_one_clear_line(run: CommandLine, remote: RemoteBroker) -> None:
    result = run("journals", "read", "no/such/journal")
    assert (result.code, result.output) == (1, "")
    assert result.errors.count("\n") == 1
    assert result.errors.startswith("coranto: read of no/such/journal")
    assert "coranto journals apply" in result.errors
    assert "coranto: selector" in run("journals", "list", "-l", "((").errors
    assert "No such file" in run("journals", "apply", "--specs", "/no/such/file").errors


def test_verbose_shows_the_traceback_in_any_position(run: CommandLine, remote: RemoteBroker) -> None:
    for words in (
        ["--verbose", "journals", "read", "no/such/journal"],
        ["journals", "read", "no/such/journal", "--verbose"],
    ):
        result = run(*words)
        assert result.code == 1
        assert "Traceback" in result.errors
        assert "JournalNotFound" in result.errors


def test_a_journal_may_be_named_like_an_option(run: CommandLine, remote: RemoteBroker) -> None:
    result = run("journals", "read", "--", "--verbose")
    assert result.code == 1
    assert "Traceback" not in result.errors


def test_a_missing_cluster_is_reported_with_advice(
    run: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CORANTO_ENDPOINT", raising=False)
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / "nothing"))
    result = run("journals", "list")
    assert (result.code, result.output) == (1, "")
    assert result.errors.count("\n") == 1
    assert "coranto up" in result.errors


def test_a_full_output_device_is_reported_once() -> None:
    script = "import sys; from coranto.cli import main; sys.exit(main(['version']))"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"coranto: No space left on device\n")


def test_a_cluster_without_the_brokers_requirements_names_the_extra(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None; from coranto.cli import main; "
        f"sys.exit(main(['up', '--data-dir', {str(tmp_path / 'data')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "pip install 'coranto[broker]'" in done.stderr
    assert not (tmp_path / "data").exists()


def test_the_doctor_writes_a_line_for_each_finding_to_a_pipe(tmp_path: Path) -> None:
    """Without boxes, and without wrapping."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main(['doctor']))"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
        env={**kept, "COLUMNS": "20"},
    )
    assert done.stdout.isascii()
    conditions = "|".join(re.escape(each.value) for each in Condition)
    for line in done.stdout.splitlines():
        assert re.match(rf"({conditions}): \S|    \S", line), line
    assert re.search("^ok: Python: .* 3", done.stdout, re.MULTILINE)
