"""etcd and its simulated counterpart satisfy the contract of coordinators."""

from __future__ import annotations

import asyncio

import pytest

from coranto.cluster import EtcdServer
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.testing.contracts.coordinator import CoordinatorContract, Scenario
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.network import Network
from coranto.testing.sim.timeline import Process


class TestEtcd(CoordinatorContract):
    @pytest.fixture(autouse=True)
    def server(self, etcd: EtcdServer) -> None:
        self.endpoint = etcd.endpoint

    def run(self, scenario: Scenario) -> None:
        async def connected() -> None:
            async with EtcdCoordinator(self.endpoint) as coordinator:
                await scenario(coordinator)

        asyncio.run(connected())


class TestTwin(CoordinatorContract):
    def run(self, scenario: Scenario) -> None:
        async def simulate(loop: SimLoop) -> None:
            network = Network(loop, loop.rng)
            process = Process(loop, "client")
            coordinator = SimCoordinator(SimEtcd(loop, network), network, "client", process, SimClock(loop, process))
            await scenario(coordinator)

        with simulated(0) as loop:
            loop.run_until_complete(simulate(loop))
