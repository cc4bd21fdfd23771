"""The embedded cluster with its real parts: etcd and broker processes, and their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from coranto.cluster import EmbeddedCluster, EtcdServer, locate
from coranto.cluster.info import process_start
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import KeySpaceState
from coranto.coordination.layout import Layout
from coranto.errors import ClusterError, DirectoryInUse, InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc

pytestmark = pytest.mark.integration

WAIT_SECONDS = 120.0


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CORANTO_ETCD", "CORANTO_DATA", "CORANTO_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def problem_of(cluster: EmbeddedCluster) -> str:
    try:
        cluster.check()
    except ClusterError as error:
        return str(error)
    return ""


def have_ended(*pids: int) -> bool:
    return not any(process_start(pid) for pid in pids)


def listing(endpoint: str) -> pb.ListResponse:
    with grpc.insecure_channel(endpoint) as channel:
        response: pb.ListResponse = next(pb_grpc.JournalStub(channel).List(pb.ListRequest(), timeout=WAIT_SECONDS))
    return response


async def key_space(cluster: EmbeddedCluster) -> KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]:
    async with EtcdCoordinator(cluster.info.etcd) as coordinator:
        keyspace = KeySpace(coordinator, Layout(cluster.info.etcd_prefix), JournalEntities())
        state = await keyspace.start()
        await keyspace.close()
        return state


async def test_etcd_alone_restarts_with_its_data_and_ports(tmp_path: Path) -> None:
    progress: list[str] = []
    with EmbeddedCluster(tmp_path, brokers=0, etcd_fsync=False, progress=progress.append) as cluster:
        info = cluster.info
        assert progress == ["starting etcd"]
        assert locate(tmp_path) == info
        async with EtcdCoordinator(info.etcd) as coordinator:
            written = await coordinator.txn([], [Put("/kept", b"yes")])
        with pytest.raises(DirectoryInUse, match=f"process {os.getpid()}"):
            EmbeddedCluster(tmp_path, brokers=0).start()
        with pytest.raises(ClusterError, match="once"):
            cluster.start()
    eventually(lambda: have_ended(info.pids["etcd"]))
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)
    with pytest.raises(InvalidInput, match="no broker 0"):
        cluster.kill_broker()

    with EmbeddedCluster(tmp_path, brokers=0, etcd_fsync=False) as cluster:
        assert cluster.info.etcd == info.etcd, "ports are kept while they are free"
        async with EtcdCoordinator(cluster.info.etcd) as coordinator:
            header, kv = await coordinator.get("/kept")
        assert kv is not None
        assert kv.value == b"yes"
        assert header.cluster_id == written.header.cluster_id


def test_two_clusters_have_two_etcds(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "a", fsync=False) as one, EtcdServer(tmp_path / "b", fsync=False) as two:
        assert one.endpoint != two.endpoint
        with pytest.raises(ClusterError, match="started already"):
            one.start()


async def test_brokers_serve_and_come_back_as_the_same_members(tmp_path: Path) -> None:
    with EmbeddedCluster(
        tmp_path, brokers=2, lease_seconds=60, zones=("zone-a", "zone-b"), etcd_fsync=False
    ) as cluster:
        info = cluster.info
        assert len(info.endpoints) == 2
        before = await key_space(cluster)
        assert [str(member.id) for member in before.members] == ["zone-a#broker-0", "zone-b#broker-1"]
        for endpoint in info.endpoints:
            response = listing(endpoint)
            assert response.status == pb.OK
            assert response.header.etcd.cluster_id == before.header.cluster_id

        os.kill(info.pids["etcd"], signal.SIGKILL)
        os.kill(info.pids["broker-0"], signal.SIGKILL)
        eventually(lambda: cluster.info.pids["broker-0"] != info.pids["broker-0"])
        cluster.wait_ready()
        assert cluster.info.endpoints == info.endpoints
        assert cluster.info.pids["etcd"] != info.pids["etcd"]
        assert cluster.info.pids["broker-1"] == info.pids["broker-1"], "it was not affected"
        assert locate(tmp_path) == cluster.info
        after = await key_space(cluster)
        revisions = {m.id: (m.kv.create_revision, m.kv.lease) for m in before.members}
        assert {m.id: (m.kv.create_revision, m.kv.lease) for m in after.members} == revisions, "leases were resumed"
        cluster.check()
    assert have_ended(*(pid for name, pid in info.pids.items() if name != "cluster"))


async def test_without_supervision_dead_processes_stay_dead_until_started(tmp_path: Path) -> None:
    with EmbeddedCluster(tmp_path, brokers=2, lease_seconds=60, supervise=False, etcd_fsync=False) as cluster:
        pid = cluster.info.pids["broker-1"]
        cluster.kill_broker(1)
        assert have_ended(pid)
        cluster.check()
        async with EtcdCoordinator(cluster.info.etcd) as coordinator:
            keyspace = KeySpace(coordinator, Layout(cluster.info.etcd_prefix), JournalEntities())
            await keyspace.start()
            (dead,) = (member.kv for member in keyspace.state.members if member.id.suffix == "broker-1")
            await coordinator.lease_revoke(dead.lease)  # As etcd does when its space is exhausted.
            await keyspace.wait_until(lambda state: len(state.members) == 1, WAIT_SECONDS)
            cluster.start_broker(1)
            await keyspace.wait_until(lambda state: len(state.members) == 2, WAIT_SECONDS)
            cluster.stop_broker(1)
            await keyspace.wait_until(lambda state: len(state.members) == 1, WAIT_SECONDS)
            await keyspace.close()
        cluster.signal_broker(0, signal.SIGKILL)
        eventually(lambda: "broker-0 ended with SIGKILL" in problem_of(cluster))
    with pytest.raises(ClusterError, match="not running"):
        cluster.start_broker(0)


async def test_an_external_etcd_can_be_used(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "mine", fsync=False) as etcd:
        environment = {"CORANTO_ETCD": f"http://{etcd.endpoint}"}
        prefixes = set()
        for folder in ("one", "two", "one"):
            with EmbeddedCluster(tmp_path / folder, brokers=0, environment=environment) as cluster:
                assert cluster.info.etcd == f"http://{etcd.endpoint}"
                assert "etcd" not in cluster.info.pids
                prefixes.add(cluster.info.etcd_prefix)
                with pytest.raises(ClusterError, match="does not run one"):
                    _ = cluster.etcd
        assert len(prefixes) == 2, "each directory has keys of its own, always the same"
        assert etcd.process.alive
        with EmbeddedCluster(tmp_path / "three", environment=environment) as cluster:
            assert listing(cluster.info.endpoint).status == pb.OK
            assert len((await key_space(cluster)).members) == 1


def test_a_failed_start_reports_the_cause_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path, etcd_fsync=False, broker_arguments=["--no-such-option"])
    with pytest.raises(ClusterError, match=r"(?s)broker-0 ended with exit code 2.*no-such-option"):
        cluster.start()
    assert not (tmp_path / "cluster.json").exists()
    with EmbeddedCluster(tmp_path, brokers=0, etcd_fsync=False):
        pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"brokers": -1}, "-1 brokers"), ({"lease_seconds": 0.5}, "lease_seconds"), ({"zones": ()}, "zone")],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=problem):
        EmbeddedCluster(tmp_path, **arguments)  # type: ignore[arg-type]


def run_up(tmp_path: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    script = (
        "import sys; from pathlib import Path; from coranto.cluster import run_foreground\n"
        "run_foreground(Path(sys.argv[1]), 1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if b"Ctrl-C" in line:
            return process, dict(locate(tmp_path).pids)
    raise AssertionError(f"ended with {process.wait()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stops_in_order_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    process, pids = run_up(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    assert output.strip().endswith(b"stopped")
    assert have_ended(*pids.values())
    log = (tmp_path / "logs" / "broker-0.log").read_text()
    assert "Traceback" not in log


@pytest.mark.system
def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    process, pids = run_up(tmp_path)
    process.kill()
    process.communicate(timeout=WAIT_SECONDS)
    eventually(lambda: have_ended(*pids.values()))
    with pytest.raises(ClusterError, match="no cluster runs"):
        locate(tmp_path)
    with EmbeddedCluster(tmp_path, etcd_fsync=False) as cluster:
        assert listing(cluster.info.endpoint).status == pb.OK
        assert "lease.resumed" in (tmp_path / "logs" / "broker-0.log").read_text()
