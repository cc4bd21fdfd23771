"""Faults of consumers, in addition to faults of brokers."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import grpc.aio

from coranto.coordination.etcd import Put
from coranto.testing.sim import etcd
from coranto.wire import consumer_pb2 as pc
from tests.simulation.broker.nemesis import Nemesis
from tests.simulation.broker.world import BrokerHost

from . import database
from .database import DatabaseFaults
from .world import SHARDS, STEPS, ConsumerMachine, ConsumerWorld


class ConsumerNemesis(Nemesis):
    """Injector of the faults of both kinds of options."""

    def __init__(self, world: ConsumerWorld) -> None:
        super().__init__(world)
        self._all = world
        of_consumers: dict[str, Callable[[ConsumerMachine], Awaitable[None]]] = {
            "kill consumer": self._kill_consumer,
            "kill at step": self._kill_at_step,
            "pause consumer": self._pause_consumer,
            "zombie": self._zombie,
            "zombie at step": self._zombie_at_step,
            "consumer outage": self._consumer_outage,
            "exit consumer": self._exit_consumer,
            "cut consumer from etcd": self._cut_consumer_from_etcd,
            "cut consumer from broker": self._cut_consumer_from_broker,
            "cut consumers": self._cut_consumers,
            "cut database": self._cut_database,
            "database errors": self._database_errors,
            "break consumer calls": self._break_consumer_calls,
            "move shard": self._move_shard,
            "change shard": self._change_shard,
        }
        for name, fault in of_consumers.items():
            self._faults[name] = self._to_a_consumer(fault)

    @property
    def names(self) -> tuple[str, ...]:
        options = self._all.of_consumers
        # Most faults should hit consumers.
        return (*options.faults, *options.faults, *options.brokers.faults)

    def heal(self) -> None:
        super().heal()
        self._all.database.faults = DatabaseFaults()
        for machine in self._all.consumers:
            machine.stays_down = False
            machine.at_step.clear()
            if machine.process is not None:
                machine.process.resume()
            machine.boot(0.1)

    def _to_a_consumer(
        self, fault: Callable[[ConsumerMachine], Awaitable[None]]
    ) -> Callable[[BrokerHost], Awaitable[None]]:
        async def inject(_: BrokerHost) -> None:
            await fault(self._rng.choice(self._all.consumers))

        return inject

    @property
    def _consumer_lease(self) -> float:
        return self._all.of_consumers.lease_seconds

    # -- Processes -----------------------------------------------------------------------------------------------------

    async def _kill_consumer(self, machine: ConsumerMachine) -> None:
        machine.kill()

    async def _kill_at_step(self, machine: ConsumerMachine) -> None:
        """Kill the process just before a step, or during it."""
        process = machine.process
        if process is not None:
            machine.at_step[self._rng.choice(STEPS)] = self._soon(process.kill)

    async def _zombie_at_step(self, machine: ConsumerMachine) -> None:
        """Pause the process at a step until others have taken over, and then resume it."""
        process = machine.process
        if process is None:
            return
        seconds = self._rng.uniform(1.2, 2.5) * self._consumer_lease

        def hang() -> None:
            process.pause()
            self._all.loop.later(seconds, process.resume)

        machine.at_step[self._rng.choice(STEPS)] = self._soon(hang)

    def _soon(self, action: Callable[[], None]) -> Callable[[], None]:
        delay = self._rng.choice((0.0, self._rng.uniform(0.0, 0.005)))
        if not delay:
            return action
        return lambda: self._all.loop.later(delay, action)

    async def _pause_consumer(self, machine: ConsumerMachine) -> None:
        await self._hold(machine, 0.05, self._consumer_lease / 3)

    async def _zombie(self, machine: ConsumerMachine) -> None:
        """Pause the process until its lease has expired and others have taken over, and then resume it."""
        await self._hold(machine, 1.2 * self._consumer_lease, 2.5 * self._consumer_lease)

    async def _hold(self, machine: ConsumerMachine, low: float, high: float) -> None:
        process = machine.process
        if process is not None:
            process.pause()
            await self._for_a_while(process.resume, low, high)

    async def _consumer_outage(self, machine: ConsumerMachine) -> None:
        machine.end()

        def back() -> None:
            machine.stays_down = False
            machine.boot(0.0)

        await self._for_a_while(back, self._consumer_lease, 2 * self._consumer_lease)

    async def _exit_consumer(self, machine: ConsumerMachine) -> None:
        machine.stop_requested.set()

    # -- The network ---------------------------------------------------------------------------------------------------

    async def _cut_consumer_from_etcd(self, machine: ConsumerMachine) -> None:
        longest = self._rng.choice((self._consumer_lease / 3, 2 * self._consumer_lease))
        await self._cut(machine.name, etcd.NODE, longest)

    async def _cut_consumer_from_broker(self, machine: ConsumerMachine) -> None:
        await self._cut(machine.name, self._rng.choice(self._all.machines).name, 8.0)

    async def _cut_consumers(self, machine: ConsumerMachine) -> None:
        other = self._rng.choice(self._all.consumers)
        if other is not machine:
            await self._cut(machine.name, other.name, 8.0)

    async def _cut_database(self, machine: ConsumerMachine) -> None:
        await self._cut(machine.name, database.NODE, 12.0)

    async def _cut(self, one: str, other: str, longest: float) -> None:
        network = self._all.network
        way = self._rng.random()
        if way < 0.6:
            repair = network.cut_both(one, other)
        else:
            repair = network.cut(one, other) if way < 0.8 else network.cut(other, one)
        await self._for_a_while(repair, 0.1, longest)

    async def _break_consumer_calls(self, machine: ConsumerMachine) -> None:
        rpc = self._all.rpc
        for call in list(rpc.live):
            if machine.name in (call.node, call.peer) and self._rng.random() < 0.5:
                rpc.break_call(call)

    # -- Services ------------------------------------------------------------------------------------------------------

    async def _database_errors(self, _: ConsumerMachine) -> None:
        rng, server = self._rng, self._all.database
        server.faults = DatabaseFaults(*(rng.choice((0.0, 0.1, 0.3)) for _ in range(3)))

        def repair() -> None:
            server.faults = DatabaseFaults()

        await self._for_a_while(repair, 0.5, 6.0)

    async def _move_shard(self, _: ConsumerMachine) -> None:
        """Reassign a shard, even one that failed, as an operator does."""
        shards = [self._rng.choice(self._all.shards)]
        with contextlib.suppress(grpc.aio.AioRpcError):  # The process may be down.
            await self._all.any_stub().Unassign(pc.UnassignRequest(shards=shards))

    async def _change_shard(self, _: ConsumerMachine) -> None:
        """Apply another spec, as an operator does."""
        world, rng = self._all, self._rng
        shard = rng.choice(world.shards)
        spec = world.shard_spec(shard)
        spec.hot_standbys = rng.choice((0, 1, 2))
        spec.max_txn_duration.FromNanoseconds(rng.choice((50_000_000, 1_000_000_000)))
        world.etcd.txn([], [Put(SHARDS.item_key(shard), spec.SerializeToString(deterministic=True))], [])
