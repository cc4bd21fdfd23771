"""Child processes for tests."""

from __future__ import annotations

import os
from pathlib import Path

from coranto.cluster.processes import ChildProcess


def child(folder: Path, command: list[str]) -> ChildProcess:
    return ChildProcess("child", command, log=folder / "logs" / "child.log", cwd=folder, environment=os.environ)


def write_program(path: Path, version: str) -> None:
    """Make a program that reports this version of etcd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\necho 'Git SHA: none'\n")
    path.chmod(0o755)
