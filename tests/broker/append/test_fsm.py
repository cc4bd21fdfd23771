"""The append state machine: its table, every path through its states, and the resources that it releases."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coranto import labels
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Compare, CompareTarget, EtcdHeader, KeyValue, TxnResult, absent
from coranto.coordination.keyspace_state import Assignment, Item
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.effects import LocalDisk
from coranto.errors import InvalidInput, StoreError, TxnOutcomeUnknown, Unavailable
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.journal_ids import shared_through
from coranto.specs.durability import ACK_SYNCED, ACK_UNMET, ACK_ZONES, Durability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.batch import PROPOSALS_IN_FLIGHT
from coranto_broker.append.entry import resolve
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.overload import ReceiveBudget
from coranto_broker.append.queue import JournalQueue, queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.receiving import Inbox
from coranto_broker.append.states import TERMINAL, TRANSITIONS, AppendEvent, ProposalPath, State
from coranto_broker.fragments.index import FragmentIndex
from coranto_broker.metrics import Metrics
from coranto_broker.ownership import Invalidated, Signal, Slot
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord, Stranded
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.pipeline import Extension, LocalStream, Pipeline, ReplicationFailed
from coranto_broker.replication.resolver import Resolution
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, SpoolFolder, folder_of
from coranto_broker.spool.in_sync import Epoch, InSyncRecord, Stamp
from coranto_broker.spool.spool import empty_at
from tests.broker.running import FaultyDisk, ManualClock, eventually

JOURNAL = "a/journal"
IN_SYNC = Layout("/cluster").in_sync_key(JOURNAL)
SELF = pb.ProcessSpec.ID(zone="local", suffix="self")
OK = pb.ReplicateResponse(status=pb.OK)


class Peer:
    """A replica with planned answers; by default it agrees to every proposal."""

    def __init__(self) -> None:
        self.answers: deque[pb.ReplicateResponse | Exception] = deque()
        self.sent: list[str] = []
        self.readable_offsets: list[int] = []
        self.asked: list[int] = []
        self.is_open = self.tells_synced = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed_send = False

    def write(self, content_delta: int, content: bytes) -> None:
        self.sent.append(content.decode())

    def propose(
        self,
        proposal: Fragment,
        registers: pb.LabelSet,
        *,
        header: Any,
        acknowledge: bool,
        ask: int,
        traceparent: str = "",
    ) -> None:
        self.asked.append(ask)
        self.sent.append(f"[{proposal.begin},{proposal.end}){'?' if acknowledge else ''}")

    def extend(self, extension: Extension) -> None:
        self.write(0, bytes(extension.content))
        self.propose(extension.proposal, extension.registers, header=None, acknowledge=True, ask=extension.ask)

    def readable(self, offset: int) -> None:
        self.readable_offsets.append(offset)

    async def drain(self) -> None:
        return

    async def acknowledgement(self) -> pb.ReplicateResponse:
        await self.gate.wait()
        answer = self.answers.popleft() if self.answers else OK
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close_send(self) -> None:
        self.closed_send = True

    async def closed(self) -> None:
        return

    def abort(self) -> None:
        self.answers.append(ReplicationFailed("given up"))
        self.gate.set()


class Client:
    """Streams messages, or fails with an error. After the last, it stays silent."""

    def __init__(self, *messages: object) -> None:
        self._messages = deque(messages)
        self.silent = asyncio.Event()

    async def read(self) -> Any:
        if not self._messages:
            self.silent.set()
            await asyncio.Event().wait()
        found = self._messages.popleft()
        if isinstance(found, Exception):
            raise found
        return found


class Result:
    """The end of an append."""

    def __init__(self, append: QueuedAppend) -> None:
        self.state = append.state
        found = append.outcome
        self.error = found if isinstance(found, Exception) else None
        outcome = found if isinstance(found, AppendOutcome) else None
        self.status = outcome.status if outcome is not None else pb.OK
        whole = outcome.fragment if outcome is not None else None
        self.commit: Fragment | None = None
        if outcome is not None and whole is not None:
            self.commit = Fragment(whole.journal, outcome.begin, outcome.end, outcome.sum, whole.codec)
        self.registers = outcome.registers if outcome is not None else pb.LabelSet()
        self.durability = outcome.durability if outcome is not None else Durability(0, 0)
        self.reason = outcome.reason if outcome is not None else ""


class World:
    """One journal and its broker, as the state machine sees them; the Route's members are `self` and `peers`."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.disk = FaultyDisk()
        self.index = FragmentIndex(self.clock)
        self.index.refresh([], 0.0)
        spool_folder = SpoolFolder(folder_of(folder, JOURNAL, 1), JOURNAL, 1, self.disk, self.clock)
        self.spool = DurableSpool(spool_folder, self, Fsync.NEVER)
        self.replica = SimpleNamespace(
            journal=JOURNAL,
            pipeline=Slot(),
            spool=Slot(),
            flow_control=FlowControl(),
            index=self.index,
            folder=spool_folder,
            wait_refreshed=self._wait_refreshed,
            acknowledged_below_demand=0,
        )
        environment: Any = self
        self.replica.queue = JournalQueue(environment, self.replica)  # type: ignore[arg-type]
        self.max_append_rate = 0
        self.quotas = SimpleNamespace(pace_append=self._pace_append)
        self.tracer = None
        self.health = ""
        self.on_txn: Callable[[], None] = lambda: None
        self.replica.pipeline.put(None)
        self.replica.spool.put(self.spool)
        self.spec = pb.JournalSpec(name=JOURNAL, replication=1)
        self.spec.fragment.length = 1 << 20
        self.spec.fragment.compression_codec = pb.NONE
        self.peers: list[Peer] = []
        self.primary = True
        self.status: pb.Status.ValueType = pb.OK
        self.consistent = True
        self.signal = Signal()
        self.revision = 10
        self.etcd_revision = 0  # The latest revision of etcd, if it is ahead of the Route's.
        self.built = 0
        self.resolved: list[int] = []
        self.changes: deque[Any] = deque()
        self.txns: list[Any] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.resolver = self.stores = self
        self.known_resolution: Resolution | None = None  # The resolution that is known without a wait.
        self.coordinator = self
        self.record: KeyValue | None = None
        self.conflicts = 0
        self.groups: list[int] = []
        self.metrics = Metrics()
        coordinator: Any = self
        self.in_sync = InSyncRecords(coordinator, Layout("/cluster"), MemberId("local", "self"))

    # -- Environment, resolver, coordinator and observer in one

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> StoredRecord:
        return await self.in_sync.verify(JOURNAL, 1, spool.stamp, spool.end)

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: StoredRecord) -> Pipeline:
        self.built += 1
        names = ["local#self", *(f"local#peer-{n}" for n in range(len(self.peers)))]
        return Pipeline(resolution.header, spool, [LocalStream(spool), *self.peers], names, reading=reading)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def resolve(self, journal: str, **options: Any) -> Resolution:
        assert (journal, options["require_primary"]) == (JOURNAL, True)
        if self.known_resolution is not None:
            return self.known_resolution
        self.resolved.append(options["min_revision"])
        self.revision = max(self.revision, options["min_revision"])
        route = pb.Route(primary=0, members=[SELF])
        for n in range(len(self.peers)):
            route.members.add(zone="local", suffix=f"peer-{n}")
        header = pb.Header(route=route, etcd=pb.Header.Etcd(revision=self.revision))
        header.process_id.CopyFrom(SELF if self.primary else pb.ProcessSpec.ID(zone="local", suffix="other"))
        value = route if self.consistent else pb.Route(primary=-1)
        assignments = [
            Assignment(
                AssignmentKey(JOURNAL, MemberId(member.zone, member.suffix), slot), value, KeyValue(f"key-{slot}")
            )
            for slot, member in enumerate(route.members)
        ]
        state: Any = SimpleNamespace(entities=JournalEntities())
        item = Item(JOURNAL, self.spec, KeyValue("item", create_revision=1))
        replica: Any = self.replica if self.primary else None
        return Resolution(self.status, state, SELF, header, item, assignments, replica, self.signal)

    def permits_hold(self, resolution: Resolution) -> bool:
        return (self.spec.flags, self.spec.suspend) == (resolution.spec.flags, resolution.spec.suspend)

    async def wait_for_change(self, resolution: Resolution) -> None:
        self.changes.popleft()()

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        return EtcdHeader(1, 1, max(self.revision, self.etcd_revision), 1), self.record

    async def txn(self, compares: Any, ops: Any) -> TxnResult:
        self.txns.append((compares, ops))
        self.on_txn()
        self.revision += 1
        if self.conflicts:
            self.conflicts -= 1
            return TxnResult(False, EtcdHeader(1, 1, self.revision, 1))
        for op in ops:
            if op.key == IN_SYNC:
                kept = Compare(IN_SYNC, CompareTarget.MOD_REVISION, self.record.mod_revision) if self.record else None
                if (kept or absent(IN_SYNC)) not in compares:
                    return TxnResult(False, EtcdHeader(1, 1, self.revision, 1))
                self.record = KeyValue(op.key, op.value, mod_revision=self.revision)
            else:
                self.consistent = True
        return TxnResult(True, EtcdHeader(1, 1, self.revision, 1))

    def proposed(self, path: ProposalPath, appends: int) -> None:
        if path is not ProposalPath.STREAMED:
            self.groups.append(appends)

    @property
    def below_demand(self) -> float | None:
        return self.metrics.registry.get_sample_value("coranto_appends_below_demand_total")

    async def problem(self, journal: str, url: str, until: Signal | None) -> str:
        return self.health

    def is_healthy(self, journal: str, url: str) -> bool:
        return not self.health

    def is_current(self, resolution: Resolution) -> bool:
        return self.known_resolution is resolution

    def known(self, journal: str, min_revision: int = 0) -> Resolution | None:
        return self.known_resolution

    def spool_commit(self, fragment: Fragment, content: Any) -> None:
        self.index.spool_commit(fragment, content)

    def spool_complete(self, sealed: Any, *, primary: bool) -> None:
        self.index.spool_complete(sealed)

    def spool_skip(self, offset: int) -> None:
        self.index.note_head(offset)

    def spool_ahead(self, end: int) -> None:
        self.index.spool_ahead(end)

    def spool_readable(self, end: int) -> None:
        self.index.spool_readable(end)

    async def _pace_append(self, caller: str, size: int) -> None:
        return

    async def _wait_refreshed(self, until: Signal) -> None:
        await self.index.wait_refreshed()

    # -- For tests

    def queued(self, content: bytes | None = None, client: Client | None = None, **request: Any) -> QueuedAppend:
        append = QueuedAppend(pb.AppendRequest(journal=JOURNAL, **request), content=content)
        append.inbox = Inbox(client or Client(), ReceiveBudget(0), 0, self.clock)
        return append

    async def run(self, append: QueuedAppend) -> Result:
        """Run an append to its outcome."""
        environment: Any = self
        try:
            outcome = await resolve(environment, append)
            if outcome is not None:
                append.settle(outcome)
            else:
                queue_of(append.resolved.require_replica).enqueue(append)
            with contextlib.suppress(Exception):
                await append.settled()
        finally:
            append.leave()
        return Result(append)

    async def append(self, *contents: bytes, **request: Any) -> Result:
        """Run an append whose content is streamed."""
        messages = [pb.AppendRequest(content=content) for content in (*contents, b"")]
        return await self.run(self.queued(client=Client(*messages, object()), **request))

    async def whole(self, content: bytes = b"", **request: Any) -> Result:
        """Run an append that was received before it requests the pipeline."""
        return await self.run(self.queued(content, **request))

    async def together(self, *appends: tuple[bytes, dict[str, Any]]) -> list[Result]:
        """Run whole appends that wait for the pipeline at the same time, in this order."""
        pipeline = await self.replica.pipeline.take()
        tasks = []
        for content, request in appends:
            tasks.append(asyncio.create_task(self.whole(content, **request)))
            await asyncio.sleep(0)
        self.groups.clear()
        self.replica.pipeline.put(pipeline)
        return list(await asyncio.gather(*tasks))

    async def is_free(self) -> bool:
        """Return True once background work has finished and the pipeline is free."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        async with asyncio.timeout(60):
            self.replica.pipeline.put(await self.replica.pipeline.take())
        return True


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def mismatch(begin: int, end: int, registers: pb.LabelSet | None = None) -> pb.ReplicateResponse:
    fragment = Fragment(JOURNAL, begin, end, b"s" * 20, Codec.NONE).to_wire()
    return pb.ReplicateResponse(status=pb.PROPOSAL_MISMATCH, fragment=fragment, registers=registers or pb.LabelSet())


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_state_is_in_the_table_and_has_a_handler() -> None:
    assert {state for state, _ in TRANSITIONS} == set(State) - TERMINAL
    assert {event for _, event in TRANSITIONS} == set(AppendEvent)
    handled = {state for state in State if hasattr(AppendFsm, f"_{state.name.lower()}")}
    assert handled == set(State) - TERMINAL - {State.STREAM_CONTENT, State.READ_ACKNOWLEDGEMENTS}
    assert all(TRANSITIONS[state, AppendEvent.FAILED] is State.ERROR for state in handled)


def test_every_state_can_be_reached_and_can_end() -> None:
    def closure(start: State) -> set[State]:
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            following = {TRANSITIONS[state, event] for event in AppendEvent if (state, event) in TRANSITIONS}
            todo.extend(following - seen)
            seen |= following
        return seen

    assert closure(State.RESOLVE) == set(State)
    for state in State:
        assert closure(state) & TERMINAL


@pytest.mark.parametrize("state", State)
def test_only_the_events_of_the_table_move_an_append(world: World, state: State) -> None:
    append = world.queued()
    for event in AppendEvent:
        append.state = state
        if (state, event) in TRANSITIONS:
            append.transition(event)
            assert append.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(RuntimeError, match="must not occur in state"):
                append.transition(event)


# ------------------------------------------------------------------------------------------------------ up to streaming


async def test_a_first_append_builds_a_pipeline_and_later_ones_use_it(world: World) -> None:
    first = await world.append(b"abc", b"def")
    assert (first.state, first.commit) == (State.FINISHED, Fragment(JOURNAL, 0, 6, sum_of(b"abcdef"), Codec.NONE))
    second = await world.append(b"ghi")
    assert second.commit is not None
    assert (second.commit.begin, second.commit.end) == (6, 9)
    assert world.built == 1
    assert await world.is_free()


async def test_a_status_ends_the_append(world: World) -> None:
    world.status = pb.JOURNAL_NOT_FOUND
    fsm = await world.append(b"abc")
    assert (fsm.state, fsm.status, fsm.error) == (State.ERROR, pb.JOURNAL_NOT_FOUND, None)


async def test_an_append_at_another_brokers_primary_is_proxied(world: World) -> None:
    world.primary = False
    fsm = await world.append(b"abc")
    assert fsm.state is State.PROXY


async def test_a_changed_route_ends_the_wait_for_the_pipeline(world: World) -> None:
    held = await world.replica.pipeline.take()
    waiting = asyncio.create_task(world.append(b"abc"))
    await asyncio.sleep(0)
    stale, world.signal = world.signal, Signal()
    world.primary = False
    stale.fire()
    assert (await waiting).state is State.PROXY
    assert len(world.resolved) == 2
    world.replica.pipeline.put(held)


async def test_a_changed_route_ends_the_wait_for_the_spool(world: World) -> None:
    spool = await world.replica.spool.take()
    waiting = asyncio.create_task(world.append(b"abc"))
    await asyncio.sleep(0)
    stale, world.signal = world.signal, Signal()
    stale.fire()
    await asyncio.sleep(0)
    world.replica.spool.put(spool)
    assert (await waiting).state is State.FINISHED
    assert len(world.resolved) == 2
    assert await world.is_free()


@pytest.mark.parametrize("held", ["pipeline", "spool"])
async def test_a_cancelled_append_releases_its_resources(world: World, held: str) -> None:
    slot = getattr(world.replica, held)
    thing = await slot.take()
    waiting = asyncio.create_task(world.append(b"abc"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    slot.put(thing)
    assert await world.is_free()
    assert (await world.append(b"abc")).state is State.FINISHED


async def test_a_pipeline_is_renewed_when_due(world: World) -> None:
    await world.append(b"one")
    pipeline = await world.replica.pipeline.take()
    assert pipeline is not None
    pipeline.renew_at = world.clock.monotonic() + 1
    world.replica.pipeline.put(pipeline)
    await world.append(b"two")
    assert world.built == 1
    world.clock.advance(1)
    fsm = await world.append(b"three")
    assert world.built == 2
    assert fsm.commit is not None
    assert (fsm.commit.begin, fsm.commit.end) == (6, 11)
    assert await world.is_free()


async def test_a_changed_route_rebuilds_the_pipeline(world: World) -> None:
    await world.append(b"abc")
    world.peers = [Peer()]
    world.spec.replication = 2
    fsm = await world.append(b"def")
    assert fsm.state is State.FINISHED
    assert world.built == 2
    # The journal's first fragment is completed before the next append; the peer receives all proposals.
    assert world.peers[0].sent == ["[0,3)?", "[3,3)", "def", "[3,6)?"]
    assert await world.is_free()


async def test_a_peer_that_lacks_content_makes_the_replicas_roll(world: World) -> None:
    await world.append(b"abc")
    world.peers, world.spec.replication = [Peer()], 2
    world.peers[0].answers.append(mismatch(3, 3))
    fsm = await world.append(b"def")
    assert fsm.state is State.FINISHED
    assert world.peers[0].sent == ["[0,3)?", "[3,3)?", "def", "[3,6)?"]


async def test_replicas_adopt_the_offset_and_registers_of_a_peer_that_is_ahead(world: World) -> None:
    await world.append(b"abc", union_registers=labels.label_set(author="old"))
    world.peers, world.spec.replication = [Peer()], 2
    world.peers[0].answers.append(mismatch(5, 9, labels.label_set(author="new")))
    fsm = await world.append(b"def")
    assert fsm.commit is not None
    assert (fsm.state, fsm.commit.begin, fsm.registers) == (State.FINISHED, 9, labels.label_set(author="new"))
    assert world.spool.registers == labels.label_set(author="new")


async def test_a_peer_with_a_later_route_causes_another_resolution(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    header = pb.Header(etcd=pb.Header.Etcd(revision=33))
    world.peers[0].answers.append(pb.ReplicateResponse(status=pb.WRONG_ROUTE, header=header))
    fsm = await world.append(b"abc")
    assert fsm.state is State.FINISHED
    assert world.resolved == [0, 33]
    assert world.built == 2


async def test_a_failed_synchronization_ends_the_append_and_the_pipeline(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    world.peers[0].answers.append(ReplicationFailed("connection refused"))
    fsm = await world.append(b"abc")
    assert (fsm.state, world.peers[0].closed_send) == (State.ERROR, True)
    assert "connection refused" in str(fsm.error)
    assert isinstance(fsm.error, RolledBack)  # Its content was not proposed, and the client is informed.
    assert await world.is_free()
    world.peers = [Peer()]  # The next pipeline opens a new stream; the failed one was closed.
    assert (await world.append(b"abc")).state is State.FINISHED


async def test_earlier_commits_are_flushed_before_replicas_continue_behind_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by simulation: replicas rolled to an end that only one broker had reached, and then lost in a power cut.
    world.peers, world.spec.replication = [Peer()], 2
    world.spool.fsync = Fsync.COMMIT
    world.spool.commit(b"abc", pb.LabelSet(), 5)
    flush, propose, happened = world.spool.flush_commits, world.peers[0].propose, []

    async def flushed() -> None:
        await flush()
        happened.append("flushed")

    def proposed(*arguments: Any, **options: Any) -> None:
        happened.append("proposed")
        propose(*arguments, **options)

    monkeypatch.setattr(world.spool, "flush_commits", flushed)
    monkeypatch.setattr(world.peers[0], "propose", proposed)
    await world.append(b"def")
    assert happened[:2] == ["flushed", "proposed"]


async def test_cancelling_a_synchronization_ends_the_pipeline(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    world.peers[0].gate.clear()
    waiting = asyncio.create_task(world.append(b"abc"))
    await eventually(lambda: world.peers[0].sent == ["[0,0)?"])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await eventually(lambda: world.peers[0].closed_send)
    world.peers = [Peer()]
    assert await world.is_free()
    assert (await world.append(b"abc")).state is State.FINISHED


async def test_a_consistent_route_is_advertised_once(world: World) -> None:
    world.consistent = False
    await world.append(b"abc")
    ((compares, ops),) = world.txns
    assert [compare.key for compare in compares] == ["key-0", IN_SYNC]
    assert [op.key for op in ops] == ["key-0", IN_SYNC]
    assert pb.Route.FromString(ops[0].value).members[0] == SELF
    assert ops[0].keep_lease
    assert world.resolved == [0, 11]
    await world.append(b"def")
    assert len(world.txns) == 1


async def test_too_few_replicas_fail_and_too_many_wait(world: World) -> None:
    world.spec.replication = 2
    fsm = await world.append(b"abc")
    assert (fsm.state, fsm.status) == (State.ERROR, pb.INSUFFICIENT_JOURNAL_BROKERS)
    assert await world.is_free()

    world.spec.replication = 1
    world.peers = [Peer()]
    world.changes.append(world.peers.clear)
    fsm = await world.append(b"abc")
    assert fsm.state is State.FINISHED
    assert not world.changes
    assert world.built == 3


async def test_a_journal_is_suspended_and_woken(world: World) -> None:
    await world.append(b"abc")
    await world.append(b"def")
    now = pb.AppendRequest.SUSPEND_NOW

    def written() -> pb.JournalSpec:
        return pb.JournalSpec.FromString(world.txns[-1][1][0].value)

    def apply() -> None:
        world.spec = written()
        world.status = pb.SUSPENDED if world.spec.suspend.level == pb.JournalSpec.Suspend.FULL else pb.OK

    world.on_txn = apply
    fsm = await world.append(suspend=now)
    assert (fsm.state, fsm.status) == (State.ERROR, pb.SUSPENDED)
    assert world.spec.suspend == pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=6)
    assert world.spool.fragment.length == 0, "local content has been completed"

    assert (await world.append(suspend=pb.AppendRequest.SUSPEND_NO_RESUME)).status == pb.SUSPENDED
    kept = await world.append(suspend=pb.AppendRequest.SUSPEND_KEEP)
    assert (kept.state, world.spec.suspend.level) == (State.FINISHED, pb.JournalSpec.Suspend.PARTIAL)
    assert (await world.append(b"x", suspend=pb.AppendRequest.SUSPEND_KEEP)).status == pb.NOT_ALLOWED

    woken = await world.append(b"ghi")
    assert woken.commit is not None
    assert (woken.state, woken.commit.begin) == (State.FINISHED, 6)
    assert world.spec.suspend.level == pb.JournalSpec.Suspend.NONE


async def test_a_fully_suspended_journal_continues_at_its_offset(world: World) -> None:
    world.spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.FULL, offset=70))
    world.status = pb.SUSPENDED
    assert (await world.append(b"x", suspend=pb.AppendRequest.SUSPEND_NO_RESUME)).status == pb.SUSPENDED

    def apply() -> None:
        (op,) = (op for op in world.txns[-1][1] if op.key == "item")
        world.spec = pb.JournalSpec.FromString(op.value)
        world.status, world.on_txn = pb.OK, lambda: None

    world.on_txn = apply
    fsm = await world.append(b"abc")
    assert fsm.commit is not None
    assert (fsm.state, fsm.commit.begin) == (State.FINISHED, 70)


async def test_a_suspension_whose_outcome_is_unknown_ends_the_append(world: World) -> None:
    await world.append(b"abc")

    def lose_the_answer() -> None:
        world.on_txn = lambda: None
        raise TxnOutcomeUnknown("lost")

    world.on_txn = lose_the_answer
    fsm = await world.append(suspend=pb.AppendRequest.SUSPEND_NOW)
    assert (fsm.state, type(fsm.error)) == (State.ERROR, TxnOutcomeUnknown)
    assert await world.is_free()
    assert (await world.append(b"def")).state is State.FINISHED


async def test_a_route_that_changes_during_a_store_check_is_resolved_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = iter([Invalidated(), ""])

    async def problem(journal: str, url: str, until: Signal) -> str:
        answer = next(problems)
        if isinstance(answer, Invalidated):
            world.revision = 20
            raise answer
        return answer

    monkeypatch.setattr(world, "problem", problem)
    world.spec.fragment.stores.append("file:///frags/")
    fsm = await world.append(b"abc")
    assert (fsm.state, len(world.resolved)) == (State.FINISHED, 2)
    assert await world.is_free()


async def test_an_unhealthy_store_refuses_appends(world: World) -> None:
    world.health = "no such bucket"
    assert (await world.append(b"abc")).state is State.FINISHED, "a journal without stores needs none"
    world.spec.fragment.stores.append("file:///frags/")
    fsm = await world.append(b"abc")
    assert (fsm.state, fsm.status) == (State.ERROR, pb.FRAGMENT_STORE_UNHEALTHY)
    assert fsm.reason == "no such bucket"
    world.health = ""
    assert (await world.append(b"abc")).state is State.FINISHED


async def test_appends_wait_for_the_first_listing_of_the_stores(world: World) -> None:
    world.index = world.replica.index = FragmentIndex(world.clock)
    waiting = asyncio.create_task(world.append(b"abc"))
    await asyncio.sleep(0)
    assert not waiting.done()
    world.index.refresh([Fragment(JOURNAL, 0, 100, b"s" * 20, Codec.NONE, "file:///frags/", 1)], 0.0)
    fsm = await waiting
    assert (fsm.state, fsm.status) == (State.ERROR, pb.INDEX_HAS_GREATER_OFFSET)
    confirmed = await world.append(b"abc", offset=100)
    assert confirmed.commit is not None
    assert confirmed.commit.begin == 100


async def test_a_store_that_cannot_be_listed_refuses_appends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(until: Signal) -> None:
        raise StoreError("no such bucket")

    world.index = world.replica.index = FragmentIndex(world.clock)
    monkeypatch.setattr(world.replica, "wait_refreshed", fail)
    fsm = await world.append(b"abc")
    assert (fsm.state, fsm.status, fsm.reason) == (
        State.ERROR,
        pb.FRAGMENT_STORE_UNHEALTHY,
        "no such bucket",
    )
    assert world.spool.end == 0


# --------------------------------------------------------------------------------------------------- streaming and ends


async def test_registers_change_with_the_commit(world: World) -> None:
    first = await world.append(b"abc", union_registers=labels.label_set(author="me"))
    assert first.registers == labels.label_set(author="me")
    refused = await world.append(b"x", check_registers=labels.parse_selector("author=you"))
    assert (refused.status, refused.registers) == (pb.REGISTER_MISMATCH, labels.label_set(author="me"))
    empty = await world.append(union_registers=labels.label_set(author="you"))
    assert isinstance(empty.error, InvalidInput)
    assert world.spool.registers == labels.label_set(author="me")
    assert world.spool.end == 3


async def test_a_read_only_journal_accepts_barriers(world: World) -> None:
    world.spec.flags = pb.JournalSpec.O_RDONLY
    assert (await world.append()).state is State.FINISHED
    refused = await world.append(b"abc")
    assert (refused.state, refused.status) == (State.ERROR, pb.NOT_ALLOWED)
    assert world.spool.end == 0


@pytest.mark.parametrize("ahead", [True, False])
async def test_content_commits_before_the_barriers_of_a_read_only_journal_or_never(world: World, ahead: bool) -> None:
    await world.append(b"abc")
    sealed = pb.JournalSpec()
    sealed.CopyFrom(world.spec)
    sealed.flags = pb.JournalSpec.O_RDONLY
    held = await world.replica.pipeline.take()
    early = [asyncio.create_task(call(b"def")) for call in (world.append, world.whole) if ahead]
    await asyncio.sleep(0)
    if ahead:  # They get the pipeline one after the other while the journal is writable.
        world.replica.pipeline.put(held)
        await asyncio.gather(*early)
        held = await world.replica.pipeline.take()
    late = [asyncio.create_task(call(b"xyz")) for call in (world.append, world.whole)]
    await asyncio.sleep(0)
    world.spec = sealed
    barriers = [asyncio.create_task(call()) for call in (world.append, world.whole)]
    await asyncio.sleep(0)
    world.replica.pipeline.put(held)
    assert [(each.status, each.commit) for each in await asyncio.gather(*late)] == [(pb.NOT_ALLOWED, None)] * 2
    end = 9 if ahead else 3
    for barrier in await asyncio.gather(*barriers):
        assert barrier.commit is not None
        assert (barrier.commit.begin, barrier.commit.end) == (end, end)
    assert world.spool.end == end
    assert await world.is_free()


async def streaming(world: World, *messages: object, **request: Any) -> QueuedAppend:
    """Start an append that streams these messages, and then waits for its client."""
    client = Client(*messages)
    append = world.queued(client=client, **request)
    environment: Any = world
    assert await resolve(environment, append) is None
    queue_of(append.resolved.require_replica).enqueue(append)
    await client.silent.wait()
    return append


async def test_a_client_that_fails_is_rolled_back(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    append = world.queued(client=Client(pb.AppendRequest(content=b"abc"), Unavailable("too slow")))
    failed = await world.run(append)
    assert failed.state is State.ERROR
    assert "too slow" in str(failed.error)
    assert await world.is_free()
    assert world.peers[0].sent[-2:] == ["abc", "[0,0)"]
    assert (world.spool.end, world.spool.delta) == (0, 0)


async def test_a_client_that_disconnects_within_a_stream_is_rolled_back(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    append = await streaming(world, pb.AppendRequest(content=b"abc"))
    append.leave()
    assert await world.is_free()
    assert world.peers[0].sent[-2:] == ["abc", "[0,0)"]
    assert world.spool.delta == 0
    assert (await world.append(b"xyz")).state is State.FINISHED
    assert world.built == 1


async def test_appends_are_pipelined_and_answered_in_order(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    peer = world.peers[0]
    await world.append(b"abc")
    peer.gate.clear()
    # The second rolls the journal's first content, and does not wait otherwise; the third and fourth overlap.
    second = asyncio.create_task(world.append(b"def"))
    await eventually(lambda: peer.sent[-1] == "[3,6)?")
    third = asyncio.create_task(world.append(b"ghi"))
    fourth = asyncio.create_task(world.append(b"jkl"))
    await eventually(lambda: peer.sent[-4:] == ["ghi", "[3,9)?", "jkl", "[3,12)?"])
    assert not any(task.done() for task in (second, third, fourth))
    assert world.index.head == 3, "nothing is visible before it is acknowledged"
    peer.gate.set()
    commits = [(await task).commit for task in (second, third, fourth)]
    assert [(commit.begin, commit.end) for commit in commits if commit] == [(3, 6), (6, 9), (9, 12)]
    assert world.index.head == 12


async def test_a_commit_outlives_its_client(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    peer = world.peers[0]
    await world.append()
    peer.gate.clear()
    leaving = asyncio.create_task(world.append(b"abc"))
    await eventually(lambda: peer.sent[-2:] == ["abc", "[0,3)?"])
    staying = asyncio.create_task(world.append(b"def"))
    for _ in range(20):  # As far as possible without the missing answer.
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    peer.gate.set()
    commit = (await staying).commit
    assert commit is not None
    assert commit.begin == 3
    assert world.index.head == 6
    assert await world.is_free()


async def test_a_broken_stream_fails_the_append_and_the_next_append_recovers(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    await world.append(b"abc")
    world.peers[0].answers.append(ReplicationFailed("it died"))
    fsm = await world.append(b"def")
    assert fsm.state is State.ERROR
    assert "it died" in str(fsm.error)
    assert not isinstance(fsm.error, RolledBack)  # It may be part of the journal.
    world.peers = [Peer()]
    again = await world.append(b"ghi")
    assert again.state is State.FINISHED
    assert world.built == 2
    # The first peer may lack this content, but the primary has it: it is part of the journal, at the same offsets.
    assert again.commit is not None
    assert again.commit.begin == 6
    assert await world.is_free()


async def test_a_silent_peer_blocks_no_append_after_the_route_has_changed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.replication.pipeline.SHUTDOWN_SECONDS", 0.05)
    world.peers, world.spec.replication = [Peer()], 2
    await world.append()
    world.peers[0].gate.clear()
    hanging = asyncio.create_task(world.append(b"abc"))
    await eventually(lambda peer=world.peers[0]: peer.sent[-2:] == ["abc", "[0,3)?"])
    assert not hanging.done()
    world.peers, world.spec.replication = [], 1
    following = await world.append(b"def")
    assert following.commit is not None
    assert (following.state, following.commit.begin) == (State.FINISHED, 3)
    failed = await asyncio.wait_for(hanging, 60)
    assert failed.state is State.ERROR
    assert "given up" in str(failed.error)
    assert await world.is_free()


async def test_a_disk_that_fails_rolls_back(world: World) -> None:
    await world.append(b"abc")
    world.disk.full = "content"
    fsm = await world.append(b"def")
    assert fsm.state is State.ERROR
    assert "no space left" in str(fsm.error)
    world.disk.full = None
    again = await world.append(b"ghi")
    assert again.commit is not None
    assert (again.state, again.commit.begin) == (State.FINISHED, 3)
    assert world.spool.fragment.sum == sum_of(b"ghi")


async def test_the_codec_changes_with_the_next_fragment(world: World) -> None:
    await world.append(b"abc")
    await world.append(b"def")
    world.spec.fragment.compression_codec = pb.GZIP
    await world.append(b"ghi")
    assert world.spool.fragment.codec is Codec.NONE
    world.spool.propose(empty_at(world.spool.fragment, 9, Codec.NONE), world.spool.registers, primary=True)
    fsm = await world.append(b"jkl")
    assert fsm.commit is not None
    assert (fsm.commit.codec, world.spool.fragment.codec) == (Codec.GZIP, Codec.GZIP)


# -------------------------------------------------------------------------------------------------------- group commit


@pytest.fixture
async def replicated(world: World) -> World:
    """Return a journal of three replicas whose first content has been completed."""
    world.peers, world.spec.replication = [Peer(), Peer()], 3
    await world.append(b"abc")
    await world.append(b"def")
    for peer in world.peers:
        peer.sent.clear()
    return world


def span(fsm: Result) -> tuple[int, int] | None:
    return (fsm.commit.begin, fsm.commit.end) if fsm.commit is not None else None


async def test_an_append_costs_each_replica_its_content_and_one_proposal(replicated: World) -> None:
    streamed = await replicated.append(b"ghi")
    whole = await replicated.whole(b"jkl")
    assert [span(streamed), span(whole)] == [(6, 9), (9, 12)]
    for peer in replicated.peers:
        assert peer.sent == ["ghi", "[3,9)?", "jkl", "[3,12)?"]
    assert replicated.groups == [1]
    assert await replicated.is_free()


async def test_appends_that_wait_together_cost_each_replica_one_proposal(replicated: World) -> None:
    contents = [bytes([ord("A") + n]) * (n + 1) for n in range(12)]
    appends = await replicated.together(*((content, {}) for content in contents))
    begin = 6
    for content, fsm in zip(contents, appends, strict=True):
        assert fsm.state is State.FINISHED
        assert fsm.commit == Fragment(JOURNAL, begin, begin + len(content), sum_of(content), Codec.NONE)
        begin += len(content)
    for peer in replicated.peers:
        assert peer.sent == [b"".join(contents).decode(), f"[3,{begin})?"]
    assert replicated.groups == [12]
    assert replicated.spool.fragment.end == replicated.index.head == begin
    assert await replicated.is_free()


async def test_each_append_of_a_batch_is_checked_as_if_earlier_ones_had_committed(replicated: World) -> None:
    me, you = labels.label_set(author="me"), labels.label_set(author="you")
    is_me, is_you = labels.parse_selector("author=me"), labels.parse_selector("author=you")
    appends = await replicated.together(
        (b"1", {"union_registers": me}),
        (b"2", {"check_registers": is_you}),
        (b"3", {"check_registers": is_me, "offset": 7}),
        (b"4", {"offset": 7}),
        (b"", {"offset": 8}),
        (b"5", {"subtract_registers": me, "union_registers": you}),
        (b"6", {"check_registers": is_you}),
    )
    assert [(fsm.state, fsm.status) for fsm in appends] == [
        (State.FINISHED, pb.OK),
        (State.ERROR, pb.REGISTER_MISMATCH),
        (State.FINISHED, pb.OK),
        (State.ERROR, pb.WRONG_APPEND_OFFSET),
        (State.FINISHED, pb.OK),
        (State.FINISHED, pb.OK),
        (State.FINISHED, pb.OK),
    ]
    assert [span(fsm) for fsm in appends] == [(6, 7), None, (7, 8), None, (8, 8), (8, 9), (9, 10)]
    assert [fsm.registers for fsm in appends] == [me, me, me, me, me, you, you]
    assert replicated.spool.registers == you
    assert replicated.peers[0].sent == ["1356", "[3,10)?"]


async def test_content_below_its_durability_demand_is_refused_but_not_barriers(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    world.spec.labels.CopyFrom(labels.label_set({ACK_ZONES: "2"}))
    for fsm in (await world.append(b"abc"), await world.whole(b"abc")):
        assert (fsm.state, fsm.status) == (State.ERROR, pb.INSUFFICIENT_JOURNAL_BROKERS)
        assert "Start brokers in other zones" in fsm.reason == world.replica.refusal
    assert (await world.append()).state is State.FINISHED
    world.spec.labels.CopyFrom(labels.label_set({ACK_ZONES: "2", ACK_UNMET: "accept"}))
    world.signal = Signal()
    accepted = await world.append(b"abc")
    assert (accepted.state, accepted.durability) == (State.FINISHED, Durability(2, 1))
    assert (world.below_demand, world.replica.acknowledged_below_demand, world.replica.refusal) == (1, 1, "")
    assert "Start brokers in other zones" in world.replica.demand_unmet


async def test_an_append_below_its_durability_demand_is_not_acknowledged(replicated: World) -> None:
    replicated.spec.labels.CopyFrom(labels.label_set({ACK_SYNCED: "true"}))
    appends = await replicated.together(
        (b"A", {}), (b"", {}), (b"B", {})
    )  # The peers answer that they have not synced.
    assert {fsm.state for fsm in appends} == {State.ERROR}
    assert "its labels demand on disk" in str(appends[0].error)
    assert (replicated.below_demand, replicated.peers[0].asked[-1]) == (2, pb.ReplicateRequest.SYNC)
    assert replicated.spool.end == replicated.index.head == 8, "it is in the journal, and its client cannot know"


async def test_an_append_with_a_durability_question_is_answered_alone(replicated: World) -> None:
    for peer, begin in zip(replicated.peers, (0, 4), strict=True):
        peer.answers.append(pb.ReplicateResponse(status=pb.OK, synced=True, held_from=begin))
    question = pb.DurabilityQuestion(since=3, sync=True)
    asking, other = await replicated.together((b"", {"durability": question}), (b"A", {}))
    assert (asking.durability, other.durability) == (Durability(1, 1, 1, 1), Durability(3, 1))
    assert replicated.peers[0].asked[-2:] == [pb.ReplicateRequest.SYNC, pb.ReplicateRequest.NOTHING]
    assert replicated.groups == [1, 1]


async def test_appends_of_an_earlier_route_join_no_batch_of_the_next(replicated: World) -> None:
    world, before = replicated, replicated.signal
    world.peers.append(Peer())
    first, second = world.queued(b"A"), world.queued(b"B")
    pipeline = await world.replica.pipeline.take()
    tasks = [asyncio.create_task(world.run(each)) for each in (first, second)]
    await eventually(lambda: world.replica.pipeline._waiters)

    def shrink() -> None:
        world.peers.pop()
        world.signal = Signal()
        before.fire()

    world.changes.append(shrink)  # While the first append waits, with the pipeline of the larger Route.
    world.replica.pipeline.put(pipeline)
    await asyncio.gather(*tasks)
    for each in (first, second):
        assert isinstance(each.outcome, AppendOutcome)
        assert each.outcome.resolution.invalidated is world.signal is not before
        assert len(each.outcome.resolution.header.route.members) == 3


async def test_a_client_that_disconnects_cancels_only_its_own_append(replicated: World) -> None:
    pipeline = await replicated.replica.pipeline.take()
    tasks = [asyncio.create_task(replicated.whole(content)) for content in (b"A", b"B", b"C")]
    await eventually(lambda: replicated.replica.pipeline._waiters)
    tasks[1].cancel()
    await asyncio.sleep(0)
    replicated.replica.pipeline.put(pipeline)
    first, gone, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert isinstance(first, Result)
    assert isinstance(third, Result)
    assert [span(first), span(third)] == [(6, 7), (7, 8)]
    assert replicated.peers[0].sent == ["AC", "[3,8)?"]
    assert await replicated.is_free()


async def test_the_next_append_leads_after_the_leaders_client_disconnects(replicated: World) -> None:
    pipeline = await replicated.replica.pipeline.take()
    tasks = [asyncio.create_task(replicated.whole(content)) for content in (b"A", b"B", b"C")]
    await eventually(lambda: replicated.replica.pipeline._waiters)
    tasks[0].cancel()
    replicated.replica.pipeline.put(pipeline)  # The first append has got the pipeline, and has not run yet.
    gone, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert isinstance(second, Result)
    assert isinstance(third, Result)
    assert [span(second), span(third)] == [(6, 7), (7, 8)]
    assert await replicated.is_free()


async def test_a_batch_outlives_its_leaders_client(replicated: World) -> None:
    for peer in replicated.peers:
        peer.gate.clear()
    pipeline = await replicated.replica.pipeline.take()
    tasks = [asyncio.create_task(replicated.whole(content)) for content in (b"A", b"B", b"C")]
    await asyncio.sleep(0)
    replicated.replica.pipeline.put(pipeline)
    await eventually(lambda: replicated.peers[0].sent == ["ABC", "[3,9)?"])
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0)
    for peer in replicated.peers:
        peer.gate.set()
    *gone, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in gone] == [asyncio.CancelledError] * 2
    assert isinstance(third, Result)
    assert span(third) == (8, 9)
    assert replicated.index.head == 9
    assert await replicated.is_free()


async def test_a_proposal_that_fails_fails_its_whole_group(replicated: World) -> None:
    replicated.peers[1].answers.append(ReplicationFailed("it died"))
    appends = await replicated.together((b"A", {}), (b"B", {"offset": 3}), (b"C", {}))
    for fsm in appends:
        assert (fsm.state, fsm.status) == (State.ERROR, pb.OK)
        assert "it died" in str(fsm.error)
    # The refused append depends on content that may not be part of the journal. It certainly is not part of it.
    assert [isinstance(fsm.error, RolledBack) for fsm in appends] == [False, True, False]
    replicated.peers = [Peer(), Peer()]
    assert (await replicated.whole(b"D")).state is State.FINISHED
    assert await replicated.is_free()


async def test_a_disk_that_fails_rolls_a_batch_back(replicated: World) -> None:
    replicated.disk.full = "content"
    appends = await replicated.together((b"A", {}), (b"B", {}))
    assert all("no space left" in str(fsm.error) for fsm in appends)
    replicated.disk.full = None
    again = await replicated.together((b"C", {}), (b"D", {}))
    assert [span(fsm) for fsm in again] == [(6, 7), (7, 8)]


async def hung(world: World, waiting: int) -> list[asyncio.Task[Result]]:
    """Start the most proposals in flight, all unacknowledged, and appends behind them."""
    for peer in world.peers:
        peer.gate.clear()
    tasks = []
    for n in range(PROPOSALS_IN_FLIGHT):
        tasks.append(asyncio.create_task(world.whole(bytes([ord("A") + n]))))
        await eventually(lambda proposed=n + 1: len(world.peers[0].sent) == 2 * proposed)
    more = range(PROPOSALS_IN_FLIGHT, PROPOSALS_IN_FLIGHT + waiting)
    tasks += [asyncio.create_task(world.whole(bytes([ord("A") + n]))) for n in more]
    await eventually(lambda: len(world.replica.queue) == waiting)  # One of them has the pipeline.
    assert len(world.peers[0].sent) == 2 * PROPOSALS_IN_FLIGHT
    return tasks


async def test_groups_gather_while_earlier_proposals_are_under_way(replicated: World) -> None:
    tasks = await hung(replicated, 5)
    for peer in replicated.peers:
        peer.gate.set()
    appends = await asyncio.gather(*tasks)
    assert [span(fsm) for fsm in appends] == [(6 + n, 7 + n) for n in range(PROPOSALS_IN_FLIGHT + 5)]
    assert replicated.groups == [1] * PROPOSALS_IN_FLIGHT + [5]


async def test_a_batch_waits_no_longer_than_its_route_lasts(replicated: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.replication.pipeline.SHUTDOWN_SECONDS", 0.05)
    tasks = await hung(replicated, 3)
    replicated.peers, replicated.spec.replication = [], 1
    stale, replicated.signal = replicated.signal, Signal()
    stale.fire()
    appends = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert [fsm.state for fsm in appends] == [State.ERROR] * PROPOSALS_IN_FLIGHT + [State.FINISHED] * 3
    assert {span(fsm) for fsm in appends[PROPOSALS_IN_FLIGHT:]} == {(8, 9), (9, 10), (10, 11)}
    assert await replicated.is_free()


async def test_a_fragment_that_is_full_ends_a_group(replicated: World) -> None:
    replicated.spec.fragment.length = 8
    appends = await replicated.together(*((b"12345", {}) for _ in range(4)))
    assert [span(fsm) for fsm in appends] == [(6, 11), (11, 16), (16, 21), (21, 26)]
    # [3,6) grows by 10 bytes and is then too long. The next one grows by 10 bytes, too.
    assert replicated.groups == [2, 2]
    assert replicated.peers[0].sent == ["1234512345", "[3,16)?", "[16,16)", "1234512345", "[16,26)?"]


async def test_an_append_that_needs_more_than_a_check_ends_a_group(world: World) -> None:
    await world.append(b"abc")
    await world.append(b"def")

    def apply() -> None:
        world.spec = pb.JournalSpec.FromString(world.txns[-1][1][0].value)

    world.on_txn = apply
    appends = await world.together(
        (b"A", {}), (b"B", {}), (b"", {"suspend": pb.AppendRequest.SUSPEND_NOW}), (b"C", {}), (b"D", {})
    )
    assert [span(fsm) for fsm in appends] == [(6, 7), (7, 8), None, (8, 9), (9, 10)]
    assert appends[2].status == pb.SUSPENDED


async def test_barriers_of_a_read_only_journal_are_a_group(world: World) -> None:
    world.spec.flags = pb.JournalSpec.O_RDONLY
    await world.append()
    appends = await world.together((b"", {}), (b"", {}), (b"refused", {}), (b"", {}))
    assert [(fsm.state, fsm.status) for fsm in appends] == [
        (State.FINISHED, pb.OK),
        (State.FINISHED, pb.OK),
        (State.ERROR, pb.NOT_ALLOWED),
        (State.FINISHED, pb.OK),
    ]
    assert world.spool.end == 0
    assert await world.is_free()


async def test_a_batch_ends_at_the_journals_rate_limit(replicated: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        replicated.clock.advance(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(replicated.clock, "sleep", sleep)
    replicated.spec.max_append_rate = 1000
    replicated.clock.advance(1)  # 1000 bytes are available.
    content = b"x" * 400
    await replicated.together(*((content, {}) for _ in range(5)))
    assert replicated.groups == [2, 1, 1, 1]


async def test_a_batch_has_a_maximum_size(replicated: World) -> None:
    replicated.spec.fragment.length = 1 << 30
    content = b"x" * (300 << 10)
    await replicated.together(*((content, {}) for _ in range(5)))
    assert replicated.groups == [3, 2]
    await replicated.together(*((b"x", {}) for _ in range(300)))
    assert replicated.groups == [256, 44]


# ------------------------------------------------------------------------------------------ without a preparation


@pytest.fixture(params=[1, 3])
async def steady(request: pytest.FixtureRequest, world: World) -> World:
    """Return a journal whose appends need no preparation: the resolution is known, and the pipeline matches."""
    if request.param == 3:
        world.peers, world.spec.replication = [Peer(), Peer()], 3
    await world.append(b"abc")
    await world.append(b"def")
    world.known_resolution = await world.resolve(JOURNAL, require_primary=True, min_revision=0)
    await world.append(b"ghi")
    world.groups.clear()
    return world


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """Record the states of all appends."""
    passed: list[State] = []
    real = QueuedAppend.transition

    def noted(append: QueuedAppend, event: AppendEvent) -> None:
        real(append, event)
        passed.append(append.state)

    monkeypatch.setattr(QueuedAppend, "transition", noted)
    return passed


async def test_appends_that_arrive_together_are_proposed_in_one_turn(steady: World, states: list[State]) -> None:
    contents = [b"A", b"BB", b"CCC"]
    appends = await asyncio.gather(*(steady.whole(content) for content in contents))
    assert [span(each) for each in appends] == [(9, 10), (10, 12), (12, 15)]
    assert steady.spool.fragment.sum == sum_of(b"defghiABBCCC")
    inline = steady.spec.replication == 1
    assert steady.groups == ([1, 1, 1] if inline else [3])
    # Nothing is prepared. Inline commits pass no states of the queue.
    assert State.START_PIPELINE not in states
    assert states.count(State.READ_ACKNOWLEDGEMENTS) == (0 if inline else 3)
    assert await steady.is_free()


async def test_a_refused_append_of_a_batch_sees_the_earlier_ones(steady: World) -> None:
    mine, yours = labels.label_set(author="me"), labels.parse_selector("author=you")
    await steady.whole(b"x", union_registers=labels.label_set(author="nobody"))
    appends = await asyncio.gather(
        steady.whole(b"1", union_registers=mine), steady.whole(b"2", check_registers=yours), steady.whole(b"3")
    )
    assert [(each.state, each.registers) for each in appends] == [
        (State.FINISHED, mine),
        (State.ERROR, mine),
        (State.FINISHED, mine),
    ]
    assert [span(each) for each in appends] == [(10, 11), None, (11, 12)]


@pytest.mark.parametrize("turns", range(12))
async def test_clients_that_disconnect_at_any_time_block_no_append(steady: World, turns: int) -> None:
    leaving = [
        asyncio.create_task(each)
        for each in (steady.whole(b"A"), steady.append(b"BB"), steady.whole(b"", offset=9), steady.append(b"D"))
    ]
    staying = asyncio.create_task(steady.whole(b"EEEEE"))
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    stayed = await asyncio.wait_for(staying, 60)
    assert stayed.state is State.FINISHED
    await asyncio.gather(*leaving, return_exceptions=True)
    assert await steady.is_free()
    assert len(steady.replica.queue) == 0
    end = steady.spool.end
    assert steady.spool.delta == 0
    assert span(await steady.whole(b"F")) == (end, end + 1)


async def test_a_queue_that_is_shut_down_answers_waiting_appends(steady: World) -> None:
    pipeline = await steady.replica.pipeline.take()
    waiting = [asyncio.create_task(steady.whole(b"A")), asyncio.create_task(steady.append(b"B"))]
    await eventually(lambda: len(steady.replica.queue) == 2)
    for task in list(steady.tasks):
        task.cancel()
    for each in await asyncio.gather(*waiting):
        assert isinstance(each.error, RolledBack)
        assert "nothing was appended" in str(each.error)
    steady.replica.pipeline.put(pipeline)
    assert (await steady.whole(b"C")).state is State.FINISHED


async def test_a_stream_that_is_shut_down_is_rolled_back(steady: World) -> None:
    append = await streaming(steady, pb.AppendRequest(content=b"abc"))
    for task in list(steady.tasks):
        task.cancel()
    with pytest.raises(RolledBack):
        await append.settled()
    assert await steady.is_free()
    assert steady.spool.delta == 0
    assert (await steady.whole(b"C")).state is State.FINISHED
    assert await steady.is_free()


# ---------------------------------------------------------------------------------------------- the in-sync record


def record_of(world: World) -> InSyncRecord:
    assert world.record is not None
    return in_sync.decode(world.record.value)


def keep(world: World, record: InSyncRecord, revision: int = 1) -> None:
    world.record = KeyValue(IN_SYNC, in_sync.encode(record), mod_revision=revision)


async def test_a_pipeline_is_recorded_before_it_takes_content(world: World) -> None:
    world.peers, world.spec.replication = [Peer()], 2
    assert (await world.append(b"abc")).state is State.FINISHED
    assert record_of(world) == InSyncRecord(1, ("local#peer-0", "local#self"), (Epoch(10, 0),))
    assert world.spool.stamp == Stamp(10, 10)
    await world.append(b"def")
    assert len(world.txns) == 1
    world.peers.append(Peer())
    world.spec.replication = 3
    world.revision = 20
    await world.append(b"ghi")
    assert record_of(world).epochs == (Epoch(10, 0), Epoch(20, 6))
    assert len(record_of(world).members) == 3


async def test_too_few_replicas_are_not_recorded(world: World) -> None:
    world.spec.replication = 2
    assert (await world.append(b"abc")).status == pb.INSUFFICIENT_JOURNAL_BROKERS
    assert world.record is None


async def test_a_record_written_by_a_transaction_without_an_answer_is_saved(world: World, tmp_path: Path) -> None:
    # Found by simulation: no broker had saved the record. After a restore of etcd, others continued without it.
    saved = SavedRecords(tmp_path / "data", LocalDisk())
    etcd: Any = world
    world.in_sync = InSyncRecords(etcd, Layout("/cluster"), MemberId("local", "self"), saved=saved)
    world.conflicts = 1
    written = InSyncRecord(1, ("local#self",), (Epoch(10, 0),))
    world.on_txn = lambda: setattr(world, "record", KeyValue(IN_SYNC, in_sync.encode(written), mod_revision=11))
    assert (await world.append(b"abc")).state is State.FINISHED
    assert (len(world.txns), record_of(world)) == (1, written)
    assert [(each.journal, each.record) for each in saved] == [(JOURNAL, replace(written, written=11))]


async def test_a_record_that_changed_concurrently_is_read_again(world: World) -> None:
    world.conflicts = 1
    fsm = await world.append(b"abc")
    assert fsm.state is State.FINISHED
    assert world.resolved == [0, 11]
    assert record_of(world).members == ("local#self",)


async def test_the_append_after_a_transaction_of_unknown_outcome_reads_the_record(world: World) -> None:
    def lose_the_answer() -> None:
        world.on_txn = lambda: None
        keep(world, InSyncRecord(1, ("local#self",), (Epoch(10, 0),)))
        raise TxnOutcomeUnknown("lost")

    world.on_txn = lose_the_answer
    assert isinstance((await world.append(b"abc")).error, TxnOutcomeUnknown)
    assert await world.is_free()
    assert (await world.append(b"abc")).state is State.FINISHED
    assert (world.built, record_of(world).epochs) == (1, (Epoch(10, 0),))


async def test_without_a_member_of_the_record_nothing_is_appended(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 70),)))
    assert (await world.append(b"abc")).status == pb.INDEX_HAS_GREATER_OFFSET
    assert (await world.append()).status == pb.INDEX_HAS_GREATER_OFFSET, "the head is unknown"
    assert (await world.append(b"abc", offset=12)).status == pb.INDEX_HAS_GREATER_OFFSET
    guessed = await world.append(b"abc", offset=70)
    assert guessed.status == pb.INDEX_HAS_GREATER_OFFSET, "only an operator confirms a loss"
    assert world.spool.end == 0
    assert await world.is_free()


async def test_a_member_with_an_empty_disk_is_removed(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#gone", "local#self"), (Epoch(5, 0),)))
    assert (await world.append(b"abc")).status == pb.INDEX_HAS_GREATER_OFFSET
    assert record_of(world).members == ("local#gone",)


async def test_a_strict_check_fails_for_a_lost_journal_even_if_it_is_read_only(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 70),)))
    world.spec.flags = pb.JournalSpec.O_RDONLY
    assert (await world.append()).state is State.FINISHED
    strict = await world.append(check_registers=labels.parse_selector(labels.HELD))
    assert (strict.state, strict.status) == (State.ERROR, pb.INDEX_HAS_GREATER_OFFSET)
    assert await world.is_free()


async def test_an_empty_append_at_the_known_end_confirms_a_loss(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 70),)))
    fsm = await world.append(offset=70)
    assert (fsm.state, fsm.status, fsm.error) == (State.FINISHED, pb.OK, None)
    assert fsm.commit is not None
    assert (fsm.commit.begin, fsm.commit.end) == (70, 70)
    assert record_of(world) == InSyncRecord(1, ("local#self",), (Epoch(11, 70),))
    assert (await world.append(b"abc")).commit == Fragment(JOURNAL, 70, 73, sum_of(b"abc"), Codec.NONE)
    assert await world.is_free()


async def test_after_a_confirmed_loss_another_pipeline_accepts_content(world: World) -> None:
    """Then each replica reads the record first, with the journal's new id."""
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 70),), journal_id="cluster-1"))
    assert (await world.append(offset=70)).state is State.FINISHED
    record = record_of(world)
    assert record is not None
    assert shared_through("cluster-1", record.journal_id) == 70
    assert record.journal_id != "cluster-1"
    assert world.built == 2
    assert (await world.append(b"abc")).state is State.FINISHED
    assert (record_of(world).journal_id, world.built) == (record.journal_id, 2)
    assert await world.is_free()


async def test_a_loss_is_confirmed_despite_concurrent_changes_in_etcd(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 70),)))

    def conflict_once() -> None:
        world.conflicts, world.on_txn = 1, lambda: None

    # The Route is advertised first. Then the confirmation writes only the record.
    assert (await world.append(b"abc")).status == pb.INDEX_HAS_GREATER_OFFSET
    world.on_txn = conflict_once
    fsm = await world.append(offset=70)
    assert (fsm.state, fsm.status, fsm.error, world.conflicts) == (State.FINISHED, pb.OK, None, 0)
    assert record_of(world) is not None
    assert await world.is_free()


async def test_a_lost_suspended_journal_keeps_its_registers_for_its_recovery(world: World) -> None:
    mine = labels.label_set(author="me")
    world.spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=70))
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 0),)))
    for request in ({}, {"suspend": pb.AppendRequest.SUSPEND_KEEP}, {"suspend": pb.AppendRequest.SUSPEND_NOW}):
        assert (await world.append(**request)).status == pb.INDEX_HAS_GREATER_OFFSET
    assert world.spool.end == 0, "the registers at its offset are not known"
    keep(world, in_sync.closed(None, 1, 70, mine))
    fsm = await world.append(suspend=pb.AppendRequest.SUSPEND_KEEP)
    assert fsm.commit is not None
    assert (fsm.state, fsm.commit.begin, fsm.registers) == (State.FINISHED, 70, mine)


async def test_the_loss_of_a_suspended_journal_is_confirmed_at_its_offset(world: World) -> None:
    world.spec.suspend.CopyFrom(pb.JournalSpec.Suspend(level=pb.JournalSpec.Suspend.PARTIAL, offset=70))
    keep(world, InSyncRecord(1, ("local#gone",), (Epoch(5, 0),)))
    fsm = await world.append(offset=70, suspend=pb.AppendRequest.SUSPEND_KEEP)
    assert (fsm.state, fsm.status, fsm.error) == (State.FINISHED, pb.OK, None)
    assert record_of(world) == InSyncRecord(1, ("local#self",), (Epoch(5, 0), Epoch(11, 70)))
    assert await world.is_free()


@pytest.mark.parametrize("members", [(), ("local#gone",)])
async def test_a_journal_that_was_closed_or_left_continues_with_its_registers(
    world: World, members: tuple[str, ...]
) -> None:
    mine = labels.label_set(author="me")
    keep(world, in_sync.left(InSyncRecord(1, (*members, "local#other")), "local#other", 70, mine))
    fsm = await world.append(b"abc")
    assert fsm.commit is not None
    assert (fsm.state, fsm.commit.begin, fsm.registers) == (State.FINISHED, 70, mine)
    assert record_of(world) == InSyncRecord(1, ("local#self",), (Epoch(10, 70),))


async def test_a_record_of_an_earlier_journal_of_the_name_is_ignored(world: World) -> None:
    keep(world, InSyncRecord(7, ("local#gone",), (Epoch(5, 70),)))
    assert (await world.append(b"abc")).state is State.FINISHED
    assert record_of(world).create_revision == 1


async def test_a_spool_that_others_continued_without_builds_no_pipeline(world: World) -> None:
    await world.append(b"abc")
    pipeline = await world.replica.pipeline.take()
    assert pipeline is not None
    world.replica.spool.put(pipeline.close_send())
    world.replica.pipeline.put(None)
    keep(world, InSyncRecord(1, ("local#other",), (Epoch(10, 0), Epoch(15, 2))))
    fsm = await world.append(b"def")
    assert isinstance(fsm.error, Stranded)
    assert (fsm.state, world.built, world.spool.end) == (State.ERROR, 1, 3)
    assert await world.is_free()


async def test_a_pipeline_checks_its_spools_again_after_a_rescue_that_ended_below_them(world: World) -> None:
    record = InSyncRecord(1, ("local#gone",), (Epoch(5, 0),))
    keep(world, record)
    # A primary that died had this spool roll over content that no other broker had.
    rolled = replace(world.spool.fragment, begin=100, end=100)
    world.spool.propose(rolled, world.spool.registers, primary=False, revision=7)
    assert (await world.append(b"abc")).status == pb.INDEX_HAS_GREATER_OFFSET
    keep(world, in_sync.closed(record, 1, 70, pb.LabelSet()), revision=20)
    fsm = await world.append(b"abc")
    assert isinstance(fsm.error, Stranded)
    assert (world.built, world.spool.end) == (1, 100), "it does not continue at 100, above a gap"
    assert record_of(world).closed
    assert await world.is_free()


async def test_a_pipeline_whose_route_is_older_than_the_recorded_one_is_given_up(world: World) -> None:
    keep(world, InSyncRecord(1, ("local#self",), (Epoch(500, 0),)))
    world.spool.propose(world.spool.fragment, world.spool.registers, primary=True, revision=500)
    world.etcd_revision = 500
    assert isinstance((await world.append(b"abc")).error, ReplicationFailed)
    world.revision = 600
    assert (await world.append(b"abc")).state is State.FINISHED
    assert await world.is_free()


async def test_a_full_suspension_closes_the_record(world: World) -> None:
    def apply() -> None:
        for op in world.txns[-1][1]:
            if op.key == "item":
                world.spec = pb.JournalSpec.FromString(op.value)
                suspended = world.spec.suspend.level == pb.JournalSpec.Suspend.FULL
                world.status = pb.SUSPENDED if suspended else pb.OK

    await world.append(b"")
    world.on_txn = apply
    fsm = await world.append(suspend=pb.AppendRequest.SUSPEND_IF_FLUSHED)
    assert fsm.status == pb.SUSPENDED
    assert record_of(world).closed
    assert (await world.append(b"abc")).state is State.FINISHED
    assert record_of(world).members == ("local#self",)


async def test_state_that_fits_a_resolution_is_not_checked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[State] = []
    resolution = await world.resolve(JOURNAL, require_primary=True, min_revision=0)

    async def resolve(journal: str, **_: Any) -> Resolution:
        return resolution

    real = QueuedAppend.transition

    def noted(append: QueuedAppend, event: AppendEvent) -> None:
        passed.append(append.state)
        real(append, event)

    monkeypatch.setattr(QueuedAppend, "transition", noted)

    async def states() -> list[State]:
        passed.clear()
        assert (await world.whole(b"abc")).state is State.FINISHED
        return passed[: passed.index(State.STREAM_CONTENT)]

    world.resolver = SimpleNamespace(  # type: ignore[assignment]
        resolve=resolve, permits_hold=lambda _: True, is_current=lambda _: False, known=lambda _: None
    )
    assert State.SEND_PIPELINE_SYNC in await states()
    short = [
        State.RESOLVE,
        State.ACQUIRE_PIPELINE,
        State.START_PIPELINE,
        State.VALIDATE_PRECONDITIONS,
    ]
    assert await states() == short
    resolution = await world.resolve(JOURNAL, require_primary=True, min_revision=0)
    assert State.UPDATE_ASSIGNMENTS in await states()
    assert await states() == short
    pipeline = await world.replica.pipeline.take()
    assert pipeline is not None
    pipeline.recorded = False  # As when the journal was closed.
    world.replica.pipeline.put(pipeline)
    assert State.UPDATE_ASSIGNMENTS in await states()
    assert world.built == 1
