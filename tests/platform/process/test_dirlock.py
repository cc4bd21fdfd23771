"""Directories for one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coranto.errors import DirectoryInUse
from coranto.process.dirlock import DirectoryLock


def test_a_directory_has_one_lock_holder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with DirectoryLock(folder):
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}") as caught:
            DirectoryLock(folder)
        assert (caught.value.directory, caught.value.pid) == (folder, os.getpid())
        DirectoryLock(folder, name="another").close()
    again = DirectoryLock(folder)
    again.close()
    again.close()


def test_a_dead_process_releases_its_lock(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from coranto.process.dirlock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryInUse, match=str(holder.pid)):
            DirectoryLock(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    DirectoryLock(tmp_path).close()


def test_a_created_directory_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    """It holds spools, fragments and etcd's data, and other users need a token to read their content."""
    before = os.umask(0o022)
    try:
        DirectoryLock(tmp_path / "data").close()
    finally:
        os.umask(before)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
