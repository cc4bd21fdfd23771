"""The coordinator on a real etcd."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from coranto.client import ClientTls
from coranto.cluster import EmbeddedCluster, EtcdServer
from coranto.cluster.etcd_program import find_etcd
from coranto.cluster.etcd_server import ask_etcd, etcd_tls, is_healthy, keep_lease_alive
from coranto.cluster.processes import ChildProcess, free_port, wait_ready
from coranto.coordination.etcd import Put, prefix_end
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.etcd_endpoints import channel_target
from coranto.coordination.layout import Layout
from coranto.errors import CoordinationError, EtcdFull, InvalidInput, TxnOutcomeUnknown, Unavailable, WatchReset


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("localhost:2379", "localhost:2379"),
        ("http://etcd:2379", "etcd:2379"),
        ("http://[::1]:2379/", "[::1]:2379"),
        ("https://etcd:2379", "etcd:2379"),
        ("unix:///run/etcd.sock", "unix:///run/etcd.sock"),
        ("10.0.0.1:1, 10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
    ],
)
def test_endpoints_are_parsed(endpoint: str, target: str) -> None:
    assert channel_target(endpoint) == target


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "etcd",
        "etcd:x",
        "ftp://etcd:1",
        "https://etcd",
        "http://etcd:1/path",
        "a:1,b:2",
        "etcd:99999",
        "https://10.0.0.1:1,10.0.0.2:2",
    ],
)
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(InvalidInput):
        channel_target(endpoint)


def test_the_end_of_a_prefix_range_is_the_next_key() -> None:
    assert prefix_end(b"/a/") == b"/a0"
    assert prefix_end(b"a\xff\xff") == b"b"
    assert prefix_end(b"\xff") == b"\0"


@pytest.mark.integration
async def test_long_ranges_are_read_in_pages_of_the_same_revision(
    coordinator: EtcdCoordinator, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto.coordination.etcd_client._PAGE", 7)
    await coordinator.txn([], [Put(f"{layout.root}{i:03}", b"") for i in range(50)])
    snapshot = await coordinator.range(layout.root)
    assert [kv.key for kv in snapshot.kvs] == [f"{layout.root}{i:03}" for i in range(50)]
    assert snapshot.count == 50
    assert len((await coordinator.range(layout.root, limit=15)).kvs) == 15


@pytest.mark.integration
async def test_a_refusal_of_etcd_raises_a_coordination_error(coordinator: EtcdCoordinator, layout: Layout) -> None:
    with pytest.raises(CoordinationError, match="etcd refused Txn"):
        await coordinator.txn([], [Put(layout.root, b""), Put(layout.root, b"")])
    with pytest.raises(CoordinationError, match="lease"):
        await coordinator.txn([], [Put(layout.root, b"", lease=12345)])
    with pytest.raises(InvalidInput, match="revision 0"):
        await anext(coordinator.watch(layout.root, 0))


@pytest.mark.integration
async def test_keys_that_are_not_utf8_are_tolerated(coordinator: EtcdCoordinator, layout: Layout) -> None:
    key = layout.root + b"\xff\x00".decode("utf-8", "surrogateescape")
    await coordinator.txn([], [Put(key, b"odd")])
    assert [kv.key for kv in (await coordinator.range(layout.root)).kvs] == [key]


def _compact(etcd: EtcdServer, revision: int) -> None:
    request = urllib.request.Request(
        f"http://{etcd.endpoint}/v3/kv/compaction", data=json.dumps({"revision": revision}).encode()
    )
    urllib.request.urlopen(request, timeout=60).close()


@pytest.mark.integration
async def test_a_watch_survives_a_restart_and_reports_lost_history(tmp_path: Path, layout: Layout) -> None:
    """On a separate etcd: killed and restarted, compacted, and replaced by an empty one."""
    with EtcdServer(tmp_path / "one", fsync=False) as etcd:
        async with EtcdCoordinator(etcd.endpoint, timeout_seconds=60) as coordinator:
            first = await coordinator.txn([], [Put(layout.root + "a", b"1")])
            async with aclosing(coordinator.watch(layout.root, first.header.revision)) as batches:
                assert (await anext(batches)).events[0].kv.value == b"1"
                following = asyncio.ensure_future(anext(batches))
                await asyncio.to_thread(etcd.kill)
                await asyncio.to_thread(etcd.start)
                await coordinator.txn([], [Put(layout.root + "a", b"2")])
                again = await asyncio.wait_for(following, 120)
                assert (again.reconnected, again.header.revision, again.events) == (True, first.header.revision, ())
                batch = await asyncio.wait_for(anext(batches), 120)
                assert ([e.kv.value for e in batch.events], batch.reconnected) == ([b"2"], False)
            await asyncio.to_thread(_compact, etcd, batch.header.revision)
            with pytest.raises(WatchReset, match="compacted"):
                await anext(coordinator.watch(layout.root, first.header.revision))
            with pytest.raises(WatchReset, match="before"):
                await anext(coordinator.watch(layout.root, batch.header.revision + 100))


@pytest.mark.integration
async def test_a_lost_server_raises_different_errors_for_reads_and_changes(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = EtcdServer(tmp_path, fsync=False)
    etcd.start()
    async with EtcdCoordinator(etcd.endpoint, timeout_seconds=60) as coordinator:
        await coordinator.get(layout.root)
        etcd.stop()
        monkeypatch.setattr(coordinator, "_timeout", 0.3)
        with pytest.raises(Unavailable):
            await coordinator.range(layout.root)
        with pytest.raises(Unavailable):
            await coordinator.lease_keepalive(1)
        with pytest.raises(TxnOutcomeUnknown):
            await coordinator.txn([], [Put(layout.root, b"")])


# -- TLS ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecureEtcd:
    """An etcd that serves only over TLS, to clients with a certificate of its authority."""

    endpoint: str
    tls: ClientTls


@pytest.fixture(scope="module")
def secure_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureEtcd]:
    folder = tmp_path_factory.mktemp("secure")
    authority = trustme.CA()
    ca, cert, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    tls = ClientTls(ca, cert, key)
    port = free_port()
    peer = free_port(taken=[port])
    endpoint = f"https://127.0.0.1:{port}"
    command = [
        str(find_etcd(os.environ).path),
        f"--data-dir={folder / 'data'}",
        f"--listen-client-urls={endpoint}",
        f"--advertise-client-urls={endpoint}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=default=http://127.0.0.1:{peer}",
        *("--client-cert-auth", f"--trusted-ca-file={ca}", f"--cert-file={cert}", f"--key-file={key}"),
        *("--unsafe-no-fsync", "--log-level=error"),
    ]
    process = ChildProcess("etcd", command, log=folder / "log", cwd=folder, environment=dict(os.environ))
    try:
        wait_ready(process, lambda: is_healthy(endpoint, tls), timeout_seconds=120, cancelled=lambda: False)
        yield SecureEtcd(endpoint, tls)
    finally:
        process.kill()


@pytest.mark.integration
async def test_etcd_over_tls_requires_a_client_certificate(secure_etcd: SecureEtcd, layout: Layout) -> None:
    tls = secure_etcd.tls
    async with EtcdCoordinator(secure_etcd.endpoint, tls=tls) as coordinator:
        lease = await coordinator.lease_grant(120)
        await coordinator.txn([], [Put(layout.root + "a", b"1", lease.id)])
        async with aclosing(coordinator.watch(layout.root, 1)) as batches:
            assert (await anext(batches)).events[0].kv.value == b"1"
        kept = asyncio.to_thread(keep_lease_alive, secure_etcd.endpoint, lease.id, tls, timeout_seconds=60.0)
        assert await kept
    for wrong in (ClientTls(tls.ca), None):
        async with EtcdCoordinator(secure_etcd.endpoint, tls=wrong, timeout_seconds=0.5) as coordinator:
            with pytest.raises(Unavailable):
                await coordinator.get(layout.root)
    assert not await asyncio.to_thread(is_healthy, secure_etcd.endpoint, ClientTls(tls.ca))


def test_certificates_for_an_etcd_without_tls_are_refused() -> None:
    with pytest.raises(InvalidInput, match="write https://host:port"):
        EtcdCoordinator("127.0.0.1:1", tls=ClientTls())
    assert etcd_tls({}) is None
    assert etcd_tls({"CORANTO_ETCD_CA": "/ca"}) == ClientTls(Path("/ca"))


@pytest.mark.integration
def test_a_cluster_uses_an_etcd_with_tls(secure_etcd: SecureEtcd, tmp_path: Path) -> None:
    tls = secure_etcd.tls
    files = {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}
    environment = {f"CORANTO_ETCD_{name}": str(path) for name, path in files.items()}
    with EmbeddedCluster(tmp_path, environment={"CORANTO_ETCD": secure_etcd.endpoint, **environment}) as cluster:
        assert cluster.info.etcd == secure_etcd.endpoint


@pytest.mark.integration
async def test_a_change_beyond_the_quota_of_etcd_is_refused_with_the_cause(tmp_path: Path, layout: Layout) -> None:
    with EtcdServer(tmp_path, fsync=False) as etcd:
        async with EtcdCoordinator(etcd.endpoint, timeout_seconds=60) as coordinator:
            assert 0 < await coordinator.bytes_in_use() < 1 << 20
            lease = await coordinator.lease_grant(60)
            alarm: dict[str, object] = {"action": "ACTIVATE", "alarm": "NOSPACE"}
            await asyncio.to_thread(ask_etcd, etcd.endpoint, None, "/v3/maintenance/alarm", alarm, 60.0)
            with pytest.raises(EtcdFull, match="alarm disarm"):
                await coordinator.txn([], [Put(layout.root + "a", b"1")])
            assert (await coordinator.get(layout.root + "a"))[1] is None
            assert await coordinator.lease_keepalive(lease.id) > 0
