"""`coranto journals edit` against a fake broker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.testing.fake_broker import CallPoint


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes an editor that runs Python statements on `text`, one for each time it opens."""

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


def test_a_missing_editor_is_reported(
    run: CommandLine, parts: tuple[str, ...], editor: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = editor()
    monkeypatch.setenv("CORANTO_EDITOR", "/no/such/editor -x")
    result = run("edit", parts[0])
    assert result.code == 1
    assert "cannot start the editor '/no/such/editor -x'" in result.errors
    assert left(seen) == []
