"""The embedded cluster's small parts: the directory lock, ports, cluster.json, and when to start again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coranto.cluster import ClusterInfo, locate
from coranto.cluster import info as cluster_info
from coranto.cluster.brokers import Restarts, port_of
from coranto.cluster.info import CLUSTER_FILE, process_start
from coranto.cluster.processes import ChildProcess, describe_exit, free_port, wait_ready
from coranto.errors import ClusterError, DirectoryInUse, InvalidInput
from coranto.process.dirlock import DirectoryLock

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def child(folder: Path, command: list[str]) -> ChildProcess:
    return ChildProcess("child", command, log=folder / "logs" / "child.log", cwd=folder, environment=os.environ)


def prints(process: ChildProcess, text: str) -> None:
    wait_ready(process, lambda: text in process.last_words(), timeout_seconds=120, cancelled=lambda: False)


def test_a_directory_has_one_holder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with DirectoryLock(folder):
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}") as caught:
            DirectoryLock(folder)
        assert (caught.value.directory, caught.value.pid) == (folder, os.getpid())
        DirectoryLock(folder, name="another").close()
    again = DirectoryLock(folder)
    again.close()
    again.close()


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
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


def test_ports_are_free_and_the_preferred_one_is_taken_when_it_can_be() -> None:
    port = free_port()
    assert free_port(port) == port
    assert free_port(port, taken=[port]) != port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        assert free_port(port) != port
    assert [port_of(text) for text in ("127.0.0.1:80", "host", "", "host:x")] == [80, 0, 0, 0]


def test_ports_are_of_the_range_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = free_port()
    monkeypatch.setenv("CORANTO_PORTS", f"{wanted}-{wanted}")
    assert free_port() == wanted
    with pytest.raises(ClusterError, match=f"between {wanted} and {wanted}"):
        free_port(taken=[wanted])
    for nonsense in ("20000", "20001-20000", "a-b", "0-10", "60000-65536"):
        monkeypatch.setenv("CORANTO_PORTS", nonsense)
        with pytest.raises(InvalidInput, match="not a range of ports"):
            free_port()


def test_children_are_stopped_politely_then_by_force(tmp_path: Path) -> None:
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


def test_a_child_that_ends_too_soon_is_quoted(tmp_path: Path) -> None:
    process = child(tmp_path, [sys.executable, "-c", "print('why it failed'); raise SystemExit(3)"])
    with pytest.raises(ClusterError, match=r"(?s)exit code 3.*why it failed"):
        wait_ready(process, lambda: False, timeout_seconds=120, cancelled=lambda: False)
    second = child(tmp_path, SLEEPER)
    prints(second, "up")
    assert "why it failed" not in second.last_words(), "that was an earlier process"
    with pytest.raises(ClusterError, match=r"(?s)not ready after 0.1 s.*up"):
        wait_ready(second, lambda: False, timeout_seconds=0.1, cancelled=lambda: False)
    with pytest.raises(ClusterError, match="closing"):
        wait_ready(second, lambda: False, timeout_seconds=120, cancelled=lambda: True)
    second.kill()


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
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


def info(data_dir: Path) -> ClusterInfo:
    return ClusterInfo(
        data_dir=data_dir,
        etcd="127.0.0.1:1",
        etcd_prefix="/p",
        endpoints=("127.0.0.1:2", "127.0.0.1:3"),
        file_root=data_dir / "fragments",
        pids={"cluster": os.getpid(), "etcd": 5},
    )


def test_a_cluster_is_located_by_argument_environment_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = info(tmp_path / ".coranto")
    cluster_info.save(saved)
    assert locate(tmp_path / ".coranto") == saved
    assert saved.endpoint == "127.0.0.1:2"
    monkeypatch.delenv("CORANTO_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert locate() == saved
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(ClusterError, match=r"elsewhere.*coranto up"):
        locate()
    monkeypatch.setenv("CORANTO_DATA", str(tmp_path / ".coranto"))
    assert locate() == saved


def test_a_cluster_whose_process_is_gone_or_another_does_not_run(tmp_path: Path) -> None:
    cluster_info.save(info(tmp_path), running=False)
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)
    cluster_info.save(info(tmp_path))
    content = json.loads((tmp_path / CLUSTER_FILE).read_text())
    for change in ({"started": "1"}, {"pids": {"cluster": 4_000_000}}, {"pids": {}}, {"endpoints": None}):
        (tmp_path / CLUSTER_FILE).write_text(json.dumps(content | change))
        with pytest.raises(ClusterError, match="no cluster runs"):
            locate(tmp_path)
    (tmp_path / CLUSTER_FILE).write_text("{")
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)


def test_a_cluster_without_brokers_says_so(tmp_path: Path) -> None:
    lonely = ClusterInfo(tmp_path, "127.0.0.1:1", "/p", (), tmp_path, {"cluster": os.getpid()})
    with pytest.raises(ClusterError, match="without brokers"):
        _ = lonely.endpoint


def test_a_process_that_keeps_dying_is_given_up_on(tmp_path: Path) -> None:
    """Restarted at once, then after growing pauses, ten times; one that lived for a while begins anew."""
    restarts = Restarts()
    pauses = []
    now = 0.0
    for _ in range(10):
        dead = child(tmp_path, ["/bin/false"])
        dead.wait(120)
        dead.started = now
        begin = now
        while not restarts.due(now, dead):
            now += 0.1
        pauses.append(now - begin)
    assert pauses == pytest.approx([0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0, 5.0], abs=0.11)
    last = child(tmp_path, ["/bin/false"])
    last.wait(120)
    last.started = now
    with pytest.raises(ClusterError, match="exit code 1"):
        restarts.due(now, last)
    lived = child(tmp_path, ["/bin/false"])
    lived.wait(120)
    lived.started = now
    assert restarts.due(now + 31, lived)


def test_a_directory_that_is_created_is_its_owner_s_alone(tmp_path: Path) -> None:
    """Spools, fragments and etcd's data lie in it: content that others need a token to read."""
    before = os.umask(0o022)
    try:
        DirectoryLock(tmp_path / "data").close()
    finally:
        os.umask(before)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
