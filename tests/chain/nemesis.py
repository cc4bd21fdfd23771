"""The nemesis: injects random harm into a chain, and undoes it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog

from tests.chain.chain import Chain, ChainConsumer
from tests.servers.processes import ProcessSlot

_log = structlog.get_logger(__name__)

Harm = Callable[[Chain, random.Random], Awaitable[None]]

_PAUSE_SECONDS: Final = 3.0


async def kill_member(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a member of a consumer. Another one takes over its shards when its lease expires."""
    await _restart([a_member(chain, rng)])


async def kill_primary_twice(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a shard's primary, and of the next primary as soon as there is one."""
    consumer = rng.choice(chain.consumers)
    shard = rng.choice(consumer.stage.specs()).id
    for _ in range(2):
        await chain.until(lambda: primary_of(consumer, shard) is not None, f"{shard} is served")
        victim = primary_of(consumer, shard)
        if victim is not None and not victim.is_harmed:
            await _restart([victim])
            await chain.progress()


async def kill_consumer(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of all members of a consumer together."""
    await _restart([member for member in rng.choice(chain.consumers).members if not member.is_harmed])


async def pause_member(chain: Chain, rng: random.Random) -> None:
    """SIGSTOP of a member, and SIGCONT once others have its shards. It is then a zombie, and must exit."""
    await _pause(chain, a_member(chain, rng))


async def pause_successor(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a shard's primary, and SIGSTOP of the next one, which becomes a zombie during its takeover."""
    consumer = rng.choice(chain.consumers)
    shard = rng.choice(consumer.stage.specs()).id
    await chain.until(lambda: primary_of(consumer, shard) is not None, f"{shard} is assigned to a member")
    victim = primary_of(consumer, shard)
    if victim is not None and not victim.is_harmed:
        await _restart([victim])
        await chain.until(lambda: primary_of(consumer, shard) is not None, f"{shard} is assigned to another member")
        successor = primary_of(consumer, shard)
        if successor is not None and not successor.is_harmed:
            await _pause(chain, successor)


async def stop_member(chain: Chain, rng: random.Random) -> None:
    """SIGTERM of a member, which hands off its shards."""
    place = a_member(chain, rng)
    place.own_ends.append(f"exit code {await place.stop()} on SIGTERM")
    await place.start()


async def kill_broker(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a broker, which is restarted immediately and continues with its lease and spools."""
    await _restart([rng.choice(chain.brokers)])


async def kill_broker_for_long(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a broker, which is restarted once others have taken over and the chain makes progress without it."""
    number = rng.randrange(len(chain.brokers))
    broker = chain.brokers[number]
    await broker.kill()
    await chain.until(lambda: not chain.is_member(number), f"etcd has dropped {broker.name} as a member")
    await chain.progress()
    await broker.start()


async def kill_two_brokers(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of two brokers together."""
    await _restart(rng.sample(chain.brokers, 2))


async def kill_all_brokers(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of all brokers together."""
    await _restart(chain.brokers)


async def kill_broker_and_member(chain: Chain, rng: random.Random) -> None:
    """SIGKILL of a broker and of a member of a consumer together."""
    await _restart([rng.choice(chain.brokers), a_member(chain, rng)])


TO_CONSUMERS: Final = (kill_member, kill_primary_twice, kill_consumer, pause_member, pause_successor, stop_member)
TO_BROKERS: Final = (kill_broker, kill_broker_for_long, kill_two_brokers, kill_all_brokers, kill_broker_and_member)


HANDS: Final[Mapping[str, tuple[Harm, ...]]] = {
    "consumers": TO_CONSUMERS,
    "brokers": TO_BROKERS,
    "members": (kill_member,),
}


class ChainNemesis:
    """Runs several hands concurrently. Each does all of its kinds of harm, in a new random order each time.

    Half of the time a hand waits until the chain makes progress. Otherwise it continues after a short pause, so that
    harm also happens during recovery.
    """

    def __init__(self, chain: Chain) -> None:
        self.done: Counter[str] = Counter()
        self._chain = chain

    @property
    def kills(self) -> dict[str, int]:
        """The number of processes of each kind that were killed."""
        chain = self._chain
        members = (member for consumer in chain.consumers for member in consumer.members)
        return {"broker": sum(place.kills for place in chain.brokers), "consumer": sum(each.kills for each in members)}

    async def run(self, seconds: float, *, kills: int = 0, alerts: int = 0) -> None:
        """Do harm for `seconds`, and until there were `kills` of each kind of process and `alerts` alerts.

        It continues until every kind of harm was done. Raises ClusterError when the chain makes no progress.
        """
        now = asyncio.get_running_loop().time
        end = now() + seconds

        def is_enough() -> bool:
            return now() >= end and min(self.kills.values()) >= kills and len(self._chain.alerts) >= alerts

        hands = [
            asyncio.create_task(self._hand(random.Random(f"{self._chain.options.seed} {name}"), kinds, is_enough))
            for name, kinds in HANDS.items()
        ]
        try:
            # Not a task group, which would wrap the error.
            await asyncio.gather(*hands)
        finally:
            for hand in hands:
                hand.cancel()
            await asyncio.gather(*hands, return_exceptions=True)

    async def _hand(self, rng: random.Random, kinds: tuple[Harm, ...], is_enough: Callable[[], bool]) -> None:
        now = asyncio.get_running_loop().time
        while not is_enough():
            for harm in rng.sample(kinds, len(kinds)):
                if is_enough() and self.done[harm.__name__]:
                    continue
                begun = now()
                await harm(self._chain, rng)
                self.done[harm.__name__] += 1
                _log.debug("nemesis.harmed", kind=harm.__name__, seconds=round(now() - begun, 1))
                if rng.random() < 0.5:
                    await self._chain.progress()
                    _log.debug("nemesis.progressed", seconds=round(now() - begun, 1))
                else:
                    await asyncio.sleep(rng.uniform(0, _PAUSE_SECONDS))


def primary_of(consumer: ChainConsumer, shard: str) -> ProcessSlot | None:
    """Return the process that is a shard's primary in etcd; None if that process has ended."""
    for each in consumer.keyspace.state.assignments(shard)[:1]:
        for number, place in enumerate(consumer.members):
            if each.slot == 0 and consumer.member_id(number, place.incarnation) == each.member:
                return place
    return None


def a_member(chain: Chain, rng: random.Random) -> ProcessSlot:
    """Return a random member of a consumer that is not harmed."""
    members = [member for consumer in chain.consumers for member in consumer.members]
    return rng.choice([member for member in members if not member.is_harmed])


async def _pause(chain: Chain, place: ProcessSlot) -> None:
    consumer = next(each for each in chain.consumers if place in each.members)
    number = consumer.members.index(place)
    # A restarted process is not a member immediately, so it would not become a zombie.
    await chain.until(lambda: consumer.knows(number, place.incarnation), f"{place.name} is a member")
    if place.is_harmed:
        return  # Another hand harms it now.
    incarnation = place.incarnation
    place.pause()
    await chain.until(lambda: not consumer.knows(number, incarnation), f"etcd has dropped {place.name} as a member")
    if consumer.stage.logged or chain.options.sql != "sqlite":  # Its lock of a SQLite file may block others.
        await chain.until(lambda: consumer.is_serving, f"others have the shards of {place.name}")
    place.resume()
    await place.ended()
    await place.start()


async def _restart(places: Sequence[ProcessSlot]) -> None:
    """Kill several processes together, and restart them."""
    for place in places:
        place.is_harmed = True
    await asyncio.gather(*(place.kill() for place in places))
    await asyncio.gather(*(place.start() for place in places))
