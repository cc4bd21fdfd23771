"""Fixtures of the broker's tests: one etcd, and brokers in this process with separate key prefixes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coranto.cluster import EtcdServer, processes
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, running_broker

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a real etcd: $CORANTO_ETCD, or one that lives as long as the tests."""
    if given := os.environ.get("CORANTO_ETCD"):
        yield given
        return
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server.endpoint


@pytest.fixture
def free_port() -> int:
    return processes.free_port()


@pytest.fixture
def broker_settings(etcd: str, tmp_path: Path) -> BrokerSettings:
    """Return settings of a broker with separate folders and a separate key prefix.

    Its lease outlives a stalled machine; tests of its expiry revoke it themselves.
    """
    return BrokerSettings(
        etcd=etcd,
        etcd_prefix=f"/test/{os.getpid()}-{next(_prefixes)}",
        port=0,
        data_dir=tmp_path / "data",
        file_root=tmp_path / "root",
        lease_seconds=60.0,
        exit_seconds=60.0,
    )


@pytest.fixture
async def broker(broker_settings: BrokerSettings) -> AsyncIterator[tuple[BrokerProcess, RawClient]]:
    """A running broker and a raw client of it."""
    async with running_broker(broker_settings) as running:
        yield running


@pytest.fixture
async def client(broker: tuple[BrokerProcess, RawClient]) -> RawClient:
    return broker[1]


@pytest.fixture
def token_ends(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """Let a test end calls before their token does."""
    ends: list[asyncio.Timeout] = []

    def timeout(seconds: float | None) -> asyncio.Timeout:
        ends.append(asyncio.timeout(seconds))
        return ends[-1]

    monkeypatch.setattr("coranto.security.admission.asyncio", SimpleNamespace(timeout=timeout))
    return ends


@pytest.fixture
def spec() -> Callable[..., pb.JournalSpec]:
    """Return a function that makes a journal's spec; keywords override its fields, and `fragment` is a mapping."""

    def make(name: str = "test/journal", *, stores: tuple[str, ...] = (), **fields: object) -> pb.JournalSpec:
        fragment = pb.JournalSpec.Fragment(length=1 << 20, compression_codec=pb.NONE, stores=stores)
        fragment.refresh_interval.FromSeconds(60)
        given = fields.pop("fragment", {})
        for field, value in given.items():  # type: ignore[attr-defined]
            if field.endswith("_interval"):
                getattr(fragment, field).FromSeconds(value)
            else:
                setattr(fragment, field, value)
        return pb.JournalSpec(name=name, replication=1, fragment=fragment, **fields)  # type: ignore[arg-type]

    return make
