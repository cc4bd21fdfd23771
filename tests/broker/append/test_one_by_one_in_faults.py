"""Concurrent appends have the same outcomes in the queue as one by one, despite faults between them.

Two clusters run the same events: specs change, disks are full, brokers die. In one of them each append is prepared and
proposed alone. Answers, content and stored fragments must be the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto import labels
from coranto.client import JournalClient, Suspend
from coranto.errors import CorantoError
from coranto.specs.durability import FSYNC
from coranto.testing import Cluster
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import batch, queue
from coranto_broker.append import registers as of_registers
from coranto_broker.append.batch import Batch
from coranto_broker.append.receiving import ContentStream
from tests.sampling import examples

from .test_one_by_one import (
    AUTHOR,
    JOURNAL,
    PAIRS,
    SETS,
    STEPS,
    Step,
    append_step,
    over_a_stream,
    over_a_stream_one_by_one,
)

BROKERS = 3


@dataclass(frozen=True)
class Together:
    """Concurrent appends."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Change:
    """A new spec."""

    replication: int
    read_only: bool = False
    fsync: str = "never"


@dataclass(frozen=True)
class FullDisk:
    """An append while the disk of the primary, or of another replica, is full. It is not repeated."""

    primary: bool


@dataclass(frozen=True)
class Death:
    """The primary, or another replica, is killed and restarted."""

    primary: bool


Event = Together | Change | FullDisk | Death
QUICK = st.builds(Step, content=st.sampled_from([b"x", b"some more", b"y" * 300]), check=PAIRS, union=SETS)
EVENTS = st.one_of(
    st.lists(QUICK, min_size=1, max_size=6).map(lambda steps: Together(tuple(steps))),
    st.lists(st.one_of(QUICK, STEPS), min_size=1, max_size=6).map(lambda steps: Together(tuple(steps))),
    st.builds(
        Change,
        replication=st.sampled_from([1, 2, 3]),
        read_only=st.sampled_from([False, False, True]),
        fsync=st.sampled_from(["never", "never", "commit"]),
    ),
    st.builds(FullDisk, primary=st.booleans()),
    st.builds(Death, primary=st.booleans()),
)


class Run:
    """One cluster, and the outcomes of the events."""

    def __init__(self) -> None:
        self.outcomes: list[object] = []
        self.content = b""
        self.fragments: list[tuple[int, int, bytes]] = []
        self._end = 0
        self._replication = 2

    async def live(self, events: list[Event]) -> None:
        async with Cluster(brokers=BROKERS) as cluster:
            spec = pb.JournalSpec(name=JOURNAL, replication=self._replication)
            spec.fragment.length, spec.fragment.compression_codec = 1024, pb.NONE
            spec.fragment.stores.append("file:///fragments/")
            spec.fragment.refresh_interval.seconds = 60
            await cluster.create(spec)
            client, once = cluster.client(retry_timeout=60), cluster.client(retry_timeout=0)
            for step in (Step(b"begun"), Step(b"z" * 1100), Step(b"and rolled")):
                await self._append(client, step)
            for event in events:
                match event:
                    case Together(steps):
                        await self._append(client, *steps)
                    case Change():
                        await self._change(cluster, client, event)
                    case FullDisk(primary):
                        disk = cluster._machine(await self._member(client, primary)).disk
                        disk.full = True
                        await self._append(once, Step(b"meets a full disk"))
                        disk.full = False
                    case Death(primary):
                        number = await self._member(client, primary)
                        if self._replication == 1:
                            continue  # Content that only a dead broker has is missing.
                        await cluster.kill(number, expire=True)
                        await cluster.start(number)
                        await cluster.ready(JOURNAL)
                if not isinstance(event, Together):
                    await self._append(
                        client, Step(b".")
                    )  # It builds a pipeline, so that later appends are not prepared.
            self._end = (await client.append(JOURNAL, b"")).end
            self.content = await client.read_all(JOURNAL, 0, self._end)
            for number in range(BROKERS):
                await cluster.stop(number)
            found = cluster.fragments(JOURNAL)
            self.fragments = sorted((each.begin, each.end, each.sum) for each in found)

    async def _append(self, client: JournalClient, *steps: Step) -> None:
        """Append all of these concurrently. Offsets are relative to the journal's end before."""
        end = self._end

        async def one(step: Step) -> object:
            try:
                done = await append_step(client, step, end)
            except CorantoError as error:
                return type(error).__name__
            self._end = max(self._end, done.end)
            registers = [(each.name, each.value) for each in done.registers.labels]
            return done.begin, done.end, done.sum, registers, done.durability

        self.outcomes += await asyncio.gather(*(one(step) for step in steps))

    async def _change(self, cluster: Cluster, client: JournalClient, change: Change) -> None:
        (listed,) = (await client.list()).journals
        spec = pb.JournalSpec()
        spec.CopyFrom(listed.spec)
        spec.replication = self._replication = change.replication
        spec.flags = pb.JournalSpec.O_RDONLY if change.read_only else pb.JournalSpec.O_RDWR
        spec.labels.CopyFrom(labels.label_set({FSYNC: change.fsync}))
        await client.apply([pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=listed.mod_revision)])
        await cluster.ready(JOURNAL)

    async def _member(self, client: JournalClient, primary: bool) -> int:
        """Return the number of the primary, or of another replica (the primary, if there is no other)."""
        (listed,) = (await client.list()).journals
        route = listed.route
        others = [index for index in range(len(route.members)) if index != route.primary]
        member = route.members[route.primary if primary or not others else others[0]]
        return int(member.suffix.rpartition("-")[2])


def outcome_of(
    events: list[Event], prepare: Callable[[ExitStack], None]
) -> tuple[list[object], bytes, list[tuple[int, int, bytes]]]:
    """Return the outcomes of all appends, the journal's content, and its fragments after all brokers have exited."""
    run = Run()

    async def main(loop: SimLoop) -> None:
        await run.live(events)

    with ExitStack() as stack:
        prepare(stack)
        with simulated(0, shuffle=False) as loop:  # Otherwise a client may send in another order.
            loop.run_until_complete(main(loop))
    return run.outcomes, run.content, run.fragments


SOME: list[Event] = [
    Together((Step(b"a"), Step(b"b", union=AUTHOR), Step(b"c", check=(("author", "2"),)), Step(b"d"))),
    FullDisk(primary=False),
    Together((Step(b"e"), Step(b"y" * 1100), Step(b"f", shift=0), Step(b"g"))),
    Change(3, fsync="commit"),
    Together((Step(b"h"), Step(b"i"))),
    Death(primary=True),
    Together((Step(b"j"), Step(b"k"), Step(b"l", suspend=Suspend.NO_RESUME), Step(b"m"))),
    FullDisk(primary=True),
    Change(1, read_only=True),
    Together((Step(b"refused"), Step(b""))),
    Change(2),
    Together((Step(b"n"), Step(b"o"))),
]


@given(st.lists(EVENTS, min_size=1, max_size=8))
@example(SOME)
@settings(max_examples=examples(20), deadline=None)
def test_concurrent_appends_have_the_outcomes_of_one_by_one_despite_faults(events: list[Event]) -> None:
    assert outcome_of(events, over_a_stream) == outcome_of(events, over_a_stream_one_by_one)


def test_batches_are_proposed_between_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    propose, taken = Batch.propose, 0

    def counted(batch: Batch, stream: ContentStream | None = None) -> None:
        nonlocal taken
        taken += len(batch.members) if len(batch.members) > 1 else 0
        propose(batch, stream)

    monkeypatch.setattr(Batch, "propose", counted)
    outcomes, content, _ = outcome_of(SOME, over_a_stream)
    assert taken >= 8
    assert content.endswith(b"jklm..no")
    assert {"RegisterMismatch", "AppendOutcomeUnknown", "Unavailable", "NotAllowed"} <= {
        each for each in outcomes if isinstance(each, str)
    }


def test_a_plan_that_forgets_earlier_appends_of_the_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet:
        return of_registers.after(request, registers)

    right = outcome_of(SOME, over_a_stream_one_by_one)
    for module in (batch, queue):
        monkeypatch.setattr(module, "apply_registers", careless)
    assert outcome_of(SOME, over_a_stream) != right
