"""Child processes for tests."""

from __future__ import annotations

import os
from pathlib import Path

from coranto.cluster.processes import ChildProcess


def child(folder: Path, command: list[str]) -> ChildProcess:
    return ChildProcess("child", command, log=folder / "logs" / "child.log", cwd=folder, environment=os.environ)
