"""Fixtures of tests with a broker that meets an etcd other than its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coranto.wire import protocol_pb2 as pb
from coranto_broker.recovery import orphaned_spools
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild

MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_spools, "PAUSE_SECONDS", 0.2)
    monkeypatch.setattr("coranto_broker.replication.replica.REFRESH_FOR_GAP_SECONDS", 0.5)


@pytest.fixture
def child(broker_settings: BrokerSettings, tmp_path: Path) -> Iterator[BrokerChild]:
    child = BrokerChild(broker_settings, tmp_path / "broker.log")
    try:
        yield child
    finally:
        child.close()


@pytest.fixture
def kept(spec: MakeSpec) -> pb.JournalSpec:
    return spec("test/journal", stores=("file:///frags/",), fragment={"refresh_interval": 1})
