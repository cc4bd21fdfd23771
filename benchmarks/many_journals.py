"""One broker with many journals: time to start and to exit, and resources of idle journals.

Each measure is taken with FEW and with MANY journals. The floor is the broker with FEW: a ratio of 1 means that the
cost grows in proportion to the number of journals. Each pass creates the journals, lists them, writes to each, leaves
them idle, kills and restarts the broker, and finally stops it gracefully and starts it again.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.runner import Figure
from coranto.client import JournalClient, SyncJournalClient
from coranto.client.heads import Heads
from coranto.cluster import EmbeddedCluster
from coranto.coordination.etcd import MAX_TXN_OPS, Op, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb

FEW, MANY = 1_000, 10_000
LEASE_SECONDS = 10.0
REST_SECONDS = 60.0
"""Seconds without calls. Every replica makes one empty append in this interval."""
STOP_SECONDS = 300.0
WRITERS = 64
CONTENT = b"x" * 200
TIMEOUT_SECONDS = 600.0
_ALL = "name:prefix=bench/"
_FLOOR = f"the same with {FEW:,} journals"


def _name(number: int) -> str:
    return f"bench/part-{number:06}"


class Broker:
    """The only broker of a cluster, and the resource usage of its process."""

    def __init__(self, cluster: EmbeddedCluster, client: SyncJournalClient) -> None:
        self.cluster = cluster
        self.client = client

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.cluster.info.pids["broker-0"])

    @property
    def log(self) -> Path:
        return self.cluster.data_dir / "logs" / "broker-0.log"

    def processor(self) -> float:
        """Return the processor time of the current broker process, in seconds."""
        return sum(self.process.cpu_times()[:2])

    def memory(self) -> int:
        """Return the resident memory in bytes."""
        return int(self.process.memory_info().rss)

    def files(self) -> int:
        """Return the number of open files."""
        return int(self.process.num_fds())

    def create(self, count: int) -> None:
        """Create journals with one store in etcd, and wait until the broker serves all of them."""
        layout = Layout(self.cluster.info.etcd_prefix)
        ops: list[Op] = []
        for number in range(count):
            fragment = pb.JournalSpec.Fragment(length=1 << 20, compression_codec=pb.NONE, stores=["file:///"])
            fragment.refresh_interval.FromSeconds(3_600)
            spec = pb.JournalSpec(name=_name(number), replication=1, fragment=fragment)
            ops.append(Put(layout.item_key(spec.name), spec.SerializeToString()))

        async def put() -> None:
            async with EtcdCoordinator(self.cluster.info.etcd) as coordinator:
                for begin in range(0, len(ops), MAX_TXN_OPS):
                    await coordinator.txn([], ops[begin : begin + MAX_TXN_OPS])

        asyncio.run(put())
        self.wait_until_serving(count)

    def wait_until_serving(self, count: int) -> None:
        """Wait until the broker serves all journals and has listed their stores.

        Polling slows the broker. So the polling interval grows, and the measured time is up to 10 % longer.
        """
        begun = time.perf_counter()
        while not self._serves(count):
            time.sleep(max(0.25, (time.perf_counter() - begun) / 10))

    def _serves(self, count: int) -> bool:
        try:
            heads: Heads = self.client.heads(_ALL)
        except CorantoError:
            return False
        return len(heads) == count and all(each.known and each.listed and each.in_sync for each in heads)

    def write_to_all(self, count: int) -> None:
        """Append once to each journal."""

        async def write() -> None:
            numbers = iter(range(count))
            async with JournalClient(self.cluster.info.endpoint, retry_timeout=TIMEOUT_SECONDS) as client:

                async def writer() -> None:
                    for number in numbers:
                        await client.append(_name(number), CONTENT)

                await asyncio.gather(*(writer() for _ in range(WRITERS)))

        asyncio.run(write())

    def status(self) -> None:
        """Run `coranto status`."""
        cluster = self.cluster.info
        command = [sys.executable, "-c", "from coranto.cli import main; main()", "status", "--output", "json"]
        with tempfile.TemporaryDirectory() as state:
            environment = os.environ | {
                "CORANTO_BROKER_ETCD_PREFIX": cluster.etcd_prefix,
                "XDG_STATE_HOME": state,
            }
            place = ["--endpoint", cluster.endpoint, "--etcd", cluster.etcd]
            subprocess.run([*command, *place], env=environment, stdout=subprocess.DEVNULL, check=True)

    def resting(self) -> float:
        """Return the share of a core that the broker uses without calls."""
        before = self.processor()
        time.sleep(REST_SECONDS)
        return (self.processor() - before) / REST_SECONDS

    def stop(self) -> None:
        """Stop the broker gracefully. Print a line if it lost its lease or left content in local files."""
        begin = self.log.stat().st_size
        self.cluster.stop_broker()
        with self.log.open("rb") as log:
            log.seek(begin)
            said = log.read().decode()
        for problem in ("lease.lost", "lease.keepalive_failed", "left_in_local_files", "leave_timed_out"):
            if problem in said:
                print(f"during its exit, the broker logged {problem}")


@contextmanager
def one_broker() -> Iterator[Broker]:
    """Yield the broker of a new cluster."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(
            Path(folder),
            lease_seconds=LEASE_SECONDS,
            supervise=False,
            etcd_fsync=False,
            stop_seconds=STOP_SECONDS,
            broker_arguments=("--journal-limit", str(2 * MANY), "--exit-seconds", "120"),
        ) as cluster,
        SyncJournalClient(cluster.info.endpoint, retry_timeout=TIMEOUT_SECONDS) as client,
    ):
        yield Broker(cluster, client)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measured(count: int) -> dict[str, float]:
    """Return all measures with `count` journals, by name. Times are seconds, sizes bytes."""
    found: dict[str, float] = {}
    with one_broker() as broker:
        memory, files = broker.memory(), broker.files()
        found["created, in sync"] = timed(lambda: broker.create(count))
        found["processor time until then"] = broker.processor()
        found["memory, untouched"] = broker.memory() - memory
        found["files, untouched"] = broker.files() - files
        found["listing"] = statistics.median(timed(lambda: broker.client.list(_ALL)) for _ in range(3))
        found["heads"] = statistics.median(timed(lambda: broker.client.heads(_ALL)) for _ in range(3))
        found["status, a process"] = statistics.median(timed(broker.status) for _ in range(3))
        found["written to each"] = timed(lambda: broker.write_to_all(count))
        found["memory, touched"] = broker.memory() - memory
        found["files, touched"] = broker.files() - files
        found["processors used at rest"] = broker.resting()
        broker.cluster.kill_broker()
        _started(broker, count, "after a kill", found)
        found["graceful exit"] = timed(broker.stop)
        _started(broker, count, "after an exit", found)
    return found


def _started(broker: Broker, count: int, when: str, found: dict[str, float]) -> None:
    """Start the broker, and record the time until it answers, appends, and serves all journals."""
    begun = time.perf_counter()
    broker.cluster.start_broker()
    found[f"answers {when}"] = time.perf_counter() - begun
    broker.client.append(_name(count // 2), CONTENT)
    found[f"appends {when}"] = time.perf_counter() - begun
    broker.wait_until_serving(count)
    found[f"all in sync {when}"] = time.perf_counter() - begun
    found[f"processor time until all in sync {when}"] = broker.processor()


def run(rounds: int) -> list[Figure]:
    """Measure one pair for every three rounds: a pass with MANY journals takes minutes."""
    pairs = [(measured(FEW), measured(MANY)) for _ in range(max(1, rounds // 3))]
    figures = []
    for name in pairs[0][0]:
        few, many = ([found[name] for found in side] for side in zip(*pairs, strict=True))
        medians = f"{statistics.median(few):,.3g} and {statistics.median(many):,.3g}"
        # Invert costs: one that grows in proportion has the ratio 1, and one that grows faster has a lower ratio.
        figures.append(
            Figure(
                f"{name} ({medians})",
                "journals / unit",
                [MANY / max(value, 1e-3) for value in many],
                [FEW / max(value, 1e-3) for value in few],
                _FLOOR,
            )
        )
    return figures
