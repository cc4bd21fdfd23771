"""The phases of a member, on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LeaseRecord, MemberSession
from coranto.effects import Clock, SystemClock
from coranto.errors import LeaseLost
from coranto.member.membership import MemberPhase, Membership, Seen
from coranto.wire import protocol_pb2 as pb
from tests.platform.coordination.test_allocator import put_journals, synchronize

WAIT_SECONDS = 60


class Work:
    """Records each call with the phase of the member."""

    def __init__(self, name: str) -> None:
        self.id = MemberId("zone-1", name)
        self.membership: Membership
        self.keyspace: KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]
        self.began_at = 0
        self.calls: list[tuple[str, MemberPhase]] = []
        self.breaks = asyncio.Event()

    def member_spec(self, endpoint: str) -> pb.BrokerSpec:
        process = pb.ProcessSpec(id=pb.ProcessSpec.ID(zone=self.id.zone, suffix=self.id.suffix), endpoint=endpoint)
        return pb.BrokerSpec(process_spec=process, journal_limit=10)

    def start(self, session: MemberSession) -> None:
        self.began_at = self.keyspace.state.revision
        self._note("start")

    async def stop(self) -> None:
        self._note("stop")

    async def exit(self) -> None:
        self._note("exit")

    def _note(self, call: str) -> None:
        self.calls.append((call, self.membership.phase))

    async def claim(self) -> None:
        self._note("claim")

    async def watch(self, clock: Clock, seen: Callable[[], Seen]) -> str:
        await self.breaks.wait()
        return "another process uses the directory"

    async def refresh(self, revision: int, brokers: tuple[str, ...]) -> bool:
        self._note(f"refresh {', '.join(brokers)}")
        return True


@pytest.fixture
async def member(coordinator: EtcdCoordinator, layout: Layout) -> AsyncIterator[Callable[[str], Work]]:
    made: list[Membership] = []

    def make(name: str) -> Work:
        work = Work(name)
        work.keyspace = KeySpace(coordinator, layout, JournalEntities(), apply_delay_seconds=0.0)
        work.membership = Membership(
            work.id,
            work,
            coordinator=coordinator,
            keyspace=work.keyspace,
            clock=SystemClock(),
            exit_seconds=WAIT_SECONDS,
            residence=work,
        )
        made.append(work.membership)
        return work

    yield make
    for each in made:
        await each.close()


async def join(work: Work, record: LeaseRecord | None = None) -> Membership:
    await work.membership.join(f"http://{work.id.suffix}:80", lease_seconds=WAIT_SECONDS, record=record)
    return work.membership


async def test_a_member_passes_its_phases_in_order(
    member: Callable[[str], Work], coordinator: EtcdCoordinator, layout: Layout
) -> None:
    work = member("broker-a")
    assert (work.membership.phase, work.membership.is_announced) == (MemberPhase.STARTING, False)
    membership = await join(work)
    assert (membership.phase, membership.is_announced) == (MemberPhase.SERVING, True)
    stop = asyncio.Event()
    stop.set()
    assert await asyncio.wait_for(membership.serve_until(stop), WAIT_SECONDS) == 0
    await membership.close()
    assert [call for call, _ in work.calls] == ["claim", "start", "exit", "refresh zone-1#broker-a"]
    assert [phase for _, phase in work.calls] == [
        MemberPhase.STARTING,
        MemberPhase.STARTING,
        MemberPhase.EXITING,
        MemberPhase.EXITING,
    ]
    assert (await coordinator.get(layout.member_key(work.id)))[1] is None


async def test_a_member_starts_at_a_revision_that_a_watch_of_the_prefix_reaches(
    member: Callable[[str], Work], coordinator: EtcdCoordinator, layout: Layout, tmp_path: Path
) -> None:
    """Gazette's processes wait for the revision of a peer until a watch of the prefix reaches it."""
    for resumed in (False, True):
        await coordinator.txn([], [Put(layout.prefix + ".not-below/mark", b"")])
        work = member("broker-a")
        membership = await join(work, LeaseRecord.within(tmp_path))
        assert membership.session.resumed == resumed
        keys = (await coordinator.range(layout.root)).kvs
        assert work.began_at == max(kv.mod_revision for kv in keys)
        membership.session.lost.set()  # As for a process that ended without revoking its lease.
        await membership.close()


async def test_an_exiting_member_transfers_its_items_before_it_stops(
    member: Callable[[str], Work], coordinator: EtcdCoordinator, layout: Layout
) -> None:
    await put_journals(coordinator, layout, count=1, replication=1)
    follower = KeySpace(coordinator, layout, JournalEntities(), apply_delay_seconds=0.0)
    first, second = member("broker-a"), member("broker-b")
    await follower.start()
    primaries = [asyncio.create_task(synchronize(follower, coordinator, each.id)) for each in (first, second)]
    try:
        await join(first)
        await follower.wait_until(lambda state: bool(state.by_member.get(first.id)), timeout=WAIT_SECONDS)
        await join(second)
        await asyncio.wait_for(first.membership.exit_gracefully(), WAIT_SECONDS)
        # The follower's watch may lag behind the member's.
        await follower.wait_until(lambda state: not state.by_member.get(first.id), timeout=WAIT_SECONDS)
        assert [each.member for each in follower.state.all_assignments] == [second.id]
        assert second.membership.phase is MemberPhase.SERVING
    finally:
        for each in primaries:
            each.cancel()
        await asyncio.gather(*primaries, return_exceptions=True)
        await follower.close()


async def test_a_member_that_lost_its_lease_stops_immediately(member: Callable[[str], Work]) -> None:
    work = member("broker-a")
    membership = await join(work)
    membership.session.lost.set()
    assert await asyncio.wait_for(membership.serve_until(asyncio.Event()), WAIT_SECONDS) == 1
    assert work.calls[-1] == ("stop", MemberPhase.EXITING)
    await membership.close()
    assert [call for call, _ in work.calls].count("stop") == 1


async def test_a_member_stops_when_another_one_uses_its_data_directory(member: Callable[[str], Work]) -> None:
    work = member("broker-a")
    membership = await join(work)
    work.breaks.set()
    assert await asyncio.wait_for(membership.serve_until(asyncio.Event()), WAIT_SECONDS) == 1
    assert work.calls[-1] == ("stop", MemberPhase.EXITING)


async def test_a_failed_announcement_leaves_no_member_key(
    member: Callable[[str], Work], coordinator: EtcdCoordinator, layout: Layout
) -> None:
    work = member("broker-a")

    async def refuse() -> None:
        raise LeaseLost("refused by the test")

    work.claim = refuse  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        await join(work)
    assert work.membership.phase is MemberPhase.STARTING
    await work.membership.close()
    assert (await coordinator.get(layout.member_key(work.id)))[1] is None
    assert work.calls == []
