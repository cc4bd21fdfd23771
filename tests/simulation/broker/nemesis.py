"""The nemesis: injects concurrent faults until it is stopped, and then ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from coranto.client.values import Suspend
from coranto.coordination.etcd import Put
from coranto.errors import CorantoError
from coranto.fragments.fragment import Codec
from coranto.testing.sim import etcd, object_store
from coranto.testing.sim.object_store import StoreFaults
from tests.simulation.broker.restoring import Operator
from tests.simulation.broker.world import LAYOUT, BrokerHost, World


class Nemesis:
    """Injector of the faults of the run's options."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._repairs: dict[int, Callable[[], None]] = {}
        self._faults: dict[str, Callable[[BrokerHost], Awaitable[None]]] = {
            "kill": self._kill,
            "kill in write": self._kill_in_write,
            "pause": self._pause,
            "long pause": self._long_pause,
            "long outage": self._long_outage,
            "crash machine": self._crash_machine,
            "cut brokers": self._cut_brokers,
            "cut one way": self._cut_one_way,
            "isolate broker": self._isolate,
            "cut etcd": self._cut_etcd,
            "cut client": self._cut_client,
            "cut store": self._cut_store,
            "break calls": self._break_calls,
            "slow readers": self._slow_readers,
            "break watches": self._break_watches,
            "compact": self._compact,
            "store errors": self._store_errors,
            "slow store": self._slow_store,
            "disk full": self._disk_full,
            "disk fails": self._disk_fails,
            "exit gracefully": self._exit_gracefully,
            "change spec": self._change_spec,
            "suspend": self._suspend,
            "store refuses fragments": self._refuse_fragments,
            "store loses a fragment": self._lose_a_fragment,
            "flip a bit": self._flip_a_bit,
            "restore etcd": self._restore_etcd,
        }
        self._operator = Operator(world)

    @property
    def names(self) -> tuple[str, ...]:
        return self._world.options.faults

    async def run(self) -> None:
        """Inject faults until cancelled. `heal` ends the remaining faults."""
        world, rng = self._world, self._rng
        if not self.names:
            return
        pace = rng.uniform(0.3, 2.0)
        running: dict[asyncio.Task[None], None] = {}
        try:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            while True:
                name = rng.choice(self.names)
                machine = rng.choice(world.machines)
                world.loop.note(f"fault: {name} ({machine.name})")
                world.coverage.sometimes(f"fault: {name}")
                task = asyncio.ensure_future(self._faults[name](machine))
                running[task] = None
                task.add_done_callback(lambda done: running.pop(done, None))
                await asyncio.sleep(rng.expovariate(1 / pace))
        finally:
            for task in list(running):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @property
    def is_done(self) -> bool:
        """True once all its work has ended. An operator finishes a restore that runs at `heal`."""
        return not self._operator.is_busy

    def heal(self) -> None:
        world = self._world
        for repair in list(self._repairs.values()):
            repair()
        self._repairs.clear()
        self._operator.rest()
        world.store.faults = StoreFaults()
        for machine in world.machines:
            machine.disk.full = False
            machine.disk.fail_sync = None
            machine.disk.before_sync = lambda name: None
            machine.disk.kill_in_write = None
            machine.flips_next = False
            machine.stays_down = False
            if machine.process is not None:
                machine.process.resume()
            machine.boot(0.1)

    async def _for_a_while(self, repair: Callable[[], None], low: float, high: float) -> None:
        """Wait between `low` and `high` seconds, then call `repair`, unless `heal` did so earlier."""
        number = self._world.loop.number()
        self._repairs[number] = repair
        await asyncio.sleep(self._rng.uniform(low, high))
        if self._repairs.pop(number, None) is not None:
            repair()

    @property
    def _lease(self) -> float:
        return self._world.options.lease_seconds

    # -- Processes and machines ----------------------------------------------------------------------------------------

    async def _kill(self, machine: BrokerHost) -> None:
        machine.kill()

    async def _kill_in_write(self, machine: BrokerHost) -> None:
        self._end_in_write(machine, lambda: None)

    def _end_in_write(self, machine: BrokerHost, also: Callable[[], object]) -> None:
        """Kill the process in the middle of one of its next writes, and call `also` at the same instant."""
        countdown = self._rng.randint(1, 12)
        wanted = self._rng.choice((".content", ".commits", ""))

        def due(name: str) -> bool:
            nonlocal countdown
            if name.endswith(wanted):
                countdown -= 1
                if countdown == 0:
                    self._world.loop.later(0.0, also)
            return countdown <= 0

        machine.disk.kill_in_write = due

    async def _pause(self, machine: BrokerHost) -> None:
        await self._stop(machine, 0.05, self._lease / 3)

    async def _long_pause(self, machine: BrokerHost) -> None:
        await self._stop(machine, self._lease, 2 * self._lease)

    async def _stop(self, machine: BrokerHost, low: float, high: float) -> None:
        process = machine.process
        if process is not None:
            process.pause()
            await self._for_a_while(process.resume, low, high)

    async def _long_outage(self, machine: BrokerHost) -> None:
        """Stop the broker until after its lease has expired."""
        machine.end()

        def back() -> None:
            machine.stays_down = False
            machine.boot(0.0)

        await self._for_a_while(back, self._lease, 2 * self._lease)

    async def _crash_machine(self, machine: BrokerHost) -> None:
        when = self._rng.choice(("now", "in write", "in sync", "in sync"))
        if when == "now":
            machine.crash()
        elif when == "in write":
            self._end_in_write(machine, machine.crash)
        else:
            self._end_in_sync(machine)

    def _end_in_sync(self, machine: BrokerHost) -> None:
        """Crash the machine before one of its next syncs has any effect."""
        countdown, disk = self._rng.randint(1, 8), machine.disk

        def syncs(_: str) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown <= 0:
                disk.before_sync = lambda name: None
                machine.kill()
                self._world.loop.later(0.0, disk.crash)

        disk.before_sync = syncs

    async def _exit_gracefully(self, machine: BrokerHost) -> None:
        machine.stop_requested.set()

    # -- The network ---------------------------------------------------------------------------------------------------

    async def _cut_brokers(self, machine: BrokerHost) -> None:
        other = self._rng.choice(self._world.machines)
        if other is not machine:
            await self._for_a_while(self._world.network.cut_both(machine.name, other.name), 0.1, 8.0)

    async def _cut_one_way(self, machine: BrokerHost) -> None:
        other = self._rng.choice([*(m.name for m in self._world.machines), etcd.NODE])
        if other != machine.name:
            ends = (machine.name, other) if self._rng.random() < 0.5 else (other, machine.name)
            await self._for_a_while(self._world.network.cut(*ends), 0.1, 8.0)

    async def _isolate(self, machine: BrokerHost) -> None:
        """Cut a broker off from all other brokers, but not from etcd."""
        others = [other.name for other in self._world.machines if other is not machine]
        repairs = [self._world.network.cut_both(machine.name, other) for other in others]

        def repair() -> None:
            for each in repairs:
                each()

        await self._for_a_while(repair, 0.5, 8.0)

    async def _cut_etcd(self, machine: BrokerHost) -> None:
        longest = self._rng.choice((self._lease / 3, 2 * self._lease))
        await self._for_a_while(self._world.network.cut_both(machine.name, etcd.NODE), 0.1, longest)

    async def _cut_client(self, machine: BrokerHost) -> None:
        writer = f"writer-{self._rng.randrange(self._world.options.writers)}"
        await self._for_a_while(self._world.network.cut_both(writer, machine.name), 0.1, 5.0)

    async def _cut_store(self, machine: BrokerHost) -> None:
        await self._for_a_while(self._world.network.cut_both(machine.name, object_store.NODE), 0.5, 10.0)

    async def _break_calls(self, machine: BrokerHost) -> None:
        rpc = self._world.rpc
        for call in list(rpc.live):
            if machine.name in (call.node, call.peer) and self._rng.random() < 0.5:
                rpc.break_call(call)
        self._world.tcp.break_connections(machine.name, self._rng, 0.5)

    async def _slow_readers(self, machine: BrokerHost) -> None:
        """Let some ends of a machine's connections, on either side, read nothing for a while."""
        ends = [each for each in self._world.tcp.live if machine.name in (each.node, each.peer[0])]
        repairs = [each.stall() for each in ends if self._rng.random() < 0.5]

        def repair() -> None:
            for each in repairs:
                each()

        await self._for_a_while(repair, 0.05, 20.0)

    # -- Services ------------------------------------------------------------------------------------------------------

    async def _break_watches(self, _: BrokerHost) -> None:
        self._world.etcd.break_watches()

    async def _compact(self, _: BrokerHost) -> None:
        self._world.etcd.compact()
        if self._rng.random() < 0.5:
            self._world.etcd.break_watches()

    async def _store_errors(self, _: BrokerHost) -> None:
        rng, store = self._rng, self._world.store
        refuse, fail, lag = rng.choice((0.0, 0.3, 0.9)), rng.choice((0.0, 0.3)), rng.choice((0.0, 3.0))
        store.faults = replace(store.faults, refuse=refuse, fail_after_applying=fail, list_lag=lag)

        def repair() -> None:
            store.faults = replace(store.faults, refuse=0.0, fail_after_applying=0.0, list_lag=0.0)

        await self._for_a_while(repair, 1.0, 8.0)

    async def _slow_store(self, _: BrokerHost) -> None:
        store = self._world.store

        def repair() -> None:
            store.faults.slow = 0.0

        store.faults.slow = self._rng.choice((0.5, 5.0, 20.0))
        await self._for_a_while(repair, 1.0, 8.0)

    async def _refuse_fragments(self, _: BrokerHost) -> None:
        """Let the store refuse fragments but accept probes."""
        store = self._world.store

        def repair() -> None:
            store.faults.refuse_fragments = 0.0

        store.faults.refuse_fragments = self._rng.choice((0.8, 1.0, 1.0))
        await self._for_a_while(repair, 2.0, 25.0)

    async def _lose_a_fragment(self, _: BrokerHost) -> None:
        """Let the store lose a fragment other than the last one of its journal, whose end defines the head."""
        stored = [each.fragment for each in self._world.store.objects.values()]
        last = {each.journal: each.end for each in sorted(stored, key=lambda each: each.end)}
        if inner := [each for each in stored if each.end < last[each.journal]]:
            self._world.store.lose(self._rng.choice(inner))

    async def _flip_a_bit(self, machine: BrokerHost) -> None:
        """Let the disk damage the next fragment that the machine's broker will store, if a replica has it too."""
        machine.flips_next = True

    async def _disk_full(self, machine: BrokerHost) -> None:
        def repair() -> None:
            machine.disk.full = False

        machine.disk.full = True
        await self._for_a_while(repair, 0.1, 3.0)

    async def _disk_fails(self, machine: BrokerHost) -> None:
        """Let syncs fail: one, some, or all for a while."""
        rng, disk = self._rng, machine.disk
        wanted = rng.choice((".content", ".commits", ""))
        left = rng.choice((1, 1, 3, 1000))

        def fails(name: str) -> bool:
            nonlocal left
            if left <= 0 or not name.endswith(wanted):
                return False
            left -= 1
            return True

        def repair() -> None:
            disk.fail_sync = None

        disk.fail_sync = fails
        await self._for_a_while(repair, 0.1, 5.0)

    async def _change_spec(self, _: BrokerHost) -> None:
        """Apply another replication, codec or fragment length, as an operator does."""
        world, rng = self._world, self._rng
        journal = rng.choice(world.journals)
        if not world.exists(journal):
            return  # etcd was emptied.
        spec = world.spec(journal)
        # One step at a time: a change from three replicas to one is the same as the loss of two.
        if rng.random() < 0.5 and world.options.replication > 1 and world.is_consistent(journal):
            spec.replication = rng.randint(2, min(3, world.options.brokers)) if world.options.brokers > 1 else 1
        else:
            spec.fragment.compression_codec = rng.choice((Codec.NONE, Codec.GZIP, Codec.ZSTANDARD))  # type: ignore[assignment]
            spec.fragment.length = rng.choice((1024, 2048, 1 << 20))
        world.etcd.txn([], [Put(LAYOUT.item_key(journal), spec.SerializeToString())], [])

    async def _restore_etcd(self, _: BrokerHost) -> None:
        await self._operator.restore()

    async def _suspend(self, machine: BrokerHost) -> None:
        """Suspend a journal, as operators do with idle ones, although it is in use. The next append resumes it."""
        world, rng = self._world, self._rng
        journal, client = rng.choice(world.journals), world.client("operator", machine, retry_timeout=1.0)
        try:
            result = await client.append(
                journal, b"", suspend=rng.choice((Suspend.NOW, Suspend.NOW, Suspend.IF_FLUSHED))
            )
        except CorantoError as error:
            world.coverage.sometimes(f"suspend: {type(error).__name__}")
        else:
            world.loop.note(f"suspended {journal} at {result.end}")
