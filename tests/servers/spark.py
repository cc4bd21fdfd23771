"""A standalone cluster of Spark: a master with two workers, as processes of this machine."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coranto.cluster.processes import free_port


@contextmanager
def running(log: Path, *command: object, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command during a block. Its output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen([str(word) for word in command], env=env, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def until(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Wait for a condition while processes run."""
    deadline = time.monotonic() + 300
    while not condition():
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@contextmanager
def standalone_cluster(folder: Path, home: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Run a master with two workers from the Spark in `home`, and yield its URL."""
    port, status = free_port(), free_port()
    url, spark_class = f"spark://127.0.0.1:{port}", home / "bin" / "spark-class"
    with ExitStack() as stack:
        master = (spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", port)
        processes = [stack.enter_context(running(folder / "master", *master, "--webui-port", status, env=env))]
        worker = (spark_class, "org.apache.spark.deploy.worker.Worker", "--webui-port", 0)
        size = ("--cores", 1, "--memory", "700m", "--work-dir", folder / "work")
        processes += [
            stack.enter_context(
                running(folder / host, *worker, *size, "--host", host, url, env={**env, "SPARK_LOCAL_IP": host})
            )
            # Spark assigns a second attempt to another host.
            for host in ("127.0.0.1", "127.0.0.2")
        ]

        def complete() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{status}/json/", timeout=30) as answer:
                    return bool(json.load(answer)["aliveworkers"] == 2)
            except (OSError, ValueError):  # It does not answer yet, or without its state.
                return False

        until(complete, processes, folder / "master")
        yield url
