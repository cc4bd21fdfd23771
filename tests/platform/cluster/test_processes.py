"""Child processes, their ports and their end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coranto.cluster.brokers import port_of
from coranto.cluster.info import process_start
from coranto.cluster.processes import ChildProcess, describe_exit, free_port, wait_ready
from coranto.errors import ClusterError, InvalidInput
from tests.platform.cluster.children import child

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def prints(process: ChildProcess, text: str) -> None:
    wait_ready(process, lambda: text in process.log_tail(), timeout_seconds=120, cancelled=lambda: False)


def test_free_ports_are_chosen_and_the_preferred_one_if_possible() -> None:
    port = free_port()
    assert free_port(port) == port
    assert free_port(port, taken=[port]) != port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert free_port(port) != port
    assert [port_of(text) for text in ("127.0.0.1:80", "host", "", "host:x")] == [80, 0, 0, 0]


def test_ports_are_in_the_range_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = free_port()
    monkeypatch.setenv("CORANTO_PORTS", f"{wanted}-{wanted}")
    assert free_port() == wanted
    with pytest.raises(ClusterError, match=f"between {wanted} and {wanted}"):
        free_port(taken=[wanted])
    for nonsense in ("20000", "20001-20000", "a-b", "0-10", "60000-65536"):
        monkeypatch.setenv("CORANTO_PORTS", nonsense)
        with pytest.raises(InvalidInput, match="not a range of ports"):
            free_port()


def test_children_are_terminated_and_then_killed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    polite, stubborn = child(tmp_path, SLEEPER), child(tmp_path / "other", STUBBORN)
    prints(polite, "up")
    prints(stubborn, "up")
    assert polite.alive
    assert polite.stop(120)
    assert polite.exit_code == -signal.SIGTERM
    assert not stubborn.stop(0.2)
    assert stubborn.exit_code == -signal.SIGKILL
    polite.signal(signal.SIGTERM)
    assert describe_exit(polite.exit_code) == "SIGTERM"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-99) == "signal 99"


def test_the_output_of_a_child_that_ends_too_soon_is_shown(tmp_path: Path) -> None:
    process = child(tmp_path, [sys.executable, "-c", "print('why it failed'); raise SystemExit(3)"])
    with pytest.raises(ClusterError, match=r"(?s)exit code 3.*why it failed"):
        wait_ready(process, lambda: False, timeout_seconds=120, cancelled=lambda: False)
    second = child(tmp_path, SLEEPER)
    prints(second, "up")
    assert "why it failed" not in second.log_tail(), "that was an earlier process"
    with pytest.raises(ClusterError, match=r"(?s)not ready after 0.1 s.*up"):
        wait_ready(second, lambda: False, timeout_seconds=0.1, cancelled=lambda: False)
    with pytest.raises(ClusterError, match="closing"):
        wait_ready(second, lambda: False, timeout_seconds=120, cancelled=lambda: True)
    second.kill()


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; from coranto.cluster.processes import ChildProcess\n"
        "folder = Path(sys.argv[1])\n"
        "child = ChildProcess('child', [sys.executable, '-c', 'import time; time.sleep(600)'], log=folder / 'log', "
        "cwd=folder, environment=os.environ)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert process_start(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 120
    while process_start(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not process_start(pid)
