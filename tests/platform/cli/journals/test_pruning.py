"""`coranto journals prune` against a fake broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto import labels
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import FileFragments
from coranto.testing.command_line import CommandLine, RemoteBroker
from tests.platform.cli.journals.conftest import persist


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


def test_fragments_shared_with_a_fork_are_kept(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    spec = remote.fake.journals[parts[0]].spec
    spec.fragment.retention.seconds = 3600
    spec.labels.CopyFrom(labels.add_value(spec.labels, labels.FORK_HOLD, "11/a/fork"))
    old = [persist(remote, parts[0], content, tmp_path, 3700) for content in (b"old content", b"shared", b"newest")]
    assert "removed 1 fragments" in run("prune", parts[0]).output
    assert [path.exists() for path in old] == [False, True, True]


@pytest.mark.parametrize("change", ["fork", "retention"])
def test_pruning_stops_when_a_journal_is_forked_or_its_retention_grows(
    change: str,
    run: CommandLine,
    remote: RemoteBroker,
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CORANTO_FILE_ROOT", str(tmp_path))
    spec = remote.fake.journals[parts[0]].spec
    spec.fragment.retention.seconds = 3600
    old = [persist(remote, parts[0], content, tmp_path, 3700) for content in (b"first", b"second", b"third", b"end")]
    remove = FileFragments.remove

    async def remove_then_change(self: FileFragments, fragment: Fragment) -> None:
        await remove(self, fragment)
        if change == "fork":
            spec.labels.CopyFrom(labels.add_value(spec.labels, labels.FORK_HOLD, f"{fragment.end}/a/fork"))
        else:
            spec.fragment.retention.seconds = 3650

    monkeypatch.setattr(FileFragments, "remove", remove_then_change)
    result = run("prune", parts[0])
    assert "removed 1 fragments" in result.output
    assert f"{parts[0]} now has a fork or another retention" in result.errors
    assert [path.exists() for path in old] == [False, True, True, True]


def test_pruning_files_requires_the_file_root(
    run: CommandLine, remote: RemoteBroker, parts: tuple[str, ...], tmp_path: Path
) -> None:
    remote.fake.journals[parts[0]].spec.fragment.retention.seconds = 3600
    old = persist(remote, parts[0], b"old content", tmp_path, 3700)
    persist(remote, parts[0], b"newest, which is kept", tmp_path, 3700)
    result = run("prune", parts[0])
    assert (result.code, result.output) == (1, "")
    assert "$CORANTO_FILE_ROOT" in result.errors
    assert old.exists()
