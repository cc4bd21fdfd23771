"""Operators who restore etcd from a backup, or start an empty etcd and apply the journals again.

They then have the brokers adopt that etcd. Until then the brokers may not serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from coranto.coordination.etcd import Put
from coranto.errors import CorantoError, WrongCluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import Backup, SimCoordinator
from coranto.testing.sim.timeline import Process
from coranto_broker.recovery.adoption import Adoption
from tests.simulation.broker.world import LAYOUT, BrokerHost, World


class Operator:
    """Operator that restores etcd, one restore at a time, and finishes each one regardless of faults."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._at_work: asyncio.Task[None] | None = None
        self._may_restore = True

    @property
    def is_busy(self) -> bool:
        """True while a restore runs."""
        return self._at_work is not None and not self._at_work.done()

    def rest(self) -> None:
        """Start no more restores, but finish a running one."""
        self._may_restore = False

    async def restore(self) -> None:
        """Restore a backup after some time, or start an empty etcd. Returns once brokers may serve.

        Returns immediately while another restore runs. Cancelling it does not stop the restore.
        """
        if self.is_busy:
            return
        rng, world = self._world.rng, self._world
        backup = world.etcd.backup() if rng.random() < 0.6 else Backup()
        self._at_work = asyncio.ensure_future(self._restore(backup, rng.uniform(0.2, 8.0)))
        await asyncio.shield(self._at_work)

    async def _restore(self, backup: Backup, seconds: float) -> None:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(seconds)
        if not self._may_restore:
            return
        # With a new cluster id, every broker detects the restore. With the same id, a broker that was down cannot.
        careful = rng.random() < 0.5
        if careful:
            await self._stop_brokers()
        world.loop.note(f"etcd goes back from revision {world.etcd.revision} to {backup.revision}")
        world.coverage.sometimes("etcd was restored from a backup" if backup.kvs else "etcd was emptied")
        specs = [Put(kv.key, kv.value) for kv in world.etcd.prefixed(LAYOUT.items)]
        world.unsure = True
        world.etcd.restore(backup, new_id=not careful)
        if not careful:
            await asyncio.sleep(rng.uniform(0.0, 4.0))  # The operator reacts late.
            await self._stop_brokers()
        for machine in rng.sample(world.machines, len(world.machines)):
            await self._until_done(self._gather, machine)
            if rng.random() < 0.3:  # An operator starts brokers too early.
                machine.locked = machine.stays_down = False
                machine.boot(0.0)
        await self._until_done(self._finish, world.machines[0])
        if not backup.kvs:
            # Other programs write to etcd too, so journals may be created at other revisions than before.
            for _ in range(rng.randint(0, 3)):
                world.etcd.txn([], [Put("of another program", b"")], [])
            world.etcd.txn([], specs, [])
        world.unsure = False
        world.coverage.sometimes("an etcd that was restored was adopted")
        for machine in world.machines:
            machine.locked = machine.stays_down = False
            machine.boot(rng.uniform(0.0, 0.5))

    async def _stop_brokers(self) -> None:
        """End all brokers, some of them by force, and let none start."""
        world, rng = self._world, self._world.rng
        for machine in world.machines:
            machine.locked = True
            machine.stop_requested.set()
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0, 6.0))
        for machine in world.machines:
            machine.end()

    async def _until_done(
        self, command: Callable[[Adoption, BrokerHost, Process], Awaitable[object]], at: BrokerHost
    ) -> None:
        """Run a command on a machine until it succeeds. Brokers that start there before it does cannot serve."""
        world = self._world
        while True:
            process = Process(world.loop, f"{at.name}.operator")
            clock = SimClock(world.loop, process)
            coordinator = SimCoordinator(world.etcd, world.network, at.name, process, clock)
            try:
                await command(Adoption(coordinator, LAYOUT, world.rng.randbytes), at, process)
                return
            except (CorantoError, OSError) as error:
                world.loop.note(f"{at.name}: not adopted yet: {error}")
                if isinstance(error, WrongCluster):
                    world.coverage.sometimes("etcd could not be adopted at once")
            await asyncio.sleep(0.5)

    async def _gather(self, adoption: Adoption, machine: BrokerHost, process: Process) -> None:
        clock = SimClock(self._world.loop, process)
        await adoption.gather(machine.member, machine.settings.data_dir, machine.disk.for_process(process), clock)

    async def _finish(self, adoption: Adoption, machine: BrokerHost, process: Process) -> None:
        await adoption.finish()
