"""The tutorial's commands and files, word for word, in a folder of their own.

Three commands are not run: those that make the environment, which is this one, and the one that installs the new
project into it; its sources are put on Python's path instead.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.system]

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
LEFT_OUT = ("python3 -m venv", ". .venv/bin/activate", "pip install ")
BLOCK = re.compile(r"(?:^`(?P<file>[^`]+)`:\n\n)?^```(?P<kind>\w+)\n(?P<content>.*?)^```", re.MULTILINE | re.DOTALL)


def script(left_out: tuple[str, ...] = LEFT_OUT) -> tuple[str, list[str]]:
    """Return the page as a shell script, and the lines of output that it promises.

    Commands that begin with `left_out` are not in it.
    """
    lines, promised = ["set -e"], []
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["kind"] != "console":
            assert block["file"], f"no file is named for {block['content'][:60]!r}"
            lines.append(f"mkdir -p $(dirname {block['file']}) && cat > {block['file']} <<'END'\n{block['content']}END")
            continue
        for line in block["content"].splitlines():
            command = line.removeprefix("$ ")
            if command == line:
                promised.append(line)
            elif command.startswith("coranto up "):
                lines += [command, "echo $! > up.pid", "until [ -s data/cluster.json ]; do kill -0 $!; sleep 0.1; done"]
            elif not command.startswith(left_out):
                lines += [f"echo '>>>' {command.split()[0]}", command]
            if command == "cd shop":
                lines.append("export PYTHONPATH=$PYTHONPATH:$PWD/src")
    return "\n".join(lines), promised


@pytest.mark.exhaustive
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    environment |= {
        "CORANTO_PORTS": os.environ["CORANTO_PORTS"],
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0",
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # As in an activated environment.
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    follow(*script(), tmp_path, environment)


def follow(text: str, promised: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the page's script in a folder, and compare its output with the promised lines."""
    assert text.count("\ndg ") == 5
    assert len(promised) == 7
    log = folder / "output"
    try:
        with log.open("w") as output:
            done = subprocess.run(
                ["bash", "-c", text], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
            )
        shown = log.read_text()
        assert done.returncode == 0, shown[-5000:]
        assert [line for line in shown.splitlines() if line in promised] == promised
        assert "RUN_FAILURE" not in shown
        assert shown.count("RUN_SUCCESS") == 3
    finally:
        _stop(folder / "up.pid")


def _stop(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return
    os.kill(pid, signal.SIGKILL)
